"""Device maps, dispatched by accelerate over the CPU and a fake GPU."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from graphs.extract import Extraction, Workload, extract
from graphs.extract.extraction import ties_of
from graphs.extract.placeable import call_graph
from graphs.graph import attributes_of
from placer.exports.device_map import LOADED, OFFLOADED, ON_HOST, ON_ONE, device_map
from placer.exports.dry_run import flow
from placer.exports.existing_map import DeviceMap
from placer.exports.format import export_extracted
from placer.exports.module_tree import around, parent
from placer.exports.placed_modules import PlacedModules
from placer.exports.renaming import ExportError, renamed_devices
from tests.fake_cuda import fake_cuda
from tests.helpers import tiny_models, tiny_transformers
from tests.helpers.extracted_steps import without_dropout
from tests.helpers.in_turn import LARGE, in_turn
from tests.helpers.placed_at_random import cut_placement, placement_of, random_placement

accelerate = pytest.importorskip("accelerate")

PAIR = ("cpu", "cuda:0")
GPUS = ("cuda:0", "cuda:1")


class Meeting(nn.Module):
    """Two towers whose outputs meet in an op of the model's code, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.right = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.left(x) + self.right(x))
        return out


class Negated(nn.Linear):
    """A layer of two ops, of which the first has nearly all work."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).neg()


def meeting() -> Workload:
    torch.manual_seed(0)
    return Workload.of(Meeting(), (torch.randn(3, 4), torch.randn(3, 2)), tiny_models.squared)


class Concatenation(nn.Module):
    """``cat`` as a module: accelerate moves the inputs of modules."""

    def forward(self, *parts: Tensor) -> Tensor:
        return torch.cat(parts, 1)


class Branches(nn.Module):
    """Two parallel branches, optionally ended by parameterless modules, and ``cat``."""

    def __init__(self, *, ends: bool = False, whole: bool = False) -> None:
        super().__init__()
        branch = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.left = branch.append(nn.Tanh()) if ends else branch
        self.right = copy.deepcopy(self.left)
        self.meet = Concatenation() if whole else None

    def forward(self, x: Tensor) -> Tensor:
        parts = self.left(x), self.right(x)
        return torch.cat(parts, 1) if self.meet is None else self.meet(*parts)


def branches(*, ends: bool = False, whole: bool = False) -> Workload:
    torch.manual_seed(0)
    blocks = (Branches(ends=ends, whole=whole) for _ in "12")
    model = nn.Sequential(*blocks, nn.Linear(4, 2))
    return Workload.of(model, (torch.randn(3, 4), torch.randn(3, 2)), tiny_models.squared)


class Contrast(nn.Module):
    """Two towers, as in CLIP: the scale of their products is a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
        self.text_projection = nn.Linear(8, 3)
        self.image = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
        self.image_projection = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor([0.5]))
        self.register_buffer("shift", torch.ones(3), persistent=False)

    def forward(self, tokens: Tensor, pixels: Tensor) -> Tensor:
        text = self.text_projection(self.text(tokens)) + self.shift
        image = self.image_projection(self.image(pixels))
        out: Tensor = self.scale.exp() * (text @ image.T)
        return out


def contrast() -> Workload:
    torch.manual_seed(0)
    inputs = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 3)
    return Workload.of(Contrast(), inputs, tiny_models.squared)


