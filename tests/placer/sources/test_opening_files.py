"""Security of opening files: none may execute code that its author wrote into it."""

from __future__ import annotations

import json
import logging
import os
import struct
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.export.pt2_archive import _package
from torch.utils._sympy import functions

from envs.hardware.cluster import load_cluster
from envs.placement import Placement
from graphs.graph_file import load_graph
from placer.policies import load as load_policy
from placer.policies.evaluation import load_suites
from placer.policies.training.config import load_config
from placer.sources import exported
from placer.sources.size_expressions import check_expression
from placer.sources.target import TargetError, load_step
from placer.warm_start import load_warm_start

torch.set_num_threads(1)

Program = dict[str, Any]
ANY: Any = torch
"""Untyped alias, for functions of torch without types."""


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor, *, by: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.linear(x) + self.shift + by}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model.pt2"
    program = torch.export.export(
        Shifted().eval(),
        (torch.ones(3, 4),),
        {"by": torch.ones(4)},
        dynamic_shapes={"x": {0: Dim("rows", min=2, max=9)}, "by": None},
    )
    torch.export.save(program, path)
    return path


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """Return a file that exists only after code of an opened file was executed."""
    return tmp_path / "ran"


def with_members(saved: Path, path: Path, changes: dict[str, Callable[[Any], Any]]) -> Path:
    """Copy an archive with the JSON of some members changed."""
    with zipfile.ZipFile(saved) as before, zipfile.ZipFile(path, "w") as after:
        for name in before.namelist():
            content = before.read(name)
            inner = name.partition("/")[2]
            if inner in changes:
                content = json.dumps(changes[inner](json.loads(content))).encode()
            after.writestr(name, content)
    return path


def ran(path: Path) -> None:
    step = load_step(str(path), training=False)
    step.model(*step.inputs, **step.keywords)


def opened(path: Path) -> str:
    """Load and run a program, and return the reason of its refusal."""
    with pytest.raises(TargetError) as refused:
        ran(path)
    assert "\n" not in str(refused.value)
    assert str(refused.value).isprintable()
    return str(refused.value)


@pytest.mark.parametrize("text", [5_000 * "x", 5_000 * "x\x1b"])
def test_long_texts_are_refused_in_short_messages(saved: Path, tmp_path: Path, text: str) -> None:
    named = {"data/constants/model_constants_config.json": lambda _: {text: {"a": "\x1b"}}}
    operator = {"models/model.json": lambda _: {"target": text}}
    for changes in (named, operator):
        why = opened(with_members(saved, tmp_path / "long.pt2", changes))
        assert len(why.removeprefix(str(tmp_path))) < 600


@pytest.mark.parametrize("member", ["models/model.json", "data/sample_inputs/model.pt"])
def test_a_damaged_member_is_told(saved: Path, tmp_path: Path, member: str) -> None:
    path = tmp_path / "damaged.pt2"
    content = saved.read_bytes()
    at = content.index(f"model/{member}".encode())  # after the 30 bytes of its header
    path.write_bytes(content[: at - 30] + b"XX" + content[at - 28 :])
    assert f"lacks {member}, or it is damaged" in opened(path)


def signature(program: Program) -> dict[str, Any]:
    found: dict[str, Any] = program["graph_module"]["module_call_graph"][0]["signature"]
    return found


def container(program: Program, **values: object) -> Program:
    """Return the program with another description of its output container."""
    version, spec = json.loads(signature(program)["out_spec"])
    signature(program)["out_spec"] = json.dumps([version, {**spec, **values}])
    return program


def size_as_code(program: Program, mark: Path) -> Program:
    for meta in program["graph_module"]["graph"]["tensor_values"].values():
        for size in meta["sizes"]:
            if "as_expr" in size:
                text = size["as_expr"]["expr_str"]
                size["as_expr"]["expr_str"] = f"open({str(mark)!r}, 'w') and {text}"
    return program


def argument_as_code(program: Program, mark: Path) -> Program:
    code = f'x):\n    pass\nopen({str(mark)!r}, "w")\ndef forward(self, x, by=None):\n    y = """ #'
    signature(program)["forward_arg_names"] = [code, "by"]
    return program


def factory_of_a_module(program: Program, mark: Path) -> Program:
    context = {
        "default_factory_module": "module_that_marks",
        "default_factory_name": "list",
        "dict_context": ["out"],
    }
    return container(program, type="collections.defaultdict", context=context)


def key_of_a_module(program: Program, mark: Path) -> Program:
    key = {"__enum__": True, "fqn": "module_that_marks:Key", "name": "a"}
    return container(program, context=json.dumps([key]))


