"""Ops that torch decomposes in traces of training steps are traced as eager mode runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphs.extract import Workload, extract
from graphs.extract.kernels.decomposed import UPSAMPLING, trained_as_in_eager_mode
from tests.helpers import one_process
from tests.helpers.tiny_models import Plain, squared

OF_DIMENSIONS = {3: "linear", 4: "bilinear", 5: "trilinear"}
MODES = [(mode, 4) for mode in ("nearest", "nearest-exact", "bilinear", "bicubic")]


@pytest.mark.slow_repeats
@pytest.mark.parametrize(("mode", "rank"), [*MODES, ("linear", 3), ("trilinear", 5)])
@pytest.mark.parametrize("extractor", ["export", "dispatch"])
def test_upsampling_is_one_op_forward_and_one_backward(
    mode: str, rank: int, extractor: str
) -> None:
    torch.manual_seed(0)
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 3](2, 2, 1)
    model = Plain(lambda m, x: F.interpolate(m.convolution(x), scale_factor=2, mode=mode))
    model.convolution = convolution
    x, y = torch.randn(2, 2, *[4] * (rank - 2)), torch.randn(2, 2, *[8] * (rank - 2))
    extraction = extract(Workload.of(model, (x, y), squared), extractor)
    ops = [data["op"] for _, data in extraction.graph.nodes(data=True)]
    assert len([op for op in ops if "upsample" in op]) == 2
    assert not any("index" in op for op in ops)
    one_process.assert_runs_as_eager(extraction, exact=extractor == "export")


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    "of",
    [torch.linalg.inv, torch.linalg.cholesky, lambda a: torch.linalg.solve(a, a.new_ones(8, 8))],
)
def test_inverses_and_factors_are_placed_op_by_op(of: Callable[[Tensor], Tensor]) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return m.linear(x) @ of(m.linear.weight @ m.linear.weight.T + torch.eye(8))

    torch.manual_seed(0)
    step = Workload.of(Plain(forward, linear=nn.Linear(8, 8)), (torch.randn(4, 8),) * 2, squared)
    extraction = extract(step)
    assert extraction.extractor == "export"
    one_process.assert_runs_as_eager(extraction)


def test_torch_is_left_as_it_was() -> None:
    ops = [getattr(torch.ops.aten, name).default for name in UPSAMPLING]
    before = [dict(op.py_kernels) for op in ops]
    with trained_as_in_eager_mode():
        assert [dict(op.py_kernels) for op in ops] != before
    assert [dict(op.py_kernels) for op in ops] == before
