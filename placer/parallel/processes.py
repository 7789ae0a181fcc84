"""The process group of a run, configured by torchrun's environment variables."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from placer.parallel.liveness import StoppedError
from placer.parallel.run_store import Store


def own_rank() -> int:
    """Return the rank of this process, 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def rank_count() -> int:
    """Return the number of processes that the launcher has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def on_this_host() -> tuple[int, int]:
    """Return the local rank of this process, and the number of ranks on its host."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return local, int(os.environ.get("LOCAL_WORLD_SIZE", str(rank_count())))


@contextmanager
def joined(timeout_s: float, *, nccl: bool = False) -> Iterator[Store]:
    """Join the ranks of the run; without a launcher there is a single one.

    Yields a separate connection to the store of the run, for the caller's use alone. The backend is
    gloo, or with ``nccl`` NCCL for tensors on CUDA devices. After an error the group is not
    destroyed, since that might wait for a rank that is gone.

    Raises:
        RuntimeError: the other ranks do not join within the timeout.
    """
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    rank, ranks = own_rank(), rank_count()
    if ranks == 1:
        store: Store = dist.HashStore()  # type: ignore[attr-defined]  # torch hides it
        signs: Store = dist.HashStore()  # type: ignore[attr-defined]  # as before
    else:
        has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = _connected(timeout_s, keeps=rank == 0 and not has_agent)
        signs = _connected(timeout_s, keeps=False)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    yield signs
    dist.destroy_process_group()


def _connected(timeout_s: float, *, keeps: bool) -> Store:
    # A launcher that restarts all ranks may keep its store, with the addresses of ranks that are
    # gone: every attempt has its own keys.
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch hides it from type checkers
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=keeps,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]  # as before


def stop_on_sigterm() -> None:
    """Make SIGTERM raise :class:`StoppedError`, which leaves time to find out why it came."""

    def stop(number: int, frame: object) -> None:
        raise StoppedError("the launcher stopped this rank")

    signal.signal(signal.SIGTERM, stop)
