"""Reads of values that only check or report: they are left out, and steps hold for any data."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from envs.executors.cores.placed_model import PlacedModel
from envs.hardware.discover import discover
from graphs.extract import ExtractionError, StepError, Workload, extract
from placer.exports.model_alone import forward_alone
from placer.messages.remarks import extraction_remarks
from tests.helpers import checking_models, one_process
from tests.helpers.checking_models import CHECKS, STEERING
from tests.helpers.tiny_models import Plain, squared

X = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)) + 0.1
OTHER = torch.rand(4, 8, generator=torch.Generator().manual_seed(1)) * 3 + 0.1


def step_of(function: Callable[..., Tensor], *, training: bool, x: Tensor = X) -> Workload:
    torch.manual_seed(0)
    model = Plain(function, linear=nn.Linear(8, 8))
    return Workload.of(model, (x, torch.ones(4, 8)), squared, training=training)


@functools.cache
def ops_without_checks(training: bool) -> int:
    plain = extract(step_of(lambda m, x: m.linear(x).relu(), training=training))
    return plain.program.op_count


def each(functions: tuple[Callable[..., Tensor], ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("function", functions, ids=lambda one: str(one.__name__))


@pytest.mark.slow_repeats
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@each(CHECKS)
def test_a_model_that_checks_values_is_exported(
    function: Callable[..., Tensor], training: bool
) -> None:
    extraction = extract(step_of(function, training=training))
    assert (extraction.extractor, extraction.fell_back) == ("export", ())
    assert all(checking_models.__file__ in line for line in extraction.unchecked)
    assert extraction.unchecked
    assert extraction.program.op_count == ops_without_checks(training)
    assert extraction.forward_program is not None
    for x in (X, OTHER):
        given = replace(extraction, step=step_of(function, training=training, x=x))
        one_process.assert_runs_as_eager(given)


@pytest.mark.slow_repeats
@each(CHECKS)
def test_a_recording_of_a_model_that_checks_values_holds_for_any_data(
    function: Callable[..., Tensor],
) -> None:
    extraction = extract(step_of(function, training=True), "dispatch")
    assert extraction.depends_on_data == ()
    assert extraction.unchecked
    assert extraction.core_refusal == ""
    one_process.assert_runs_as_eager(
        replace(extraction, step=step_of(function, training=True, x=OTHER))
    )


@pytest.mark.slow_repeats
@pytest.mark.parametrize("extractor", ["auto", "dispatch"])
@each(STEERING)
def test_what_steers_the_model_still_depends_on_data(
    function: Callable[..., Tensor], extractor: str
) -> None:
    extraction = extract(step_of(function, training=True), extractor)
    assert extraction.extractor == "dispatch"
    assert extraction.depends_on_data
    assert "reads values of tensors" in extraction.core_refusal
    one_process.assert_runs_as_eager(extraction)


FAILING = [one for one in CHECKS if one.__name__ not in ("warning", "warned", "printing")]


@pytest.mark.slow_repeats
@pytest.mark.parametrize("extractor", ["auto", "export", "dispatch"])
@each(tuple(one for one in FAILING if one is not checking_models.searching))
def test_a_check_that_fails_on_the_example_is_an_error(
    function: Callable[..., Tensor], extractor: str
) -> None:
    step = step_of(function, training=True, x=X * torch.tensor([-1.0, *[torch.inf] * 7]))
    with pytest.raises(Exception) as eager:  # noqa: PT011  # whatever the model raises
        step.model(*step.model_inputs)
    with pytest.raises((StepError, ExtractionError)) as refused:
        extract(step, extractor)
    text = str(eager.value) if function is not checking_models.asserting else "the least is"
    assert text.splitlines()[0].rstrip(". ")[:40] in str(refused.value)


def test_one_remark_names_the_lines_of_checks_that_a_placed_step_does_not_make() -> None:
    extraction = extract(step_of(checking_models.raising, training=True))
    (remark,) = [one for one in extraction_remarks(extraction) if "check" in one]
    line = checking_models.raising.__code__.co_firstlineno + 1
    assert f'File "{checking_models.__file__}", line {line}, in raising' in remark


@pytest.mark.slow_repeats
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_a_forward_pass_alone_leaves_checks_out_as_well(training: bool) -> None:
    program = forward_alone(step_of(checking_models.raising, training=training))
    plain = forward_alone(step_of(lambda m, x: m.linear(x).relu(), training=training))
    assert [call.op for call in program.calls] == [call.op for call in plain.calls]


@pytest.mark.slow
def test_a_placed_model_runs_other_data_than_the_checks_have_seen() -> None:
    extraction = extract(step_of(checking_models.comparing, training=True))
    step, count = extraction.step, extraction.program.op_count
    cluster = discover(f"core:{min(os.sched_getaffinity(0))}")
    with PlacedModel(extraction, cluster, [0] * count, range(count)) as placed:
        for x in (X, OTHER):
            found = placed.step(x, torch.ones(4, 8))
            expected = squared(step.model(x), torch.ones(4, 8))
            torch.testing.assert_close(found, expected.detach())


@pytest.mark.slow
def test_checks_of_transformers_are_left_out() -> None:
    pytest.importorskip("transformers")
    for training in (True, False):
        extraction = extract(step_of(checking_models.checking_by_transformers, training=training))
        assert (extraction.extractor, extraction.fell_back) == ("export", ())
        line = checking_models.checking_by_transformers.__code__.co_firstlineno + 3
        assert extraction.unchecked == (
            f'File "{checking_models.__file__}", line {line}, in checking_by_transformers',
            f'File "{checking_models.__file__}", line {line + 1}, in checking_by_transformers',
        )
        one_process.assert_runs_as_eager(extraction)


@pytest.mark.slow
def test_a_warning_of_transformers_makes_nothing_depend_on_data() -> None:
    pytest.importorskip("transformers")
    step = step_of(checking_models.warning_by_transformers, training=True)
    extraction = extract(step, "dispatch")
    assert extraction.depends_on_data == ()
    assert "warn_if_padding_and_no_attention_mask" in extraction.unchecked[0]
    one_process.assert_runs_as_eager(extraction)


@pytest.mark.slow
def test_a_model_on_the_meta_device_checks_by_torch_only() -> None:
    step = step_of(checking_models.checking_all, training=True)
    step.model.to("meta")
    assert extract(step).extractor == "export"
    other = step_of(checking_models.raising, training=True)
    other.model.to("meta")
    with pytest.raises(ExtractionError, match="depends on the values in a tensor"):
        extract(other)


def test_a_model_whose_source_is_unknown_depends_on_data() -> None:
    made: dict[str, Any] = {}
    text = "def forward(m, x):\n    assert (x > 0).all()\n    return m.linear(x)\n"
    exec(compile(text, "<nowhere>", "exec"), made)
    assert extract(step_of(made["forward"], training=True)).depends_on_data


def test_a_file_that_was_changed_after_its_import_depends_on_data(tmp_path: Path) -> None:
    file = tmp_path / "changed_model.py"
    file.write_text("def forward(m, x):\n    if x.sum() > 0: x = x + 1\n    return m.linear(x)\n")
    module = types.ModuleType("changed_model")
    exec(compile(file.read_text(), str(file), "exec"), vars(module))
    file.write_text("def forward(m, x):\n    if x.sum() > 0: raise 1\n    return m.linear(x)\n")
    assert extract(step_of(module.forward, training=True)).depends_on_data


def test_ways_to_read_values_are_restored() -> None:
    extract(step_of(checking_models.raising, training=True))
    assert not {"__bool__", "item", "tolist"} & vars(torch.Tensor).keys()
    assert type(torch.equal) is types.BuiltinFunctionType
