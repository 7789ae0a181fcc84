"""Security of opening exported programs: none may execute code that its author wrote into it."""

from __future__ import annotations

import json
import logging
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.export.pt2_archive import _package

from placer.sources.names import TargetError
from placer.sources.target import load_step

Program = dict[str, Any]


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


def constraint_as_code(program: Program, mark: Path) -> Program:
    constraints = program["range_constraints"]
    some = next(iter(constraints.values()))
    constraints[f"open({str(mark)!r}, 'w')"] = some
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
        constraint_as_code,
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


@pytest.mark.slow_repeats
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


def test_a_broken_node_is_told_in_a_short_line(saved: Path, tmp_path: Path) -> None:
    def renamed(program: Program) -> Program:
        node = program["graph_module"]["graph"]["nodes"][0]
        node["outputs"][0]["as_tensor"]["name"] = "other"
        return program

    path = with_members(saved, tmp_path / "renamed.pt2", {"models/model.json": renamed})
    message = opened(path)
    assert message.endswith(f"torch cannot load {path}: KeyError: 'other'")
    assert len(message) <= 600


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
