"""Existing placements of users: device maps and placements as warm starts of a search."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import placer
from envs.hardware.cluster import Cluster, Device, Link
from envs.placement import Placement
from graphs.extract import Extraction, Workload, extract
from graphs.extract.placeable import call_graph
from graphs.graph import PHASES, GraphArrays
from graphs.synthetic.shapes import Weights, layered
from placer.exports.device_map import device_map
from placer.exports.existing_map import DeviceMap
from placer.exports.placed_modules import PlacedModules
from placer.warm_start import load_warm_start, placement_of
from tests.helpers import tiny_models
from tests.helpers.clusters import nodes
from tests.helpers.placed_at_random import cluster_of, cut_placement
from tests.helpers.tiny_models import Plain

PAIR = ("a", "b")


def layers() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    return Workload.of(model, (torch.randn(3, 4), torch.randn(3, 2)), tiny_models.squared)


def placed(
    devices: dict[str, str],
    extraction: Extraction,
    names: tuple[str, ...] = PAIR,
    *,
    of_calls: bool = False,
) -> Placement:
    graph = call_graph(extraction).graph if of_calls else extraction.graph
    return placement_of(
        DeviceMap(devices), extraction, GraphArrays.from_graph(graph), cluster_of(names)
    )


def test_ops_run_where_the_map_has_their_module_and_others_where_their_inputs_are() -> None:
    extraction = extract(layers())
    placement = placed({"0": "a", "2": "b"}, extraction)
    graph = GraphArrays.from_graph(extraction.graph)
    for op_id, module, phase in zip(graph.ids, graph.modules, graph.phase, strict=True):
        expected = {"0": "a", "2": "b"}.get(module)
        if expected is None and PHASES[phase] == "forward":
            expected = "a" if module == "1" else "b"  # the loss reads the output of the last layer
        if expected is not None:
            assert placement.device_of(op_id) == expected, op_id


def test_the_innermost_module_of_a_map_counts() -> None:
    placement = placed({"": "a", "middle": "b"}, extract(tiny_models.tied_weights()))
    assert set(placement.devices_of("middle")) == {"b"}
    assert set(placement.devices_of("embedding")) == {"a"}


def test_a_map_that_was_exported_is_the_placement_again() -> None:
    extraction = extract(layers())
    placement = cut_placement(extraction, ("cuda:0", "cuda:1"), ("2",), of_calls=True)
    content = device_map(PlacedModules.of(extraction, placement, main_device="cuda:1")).content
    again = {module: f"cuda:{number}" for module, number in content.items()}
    placement = placed(again, extraction, ("cuda:0", "cuda:1"))
    assert set(placement.devices_of("0")) == {"cuda:0"}
    assert set(placement.devices_of("2")) == {"cuda:1"}


def test_maps_are_read_with_gpus_by_number_and_placements_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text('{"0": 1, "2": "cpu", "4": "cuda", "6": "core:0"}')
    expected = {"0": "cuda:1", "2": "cpu", "4": "cuda:0", "6": "core:0"}
    assert load_warm_start(path) == DeviceMap(expected)
    placement = cut_placement(extract(layers()), PAIR, ("2",), of_calls=False)
    placement.save(path)
    assert isinstance(load_warm_start(path), Placement)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"0": "disk"}', "'0' is on 'disk'"),
        ('{"0": true}', "'0' is on True"),
        ("{}", "it names no modules"),
        ("[]", "map.json"),
        ('{"format": "placer-placement/9", "devices": {}}', "this version reads"),
    ],
)
def test_what_is_no_map_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "map.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_warm_start(path)


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ({"0": "a", "2": "a", "3": "b"}, "names '3', which Sequential has not"),
        ({"0": "a", "1": "b"}, r"leaves out 2 of 4 parameters and buffers, such as '2\.weight'"),
        ({"0": "a", "2": "cuda:7"}, "on cuda:7 .a number N means cuda:N., but the devices are a"),
    ],
)
def test_a_map_of_another_model_or_cluster_is_refused(
    devices: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        placed(devices, extract(layers()))


def doubled() -> nn.Module:
    """Return a sum of two layers, which Hugging Face cannot run with the layers on two devices."""
    left, right = nn.Linear(4, 4), nn.Linear(4, 4)
    return Plain(lambda self, x: self.left(x) + self.right(x), left=left, right=right)


def scaled() -> nn.Module:
    """Return a layer whose input is scaled by a parameter and shifted by a buffer beside it."""
    model = Plain(
        lambda self, x: self.layer(torch.relu(x * self.scale) + self.shift), layer=nn.Linear(4, 4)
    )
    model.scale = nn.Parameter(torch.ones(4))
    model.register_buffer("shift", torch.ones(4))
    return model


def around() -> nn.Module:
    """Return a model with the scaled layer inside."""
    return Plain(lambda self, x: self.inner(self.head(x)), head=nn.Linear(4, 4), inner=scaled())


def inferring(model: nn.Module, extractor: str = "auto") -> Extraction:
    return extract(Workload.of(model, torch.randn(3, 4), training=False), extractor)


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("model", "devices", "words"),
    [
        (doubled, "left=cuda:0 right=cuda:1", "add in Plain.forward fails, since what left and "),
        (doubled, "=cuda:1", ""),
        (scaled, "scale=cuda:1 shift=cuda:0 layer=cuda:0", "scale, in no module of the map, is"),
        (scaled, "scale=cuda:0 shift=cuda:0 layer=cuda:1", ""),
        (
            around,
            "head=c inner.layer=c inner.scale=d inner.shift=c",
            "mul in Plain.forward of inner",
        ),
        # a module counts for the tensors in it
        (around, "head=b inner=a inner.scale=b", "inner around it is on a"),
        (around, "head=b =a inner.scale=b", "the whole model around it is on a"),
        (lambda: layers().model, "0=cuda:0 2=cuda:1", ""),
    ],
)
def test_what_dispatch_model_would_not_run_is_reported_and_nothing_else(
    model: Callable[[], nn.Module], devices: str, words: str
) -> None:
    entries = DeviceMap(dict(entry.split("=") for entry in devices.split()))
    conflict = entries.conflict(inferring(model()))
    assert words in conflict
    assert bool(conflict) == bool(words)


def test_layers_in_a_chain_have_no_conflict_in_a_graph_of_modules() -> None:
    chain = DeviceMap({"0": "cuda:0", "2": "cuda:1"})
    assert chain.conflict(extract(layers(), "modules")) == ""


@pytest.mark.slow_repeats
@pytest.mark.parametrize("of_calls", [False, True])
def test_what_reads_a_tensor_of_a_map_runs_where_the_map_has_it(of_calls: bool) -> None:
    extraction = inferring(around())
    devices = {"head": "b", "inner.layer": "a", "inner.scale": "a", "inner.shift": "b"}
    placement = placed(devices, extraction, of_calls=of_calls)
    assert set(placement.devices_of("head")) == {"b"}
    assert placement.device_of("inner:mul") == placement.device_of("inner:relu") == "a"
    assert placement.device_of("inner:add") == "b"
    assert set(placement.devices_of("inner.layer")) == {"a"}
    apart = {"inner.layer.weight": "a", "inner.layer.bias": "a"}
    devices = {"head": "b", "inner.scale": "b", "inner.shift": "b"} | apart
    placement = placed(devices, extraction, of_calls=of_calls)
    assert placement.device_of("inner:add") == "b"
    assert set(placement.devices_of("inner.layer")) == {"a"}
    for module in ("inner", ""):  # counts for the tensors in it
        devices = {"head": "b", module: "a", "inner.scale": "b"}
        assert placed(devices, extraction).device_of("inner:mul") == "a"


def test_tensors_of_a_map_have_one_device_for_each_module_of_a_graph_of_modules() -> None:
    extraction = inferring(scaled(), "modules")
    with pytest.raises(ValueError, match="'shift' on b, but other tensors of its module on a"):
        placed({"scale": "a", "shift": "b", "layer": "b"}, extraction)
    for name in ("a", "b"):
        placement = placed({"scale": name, "shift": name, "layer": "b"}, extraction)
        assert set(placement.devices_of("layer")) == {"b"}
        assert {placement.device_of(op) for op in extraction.graph if op.startswith(":")} == {name}
    placed({"": "a", "layer": "b", "scale": "a"}, extraction)


@pytest.mark.usefixtures("second_device")
def test_dispatch_model_treats_entries_of_tensors_as_reported() -> None:
    accelerate = pytest.importorskip("accelerate")

    def devices(model: nn.Module, content: dict[str, str]) -> dict[str, str]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The following device_map keys do not match")
            accelerate.dispatch_model(model, content, main_device="cpu")
        return {name: str(tensor.device) for name, tensor in model.state_dict().items()}

    content = {"scale": "cuda:0", "shift": "cpu", "layer": "cuda:0"}
    assert devices(scaled(), content)["scale"] == "cpu"
    for module in ("inner", ""):
        content = {"head": "cuda:0", module: "cpu", "inner.scale": "cuda:0"}
        assert devices(around(), content)["inner.scale"] == "cpu"
    loaded = around()
    loaded.get_submodule("inner").scale = nn.Parameter(torch.ones(4, device="cuda:0"))
    content = {"head": "cpu", "inner.layer": "cpu", "inner.scale": "cuda:0", "inner.shift": "cpu"}
    assert devices(loaded, content)["inner.scale"] == "cuda:0"
    with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
        loaded(torch.randn(3, 4))


@pytest.mark.slow
@pytest.mark.usefixtures("second_device")
def test_what_a_user_has_is_one_more_candidate_and_always_run() -> None:
    devices = {"0": "cuda:0", "2": "cpu"}
    result = placer.optimize(
        layers(),
        devices="cuda:0,cpu",
        constraints=placer.Constraints(memory={"cuda:0": 1 << 30, "cpu": 1 << 30}),
        search=placer.SearchConfig(budget="50e", policy=None, start_from=devices),
        progress=False,
    )
    [start] = [row for row in result.candidates if row.kind is placer.Kind.WARM_START]
    assert start.measurement is not None
    assert start.measurement.ok, start.measurement.failure
    for module, device in devices.items():
        assert set(start.placement.devices_of(module)) == {device}


def test_a_search_from_a_placement_is_never_worse_than_it(
    files: Callable[..., tuple[Path, Path]],
) -> None:
    graph, cluster = files()

    def search(budget: str, start: placer.Placement | None = None) -> placer.Result:
        config = placer.SearchConfig(budget=budget, policy=None, start_from=start)
        return placer.optimize(graph, cluster, search=config, progress=False)

    far, near = search("3000e"), search("1e")
    assert near.best.predicted_s > far.best.predicted_s
    again = search("1e", far.placement)
    assert again.best.kind is placer.Kind.WARM_START
    assert again.best.predicted_s == far.best.predicted_s


def test_the_search_goes_on_from_a_warm_start() -> None:
    rng, weights = np.random.default_rng(1), Weights(ratio=2.0)
    graph, cluster = layered(rng, ops=300, weights=weights), nodes(2, 4)

    def found(evaluations: int, start: Placement | None = None) -> dict[bool, float]:
        """Return the best predicted step of the warm start, True, and of the other candidates."""
        search = placer.SearchConfig(
            budget=f"{evaluations}e", policy=None, workers=1, start_from=start
        )
        result = placer.optimize(graph, cluster, search=search)
        placements.append(result.placement)
        best_s = {True: np.inf, False: np.inf}
        for each in result.candidates:
            kind = each.kind is placer.Kind.WARM_START
            best_s[kind] = min(best_s[kind], each.predicted_s)
        return best_s

    placements: list[Placement] = []
    good_s = found(1000)[False]
    alone_s, warm_s = found(300)[False], found(300, placements[0])
    assert warm_s[True] == pytest.approx(good_s)
    assert warm_s[False] < alone_s


def test_a_search_may_start_from_the_unplaced_model_on_all_cores_together() -> None:
    graph, cores = layered(np.random.default_rng(1), ops=30), ("core:0", "core:1")
    devices = tuple(Device(name=name, kind="core", memory_bytes=1 << 40) for name in cores)
    link = Link(between=cores, latency_s=1e-6, bandwidth_bytes_per_s=1e9)
    cluster = Cluster(name="two", devices=devices, links=(link,))
    arrays = GraphArrays.from_graph(graph)
    zeros = np.zeros(len(arrays))
    together = Placement.of(arrays, cluster_of(("core:0-1",)), zeros.astype(np.int32), zeros)
    unplaced = replace(together, unplaced=True)

    def found(start: Placement | None) -> placer.Result:
        search = placer.SearchConfig(budget="20e", policy=None, workers=1, start_from=start)
        return placer.optimize(graph, cluster, search=search, progress=False)

    without, started = found(None), found(unplaced)
    assert started.best.predicted_s == without.best.predicted_s
    assert [each.name for each in started.candidates] == [each.name for each in without.candidates]
    with pytest.raises(ValueError, match="has no device 'core:0-1'"):
        found(together)
    with pytest.raises(ValueError, match="on core:0-1, not on core:0, core:1: leave the devices"):
        placer.evaluate(unplaced, graph, cluster, progress=False)
