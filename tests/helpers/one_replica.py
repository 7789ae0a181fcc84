"""One of two processes that train placed modules with DistributedDataParallel."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from envs.executors.torch.placed_module import PlacedModule
from graphs.extract import Workload, extract
from tests.helpers import tiny_models

STEPS = 2
REPLICAS = 2


def shard(number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a rank in a step."""
    torch.manual_seed(10 * number + rank)
    return torch.randn(4, 3, 16, 16), torch.randint(5, (4,))


def of_replica(rank: int) -> Workload:
    """Return a step whose parameters and buffers, batch norm included, differ by rank."""
    step = tiny_models.conv_net()
    with torch.no_grad():
        for tensor in step.named_state().values():
            tensor.add_(rank)
    return step


def trained(rank: int) -> dict[str, object]:
    """Return the state after some steps, the last gradients, and the error for mixed devices."""
    extraction = extract(of_replica(rank))
    placed = PlacedModule(extraction, {call.key: "cpu" for call in extraction.forward.placed_calls})
    replica = DistributedDataParallel(placed)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    for number in range(STEPS):
        optimizer.zero_grad()
        replica(*shard(number, rank)).backward()
        optimizer.step()
    return {
        "state": replica.state_dict(),
        "gradients": {name: own.grad for name, own in placed.named_parameters()},
        "mixed types": refusal(placed),
    }


def refusal(placed: PlacedModule) -> str:
    """Return torch's error for parameters on the CPU and on another device type."""
    from tests.helpers.vdev import vdev

    with vdev() as device:
        calls = placed._program.placed_calls
        placed.place({call.key: device if call.op == "linear" else "cpu" for call in calls})
        try:
            DistributedDataParallel(placed)
        except ValueError as error:
            return str(error)
    return ""


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=REPLICAS
    )
    torch.save(trained(rank), folder / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)  # threads of gloo may still be running


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