def call(program: Program, target: str, **inputs: dict[str, object]) -> Program:
    graph = program["graph_module"]["graph"]
    named = [{"name": name, "arg": value, "kind": 1} for name, value in inputs.items()]
    node = {"target": target, "inputs": named, "outputs": [{"as_tensor": {"name": "called"}}]}
    graph["nodes"].insert(0, {**node, "metadata": {}, "name": "called"})
    some = next(iter(graph["tensor_values"].values()))
    sizes = {"sizes": [{"as_int": 8}], "strides": [{"as_int": 1}]}
    graph["tensor_values"]["called"] = {**some, **sizes}
    return program


def file_written_by_an_operator(program: Program, mark: Path) -> Program:
    return call(
        program,
        "torch.ops.aten.from_file.default",
        filename={"as_string": str(mark)},
        shared={"as_bool": True},
        size={"as_int": 8},
    )


@pytest.mark.parametrize(
    "attack",
    [
        size_as_code,
        argument_as_code,
        factory_of_a_module,
        key_of_a_module,
        file_written_by_an_operator,
    ],
)
def test_an_exported_program_runs_no_code_of_its_own(
    saved: Path,
    tmp_path: Path,
    mark: Path,
    monkeypatch: pytest.MonkeyPatch,
    attack: Callable[[Program, Path], Program],
) -> None:
    marks = f"import enum\nopen({str(mark)!r}, 'w')\nclass Key(enum.Enum):\n    a = 1\n"
    (tmp_path / "module_that_marks.py").write_text(marks)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "attack.pt2"
    with_members(saved, path, {"models/model.json": lambda program: attack(program, mark)})
    try:
        assert opened(path).startswith(f"{path} ")
    finally:
        sys.modules.pop("module_that_marks", None)
    assert not mark.exists()


def input_spec(change: Callable[[Any, Any, Any], object]) -> Callable[[Program], Program]:
    """Return a change of the input containers: all of them, the arguments, the keywords."""

    def changed(program: Program) -> Program:
        version, spec = json.loads(signature(program)["in_spec"])
        change(spec, *spec["children_spec"])
        signature(program)["in_spec"] = json.dumps([version, spec])
        return program

    return changed


def input_names(*names: str) -> Callable[[Program], Program]:
    def changed(program: Program) -> Program:
        signature(program)["forward_arg_names"] = names
        return program

    return changed


ORDERED = {"type": "collections.OrderedDict"}


@pytest.mark.parametrize(
    "change",
    [
        input_spec(lambda both, _, __: both.update(ORDERED, context='["args", "kwargs"]')),
        input_spec(lambda _, arguments, __: arguments.update(ORDERED, context='["x"]')),
        input_spec(lambda _, __, keywords: keywords.update(ORDERED)),
        input_spec(lambda _, arguments, __: arguments.update(type="builtins.list")),
        input_spec(lambda _, __, keywords: keywords.update(context='["other"]')),
        input_names("self", "by"),
        input_names("x", "self"),
        input_names("class", "by"),
        input_names("x", "x"),
        input_names("x"),
    ],
)
def test_a_program_that_does_not_take_its_own_inputs_is_refused(
    saved: Path, tmp_path: Path, change: Callable[[Program], Program]
) -> None:
    path = with_members(saved, tmp_path / "edited.pt2", {"models/model.json": change})
    with pytest.raises(TargetError, match=r"does not take the example inputs|cannot load"):
        load_step(str(path), training=False)


def test_a_name_of_a_buffer_is_no_code(saved: Path, tmp_path: Path, mark: Path) -> None:
    name = f'linear"), open("{mark}", "w"), ("'

    def renamed(program: Program) -> Program:
        for spec in program["graph_module"]["signature"]["input_specs"]:
            if "buffer" in spec:
                spec["buffer"]["buffer_name"] = name
        return program

    def moved(weights: Program) -> Program:
        weights["config"][name] = weights["config"].pop("shift")
        return weights

    config = "data/weights/model_weights_config.json"
    path = tmp_path / "attack.pt2"
    with_members(saved, path, {"models/model.json": renamed, config: moved})
    assert "is not the path of a module" in opened(path)
    assert not mark.exists()


