"""Security of opening files: none may execute code that its author wrote into it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from envs.hardware.cluster import load_cluster
from envs.placement import Placement
from graphs.graph_file import load_graph
from placer.policies import load as load_policy
from placer.policies.evaluation import load_suites
from placer.policies.training.config import load_config
from placer.sources.names import TargetError
from placer.sources.target import load_step
from placer.warm_start import load_warm_start

Program = dict[str, Any]


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """Return a file that exists only after code of an opened file was executed."""
    return tmp_path / "ran"


TINY: Program = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 31}


@pytest.fixture
def folder(tmp_path: Path, mark: Path) -> Path:
    """Return a transformers model folder with custom classes that create the mark."""
    pytest.importorskip("transformers")
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    config = {**TINY, "auto_map": own, "trust_remote_code": True, "code_revision": "main"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        f"open({str(mark)!r}, 'w')\n"
        "class Config(GPT2Config): pass\n"
        "class Model(GPT2LMHeadModel): pass\n"
    )
    return tmp_path


def test_a_folder_of_transformers_runs_no_code_of_its_own(folder: Path, mark: Path) -> None:
    model = load_step(f"hf:{folder}?sequence=4", training=True).model
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert type(model).__module__.startswith("transformers.")
    assert not mark.exists()


@pytest.mark.parametrize(
    "field",
    [
        "trust_remote_code=true",
        "code_revision=main",
        "name_or_path=else",
        "_name_or_path=else",
        "return_unused_kwargs=true",
        "gguf_file=own.gguf",
        "subfolder=.",
        "cache_dir=.",
        "auto_map={}",
    ],
)
def test_keywords_of_loading_are_no_fields(folder: Path, mark: Path, field: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config[field.partition("=")[0]] = "here, too"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match=field.partition("=")[0]):
        load_step(f"hf:{folder}?sequence=4&{field}", training=True)
    assert not mark.exists()


@pytest.mark.parametrize(
    "asked",
    [
        {"attn_implementation": "org/kernel"},
        {"_attn_implementation": "org/kernel@main:name"},
        {"attn_implementation": {"text_config": "paged|org/kernel"}},
        {"text_config": {"_attn_implementation_internal": "org/kernel"}},
        {"experts_implementation": "org/kernel"},
        {"attn_implementation": "flash_attention_2"},
        {"vision_config": {"use_pretrained_backbone": True}},
        {"backbone": "org/model"},
        {"architecture": "hf-hub:org/model"},
        {"model_args": {"checkpoint_path": "own.pth"}},
    ],
)
def test_a_configuration_fetches_nothing(folder: Path, asked: Program) -> None:
    (folder / "config.json").write_text(json.dumps({**TINY, **asked}))
    with pytest.raises(TargetError, match=r"implementation|elsewhere"):
        load_step(f"hf:{folder}?sequence=4", training=True)
    (folder / "config.json").write_text(json.dumps({**TINY, **dict.fromkeys(asked)}))
    ((name, value),) = asked.items()
    with pytest.raises(TargetError, match=r"implementation|elsewhere|has no field"):
        load_step(f"hf:{folder}?sequence=4&{name}={json.dumps(value)}", training=True)


def test_code_of_a_model_unknown_to_transformers_is_not_run(folder: Path, mark: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own"}))
    with pytest.raises(TargetError, match="code in a folder is not run"):
        load_step(f"hf:{folder}", training=True)
    assert not mark.exists()


KERNELS = """
from pathlib import Path

def __getattr__(name):
    def called(*arguments, **keywords):
        if "kernel" in name:
            Path(__file__).with_name("ran").touch()
        return lambda item: item
    return called
