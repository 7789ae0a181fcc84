"""Steps in bf16: the casts, bytes and results of ``torch.autocast``."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from envs.executors.cores.placed_model import PlacedModel
from envs.hardware.discover import discover
from graphs.extract import Extraction, ExtractionError, Workload, extract
from graphs.flops import further_formulas
from graphs.graph import GraphArrays
from graphs.optimizer import Optimizer
from tests.helpers import one_process, tiny_models, tiny_transformers
from tests.helpers.in_turn import in_turn
from tests.helpers.tiny_models import (
    Plain,
    assert_same,
    eager,
    forward,
    gradients_of,
    saved_bytes,
    squared,
    state_of,
)

pytest.importorskip("transformers")

CORES = sorted(os.sched_getaffinity(0))


def composites() -> Workload:
    """Return inference with operators that torch.export keeps whole but autocast decomposes."""

    def forward(m: Any, x: Tensor) -> list[Tensor]:
        return [
            m.gru(x)[0],
            m.lstm(x)[0],
            torch.einsum("abc,cd->abd", x, m.linear.weight),
            m.linear(x) + m.linear(x * 2),
        ]

    torch.manual_seed(0)
    model = Plain(
        forward,
        gru=nn.GRU(4, 4),
        lstm=nn.LSTM(4, 4),
        linear=nn.Linear(4, 4),
    )
    return Workload.of(model, torch.randn(3, 2, 4), training=False)


def asks_for_its_dtype() -> Workload:
    """Return a model that uses the dtype of its own results and disables autocast for a part."""

    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x)
        masked = hidden + torch.finfo(hidden.dtype).eps
        with torch.autocast("cpu", enabled=False):
            exact = m.second(masked.float())
        out: Tensor = m.first(exact).to(hidden.dtype) * 2
        return out

    torch.manual_seed(0)
    model = Plain(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    return Workload.of(model, (torch.randn(3, 4), torch.randn(3, 4)), squared)


STEPS: dict[str, Callable[[], Workload]] = {
    **{name: make for name, make in tiny_models.STEPS.items() if name != "inception"},
    **{make.__name__: make for make in (composites, asks_for_its_dtype)},
    **{
        name: functools.partial(tiny_transformers.without_dropout, name)
        for name in ("bert", "gpt2", "llama")
    },
}
UNRUNNABLE = {"composites", "lstm_inference"} if tiny_models.NO_BF16_LSTM else set[str]()
SKIPPED = pytest.mark.skip(reason=tiny_models.NO_BF16_LSTM)
EXACT = pytest.mark.parametrize(
    "name",
    [
        *in_turn(sorted(STEPS.keys() - UNRUNNABLE - {"llama"})),
        *(pytest.param(name, marks=SKIPPED) for name in sorted(UNRUNNABLE)),
    ],
)
LARGER = pytest.mark.parametrize("name", in_turn(["conv_net", "nmt", "bert", "gpt2", "llama"]))


@functools.cache
def extracted(name: str, extractor: str = "export") -> Extraction:
    return extract(replace(STEPS[name](), dtype="bf16"), extractor)


class Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types there
    """Counts casts that are executed."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


# --- results


@pytest.mark.slow_repeats
@EXACT
def test_a_step_is_bit_for_bit_that_of_autocast(name: str) -> None:
    one_process.assert_runs_as_eager(extracted(name), exact=True)


ROUNDED = [pytest.param("llama", "export", marks=pytest.mark.slow)]
"""It adds gradients in another order, in fp32 too."""
RECORDED = [(name, "dispatch") for name in ("conv_net", "attention", "asks_for_its_dtype")]
"""Every reader of a parameter casts it again, so that its gradient is rounded more often."""


