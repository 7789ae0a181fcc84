"""Placements exported as pipelines and layer counts, and the export command."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.utils._pytree import tree_leaves

import placer
from envs.placement import Placement
from graphs.extract import Extraction, Workload, extract
from graphs.extract.placeable import call_graph
from graphs.graph import attributes_of
from placer.cli.main import main
from placer.exports import FORMATS, format_named, pipelining
from placer.exports.device_map import device_map
from placer.exports.format import Format, export_extracted
from placer.exports.layer_counts import layer_counts, titan_parts
from placer.exports.module_tree import Stack
from placer.exports.pipelining import Stage
from placer.exports.placed_modules import PlacedModules
from placer.exports.renaming import ExportError
from tests.helpers import tiny_models, tiny_reference_models, tiny_transformers
from tests.helpers.extracted_steps import without_dropout
from tests.helpers.placed_at_random import cut_placement, placement_of

GPUS = ("cuda:0", "cuda:1")


def normed(forward: Callable[..., Any]) -> Workload:
    torch.manual_seed(0)
    layers = {"norm": nn.LayerNorm(4), "first": nn.Linear(4, 4), "last": nn.Linear(4, 4)}
    model = tiny_models.Plain(forward, **layers)
    return Workload.of(model, (torch.randn(3, 4), torch.randn(3, 4)), tiny_models.squared)


def uncalled_head() -> Workload:
    """Return a model whose first module has most work, and whose head no step calls."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4))
    layers = {"head": nn.Linear(4, 2), "first": first, "last": nn.Linear(4, 4)}
    model = tiny_models.Plain(lambda m, x: m.last(m.first(x)), **layers)
    return Workload.of(model, torch.ones(2, 4), training=False)


def two_stacks() -> Workload:
    parts = {
        name: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for name in ("encoder", "decoder")
    }
    model = tiny_models.Plain(lambda m, x: m.decoder(m.encoder(x)), **parts)
    return Workload.of(model, torch.ones(2, 4), training=False)


def layers_twice() -> Workload:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = tiny_models.Plain(lambda m, x: m.layers(m.layers(x)), layers=layers)
    return Workload.of(model, torch.ones(2, 4), training=False)


