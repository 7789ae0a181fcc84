"""Existing placements of users: device maps and placements as warm starts of a search."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import placer
from envs.placement import Placement
from graphs.extract import Extraction, Workload, extract
from graphs.extract.placeable import call_graph
from graphs.graph import PHASES, GraphArrays
from placer.exports.device_map import device_map
from placer.exports.existing_map import DeviceMap
from placer.exports.placed_modules import PlacedModules
from placer.warm_start import load_warm_start, placement_of
from tests.helpers import tiny_models
from tests.helpers.placed_at_random import cluster_of, cut_placement

torch.set_num_threads(1)
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


class Doubled(nn.Module):
    """A sum of two layers, which Hugging Face cannot run with the layers on two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        both: Tensor = self.left(x) + self.right(x)
        return both


def doubled() -> Workload:
    return Workload.of(Doubled(), (torch.randn(3, 4), torch.randn(3, 2)), tiny_models.squared)


def test_what_dispatch_model_would_not_run_is_reported_and_nothing_else() -> None:
    extraction = extract(doubled())
    conflict = DeviceMap({"left": "cuda:0", "right": "cuda:1"}).conflict(extraction)
    assert "add in Doubled.forward fails, since what left and right give" in conflict
    assert DeviceMap({"": "cuda:1"}).conflict(extraction) == ""
    chain = DeviceMap({"0": "cuda:0", "2": "cuda:1"})
    assert chain.conflict(extract(layers())) == ""
    assert chain.conflict(extract(layers(), "modules")) == ""


class Scaled(nn.Module):
    """A layer whose input is scaled by a parameter and shifted by a buffer of the same module."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(torch.relu(x * self.scale) + self.shift)
        return out


class Around(nn.Module):
    """``Scaled`` inside of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.inner = nn.Linear(4, 4), Scaled()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(self.head(x))
        return out


def scaled(model: nn.Module) -> Extraction:
    return extract(Workload.of(model, torch.randn(3, 4), training=False))


@pytest.mark.parametrize("of_calls", [False, True])
def test_what_reads_a_tensor_of_a_map_runs_where_the_map_has_it(of_calls: bool) -> None:
    extraction = scaled(Around())
    tensors = {"inner.scale": "a", "inner.shift": "b"}
    devices = {"head": "b", "inner.layer": "a"} | tensors
    found = placed(devices, extraction, of_calls=of_calls)
    assert set(found.devices_of("head")) == {"b"}
    assert found.device_of("inner:mul") == "a"
    assert found.device_of("inner:relu") == "a"
    assert found.device_of("inner:add") == "b"
    assert set(found.devices_of("inner.layer")) == {"a"}
    apart = {"head": "b", "inner.layer.weight": "a", "inner.layer.bias": "a"}
    found = placed(apart | dict.fromkeys(tensors, "b"), extraction, of_calls=of_calls)
    assert found.device_of("inner:add") == "b"
    assert set(found.devices_of("inner.layer")) == {"a"}


def test_a_module_of_a_map_counts_for_the_tensors_in_it_as_for_dispatch_model() -> None:
    extraction = scaled(Around())
    for module in ("inner", ""):
        devices = {"head": "b", module: "a", "inner.scale": "b"}
        assert placed(devices, extraction).device_of("inner:mul") == "a"
        conflict = DeviceMap(devices).conflict(extraction)
        assert "inner.scale on b" in conflict
        assert f"{module or 'the whole model'} around it is on a" in conflict


def test_entries_of_tensors_that_dispatch_model_would_not_run_are_reported() -> None:
    mixed = DeviceMap({"scale": "cuda:1", "shift": "cuda:0", "layer": "cuda:0"})
    assert "scale, in no module of the map, is sent to cuda:0" in mixed.conflict(scaled(Scaled()))
    inner = DeviceMap(
        {
            "head": "cuda:0",
            "inner.layer": "cuda:0",
            "inner.scale": "cuda:1",
            "inner.shift": "cuda:0",
        }
    )
    assert "mul in Scaled.forward of inner fails" in inner.conflict(scaled(Around()))
    fine = DeviceMap({"scale": "cuda:0", "shift": "cuda:0", "layer": "cuda:1"})
    assert fine.conflict(scaled(Scaled())) == ""


@pytest.mark.usefixtures("second_device")
def test_dispatch_model_treats_entries_of_tensors_as_reported() -> None:
    accelerate = pytest.importorskip("accelerate")

    def devices(model: nn.Module, content: dict[str, str]) -> dict[str, str]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The following device_map keys do not match")
            accelerate.dispatch_model(model, content, main_device="cpu")
        return {name: str(tensor.device) for name, tensor in model.state_dict().items()}

    content = {"scale": "vdev:0", "shift": "cpu", "layer": "vdev:0"}
    assert devices(Scaled(), content)["scale"] == "cpu"
    for module in ("inner", ""):
        found = devices(Around(), {"head": "vdev:0", module: "cpu", "inner.scale": "vdev:0"})
        assert found["inner.scale"] == "cpu"
    loaded = Around()
    loaded.inner.scale = nn.Parameter(torch.ones(4, device="vdev:0"))
    content = {"head": "cpu", "inner.layer": "cpu", "inner.scale": "vdev:0", "inner.shift": "cpu"}
    assert devices(loaded, content)["inner.scale"] == "vdev:0"
    with pytest.raises(RuntimeError, match="all tensors must be on one device"):
        loaded(torch.randn(3, 4))


def test_of_a_graph_of_modules_it_is_not_known_what_reads_a_tensor() -> None:
    extraction = extract(Workload.of(Scaled(), torch.randn(3, 4), training=False), "modules")
    with pytest.raises(ValueError, match="names 'scale', but in a graph of modules"):
        placed({"scale": "a", "shift": "a", "layer": "b"}, extraction)
    placed({"": "a", "layer": "b", "scale": "a"}, extraction)


@pytest.mark.usefixtures("second_device")
def test_what_a_user_has_is_one_more_candidate_and_always_run() -> None:
    step = layers()
    result = placer.optimize(
        step.model,
        step.inputs,
        loss=step.loss,
        devices="vdev:0,cpu",
        constraints=placer.Constraints(memory={"vdev:0": 1 << 30, "cpu": 1 << 30}),
        search=placer.SearchConfig(
            budget="50e", policy=None, start_from={"0": "vdev:0", "2": "cpu"}
        ),
        progress=False,
    )
    own = next(row for row in result.candidates if row.kind is placer.Kind.WARM_START)
    assert own.measurement is not None
    assert own.measurement.ok
    assert set(own.placement.devices_of("0")) == {"vdev:0"}
    assert set(own.placement.devices_of("2")) == {"cpu"}


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
