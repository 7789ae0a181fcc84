"""Steps are copied together with the state that their model keeps of earlier passes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphs.extract import Workload
from graphs.workload import step_copy
from tests.helpers import tiny_models

torch.set_num_threads(1)


class Keeping(nn.Module):
    """Keeps results in attributes; its second layer is its first one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.linear.weight
        self.last = torch.zeros(())
        self.search_trace: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.linear(x)
        self.search_trace = [self.last, self.tied(self.last)]
        return self.search_trace[1]


def test_kept_tensors_are_copied_without_history_and_stay_one() -> None:
    model = Keeping()
    step = Workload.of(model, (torch.randn(3, 4), torch.randn(3, 4)), tiny_models.squared)
    tiny_models.forward(step)
    found = step_copy(step).model
    assert isinstance(found, Keeping)
    assert found.search_trace[0] is found.last
    for mine, own in zip(found.search_trace, model.search_trace, strict=True):
        assert mine.is_leaf
        assert torch.equal(mine, own)
        assert mine.data_ptr() != own.data_ptr()
    assert not model.last.is_leaf
    assert found.tied.weight is found.linear.weight
    assert found.linear.weight is not model.linear.weight
    assert found.linear.weight.requires_grad
