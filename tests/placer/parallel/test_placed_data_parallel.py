"""DistributedDataParallel around a placed module trains as around the unplaced one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from envs.executors.torch.placed_module import PlacedModule
from graphs.extract import Workload, extract
from tests.helpers.ranks import on_ranks
from tests.helpers.tiny_models import conv_net


def of_replica(rank: int) -> Workload:
    """Return a step whose parameters and buffers, batch norm included, differ by rank."""
    step = conv_net()
    with torch.no_grad():
        for tensor in step.named_state().values():
            tensor.add_(rank)
    return step


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        loss: Tensor = F.cross_entropy(self.model(inputs[0]), inputs[1])
        return loss


def placed_and_plain() -> list[dict[str, Tensor]]:
    states = []
    for is_placed in (True, False):
        step = of_replica(dist.get_rank())
        module: nn.Module = WithLoss(step.model)
        if is_placed:
            extraction = extract(step)
            calls = extraction.forward.placed_calls
            module = PlacedModule(extraction, {call.key: "cpu" for call in calls})
        replica = DistributedDataParallel(module)
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        for number in range(2):
            torch.manual_seed(10 * number + dist.get_rank())
            batch = torch.randn(4, 3, 16, 16), torch.randint(5, (4,))
            optimizer.zero_grad()
            torch.autograd.backward(replica(*batch))
            optimizer.step()
        states.append(dict((module if is_placed else step.model).state_dict()))
    return states


@pytest.mark.slow
def test_placed_modules_train_under_ddp_as_unplaced_ones() -> None:
    (placed, plain), (other, _) = on_ranks(2, placed_and_plain)
    torch.testing.assert_close(placed, plain, rtol=1e-5, atol=1e-6)
    assert not torch.equal(placed["1.running_mean"], other["1.running_mean"])  # another batch
