"""Steps are copied together with the state that their model keeps of earlier passes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphs.extract import Workload
from graphs.workload import step_copy
from tests.helpers import tiny_models


def test_state_has_the_names_and_order_of_torch() -> None:
    step = Workload(Keeping(), (torch.zeros(4, 4),))
    model = step.model
    model.register_buffer("none", None)
    model.register_parameter("scale", None)
    model.twice = model.linear
    model.norm = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU())
    expected = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    state = step.named_state()
    assert list(state) == [name for name, _ in expected]
    assert all(state[name] is tensor for name, tensor in expected)


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
