"""Device maps, dispatched by accelerate over the CPU and a fake second device."""

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
from placer.exports.device_map import OFFLOADED, ON_HOST, device_map
from placer.exports.dry_run import flow
from placer.exports.format import Exported, export_extracted
from placer.exports.placed_modules import PlacedModules, around, parent
from placer.exports.renaming import ExportError
from tests.helpers import tiny_models, tiny_transformers
from tests.helpers.in_turn import LARGE, in_turn
from tests.helpers.placed_at_random import cut_placement, placement_of, random_placement
from tests.helpers.vdev import vdev

torch.set_num_threads(1)
accelerate = pytest.importorskip("accelerate")
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="vdev would take CUDA's place")

PAIR = ("cpu", "vdev:0")
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


def transformer(name: str) -> Workload:
    target = tiny_transformers.TARGETS[name] + tiny_transformers.WITHOUT_DROPOUT.get(name, "")
    return tiny_transformers.load(target)


STEPS: dict[str, Callable[[], Workload]] = {
    "meeting": meeting,
    "branches": branches,
    "branches_with_ends": functools.partial(branches, ends=True),
    "branches_as_modules": functools.partial(branches, whole=True),
    "attention": tiny_models.attention,
    "conv_net": tiny_models.conv_net,
    "norm_twice": tiny_models.norm_twice,
    "nmt": tiny_models.nmt,
    **{name: functools.partial(transformer, name) for name in ("bert", "gpt2", "t5", "llama")},
}


@functools.cache
def extracted(name: str) -> Extraction:
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


@without_cuda
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
        with vdev():
            model = accelerate.dispatch_model(copy.deepcopy(step.model), found, main_device="cpu")
            if len(set(found.values())) == 1:  # the user has to feed it on its device
                assert {str(p.device) for p in model.parameters()} == set(found.values())
                continue
            seen = trained(step, model)
        torch.testing.assert_close(seen, expected, atol=1e-5, rtol=1e-5)


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
    assert (found.moved_op_count, found.remedy) == (0, "")


def test_only_what_meets_is_joined() -> None:
    extraction = extracted("meeting")
    placement = cut_placement(extraction, GPUS, ("right",), of_calls=True)
    placed = PlacedModules.of(extraction, placement)
    found = device_map(placed)
    # left.2 and right.2 have equal FLOPs on both devices; ties go to the first device.
    assert found.content == {"left": 0, "right.0": 1, "right.2": 0, "head": 1}
    moved = [op for op in placed.moved_ops(found.runs_on) if op.call not in found.not_placed]
    assert [op.module for op in moved if op in placed.ops] == ["right.2", ""]  # linear and add


def rights_apart(name: str) -> Exported:
    """Return the map of a placement with every right branch on the second GPU."""
    extraction = extracted(name)
    graph = call_graph(extraction).graph
    devices = [int(".right" in attributes_of(graph, node)["module"]) for node in graph]
    return export_extracted(device_map, extraction, placement_of(graph, GPUS, devices))


def test_branches_that_meet_in_a_layer_lose_only_what_meets() -> None:
    found = rights_apart("branches")
    assert {path for path, device in found.content.items() if device == 1} == {
        "0.right.0",
        "1.right.0",
    }


def test_a_module_without_parameters_at_the_end_of_a_branch_is_all_that_meets() -> None:
    found = rights_apart("branches_with_ends")
    assert found.content == {
        "0.left": 0,
        "0.right.0": 1,
        "0.right.2": 1,
        "0.right.3": 0,
        "1.left": 0,
        "1.right.0": 1,
        "1.right.2": 1,
        "1.right.3": 0,
        "2": 0,
    }


def test_what_is_added_layer_after_layer_joins_layers() -> None:
    extraction = extracted("gpt2")
    graph = call_graph(extraction).graph
    ends = ("attn.c_proj", "mlp.c_proj")  # their outputs are added to the inputs
    devices = [int(attributes_of(graph, node)["module"].endswith(ends)) for node in graph]
    found = device_map(PlacedModules.of(extraction, placement_of(graph, GPUS, devices)))
    assert not any(name.startswith("transformer.h.0.") for name in found.content)