"""
LOADING = """
from placer.sources.target import load_step
load_step("hf:mamba?num_hidden_layers=1&hidden_size=8", training=False, weights=False)
import huggingface_hub
from transformers.integrations.hub_kernels import lazy_load_kernel
print(lazy_load_kernel("deep-gemm"), huggingface_hub.constants.is_offline_mode())
"""


@pytest.mark.slow
def test_kernels_of_the_hub_are_neither_fetched_nor_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text(KERNELS)
    (tmp_path / "kernels-0.18.5.dist-info").mkdir()
    about = "Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.5\n"
    (tmp_path / "kernels-0.18.5.dist-info/METADATA").write_text(about)
    asked = {"USE_HUB_KERNELS": "1", "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(tmp_path)}
    loaded = subprocess.run(
        [sys.executable, "-c", LOADING], env=os.environ | asked, check=True, stdout=subprocess.PIPE
    )
    assert loaded.stdout.decode().split() == ["None", "True"]
    assert not (tmp_path / "kernels/ran").exists()


def onnx_file(path: Path, *, weights: str = "weights", node: str = "", location: str = "") -> Path:
    """Write a file with one multiplication whose weights are at ``location``."""
    onnx = pytest.importorskip("onnx")
    tensor = onnx.numpy_helper.from_array(torch.ones(2, 2).numpy(), weights)
    if location:
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)
    x, y = (onnx.helper.make_tensor_value_info(name, 1, [2, 2]) for name in "xy")
    product = onnx.helper.make_node("MatMul", ["x", weights], ["y"], name=node)
    graph = onnx.helper.make_graph([product], "graph", [x], [y], [tensor])
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())
    return path


def test_a_name_in_onnx_is_no_code(tmp_path: Path, mark: Path) -> None:
    code = f'forward"), open("{mark}", "w"), ("'
    path = onnx_file(tmp_path / "model.onnx", weights=code, node=code)
    step = load_step(str(path), training=False)
    program = torch.export.export(step.model, tuple(step.inputs), strict=False)
    assert torch.equal(program.module(check_guards=False)(*step.inputs), step.model(*step.inputs))
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["above", "absolute", "symbolic link", "hard link", "folder"])
def test_external_data_of_onnx_is_read_from_the_folder_of_the_model_only(
    tmp_path: Path, kind: str
) -> None:
    folder, secret = tmp_path / "folder", tmp_path / "secret"
    folder.mkdir()
    secret.write_bytes(bytes(16))
    match kind:
        case "above":
            location = "../secret"
        case "absolute":
            location = str(secret)
        case "folder":
            (folder / "inner").symlink_to(tmp_path)
            location = "inner/secret"
        case _:
            location = "weights"
            link = os.symlink if kind == "symbolic link" else os.link
            link(secret, folder / location)
    path = onnx_file(folder / "model.onnx", location=location)
    with pytest.raises(TargetError, match="cannot be read"):
        load_step(str(path), training=False)


ESCAPE = "\x1b[2J\x1b]0;owned\x07"
GRAPH: Program = {"format": "placer-graph/1", "nodes": [{"id": "a", "cost_s": {"*": 1.0}}]}
PLACEMENT: Program = {"format": "placer-placement/1", "devices": {"a": "core:0"}}


@pytest.mark.parametrize(
    ("read", "content"),
    [
        (load_graph, {**GRAPH, "name": ESCAPE}),
        (load_graph, {**GRAPH, "nodes": [{"id": "a", "op": ESCAPE, "cost_s": {"*": 1.0}}]}),
        (load_graph, {**GRAPH, "nodes": [{"id": "a", "cost_s": {ESCAPE: 1.0}}]}),
        (Placement.load, {**PLACEMENT, "devices": {"a": ESCAPE}}),
        (Placement.load, {**PLACEMENT, "cluster": ESCAPE}),
        (Placement.load, {**PLACEMENT, "made_by": {"version": ESCAPE}}),
        (Placement.load, {**PLACEMENT, ESCAPE: 1}),
        (load_warm_start, {"model": ESCAPE}),
        (load_cluster, f'name = "{ascii(ESCAPE)[1:-1]}"'),
        (load_config, f'"{ascii(ESCAPE)[1:-1]}" = 1'),
        (load_suites, f'[[suite]]\nname = "{ascii(ESCAPE)[1:-1]}"'),
    ],
)
def test_control_characters_in_a_file_are_refused(
    tmp_path: Path, read: Callable[[Path], object], content: Program | str
) -> None:
    path = tmp_path / "file.json"
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text.replace(r"\x", r"\u00"))
    with pytest.raises(ValueError, match="cannot be printed") as refused:
        read(path)
    assert str(refused.value).isprintable()


def test_control_characters_in_the_card_of_a_policy_are_refused(tmp_path: Path) -> None:
    (tmp_path / "own.safetensors").write_bytes(b"")
    (tmp_path / "own.json").write_text(json.dumps({"format": ESCAPE}))
    with pytest.raises(ValueError, match="cannot be printed") as refused:
        load_policy(str(tmp_path / "own"))
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("field", ["weights", "node"])
def test_control_characters_in_onnx_are_refused(tmp_path: Path, field: str) -> None:
    path = onnx_file(tmp_path / "model.onnx", **{field: ESCAPE})
    with pytest.raises(TargetError, match="cannot be printed") as refused:
        load_step(str(path), training=False)
    assert str(refused.value).isprintable()