class Patches(nn.Module):
    """Adds positions, its own parameter, to the output of its first module."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(3, 4))
        self.embed = nn.Linear(4, 4)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(self.embed(x) + self.positions)
        return out


def patches() -> Workload:
    torch.manual_seed(0)
    return Workload.of(Patches(), (torch.randn(3, 4), torch.randn(3, 2)), tiny_models.squared)


STEPS: dict[str, Callable[[], Workload]] = {
    "meeting": meeting,
    "branches": branches,
    "branches_with_ends": functools.partial(branches, ends=True),
    "branches_as_modules": functools.partial(branches, whole=True),
    "attention": tiny_models.attention,
    "contrast": contrast,
    "conv_net": tiny_models.conv_net,
    "norm_twice": tiny_models.norm_twice,
    "nmt": tiny_models.nmt,
    "patches": patches,
    **{
        name: functools.partial(tiny_transformers.without_dropout, name)
        for name in ("bert", "gpt2", "t5", "llama")
    },
}


@functools.cache
def extracted(name: str) -> Extraction:
    if name in tiny_transformers.TARGETS:
        return without_dropout(name)
    return extract(STEPS[name]())


def trained(step: Workload, model: nn.Module) -> dict[str, Any]:
    """Return the loss and all gradients of one step, on the CPU."""
    output = model(*step.model_inputs, **step.keywords)
    loss = output.loss if step.loss is None else step.loss(output, step.inputs[-1])
    loss.backward()
    gradients = {
        name: None if p.grad is None else p.grad.to("cpu") for name, p in model.named_parameters()
    }
    return {"": loss.detach().to("cpu"), **gradients}


@pytest.mark.slow_repeats
@pytest.mark.filterwarnings("ignore:The following device_map keys do not match any submodules")
@pytest.mark.parametrize("by", ["op", "module", "layer"])
@pytest.mark.parametrize("name", in_turn(STEPS))
def test_accelerate_trains_whatever_was_placed(name: str, by: str) -> None:
    extraction = extracted(name)
    step = extraction.step
    expected = trained(step, copy.deepcopy(step.model))
    for seed in range(2):
        placement = random_placement(extraction, PAIR, seed, by=by)
        placed = PlacedModules.of(extraction, placement, main_device="cpu")
        found = device_map(placed).content
        for tied, first in ties_of(step).items():
            homes = {found[home] for n in (tied, first) if (home := around(n, found)) is not None}
            assert len(homes) == 1
        with fake_cuda():
            model = accelerate.dispatch_model(copy.deepcopy(step.model), found, main_device="cpu")
            if len(set(found.values())) == 1:  # the user has to feed it on its device
                [home] = set(found.values())
                there = torch.device("cpu" if home == "cpu" else "cuda:0")
                assert {p.device for p in model.parameters()} == {there}
                continue
            seen = trained(step, model)
        torch.testing.assert_close(seen, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(STEPS.keys() - LARGE)),
    seed=st.integers(0, 10**6),
    by=st.sampled_from(["op", "module", "layer"]),
    main_device=st.sampled_from([*GPUS, None]),
)
def test_a_map_covers_all_splits_no_tie_and_passes_the_dry_run(
    name: str, seed: int, by: str, main_device: str | None
) -> None:
    extraction = extracted(name)
    placement = random_placement(extraction, GPUS, seed, by=by)
    found = device_map(PlacedModules.of(extraction, placement, main_device=main_device)).content
    model = extraction.step.model
    homes = {entry: around(entry, found) for entry in model.state_dict()}
    assert None not in homes.values()
    for tied, first in ties_of(extraction.step).items():
        assert found[homes[tied]] == found[homes[first]]
    assert not any(around(parent(m), found) is not None for m in found if m)
    devices = {module: f"cuda:{number}" for module, number in found.items()}
    fed = main_device or "cuda:0"
    assert len(set(devices.values())) == 1 or (
        flow(extraction.forward, extraction.step, devices, fed).conflict is None
    )


@pytest.mark.slow
def test_a_placement_by_layers_is_written_as_it_is() -> None:
    extraction = extracted("llama")
    placement = cut_placement(extraction, GPUS, ("model.layers.1",), of_calls=True)
    found = export_extracted(device_map, extraction, placement, main_device="cuda:1")
    assert found.content == {
        "model.embed_tokens": 0,
        "model.rotary_emb": 0,
        "model.layers.0": 0,
        "model.layers.1": 1,
        "model.norm": 1,
        "lm_head": 1,
    }
    assert (found.moved_op_count, found.remedy) == (0, LOADED.format(1))


def test_only_what_meets_is_joined() -> None:
    extraction = extracted("meeting")
    placement = cut_placement(extraction, GPUS, ("right",), of_calls=True)
    placed = PlacedModules.of(extraction, placement)
    found = device_map(placed)
    # left.2 and right.2 have equal FLOPs on both devices; ties go to the first device.
    assert found.content == {"left": 0, "right.0": 1, "right.2": 0, "head": 1}
    moved = [op for op in placed.moved_ops(found.runs_on) if op.call not in found.not_placed]
    assert [op.module for op in moved if op in placed.ops] == ["right.2", ""]  # linear and add


@pytest.mark.parametrize(
    ("name", "on_second"),
    [
        ("branches", {"0.right.0", "1.right.0"}),
        ("branches_with_ends", {f"{k}.right.{i}" for k in range(2) for i in (0, 2)}),
        ("branches_as_modules", {"0.right", "1.right"}),
    ],
)
def test_of_two_branches_only_the_modules_whose_outputs_meet_share_a_device(
    name: str, on_second: set[str]
) -> None:
    extraction = extracted(name)
    graph = call_graph(extraction).graph
    devices = [int(".right" in attributes_of(graph, node)["module"]) for node in graph]
    exported = export_extracted(device_map, extraction, placement_of(graph, GPUS, devices))
    assert {path for path, device in exported.content.items() if device == 1} == on_second
    assert (exported.moved_op_count == 0) == (name == "branches_as_modules")


@pytest.mark.slow
def test_what_a_library_does_not_divide_stays_whole() -> None:
    model: Any = Meeting()
    model._no_split_modules = ["Sequential"]  # as models of transformers have it
    extraction = extract(replace(meeting(), model=model))
    graph = call_graph(extraction).graph
    devices = [int(attributes_of(graph, node)["module"] == "right.0") for node in graph]
    placement = placement_of(graph, GPUS, devices)
    found = device_map(PlacedModules.of(extraction, placement))
    assert found.content == {"": 0}, "left and right meet"
    del model._no_split_modules
    found = device_map(PlacedModules.of(extraction, placement))
    assert found.content == {"left": 0, "right.0": 1, "right.2": 0, "head": 0}


@pytest.mark.parametrize(
    ("name", "on_second", "expected"),
    [
        (
            "contrast",
            "text",
            {"scale": 0, "text": 1, "text_projection": 0, "image": 0, "image_projection": 0},
        ),
        ("patches", "layers", {"positions": 0, "embed": 0, "layers": 1}),
    ],
)
def test_a_model_with_a_parameter_of_its_own_is_divided(
    name: str, on_second: str, expected: dict[str, int]
) -> None:
    extraction = extracted(name)
    graph = call_graph(extraction).graph
    devices = [int(attributes_of(graph, node)["module"].startswith(on_second)) for node in graph]
    found = device_map(PlacedModules.of(extraction, placement_of(graph, GPUS, devices)))
    assert found.content == expected
    assert not found.remedy
    given = DeviceMap({path: f"cuda:{number}" for path, number in found.content.items()})
    assert given.conflict(extraction) == ""


def test_a_map_of_one_device_says_what_keeps_the_model_together() -> None:
    model = tiny_models.Plain(lambda m, x: m.a(x) + m.b(x), a=nn.Linear(4, 2), b=nn.Linear(4, 2))
    extraction = extract(replace(meeting(), model=model))
    graph = call_graph(extraction).graph
    devices = [int(attributes_of(graph, node)["module"] == "b") for node in graph]
    found = device_map(PlacedModules.of(extraction, placement_of(graph, GPUS, devices)))
    assert found.content == {"": 0}
    assert "since add in Plain.forward reads what a and b give" in found.remedy


def test_a_map_of_one_device_says_that_each_module_has_most_work_there() -> None:
    model = tiny_models.Plain(lambda m, x: m.a(x), a=Negated(4, 2))
    extraction = extract(replace(meeting(), model=model))
    graph = call_graph(extraction).graph
    (away,) = (node for node in graph if node.endswith(":neg"))
    devices = [int(node == away) for node in graph]
    found = device_map(PlacedModules.of(extraction, placement_of(graph, GPUS, devices)))
    assert found.content == {"": 0}
    assert found.remedy == ON_ONE


@pytest.mark.parametrize("name", ["attention", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_residual_paths_join_layers(name: str) -> None:
    extraction = extracted(name)
    graph = call_graph(extraction).graph
    # Their outputs are added to the inputs.
    ends = ("attn.c_proj", "mlp.c_proj") if name == "gpt2" else ("self_attn", "linear2")
    devices = [int(attributes_of(graph, node)["module"].endswith(ends)) for node in graph]
    assert set(devices) == {0, 1}
    content = device_map(PlacedModules.of(extraction, placement_of(graph, GPUS, devices))).content
    layer = "transformer.h.0." if name == "gpt2" else "self_attn."
    assert not any(path.startswith(layer) for path in content)


@pytest.mark.slow
def test_a_module_that_is_called_twice_moves_no_values() -> None:
    model, shared = Meeting(), nn.Tanh()
    model.left.append(shared)
    model.right.append(shared)
    extraction = extract(replace(meeting(), model=model))
    placed = PlacedModules.of(extraction, random_placement(extraction, GPUS, 0))
    assert placed.gates() == {"left.1", "right.1"}


def halves(names: tuple[str, ...], *, training: bool = True, **options: Any) -> PlacedModules:
    """Return a convolutional network with all from its second convolution on the second device."""
    step = replace(tiny_models.conv_net(), training=training)
    extraction = extracted("conv_net") if training else extract(step)
    placement = cut_placement(extraction, names, ("4",), of_calls=True)
    return PlacedModules.of(extraction, placement, **options)


@pytest.mark.slow
def test_the_cpu_beside_a_gpu_computes_only_if_it_is_the_main_device() -> None:
    names = ("cuda:0", "cpu")
    with pytest.raises(ExportError, match="gradients"):
        device_map(halves(names))
    on_host = device_map(halves(names, main_device="cpu"))
    assert set(on_host.content.values()) == {0, "cpu"}
    assert on_host.remedy == ON_HOST
    offloaded = device_map(halves(names, training=False))
    assert offloaded.content["4"] == "cpu"
    assert (offloaded.remedy, offloaded.is_predictable) == (OFFLOADED, False)


def test_cores_are_no_devices_of_torch_until_they_are_renamed() -> None:
    cores = ("core:0", "core:1")
    with pytest.raises(ExportError, match="as in core:0=cuda:0,core:1=cuda:1"):
        device_map(halves(cores))
    with pytest.raises(ExportError, match=r"core:7 cannot be renamed: .* as in [a-z:0-9]+=cuda:0"):
        halves(cores, renamed={"core:7": "cuda:0"})
    renamed = dict(zip(cores, GPUS, strict=True))
    with pytest.raises(ExportError, match="two devices would be cuda:1: give each a name"):
        halves(cores, renamed=dict.fromkeys(cores, "cuda:1"))
    found = device_map(halves(cores, renamed=renamed, main_device="cuda:1"))
    assert (found.content["0"], found.content["4"]) == (0, 1)
    assert found.remedy == LOADED.format(1)


def test_a_set_of_cores_is_renamed_as_its_first_core_is() -> None:
    written = {"core:0": "cuda:1", "core:1": "cuda:0"}
    graph = call_graph(extracted("conv_net")).graph
    unplaced = replace(placement_of(graph, ("core:0-1",), [0] * len(graph)), unplaced=True)
    placed = PlacedModules.of(extracted("conv_net"), unplaced, renamed=written)
    assert device_map(placed).content == {"": 1}
    assert renamed_devices({"core:0+2": "cpu", **written}, ("core:0+2",))["core:0+2"] == "cpu"
    with pytest.raises(ExportError, match="core:1 cannot be renamed: the placement has core:0-1,"):
        renamed_devices({"core:1": "cuda:0"}, ("core:0-1",))