@pytest.mark.parametrize(
    "target",
    [
        "torch.os.mkdir",
        "torch.ops.load_library",
        "torch.hub.load",
        "_operator.call",
        "torch.ops.aten.save.default",
        "torch.ops.higher_order.flat_apply",
        "torch.ops.aten.nothing.default",
        "torch.ops.aten.9.default",
        "torch.ops.aten.add.__add__",
        "#executorch:call",
        "print",
    ],
)
def test_only_operators_on_tensors_are_called(saved: Path, tmp_path: Path, target: str) -> None:
    path = tmp_path / "attack.pt2"
    with_members(
        saved, path, {"models/model.json": lambda program: call(program, target, x={"as_int": 1})}
    )
    assert f"calls {target!r}, which is no operator" in opened(path)


def test_pickled_weights_are_refused(saved: Path, tmp_path: Path) -> None:
    def pickled(weights: Program) -> Program:
        weights["config"]["shift"]["use_pickle"] = True
        return weights

    config = "data/weights/model_weights_config.json"
    path = with_members(saved, tmp_path / "attack.pt2", {config: pickled})
    assert "pickled objects" in opened(path)


def test_torch_logs_nothing_of_what_it_refuses(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flat(weights: Program) -> Program:
        next(iter(weights["config"].values()))["tensor_meta"]["strides"] = []
        return weights

    path = tmp_path / "flat.pt2"
    with_members(saved, path, {"data/weights/model_weights_config.json": flat})
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.Logger, "handle", lambda _, record: records.append(record))
    assert "torch cannot load" in opened(path)
    assert not records


def records(archive: bytes) -> tuple[int, int]:
    """Return the start and the size of an archive's member list."""
    size, begin = struct.unpack("<II", archive[-10:-2])
    return begin, size


def two_archives(for_torch: bytes, for_python: bytes) -> bytes:
    """Return two archives in one file.

    Torch looks for the member list where the end of the file says it begins, Python directly before
    that end.
    """
    begin, size = records(for_torch)
    other_begin, other_size = records(for_python)
    listed = for_python[other_begin : other_begin + other_size]
    end = len(for_torch) + other_begin
    missing = size - other_size
    assert missing >= 0, "a longer list for torch"
    # pad the list with a comment of the last member
    last = listed.rindex(b"PK\x01\x02")
    commented = bytearray(listed + b" " * missing)
    struct.pack_into("<H", commented, last + 32, missing)
    moved, at = end - begin, 0
    while (at := commented.find(b"PK\x01\x02", at)) >= 0:
        (offset,) = struct.unpack_from("<I", commented, at + 42)
        struct.pack_into("<i", commented, at + 42, offset + len(for_torch) - moved)
        at += 46
    return for_torch + for_python[:other_begin] + bytes(commented) + for_torch[-22:]


@pytest.mark.parametrize("who_sees_it", ["torch", "python"])
def test_an_archive_with_two_lists_of_members_is_checked_as_torch_reads_it(
    saved: Path, tmp_path: Path, mark: Path, who_sees_it: str
) -> None:
    attack = {"models/model.json": lambda program: size_as_code(program, mark)}
    clean = with_members(saved, tmp_path / "clean.pt2", {})
    harmful = with_members(saved, tmp_path / "harmful.pt2", attack)
    first, second = (harmful, clean) if who_sees_it == "torch" else (clean, harmful)
    with zipfile.ZipFile(first, "a") as longer:
        for number in range(10):
            longer.writestr(f"model/extra/{number:0100}", "x" * 1000)
    path = tmp_path / "model.pt2"
    path.write_bytes(two_archives(first.read_bytes(), second.read_bytes()))
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(second) as expected:
        assert archive.namelist() == expected.namelist()
        for name in archive.namelist():
            assert archive.read(name) == expected.read(name)
    if who_sees_it == "torch":
        assert "is no expression of sizes" in opened(path)
    else:
        ran(path)
    assert not mark.exists()


