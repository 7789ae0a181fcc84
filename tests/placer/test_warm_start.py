"""Existing user placements: device maps as placements, and their step times."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import placer
from envs import torch_runtime
from envs.costs import torch_speeds
from envs.hardware.discover import discover
from envs.placement import Placement
from graphs.extract import Extraction, Workload, extract
from graphs.extract.placeable import call_graph
from graphs.graph import PHASES, GraphArrays
from placer.cli.main import main
from placer.device_map import DeviceMap
from placer.exports.device_map import device_map
from placer.exports.placed_modules import PlacedModules
from placer.measuring import score
from placer.warm_start import load_warm_start, placement_of
from tests.helpers import tiny_models
from tests.helpers.placed_at_random import cluster_of, cut_placement
from tests.helpers.vdev import vdev

torch.set_num_threads(1)
PAIR = ("a", "b")
TARGET = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    return model, (torch.randn(16, 64), torch.randn(16, 8)), nn.MSELoss()
"""


def layers() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    return Workload.of(model, (torch.randn(3, 4), torch.randn(3, 2)), tiny_models.squared)


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make calibration quick and keep it for one test."""
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch_speeds, "STREAM_BYTES", 1 << 20)
    monkeypatch.setattr(torch_speeds, "LARGE_BYTES", 1 << 20)
    monkeypatch.setattr(torch_runtime, "TURN_S", 0.0)


@pytest.fixture
def second_device() -> Iterator[None]:
    if torch.cuda.is_available():
        pytest.skip("vdev would take CUDA's place")
    with vdev():
        yield


# --- device maps


def test_ops_run_where_the_map_has_their_module_and_others_where_their_inputs_are() -> None:
    extraction = extract(layers())
    graph = GraphArrays.from_graph(extraction.graph)
    found = DeviceMap({"0": "a", "2": "b"}).placed(extraction, graph, cluster_of(PAIR))
    for op_id, module, phase in zip(graph.ids, graph.modules, graph.phase, strict=True):
        expected = {"0": "a", "2": "b"}.get(module)
        if expected is None and PHASES[phase] == "forward":
            expected = "a" if module == "1" else "b"  # the loss reads the output of the last layer
        if expected is not None:
            assert found.device_of(op_id) == expected, op_id


def test_the_innermost_module_of_a_map_counts() -> None:
    extraction = extract(tiny_models.tied_weights())
    graph = GraphArrays.from_graph(extraction.graph)
    found = DeviceMap({"": "a", "middle": "b"}).placed(extraction, graph, cluster_of(PAIR))
    assert set(found.devices_of("middle")) == {"b"}
    assert set(found.devices_of("embedding")) == {"a"}
    found.check(graph, cluster_of(PAIR))


def test_a_map_that_was_exported_is_the_placement_again() -> None:
    extraction = extract(layers())
    placement = cut_placement(extraction, ("cuda:0", "cuda:1"), ("2",), of_calls=True)
    content = device_map(PlacedModules.of(extraction, placement, main_device="cuda:1")).content
    again = DeviceMap({module: f"cuda:{number}" for module, number in content.items()})
    assert again.device_names == ("cuda:0", "cuda:1")
    graph = GraphArrays.from_graph(extraction.graph)
    found = again.placed(extraction, graph, cluster_of(again.device_names))
    assert set(found.devices_of("0")) == {"cuda:0"}
    assert set(found.devices_of("2")) == {"cuda:1"}


def test_maps_are_read_with_gpus_by_number(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text('{"0": 1, "2": "cpu", "4": "cuda", "6": "core:0"}')
    assert load_warm_start(path) == DeviceMap(
        {"0": "cuda:1", "2": "cpu", "4": "cuda:0", "6": "core:0"}
    )
    extraction = extract(layers())
    placement = cut_placement(extraction, PAIR, ("2",), of_calls=False)
    placement.save(path)
    assert isinstance(load_warm_start(path), Placement)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"0": "disk"}', "'0' is on 'disk'"),
        ('{"0": true}', "'0' is on True"),
        ("{}", "it names no modules"),
        ("[]", "map.json"),
        ('{"format": "placer-placement/9", "devices": {}}', "this version reads"),
    ],
)
def test_what_is_no_map_is_refused(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "map.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=told):
        load_warm_start(path)


def test_a_map_of_another_model_is_refused() -> None:
    extraction = extract(layers())
    graph = GraphArrays.from_graph(extraction.graph)
    cases = {
        "names '3', which Sequential has not": {"0": "a", "2": "a", "3": "b"},
        r"leaves out 2 of 4 parameters and buffers, such as '2\.weight'": {"0": "a", "1": "b"},
        "c": {"0": "a", "2": "c"},
    }
    for told, devices in cases.items():
        with pytest.raises(ValueError, match=told):
            placement_of(DeviceMap(devices), extraction, graph, cluster_of(PAIR))


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


def test_what_dispatch_model_would_not_run_is_told_and_nothing_else() -> None:
    extraction = extract(doubled())
    told = DeviceMap({"left": "cuda:0", "right": "cuda:1"}).conflict(extraction)
    assert "add in Doubled.forward fails, since what left and right give" in told
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
    graph = GraphArrays.from_graph(call_graph(extraction).graph if of_calls else extraction.graph)
    tensors = {"inner.scale": "a", "inner.shift": "b"}
    found = DeviceMap({"head": "b", "inner.layer": "a"} | tensors).placed(
        extraction, graph, cluster_of(PAIR)
    )
    assert set(found.devices_of("head")) == {"b"}
    assert found.device_of("inner:mul") == "a"
    assert found.device_of("inner:relu") == "a"
    assert found.device_of("inner:add") == "b"
    assert set(found.devices_of("inner.layer")) == {"a"}
    apart = {"head": "b", "inner.layer.weight": "a", "inner.layer.bias": "a"}
    found = DeviceMap(apart | dict.fromkeys(tensors, "b")).placed(
        extraction, graph, cluster_of(PAIR)
    )
    assert found.device_of("inner:add") == "b"
    assert set(found.devices_of("inner.layer")) == {"a"}


def test_a_module_of_a_map_counts_for_the_tensors_in_it_as_for_dispatch_model() -> None:
    extraction = scaled(Around())
    graph = GraphArrays.from_graph(extraction.graph)
    for module in ("inner", ""):
        given = DeviceMap({"head": "b", module: "a", "inner.scale": "b"})
        assert given.placed(extraction, graph, cluster_of(PAIR)).device_of("inner:mul") == "a"
        told = given.conflict(extraction)
        assert "inner.scale on b" in told
        assert f"{module or 'the whole model'} around it is on a" in told


def test_entries_of_tensors_that_dispatch_model_would_not_run_are_told() -> None:
    told = DeviceMap({"scale": "cuda:1", "shift": "cuda:0", "layer": "cuda:0"}).conflict(
        scaled(Scaled())
    )
    assert "scale, which is in no module of the map, is sent to cuda:0" in told
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
def test_dispatch_model_treats_entries_of_tensors_as_is_told() -> None:
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
    graph = GraphArrays.from_graph(extraction.graph)
    with pytest.raises(ValueError, match="names 'scale', but in a graph of modules"):
        DeviceMap({"scale": "a", "shift": "a", "layer": "b"}).placed(
            extraction, graph, cluster_of(PAIR)
        )
    whole = {"": "a", "layer": "b", "scale": "a"}
    DeviceMap(whole).placed(extraction, graph, cluster_of(PAIR))


# --- warm starts


@pytest.mark.usefixtures("second_device")
def test_what_a_user_has_is_one_more_candidate_and_always_run() -> None:
    step = layers()
    found = placer.optimize(
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
    given = next(own for own in found.candidates if own.kind is placer.Kind.WARM_START)
    assert given.measurement is not None
    assert given.measurement.ok
    assert set(given.placement.devices_of("0")) == {"vdev:0"}
    assert set(given.placement.devices_of("2")) == {"cpu"}


def test_a_search_from_a_placement_is_never_worse_than_it(
    files: Callable[..., tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, cluster = files()
    best, out = tmp_path / "best.json", tmp_path / "out.json"
    command = ["optimize", str(graph), "--cluster", str(cluster), "--policy", "none", "--json"]
    assert main([*command, "--budget", "3000e", "--out", str(best)]) == 0
    far = json.loads(capsys.readouterr().out)
    assert main([*command, "--budget", "1e", "--out", str(out)]) == 0
    near = json.loads(capsys.readouterr().out)
    assert near["step_s"] > far["step_s"]
    started = [*command, "--budget", "1e", "--out", str(out), "--start-from", str(best)]
    assert main(started) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["best"], found["step_s"]) == ("warm start", far["step_s"])


def test_a_graph_file_has_no_modules_to_start_from(
    files: Callable[..., tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, cluster = files()
    given = tmp_path / "map.json"
    given.write_text('{"0": "a"}')
    command = ["optimize", str(graph), "--cluster", str(cluster), "--start-from", str(given)]
    assert main([*command, "--out", str(tmp_path / "out.json")]) == 2
    assert "give a placement" in capsys.readouterr().err
    assert main([*command, "--out", str(given)]) == 2
    assert "--start-from are the same file" in capsys.readouterr().err


# --- scores


@pytest.mark.usefixtures("second_device")
def test_a_map_over_two_devices_is_run_and_predicted() -> None:
    step = layers()
    before = tiny_models.state_of(step)
    cluster = discover("vdev:0,cpu", {"vdev:0": 1 << 30, "cpu": 1 << 30})
    found = score(step, DeviceMap({"0": "vdev:0", "2": "cpu"}), cluster)
    assert found.measurement.ok
    assert found.predicted.feasible
    assert set(found.placement.devices_of("0")) == {"vdev:0"}
    assert set(found.placement.devices_of("2")) == {"cpu"}
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told["measured"]["step_s"] == found.step_s
    assert told["predicted"]["step_s"] == found.predicted.step_s
    (remark,) = told["remarks"]
    assert "2 would be computed on vdev:0" in remark
    impossible = score(doubled(), DeviceMap({"left": "vdev:0", "right": "cpu"}), cluster)
    assert impossible.measurement.ok
    assert "dispatch_model would not do" in impossible.to_dict()["remarks"][0]
    tiny_models.assert_same(tiny_models.state_of(step), before)


def test_the_command_scores_a_placement_on_a_pinned_core_and_a_map_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, given = tmp_path / "model.py", tmp_path / "given.json"
    model.write_text(TARGET)
    given.write_text('{"": "cpu"}')
    command = ["evaluate", f"{model}:build", "--placement", str(given)]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["predicted"]["peak_memory_bytes"].keys() == {"cpu"}
    core = discover("auto").names[0] if not torch.cuda.is_available() else "core:0"
    given.write_text(json.dumps({"": core}))
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "predicted step: " in told
    assert "measured step: " in told


@pytest.mark.usefixtures("second_device")
def test_the_command_holds_the_host_to_its_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, given = tmp_path / "model.py", tmp_path / "given.json"
    model.write_text(TARGET)
    given.write_text('{"": "cpu"}')
    command = ["evaluate", f"{model}:build", "--placement", str(given), "--json"]
    devices = ["--devices", "vdev:0,cpu", "--memory"]
    assert main([*command, *devices, "vdev:0=1GiB,cpu=20kB"]) == 1
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert not found["feasible"]
    assert "but has 20.0 kB" in found["why"]
    assert "kB too little" in told.err
    assert main([*command, *devices, "vdev:0=1GiB,cpu=1MB"]) == 0
    given.write_text('{"": "vdev:0"}')
    assert main([*command, *devices, "vdev:0=1GiB,cpu=20kB"]) == 0


def test_the_command_says_what_cannot_be_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, given = tmp_path / "model.py", tmp_path / "given.json"
    model.write_text(TARGET)
    command = ["evaluate", f"{model}:build", "--placement", str(given)]
    assert main(command) == 2
    assert "given.json" in capsys.readouterr().err
    given.write_text('{"0": "cpu"}')
    assert main(command) == 2
    assert "leaves out 2 of 4" in capsys.readouterr().err
    given.write_text('{"": "nowhere:0"}')
    assert main(command) == 2
    assert "nowhere:0" in capsys.readouterr().err
    given.write_text('{"": 7}')
    assert main(command) == 2
    assert "7 in a device map means cuda:7" in capsys.readouterr().err
    assert main([*command, "--devices", "core:0"]) == 2
    assert "'' on cuda:7, which is what 7 means" in capsys.readouterr().err
    extraction = extract(layers())
    many = cut_placement(extraction, ("cpu",), (), of_calls=True)
    replace(many, graph="0" * 64).save(given)
    assert main(command) == 2
    assert "was made for graph 000000000000" in capsys.readouterr().err