class Experts(nn.Module):
    """Two experts, which compute all tokens, and a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        out: torch.Tensor = (outputs @ self.router(x).unsqueeze(-1)).squeeze(-1)
        return out


def experts() -> Workload:
    layers = nn.Sequential(Experts(), Experts())
    model = tiny_models.Plain(lambda m, x: m.layers(x), layers=layers)
    return Workload.of(model, torch.ones(2, 4), training=False)


STEPS: dict[str, Callable[[], Workload]] = {
    "norm_later": lambda: normed(lambda m, x: m.last(m.norm(m.first(m.norm(x))))),
    "norm_chain": lambda: normed(lambda m, x: m.last(m.first(m.norm(x)))),
    "norm_twice": lambda: normed(lambda m, x: m.last(m.norm(m.norm(m.first(x))))),
    "conv_net": tiny_models.conv_net,
    "tied_weights": tiny_models.tied_weights,
    "two_stacks": two_stacks,
    "layers_twice": layers_twice,
    "no_weights": lambda: Workload.of(nn.ReLU(), torch.ones(2, 4), training=False),
    "uncalled_head": uncalled_head,
    "experts": experts,
    "inception": tiny_models.inception,
    "three_layers": lambda: Workload.of(*three_layers()),
    "separate_moe": tiny_reference_models.separate_moe,
}


@functools.cache
def extracted(name: str) -> Extraction:
    if name in tiny_transformers.TARGETS:
        pytest.importorskip("transformers")
        return without_dropout(name)
    return extract(STEPS[name]())


def cut(
    name: str, *cuts: str, names: tuple[str, ...] = GPUS, of_calls: bool = True
) -> PlacedModules:
    extraction = extracted(name)
    return PlacedModules.of(extraction, cut_placement(extraction, names, cuts, of_calls=of_calls))


# --- pipelines


@pytest.mark.slow_repeats
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch copies what it deprecates
@pytest.mark.parametrize(
    ("name", "cuts", "of_calls"),
    [
        ("conv_net", ("4",), True),
        ("conv_net", ("4",), False),
        ("norm_chain", ("first", "last"), False),
        ("uncalled_head", ("last",), True),
        pytest.param("bert", ("bert.encoder.layer.1",), True, marks=pytest.mark.slow),
        pytest.param("gpt2", ("transformer.h.0", "transformer.h.1"), False, marks=pytest.mark.slow),
        pytest.param("t5", ("decoder.block.0", "decoder.block.1"), True, marks=pytest.mark.slow),
        pytest.param("inception", ("mixed_6c.branch7x7dbl_2",), True, marks=pytest.mark.slow),
    ],
)
def test_torch_cuts_the_model_where_the_placement_does(
    name: str, cuts: tuple[str, ...], of_calls: bool
) -> None:
    names = tuple(f"cuda:{i}" for i in range(len(cuts) + 1))
    placed = cut(name, *cuts, names=names, of_calls=of_calls)
    found = pipelining.pipeline(placed).content
    assert found["stages"] == list(names)
    for start, asked in zip(found["split_points"], cuts, strict=True):
        assert start.startswith(asked)
    step, model = placed.step, copy.deepcopy(placed.model)
    split_spec = dict.fromkeys(found["split_points"], SplitPoint.BEGINNING)
    pipe = pipeline(model, step.model_inputs, dict(step.keywords), split_spec=split_spec)
    assert pipe.num_stages == len(names)
    torch.manual_seed(0)
    seen = pipe(*step.model_inputs, **step.keywords)
    torch.manual_seed(0)
    expected = copy.deepcopy(placed.model)(*step.model_inputs, **step.keywords)
    torch.testing.assert_close(
        [leaf for leaf in tree_leaves(seen) if isinstance(leaf, torch.Tensor)],
        [leaf for leaf in tree_leaves(expected) if isinstance(leaf, torch.Tensor)],
    )


def going_back(name: str, *cuts: str) -> PlacedModules:
    """Return a placement whose last part is back on the first device."""
    placed = cut(name, *cuts, names=("cuda:0", "cuda:1", "cuda:2"))
    return replace(
        placed, ops=tuple(replace(op, device=op.device.replace("2", "0")) for op in placed.ops)
    )


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("write", "placed", "reason"),
    [
        (pipelining.pipeline, lambda: going_back("conv_net", "1", "7"), "then 7 is"),
        (pipelining.pipeline, lambda: cut("norm_later", "first"), "norm runs again"),
        (pipelining.pipeline, lambda: cut("norm_twice", "norm"), "begin with norm"),
        (pipelining.pipeline, lambda: cut("conv_net", names=("cuda:0",)), "all modules are on"),
        (pipelining.pipeline, lambda: cut("no_weights"), "ReLU has no parameters or buffers"),
        (device_map, lambda: cut("no_weights"), "ReLU has no parameters or buffers"),
        (layer_counts, lambda: cut("layers_twice", "layers.1"), r"layers\.0 runs again in stage 0"),
        (layer_counts, lambda: cut("llama", names=("cuda:0",)), "all modules are on cuda:0"),
        (layer_counts, lambda: cut("llama", "model.norm"), r"all layers of model\.layers are on"),
        (layer_counts, lambda: cut("two_stacks", "decoder.0"), "2 lists of layers"),
        (layer_counts, lambda: cut("conv_net", "4"), "no list of like layers"),
    ],
)
def test_a_placement_that_a_format_cannot_express_is_refused(
    write: Format, placed: Callable[[], PlacedModules], reason: str
) -> None:
    with pytest.raises(ExportError, match=reason):
        write(placed())


def test_a_shared_embedding_stays_where_it_is_reached_and_its_gradients_need_a_sum() -> None:
    found = pipelining.pipeline(cut("tied_weights", "middle"))
    assert found.content["split_points"] == {"middle": "beginning"}
    assert "embedding and head share" in found.remedy


@pytest.mark.slow
def test_backward_ops_run_with_their_forward_call_whichever_module_they_are_named_after() -> None:
    layer = functools.partial(tiny_models.Plain, lambda m, x: m.norm(x + m.first(x)))
    layers = (layer(first=nn.Linear(4, 4), norm=nn.LayerNorm(4)) for _ in "12")
    model = nn.Sequential(*layers)
    extraction = extract(Workload.of(model, (torch.ones(2, 4), torch.ones(2, 4)), nn.MSELoss()))
    ids = list(extraction.graph)
    by_layer = [
        int(not attributes_of(extraction.graph, op)["module"].startswith("0")) for op in ids
    ]
    assert extraction.call_of[ids.index("1.norm:backward/add.gradient")].startswith("0.norm:")
    placement = placement_of(extraction.graph, GPUS, by_layer)
    assert export_extracted(pipelining.pipeline, extraction, placement).moved_op_count == 1


# --- layers


@pytest.mark.slow
def test_layers_are_counted_by_stage_and_every_module_is_in_one() -> None:
    placed = cut("llama", "model.layers.1")
    found = layer_counts(placed).content
    assert found["counts"] == [1, 1]
    assert found["stages"] == list(GPUS)
    assert found["vllm"] == {"VLLM_PP_LAYER_PARTITION": "1,1"}
    assert found["torchtitan"]["module_fqns_per_model_part"] == [
        ["tok_embeddings", "layers.0", "rotary_emb"],
        ["layers.1", "norm", "lm_head", "rotary_emb"],
    ]


def test_names_for_torchtitan_are_children_of_the_model_or_layers_of_its_list() -> None:
    two = [nn.Linear(2, 2), nn.Linear(2, 2)]
    model = nn.ModuleDict(
        {
            "blocks": nn.ModuleList(two),
            "tower": nn.Sequential(*two),
            "model": nn.ModuleDict({"layers": nn.ModuleList(two), "h": nn.ModuleList(two)}),
        }
    )

    def parts(stack: str, first: Sequence[str], second: Sequence[str]) -> list[list[str]] | None:
        both = [Stage("cuda:0", tuple(first)), Stage("cuda:1", tuple(second))]
        return titan_parts(model, Stack(stack, (f"{stack}.0", f"{stack}.1")), both)

    as_they_are = ["stem", "blocks.0"], ["blocks.1", "head"]
    assert parts("blocks", *as_they_are) == list(as_they_are)
    assert parts("blocks", ["stem.conv", "blocks.0"], ["blocks.1"]) is None
    assert parts("tower", ["tower.0"], ["tower.1"]) is None
    assert parts("model.h", ["model.wte", "model.h.0"], ["model.h.1", "lm_head"]) is None
    of_hugging_face = parts("model.layers", ["model.embed_tokens", "model.layers.0"], ["lm_head"])
    assert of_hugging_face == [["tok_embeddings", "layers.0"], ["lm_head"]]


def test_counts_hold_although_what_is_around_the_layers_goes_back() -> None:
    found = layer_counts(going_back("llama", "model.layers.1", "model.norm"))
    assert found.content["counts"] == [1, 1]
    assert "torchtitan" not in found.content
    assert not found.is_predictable


# --- the command


THREE_LAYERS = """
import torch
from torch import nn