def test_a_file_changed_while_it_is_opened_is_loaded_as_it_was_checked(
    saved: Path, tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "model.pt2", tmp_path / "attack.pt2"
    path.write_bytes(saved.read_bytes())
    attack = {"models/model.json": lambda program: size_as_code(program, mark)}
    load = _package.load_pt2

    def load_after_change(file: Any) -> object:
        with_members(saved, other, attack).replace(path)
        return load(file)

    monkeypatch.setattr(_package, "load_pt2", load_after_change)
    assert len(load_step(str(path), training=False).inputs) == 1
    assert not mark.exists()


def test_loading_changes_nothing_for_other_threads(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(os.environ)
    load = _package.load_pt2

    def load_and_look(file: Any) -> object:
        seen = threading.Thread(target=lambda: during.append(dict(os.environ)))
        seen.start()
        seen.join()
        return load(file)

    during: list[dict[str, str]] = []
    monkeypatch.setattr(_package, "load_pt2", load_and_look)
    exported.load(saved, training=False)
    assert during == [before]


class OfSizes(nn.Module):
    """Functions of a vector and a number, by name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor, y: torch.Tensor, count: torch.Tensor) -> Any:
        size, other = x.shape[0], y.shape[0]
        match self.name:
            case "sum":
                return x.sum(0)
            case "part":
                return x[: (size + 1) // 3], torch.ones(size % 5 + 1), torch.ones(size**2)
            case "larger and smaller":
                return torch.ones(max(size, other)), torch.ones(ANY.sym_min(size, other))
            case "root":
                return x * torch.sym_sqrt(size) / size
            case "selected":
                return x[x > 0]
            case "counted":
                number = count.item()
                ANY._check(number >= 0)
                ANY._check(number <= 6)
                return x[:number]
            case "branch":
                return torch.cond(size > 4, lambda x: x + 1, lambda x: x - 1, (x,))
            case "resized":
                return nn.functional.interpolate(x.reshape(1, 1, -1), scale_factor=1.7)
        return torch.vmap(lambda row: row * row.sum())(x.reshape(2, -1))


ROWS = Dim("rows", min=2, max=40)
OF_EACH = ["larger and smaller", "sum", "part", "root", "selected", "counted", "branch", "resized"]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [(name, ({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}, {})) for name in OF_EACH]
    + [("sum", ({0: ROWS}, {0: ROWS + 3}, {})), ("mapped", ({}, {}, {}))],
)
def test_genuine_dynamic_sizes_load(tmp_path: Path, name: str, sizes: Any) -> None:
    inputs = (torch.arange(-2.0, 4.0), torch.ones(9), torch.tensor(2))
    model = OfSizes(name).eval()
    torch.export.save(torch.export.export(model, inputs, dynamic_shapes=sizes), tmp_path / "m.pt2")
    step = load_step(str(tmp_path / "m.pt2"), training=False)
    torch.testing.assert_close(step.model(*step.inputs), model(*inputs))


@pytest.mark.parametrize("name", functions.__all__)
def test_every_function_of_sizes_that_torch_has_is_in_the_grammar(name: str) -> None:
    check_expression(f"{name}(Symbol('s7', positive=True, integer=True), Integer(-2))")


@pytest.mark.parametrize(
    "text",
    [
        "s77",
        "2*s0 - 1",
        "(s0 + u1)//2 <= 64",
        "(s0 > 3) & ~(s1 < 2)",
        "Pow(Symbol('s7', integer=True), Integer(2))",
        "Add(Float('0.5', precision=53), Rational(1, 3))",
        "And(StrictLessThan(Symbol('s7', integer=True), Integer(9)), true)",
        "Max(1, s0, Min(s1, 4096))",
    ],
)
def test_expressions_of_sizes_are_admitted(text: str) -> None:
    check_expression(text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('id')",
        "Symbol('s7').__class__",
        "Symbol('x')",
        "Symbol('__import__')",
        "Symbol(s7)",
        "Symbol('s7', cls=Integer)",
        "Symbol('s7', integer=open('f', 'w'))",
        "Symbol(**{'name': 's7'})",
        "S('1+1')",
        "sympify('1+1')",
        "Integer('7')",
        "Float('exit()')",
        "lambda: 1",
        "[s0 for s0 in s1]",
        "s0 if s1 else s2",
        "(s0 := 1)",
        "s0.func",
        "s0[0]",
        "f'{s0}'",
        "Max(*s0)",
        "Function('f')(s0)",
        "eval",
        "u99999999999",
        "1j",
        "1e999",
        "s0\n",
        "ｓ0",
        "",
        "(" * 300,
        "-" * 20_000 + "1",
        "1+" * 60_000 + "1",
        "Pow(Integer(9), Integer(9999999))",
        "2**(64**64)",
        "((((2**64)**64)**64)**64)**64",
        "LShift(Integer(1), Integer(1000000000))",
        "PythonMod((s0+s1+s2+s3)**20, (s0+s1)**20)",
        "Max(" + ", ".join(f"s{i}" for i in range(17)) + ")",
    ],
)
def test_anything_else_is_no_expression_of_sizes(text: str) -> None:
    with pytest.raises(ValueError, match=r"expression of sizes|bits"):
        check_expression(text)


def test_an_expression_that_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="no text"):
        exported._check({"expr_str": {"name": "__import__('os')"}}, "")


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
