"""Replicas on GPUs, reduced by NCCL; the same with gloo on CPUs, which any machine can run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from placer.parallel.grad_sync import GradSync
from tests.helpers.ranks import BACKENDS, each, on_ranks
from tests.helpers.replicas import backward, mlp, mse, own_batch, parameters
from tests.helpers.runs import losses_in_one_process, prepared, rank
from tests.helpers.second_devices import on_gpus


def run_with_backend(words: list[str]) -> tuple[int, str, str, Any]:
    """Run a rank; return exit code, output, error output and the backend of its group."""
    used: list[Any] = []
    join = dist.init_process_group

    def watched(backend: Any, *arguments: Any, **named: Any) -> None:
        used.append(backend)
        join(backend, *arguments, **named)

    dist.init_process_group = watched  # type: ignore[assignment]  # it passes all on
    code, out, err = rank(words)
    dist.init_process_group = join
    return code, out, err, used


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("device", "ranks"),
    [("cpu", 1), ("cpu", 2), *(on_gpus(count, "cuda:0", count) for count in (1, 2))],
)
def test_a_run_trains_as_one_process_does(device: str, ranks: int, tmp_path: Path) -> None:
    words = [*prepared(tmp_path, device)(4, data="batch"), "--json"]
    found = on_ranks(ranks, run_with_backend, words, joined=False)
    for code, _, err, backend in found:
        assert code == 0, err
        assert backend == [BACKENDS[torch.device(device).type]]
    expected = losses_in_one_process(f"{tmp_path}/target.py", 4, ranks=ranks)
    np.testing.assert_allclose(json.loads(found[0][1])["losses"], expected, rtol=1e-4)


Parameters = dict[str, Tensor]


def beside_ddp(device_type: str, accumulate: int) -> tuple[Parameters, Parameters]:
    """Return the parameters after training in sync by GradSync, and by torch's own."""
    device = torch.device(device_type, dist.get_rank() if device_type == "cuda" else 0)
    ours, theirs = mlp().to(device), mlp().to(device)
    # small buckets, so that several are in flight at once
    sync = GradSync(ours, accumulate=accumulate, bucket_bytes=1024)
    ddp = DistributedDataParallel(theirs)
    own, other = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, theirs))
    for number in range(5):
        sync.zero_grad()
        other.zero_grad()
        for part in range(accumulate):
            batch = own_batch(number * accumulate + part, 16, 8)
            batch = [tensor.to(device) for tensor in batch]
            ddp.require_backward_grad_sync = part == accumulate - 1
            backward(mse(ours, batch) / accumulate)
            backward(mse(ddp, batch) / accumulate)
        sync.finish()
        own.step()
        other.step()
    return parameters(ours), parameters(theirs)


@pytest.mark.slow
@pytest.mark.parametrize("device_type", ["cpu", on_gpus(2, "cuda")])
def test_gradients_are_reduced_as_by_ddp(device_type: str) -> None:
    cases = {f"{count} passes": (beside_ddp, device_type, count) for count in (1, 3)}
    for of_rank in on_ranks(2, each, cases, device_type=device_type):
        for ours, ddp in of_rank.values():
            tolerance = 0.0 if device_type == "cpu" else 1e-6
            torch.testing.assert_close(ours, ddp, rtol=tolerance, atol=tolerance)