@pytest.mark.slow_repeats
@pytest.mark.parametrize(("name", "extractor"), [*ROUNDED, *RECORDED])
def test_some_steps_differ_from_autocast_by_rounding(name: str, extractor: str) -> None:
    extraction = extracted(name, extractor)
    expected, placed = eager(extraction.step), one_process.run_placed(extraction)
    tolerance = 1e-2 if extractor == "export" else 0
    torch.testing.assert_close(
        placed.output, expected.output.detach(), rtol=tolerance, atol=tolerance
    )
    gradients = tiny_models.tied_gradients(placed.gradients, extraction.step)
    for parameter, gradient in expected.gradients.items():
        limit = 2e-2 * float(gradient.abs().max())
        torch.testing.assert_close(gradients[parameter], gradient, rtol=0, atol=limit)


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_workers_train_as_autocast_does() -> None:
    step = replace(tiny_models.conv_net(), dtype="bf16", optimizer=Optimizer(kind="adamw"))
    twin = copy.deepcopy(step)
    optimizer = torch.optim.AdamW(twin.model.parameters(), fused=True)
    extraction = extract(step)
    home: dict[str, int] = {}
    devices = [
        home.setdefault(data["colocate"] or op_id, len(home) % 2)
        for op_id, data in extraction.graph.nodes(data=True)
    ]
    cluster = discover(f"core:{CORES[0]},core:{CORES[1]}")
    with PlacedModel(extraction, cluster, devices, range(len(devices))) as placed:
        for _ in range(3):
            optimizer.zero_grad()
            loss = forward(twin)
            loss.backward()
            optimizer.step()
            assert_same(placed.step(*step.inputs), loss.detach())
        assert_same(state_of(step), state_of(twin))
    assert {own.dtype for own in gradients_of(twin).values()} == {torch.float32}


# --- the graph


@pytest.mark.slow_repeats
@EXACT
def test_the_casts_are_those_that_autocast_makes(name: str) -> None:
    """Each parameter once, whatever its number of readers, and as many again in backward."""
    extraction = extracted(name)
    with Casts() as casts:  # type: ignore[no-untyped-call]  # as above
        output = forward(copy.deepcopy(extraction.step))
        if extraction.step.training:
            output.backward()
    ops = [call.target for call in extraction.program.calls]
    assert ops.count("aten._to_copy.default") == casts.count > 0


def test_bytes_are_two_for_each_element_that_is_bf16() -> None:
    nodes = extracted("conv_net").graph.nodes
    assert nodes["0:convolution"]["output_bytes"] == 2 * (4 * 8 * 16 * 16)
    weight, image = 8 * 3 * 3 * 3, 4 * 3 * 16 * 16
    assert nodes["0:_to_copy"]["moved_bytes"] == (4 + 2) * weight
    assert nodes["0:_to_copy#1"]["moved_bytes"] == (4 + 2) * image
    model = extracted("conv_net").step.model
    parameters, buffers = (sum(t.nbytes for t in of()) for of in (model.parameters, model.buffers))
    arrays = GraphArrays.from_graph(extracted("conv_net").graph)
    assert arrays.gradient_bytes.sum() == parameters
    assert arrays.parameter_bytes.sum() == parameters + buffers


@LARGER
def test_flops_and_saved_bytes_are_those_of_a_run_under_autocast(name: str) -> None:
    extraction = extracted(name)
    with FlopCounterMode(display=False, custom_mapping=further_formulas()) as counter:
        forward(copy.deepcopy(extraction.step)).backward()
    arrays = GraphArrays.from_graph(extraction.graph)
    assert arrays.flops.sum() == counter.get_total_flops() > 0
    assert arrays.saved_bytes.sum() == pytest.approx(saved_bytes(extraction.step), rel=0.05)


@LARGER
def test_casts_too_have_a_module_and_what_they_differentiate(name: str) -> None:
    extraction = extracted(name)
    nodes = [data for _, data in extraction.graph.nodes(data=True)]
    paths = {path for path, _ in extraction.step.model.named_modules()}
    assert {node["module"] for node in nodes} <= paths
    casts = [
        forward_op
        for node, forward_op in zip(nodes, extraction.forward_of, strict=True)
        if node["op"] == "_to_copy" and node["phase"] == "backward"
    ]
    assert len(casts) > 0
    assert all(op is not None and nodes[op]["phase"] == "forward" for op in casts)


# --- state that must not change, and refusals


def test_autocast_is_off_after_an_extraction_that_failed() -> None:
    def broken(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.linear(x)
        return y if y.sum() > 0 else -y

    step = Workload.of(Plain(broken, linear=nn.Linear(4, 3)), (torch.ones(2, 4), torch.ones(2, 3)))
    with pytest.raises(ExtractionError, match="depends on the values"):
        extract(replace(step, loss=squared, dtype="bf16"), "export")
    assert not torch.is_autocast_enabled("cpu")
    assert F.linear(torch.ones(1, 2), torch.ones(1, 2)).dtype is torch.float32


@pytest.mark.parametrize(
    ("dtype", "message"),
    [("fp16", "fp16 is not for CPUs: .* use bf16"), ("bf8", "'bf8' is not one of fp32, bf16")],
)
def test_other_dtypes_are_refused(dtype: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload.of(nn.Linear(2, 2), torch.ones(1, 2), training=False, dtype=dtype)
