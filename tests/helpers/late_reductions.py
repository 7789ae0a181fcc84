"""Reductions whose results come when somebody waits for them: scenarios on one rank.

Until then the tensor of a result holds NaN. Each takes a seed, as the scenarios of streams do, and
needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from placer.parallel.buckets import Bucket
from placer.parallel.grad_sync import GradSync
from placer.parallel.methods.reductions import (
    AllReduce,
    Float16,
    Hierarchical,
    PowerSgd,
    Reduction,
)
from tests.helpers.replicas import backward, mlp, mse, own_batch
from tests.helpers.timed_idle import alone

COLLECTIVES: Final = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single")


class LateWork:
    """A work of torch whose result is there after ``wait``."""

    def __init__(self, work: Any, result: Tensor) -> None:
        work.wait()
        self._result, self._values = result, result.clone()
        result.fill_(torch.nan)

    def wait(self) -> None:
        self._result.copy_(self._values)


@contextmanager
def late_works() -> Iterator[None]:
    """Let asynchronous collectives of torch be as late as they may."""

    def late(collective: Callable[..., Any], result: Tensor, *rest: Any, **named: Any) -> Any:
        work = collective(result, *rest, **named)
        return LateWork(work, result) if named.get("async_op") else work

    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            if hasattr(dist, name):
                patch.setattr(dist, name, partial(late, getattr(dist, name)))
        yield


class ThreeLevels(Hierarchical):
    """Reduces level by level, on each alone."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        assert dist.group.WORLD is not None
        self._groups = [dist.group.WORLD] * 3


def reduced_late(make: Callable[[Any], Reduction], tolerance: float, seed: int) -> None:
    """Gradients of a step, and of the next, are those of the model."""
    with alone(), late_works():
        model, plain = mlp(), mlp()
        plain.load_state_dict(model.state_dict())
        sync = GradSync(model, reduction=make, bucket_bytes=256)
        for number in range(2):
            sync.zero_grad()
            plain.zero_grad()
            batch = own_batch(number, 16, 8)
            backward(mse(model, batch))
            sync.finish()
            backward(mse(plain, batch))
            for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=tolerance)
        sync.close()


class LateFuture:
    """A future of a hook that is done after ``wait``."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.is_done = False

    def wait(self) -> None:
        self.is_done = True

    def value(self) -> Tensor:
        return self.flat


def one_bucket_at_a_time(seed: int) -> None:
    """PowerSGD begins with a bucket when it is done with the one before."""
    started: list[LateFuture] = []

    def hook(state: Any, bucket: Bucket) -> Any:
        assert all(future.is_done for future in started)
        started.append(LateFuture(bucket.buffer()))
        return started[-1]

    with alone():
        reduction = PowerSgd()
        reduction.hook = hook
        model = mlp()
        sync = GradSync(model, reduction=lambda group: reduction, bucket_bytes=256)
        backward(mse(model, own_batch(0, 16, 8)))
        sync.finish()
        sync.close()
    assert len(started) > 1


METHODS: Final = ((AllReduce, 0.0), (Float16, 1e-3), (ThreeLevels, 0.0))
LATE: Final[dict[str, Callable[[int], None]]] = {
    make.__name__: partial(reduced_late, make, tolerance) for make, tolerance in METHODS
} | {PowerSgd.__name__: one_bucket_at_a_time}