def build():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in "123"))
    return model, (torch.ones(2, 4), torch.ones(2, 4)), nn.MSELoss()
"""


def three_layers() -> tuple[nn.Module, tuple[Any, ...], nn.Module]:
    names: dict[str, Any] = {}
    exec(THREE_LAYERS, names)
    built: tuple[nn.Module, tuple[Any, ...], nn.Module] = names["build"]()
    return built


@pytest.fixture
def target(tmp_path: Path) -> tuple[str, Path]:
    """Return a model file and a placement of its ops on two cores."""
    path = tmp_path / "model.py"
    path.write_text(THREE_LAYERS)
    placement = cut_placement(
        extracted("three_layers"), ("core:0", "core:1"), ("1",), of_calls=False
    )
    placement.save(tmp_path / "placement.json")
    return f"{path}:build", tmp_path / "placement.json"


def export(target: tuple[str, Path], *arguments: str) -> int:
    name, placement = target
    return main(["export", str(placement), name, *arguments])


@pytest.mark.slow
def test_the_command_writes_what_the_formats_say(
    target: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected: dict[str, Any] = {
        "device-map": {"0": 0, "1": 1, "2": 1},
        "pipeline": {"stages": ["cuda:0", "cuda:1"], "split_points": {"1": "beginning"}},
    }
    for name, content in expected.items():
        out = tmp_path / f"{name}.json"
        renamed = ("--as", "core:0=cuda:0,core:1=cuda:1")
        assert export(target, "--format", name, "--out", str(out), *renamed) == 0
        assert json.loads(out.read_text()) == content
        assert str(out) in capsys.readouterr().err
    assert export(target, "--format", "layer-counts") == 0
    assert json.loads(capsys.readouterr().out)["counts"] == [1, 2]
    for names, stages in (  # an idle device, and an exchange
        ("core:0=cuda:0,core:1=cuda:1,core:2=cuda:2", ["cuda:0", "cuda:1"]),
        ("core:0=core:1,core:1=core:0", ["core:1", "core:0"]),
    ):
        assert export(target, "--format", "layer-counts", "--as", names) == 0
        assert json.loads(capsys.readouterr().out)["stages"] == stages


@pytest.mark.slow
def test_the_command_writes_the_unplaced_model_on_all_cores(
    target: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    graph = extracted("three_layers").graph
    unplaced = replace(placement_of(graph, ("core:0-1",), [0] * len(graph)), unplaced=True)
    unplaced.save(target[1])
    renamed = ("--as", "core:0=cuda:0,core:1=cuda:1")
    assert export(target, "--format", "device-map", *renamed) == 0
    assert json.loads(capsys.readouterr().out) == {"": 0}


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        ("device-map", 2, "as in core:0=cuda:0,core:1=cuda:1"),
        ("override-regex", 1, "no layers with experts"),
        ("pipeline --as cuda:0=cuda:1", 2, "the placement has core:0, core:1"),
        ("layer-counts --as core:0=meta", 2, "no device meta"),
        ("device-map --as core:0=cuda:0,core:1=cuda:1 --main-device gpu", 2, "no device gpu"),
        ("device-map --as core:0=cuda:0,core:1=cuda:1 --main-device cuda:7", 2, "cuda:0, cuda:1"),
        ("layer-counts --inference", 2, "leave --inference out"),
        ("layer-counts --dtype bf16", 2, "dtype"),
        ("layer-counts --optimizer sgd", 2, "such as optimizer op"),
    ],
)
def test_the_command_refuses_unknown_devices_and_options(
    target: tuple[str, Path],
    arguments: str,
    status: int,
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert export(target, "--format", *arguments.split()) == status
    assert reason in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_refuses_other_graphs_and_files(
    target: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export((str(tmp_path / "graph.json"), target[1]), "--format", "pipeline") == 2
    assert "a graph file has no modules" in capsys.readouterr().err
    replace(Placement.load(target[1]), graph="0" * 64).save(target[1])
    assert export(target, "--format", "layer-counts") == 2
    assert "was made for graph 000000000000" in capsys.readouterr().err
    target[1].write_text('{"": 0}')
    assert export(target, "--format", "pipeline") == 2
    assert "placement.json is a device_map already" in capsys.readouterr().err


def test_python_exports_what_the_command_does(target: tuple[str, Path]) -> None:
    model, inputs, loss = three_layers()
    renamed = {"core:0": "cuda:0", "core:1": "cuda:1"}
    found = placer.export(target[1], "device-map", model, inputs, loss=loss, renamed=renamed)
    assert found.content == {"0": 0, "1": 1, "2": 1}
    # Cut in the forward pass; everything after the cut is on core:1, all backward ops included.
    assert (found.moved_op_count, found.op_count) == (3, 19)
    with pytest.raises(ValueError, match="give model and example_inputs"):
        placer.export(target[1], "pipeline", model)


def test_a_loss_that_is_a_module_and_placed_elsewhere_moves() -> None:
    extraction = extracted("three_layers")
    graph = call_graph(extraction).graph
    devices = [int(attributes_of(graph, node)["module"].startswith("2")) for node in graph]
    placed = PlacedModules.of(extraction, placement_of(graph, GPUS, devices))
    moved = placed.moved_ops(pipelining.pipeline(placed).runs_on)
    assert [op.module for op in moved if op in placed.ops] == ["loss"]


def test_every_format_is_found_by_its_name() -> None:
    assert all(callable(format_named(name)) for name in FORMATS)
    with pytest.raises(ValueError, match="did you mean device-map"):
        format_named("device_map")
