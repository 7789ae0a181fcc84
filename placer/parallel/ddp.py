"""Reductions as DDP hooks. No string annotations here: DDP compares those of its hooks."""

import torch
import torch.distributed as dist

from placer.parallel.reductions import Reduction


def ddp_hook(
    state: Reduction,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch hides it from type checkers
) -> torch.futures.Future[torch.Tensor]:
    """Run a reduction as a DDP hook: ``ddp.register_comm_hook(reduction, ddp_hook)``.

    It waits for each bucket, so nothing overlaps with the backward pass. DDP rebuilds its buckets
    after the first step, so stateful reductions must start with a later one.
    """
    state.start(bucket).wait()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
