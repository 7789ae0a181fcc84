"""ONNX files as workloads: torch's exports are read back, unsupported models are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from envs.executors.cores.instruction_lists import device_lists, priority_order
from graphs.extract import extract
from graphs.models import ResNet, ResNetConfig
from placer.sources import onnx as source
from placer.sources.names import TargetError
from placer.sources.target import load_step
from tests.helpers import one_process
from tests.helpers.tiny_models import assert_same, export_onnx
from tests.helpers.tiny_transformers import TARGETS
from tests.helpers.tiny_transformers import load as load_transformer

onnx = pytest.importorskip("onnx")
helper, FLOAT, INT64 = onnx.helper, onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


class Convolutions(nn.Module):
    """Pads unevenly, rounds sizes up, and joins branches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8))
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.average = nn.AvgPool2d(3, 1, 1, count_include_pad=False)
        self.up = nn.ConvTranspose2d(16, 4, 2, stride=2)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.pad(x, (0, 1, 0, 1))
        x = nn.functional.hardswish(self.first(x))
        x = torch.cat([self.pool(self.grouped(x)), self.average(x)[:, :, ::2, ::2]], 1)
        x = nn.functional.leaky_relu(self.norm(self.up(x)))
        x = nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear")
        head: torch.Tensor = self.head(x.mean((2, 3)))
        return head.log_softmax(-1)


class Recurrent(nn.Module):
    """A recurrent layer between two others, batch first."""

    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.layer = kind(4, 6, batch_first=True, **options)
        self.head = nn.LazyLinear(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layer(x)[0])
        return found


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (Convolutions, (2, 3, 16, 16)),
    "resnet": (lambda: ResNet(ResNetConfig(blocks=(1, 1, 1, 1), width=4)), (2, 3, 32, 32)),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, activation="gelu"), 2
        ),
        (2, 5, 16),
    ),
    "lstm": (lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True), (2, 5, 4)),
    "gru": (lambda: Recurrent(nn.GRU, bias=False), (2, 5, 4)),
    "rnn": (lambda: Recurrent(nn.RNN, bidirectional=True), (2, 5, 4)),
}


@pytest.mark.slow_repeats
@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_computes_what_the_original_does_placed_on_two_devices(
    name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)
    model(x)  # initializes lazy modules
    path = export_onnx(model, (x,), tmp_path / "model.onnx")
    step = load_step(str(path), training=False)
    with torch.no_grad():
        torch.testing.assert_close(step.model(x), model(x), rtol=1e-5, atol=1e-5)
        expected = step.model(*step.inputs)
    extraction = extract(step)
    count = extraction.program.op_count
    order = priority_order(extraction.program, [0.0] * count)
    lists = device_lists(extraction.program, [i % 2 for i in range(count)], order, 2)
    assert_same(one_process.run(extraction, lists).output, expected)


