"""Programs saved by torch.export as workloads."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from envs.executors.cores.instruction_lists import device_lists
from graphs.extract import extract
from placer.sources.names import TargetError
from placer.sources.target import load_step
from tests.helpers import one_process
from tests.helpers.tiny_models import assert_same

ANY: Any = torch
"""Untyped alias, for functions of torch without types."""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)).eval()
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(model, (torch.randn(3, 4),)), path)
    return path


@pytest.mark.slow
def test_a_saved_program_is_placed_as_it_was_exported(saved: Path) -> None:
    step = load_step(str(saved), training=False)
    extraction = extract(step)
    assert {"0", "3"} <= {module for _, module in extraction.graph.nodes(data="module")}
    count = extraction.program.op_count
    lists = device_lists(extraction.program, [i % 2 for i in range(count)], range(count), 2)
    program = torch.export.load(saved)
    expected = program.module()(*program.example_inputs[0])
    assert_same(one_process.run(extraction, lists).output, expected.detach())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, factor: float, *, double: bool) -> torch.Tensor:
        rows: torch.Tensor = self.linear(x).reshape(x.shape[0] * 2, 2)
        return rows * factor * (2 if double else 1)


@pytest.mark.slow
def test_dynamic_sizes_are_those_of_the_example_and_numbers_are_part_of_the_program(
    tmp_path: Path,
) -> None:
    path = tmp_path / "dynamic.pt2"
    model, inputs, keywords = Scaled().eval(), (torch.randn(3, 4), 2.5), {"double": True}
    shapes = {"x": {0: torch.export.Dim("batch")}, "factor": None, "double": None}
    program = torch.export.export(model, inputs, keywords, dynamic_shapes=shapes)
    torch.export.save(program, path)
    extraction = extract(load_step(str(path), training=False))
    assert [tuple(value.shape) for value in extraction.program.values][-1] == (6, 2)
    lists = device_lists(extraction.program, [0, 0, 0], range(3), 1)
    found = one_process.run(extraction, lists).output
    assert_same(found, model(*inputs, **keywords).detach())


def refusal(path: Path) -> str:
    with pytest.raises(TargetError) as refused:
        load_step(str(path), training=False)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_files_that_are_no_programs_and_training_are_refused(saved: Path) -> None:
    with pytest.raises(TargetError) as refused:
        load_step(str(saved), training=True)
    assert refused.value.remedy == "inference"
    saved.write_text("no archive")
    assert "is not a program that torch.export.save wrote" in refusal(saved)


@pytest.mark.parametrize(
    "member",
    ["data/constants/opaque_obj_0", "data/constants/custom_obj_0", "data/aotinductor/m.so"],
)
def test_what_would_have_to_be_unpickled_or_run_is_refused(saved: Path, member: str) -> None:
    with zipfile.ZipFile(saved, "a") as archive:
        archive.writestr(f"model/{member}", b"")
    assert f"holds '{member}'" in refusal(saved)


class Touch:
    """Creates a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("harmless", [True, False])
def test_a_pickle_in_place_of_the_inputs_is_never_run(
    saved: Path, tmp_path: Path, harmless: bool
) -> None:
    inputs: tuple[Any, ...] = ((torch.ones(3, 4),), {})
    torch.save(inputs if harmless else (Touch(tmp_path / "touched"), {}), tmp_path / "inputs.pt")
    other = saved.with_name("other.pt2")
    with zipfile.ZipFile(saved) as before, zipfile.ZipFile(other, "w") as after:
        for name in before.namelist():
            swapped = name.endswith("sample_inputs/model.pt")
            content = (tmp_path / "inputs.pt").read_bytes() if swapped else before.read(name)
            after.writestr(name, content)
    if harmless:
        assert_same(load_step(str(other), training=False).inputs, inputs[0])
    else:
        assert "example inputs other than tensors" in refusal(other)
    assert not (tmp_path / "touched").exists()


class OfSizes(nn.Module):
    """Functions of a vector and a number, by name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor, y: torch.Tensor, count: torch.Tensor) -> Any:
        size, other = x.shape[0], y.shape[0]
        match self.name:
            case "sum" | "related":
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


ROWS, SAME = Dim("rows", min=2, max=40), dict[int, Any]()
SIZES = {"mapped": (SAME, SAME, SAME), "related": ({0: ROWS}, {0: ROWS + 3}, SAME)}
DYNAMIC = {0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}, SAME


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    "name",
    [
        *("sum", "part", "larger and smaller", "root", "selected", "counted", "branch", "resized"),
        *SIZES,
    ],
)
def test_genuine_dynamic_sizes_load(tmp_path: Path, name: str) -> None:
    inputs = (torch.arange(-2.0, 4.0), torch.ones(9), torch.tensor(2))
    model, sizes = OfSizes(name).eval(), SIZES.get(name, DYNAMIC)
    torch.export.save(torch.export.export(model, inputs, dynamic_shapes=sizes), tmp_path / "m.pt2")
    step = load_step(str(tmp_path / "m.pt2"), training=False)
    torch.testing.assert_close(step.model(*step.inputs), model(*inputs))
