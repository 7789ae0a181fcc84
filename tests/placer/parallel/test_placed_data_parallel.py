"""DistributedDataParallel around placed modules equals one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from envs.executors.torch.placed_module import PlacedModule
from graphs.extract import Workload, extract
from tests.helpers.ranks import on_ranks
from tests.helpers.tiny_models import conv_net, forward

RANKS = 2
STEPS = 2


def shard(number: int, rank: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(10 * number + rank)
    return torch.randn(4, 3, 16, 16), torch.randint(5, (4,))


def of_replica(rank: int) -> Workload:
    """Return a step whose parameters and buffers, batch norm included, differ by rank."""
    step = conv_net()
    with torch.no_grad():
        for tensor in step.named_state().values():
            tensor.add_(rank)
    return step


def trained_with_ddp() -> dict[str, Tensor]:
    extraction = extract(of_replica(dist.get_rank()))
    placed = PlacedModule(extraction, {call.key: "cpu" for call in extraction.forward.placed_calls})
    replica = DistributedDataParallel(placed)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    for number in range(STEPS):
        optimizer.zero_grad()
        replica(*shard(number, dist.get_rank())).backward()
        optimizer.step()
    return dict(placed.state_dict())


def trained_in_one_process() -> list[dict[str, Tensor]]:
    """Return the state of each replica; all have the buffers of the first before every step."""
    steps = [of_replica(0) for _ in range(RANKS)]
    for number in range(STEPS):
        buffers = {name: buffer.clone() for name, buffer in steps[0].model.named_buffers()}
        for rank, step in enumerate(steps):
            step.model.load_state_dict(buffers, strict=False)
            step.model.zero_grad()
            forward(replace(step, inputs=shard(number, rank))).backward()
        with torch.no_grad():
            for parameters in zip(*(step.model.parameters() for step in steps), strict=True):
                gradient = torch.stack([p.grad for p in parameters if p.grad is not None]).mean(0)
                for parameter in parameters:
                    parameter.sub_(0.1 * gradient)
    return [step.model.state_dict() for step in steps]


@pytest.mark.skipif(torch.cuda.is_available(), reason="vdev would take CUDA's place")
def test_placed_modules_train_under_ddp_as_in_one_process() -> None:
    expected = trained_in_one_process()
    for state, result in zip(expected, on_ranks(RANKS, trained_with_ddp), strict=True):
        torch.testing.assert_close(result, state, rtol=1e-5, atol=1e-6)
    means = [state["1.running_mean"] for state in expected]
    assert not torch.equal(*means), "each has seen another batch since the last broadcast"
