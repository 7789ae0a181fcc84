"""Reductions under DDP. Annotations are no strings here: DDP compares those of its hooks."""

import torch
import torch.distributed as dist

from placer.parallel.reductions import Reduction


def ddp_hook(
    state: Reduction,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch hides it from type checkers
) -> torch.futures.Future[torch.Tensor]:
    """A reduction as a hook of DDP: ``ddp.register_comm_hook(reduction, ddp_hook)``.

    It waits for each bucket, so the backward pass hides none of it. DDP fills its buckets anew
    after the first step: a reduction that remembers must begin to with a later one.
    """
    state.start(bucket).wait()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