def test_an_op_that_is_a_module_moves_nothing_else() -> None:
    found = rights_apart("branches_as_modules")
    assert {path for path, device in found.content.items() if device == 1} == {
        "0.right",
        "1.right",
    }
    assert found.content["0.meet"] == found.content["1.meet"] == 0
    assert found.moved_op_count == 0


def test_a_module_that_is_called_twice_is_not_where_values_are_moved() -> None:
    torch.manual_seed(0)
    shared = nn.Tanh()
    model = Meeting()
    model.left.append(shared)
    model.right.append(shared)
    extraction = extract(replace(meeting(), model=model))
    placed = PlacedModules.of(extraction, random_placement(extraction, GPUS, 0))
    assert placed.gates() == {"left.1", "right.1"}


@without_cuda
def test_a_module_of_the_map_without_parameters_gets_what_it_reads() -> None:
    step = branches(whole=True)
    found = {"0.left": "cpu", "0.right": "vdev:0", "0.meet": "vdev:0", "1": "cpu", "2": "cpu"}
    expected = trained(step, copy.deepcopy(step.model))
    with vdev():
        model = accelerate.dispatch_model(copy.deepcopy(step.model), found, main_device="cpu")
        seen = trained(step, model)
    torch.testing.assert_close(seen, expected, atol=1e-5, rtol=1e-5)
    del found["0.meet"]
    with vdev(), pytest.raises(RuntimeError, match="all tensors must be on one device"):
        accelerate.dispatch_model(copy.deepcopy(step.model), found, main_device="cpu")(
            step.inputs[0]
        )


def test_one_device_is_one_entry() -> None:
    extraction = extracted("gpt2")
    placement = random_placement(extraction, ("cuda:3",), 0)
    found = export_extracted(device_map, extraction, placement)
    assert (found.content, found.moved_op_count) == ({"": 3}, 0)


def test_training_on_the_cpu_beside_a_gpu_is_refused_where_it_means_offloading() -> None:
    extraction = extracted("llama")
    placement = cut_placement(extraction, ("cuda:0", "cpu"), ("model.layers.1",), of_calls=True)
    with pytest.raises(ExportError, match="gradients"):
        device_map(PlacedModules.of(extraction, placement))
    fed_on_cpu = device_map(PlacedModules.of(extraction, placement, main_device="cpu"))
    assert set(fed_on_cpu.content.values()) == {0, "cpu"}
    assert fed_on_cpu.remedy == ON_HOST


def test_inference_with_offloaded_modules_is_told_what_it_means() -> None:
    extraction = extract(replace(STEPS["llama"](), training=False))
    placement = cut_placement(extraction, ("cuda:0", "cpu"), ("model.layers.1",), of_calls=True)
    found = device_map(PlacedModules.of(extraction, placement))
    assert found.content["model.layers.1"] == "cpu"
    assert (found.remedy, found.is_predictable) == (OFFLOADED, False)


def test_cores_are_no_devices_of_torch_until_they_are_renamed() -> None:
    extraction = extracted("llama")
    cores = ("core:0", "core:1")
    placement = cut_placement(extraction, cores, ("model.layers.1",), of_calls=False)
    with pytest.raises(ExportError, match="as in core:0=cuda:0,core:1=cuda:1"):
        device_map(PlacedModules.of(extraction, placement))
    with pytest.raises(ExportError, match="core:7 cannot be renamed"):
        PlacedModules.of(extraction, placement, renamed={"core:7": "cuda:0"})
    renamed = dict(zip(cores, GPUS, strict=True))
    placed = PlacedModules.of(extraction, placement, renamed=renamed, main_device="cuda:1")
    assert device_map(placed).content["model.layers.0"] == 0
    assert device_map(placed).content["model.layers.1"] == 1
