"""A stream of a fake device goes on after a collective only when all ranks have taken part."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.fake_cuda import fake_cuda
from tests.helpers.ranks import on_ranks

LATE = timedelta(seconds=0.5)


def sum_beside_a_late_stream(news: Path) -> list[float]:
    """Return a sum over two ranks; the stream of the second wakes up when the first has read it.

    Or after a while, if the first waits for it, as it should.
    """
    store = dist.FileStore(str(news), 2)  # type: ignore[attr-defined]  # torch hides it
    with fake_cuda() as machine:
        [device] = machine.devices
        mine = torch.full((3,), dist.get_rank() + 1.0, device=device)
        if dist.get_rank():
            machine.queues.sleep(machine.stream_of(device))
        work = dist.all_reduce(mine, async_op=True)
        assert work is not None
        work.wait()  # the stream waits, the host goes on
        if dist.get_rank():
            with contextlib.suppress(RuntimeError):
                store.wait(["has read"], LATE)
        found: list[float] = mine.tolist()
        store.set("has read", "")
        return found


@pytest.mark.slow
def test_a_sum_is_read_when_the_stream_of_every_rank_has_added_its_part(tmp_path: Path) -> None:
    assert on_ranks(2, sum_beside_a_late_stream, tmp_path / "news") == [[3.0] * 3] * 2