@pytest.mark.slow
def test_a_transformer_keeps_names_sizes_and_results(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    original = load_transformer(TARGETS["bert"], training=False)
    ids = original.keywords["input_ids"]
    axes = {"x0": {1: "sequence"}}
    path = export_onnx(original.model, (ids,), tmp_path / "model.onnx", dynamic_axes=axes)
    step = load_step(f"{path}?sequence=8", training=False)
    with torch.no_grad():
        output, expected = step.model(ids), original.model(ids).logits
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert "bert.embeddings.word_embeddings.weight" in step.model.state_dict()
    modules = {str(node["module"]) for _, node in extract(step).graph.nodes(data=True)}
    assert "bert.encoder.layer.1.attention.self.query.MatMul" in modules


def single(
    op: str,
    inputs: dict[str, tuple[int | str, ...]],
    *,
    known: dict[str, np.ndarray[Any, Any]] | None = None,
    domain: str = "",
    **attributes: Any,
) -> Any:
    """Return a model of one node with inputs of these shapes and constant inputs."""
    held = known or {}
    node = helper.make_node(
        op, [*inputs, *held], ["y"], name=f"the/{op}", domain=domain, **attributes
    )
    graph = helper.make_graph(
        [node],
        "one node",
        [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        [onnx.numpy_helper.from_array(value, name) for name, value in held.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def refusal(target: object) -> str:
    with pytest.raises(TargetError) as refused:
        load_step(str(target), training=False)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a valid file with two symbolic sizes, one of them used twice."""
    found = tmp_path / "model.onnx"
    onnx.save(single("Add", {"a": ("batch", "width"), "b": ("batch", 1)}), found)
    return found


def test_open_sizes_are_given_by_their_names(path: Path) -> None:
    step = load_step(f"{path}?batch=2&width=3", training=False)
    assert [tuple(x.shape) for x in step.inputs] == [(2, 3), (2, 1)]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("?batch=2", "{path}?batch=2&width=1"),
        ("?batch=2&depth=3", "batch, width, not depth"),
        ("?batch=0&width=1", "batch is 0"),
        ("?batch=many", "?name=size"),
    ],
)
def test_sizes_that_are_missing_or_wrong_are_refused(path: Path, query: str, message: str) -> None:
    assert message.format(path=path) in refusal(f"{path}{query}")


def test_a_size_without_a_name_is_called_by_its_input_and_axis(path: Path) -> None:
    model = single("Relu", {"x": (2, "n")})
    model.graph.input[0].type.tensor_type.shape.dim[1].ClearField("dim_param")
    onnx.save(model, path)
    assert "leaves the size of x.1 open" in refusal(path)
    assert load_step(f"{path}?x.1=3", training=False).inputs[0].shape == (2, 3)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (single("Relu", {"x": (2**50, 2)}), "18014398.5 GB"),
        (single("Relu", {"x": (2**62, 4)}), "147573952589.7 GB"),
        (single("Relu", {"x": (-5, 2)}), "[-5, 2]"),
        (single("Multinomial", {"x": (1, 2)}), "'the/Multinomial' (Multinomial) is an operator"),
        (single("Relu", {"x": (1, 2)}, domain="com.microsoft"), "of the domain com.microsoft"),
        (single("Reshape", {"x": (2,), "s": (1,)}), "depends on the data, but decides sizes"),
        (
            single("ConstantOfShape", {}, known={"s": np.array([10**6, 10**6])}),
            "makes a tensor of 1.0e+12 elements",
        ),
        (single("MatMul", {"a": (2, 3), "b": (2, 3)}), "does not run on these inputs"),
        (
            single("Relu", {}, known={"x": np.array(["text"], object)}),
            "uses the ONNX type number 8",
        ),
    ],
)
def test_a_node_or_input_that_cannot_be_placed_is_named(
    model: Any, message: str, path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    onnx.save(model, path)
    reason = refusal(path)
    assert reason.startswith(str(path))
    assert message in reason
    assert capfd.readouterr().err == ""


def test_a_branch_is_taken_where_its_condition_is_known(path: Path) -> None:
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node(op, ["x"], [op])],
            name,
            [],
            [helper.make_tensor_value_info(op, FLOAT, None)],
        )
        for name, op in (("then", "Neg"), ("else", "Exp"))
    }
    for condition, expected in ((True, -1.0), (False, np.e)):
        model = single("If", {}, known={"condition": np.array(condition)}, **branches)
        model.graph.input.append(helper.make_tensor_value_info("x", FLOAT, (1,)))
        onnx.save(model, path)
        found = load_step(str(path), training=False).model(torch.ones(1))
        assert found.item() == pytest.approx(expected)
    model.graph.initializer.pop()
    model.graph.input.append(helper.make_tensor_value_info("condition", onnx.TensorProto.BOOL, ()))
    onnx.save(model, path)
    assert "(If) depends on the data" in refusal(path)


def test_weights_beside_the_file_are_read_and_missed(path: Path) -> None:
    weights = np.arange(2000, dtype=np.float32).reshape(2, 1000)
    model = single("MatMul", {"x": (1, 2)}, known={"layer.weight": weights})
    onnx.save(model, path, save_as_external_data=True, location="weights.bin")
    state = load_step(str(path), training=False).model.state_dict()
    assert_same(state, {"layer.weight": torch.from_numpy(weights)})
    path.with_name("weights.bin").unlink()
    assert "weights.bin" in refusal(path)


def test_one_tensor_under_two_names_is_one_parameter(path: Path) -> None:
    model = single("MatMul", {"x": (2, 2)}, known={"w": np.ones((2, 2), np.float32)})
    model.graph.node[0].output[0] = "h"
    model.graph.node.insert(0, helper.make_node("Identity", ["w"], ["same"]))
    model.graph.node.append(helper.make_node("MatMul", ["h", "same"], ["y"]))
    onnx.save(model, path)
    assert list(load_step(str(path), training=False).model.state_dict()) == ["w"]


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("name", "scopes", "module"),
    [
        (
            "node_relu",
            "['', 'layers.0', 'layers.0.self_attn', 'relu']",
            "layers.0.self_attn.node_relu",
        ),
        ("/forward/training", "", "forward_2.training_1"),  # names that torch keeps for itself
    ],
)
def test_modules_are_those_that_the_exporter_noted_or_follow_from_names(
    name: str, scopes: str, module: str, path: Path
) -> None:
    model = single("MatMul", {"x": (2, 2)}, known={"forward.training": np.ones((2, 2), np.float32)})
    model.graph.node[0].name = name
    if scopes:
        noted = model.graph.node[0].metadata_props.add()
        noted.key, noted.value = "pkg.torch.onnx.name_scopes", scopes
    onnx.save(model, path)
    step = load_step(str(path), training=False)
    assert_same(step.model(torch.ones(2, 2)), torch.full((2, 2), 2.0))
    assert [node["module"] for _, node in extract(step).graph.nodes(data=True)] == [module]


def test_files_that_are_missing_damaged_or_too_large_are_refused(path: Path) -> None:
    assert f"did you mean {path.name}?" in refusal(path.with_name("modle.onnx"))
    whole = path.read_bytes()
    for size in range(len(whole) - 1):
        path.write_bytes(whole[:size])
        refusal(f"{path}?batch=1&width=1")
    path.write_bytes(b"\x08\x07" + b"\x00" * 64)
    assert f"{path} is no ONNX file" in refusal(path)
    with path.open("wb") as file:
        file.truncate(3 * 10**9)
    assert "3.0 GB" in refusal(path)


def test_weights_that_do_not_fit_and_a_missing_library_are_named(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "available_memory_bytes", lambda: 0)
    onnx.save(single("Relu", {}, known={"x": np.ones(10**6, np.float32)}), path)
    assert "needs 0.0 GB for its weights" in refusal(path)
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert "pip install 'device-placer[onnx]'" in refusal(path)
