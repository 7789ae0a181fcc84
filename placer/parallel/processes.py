"""The process group of a run, as the environment that torchrun sets says it."""

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
    """The rank of this process; 0 where no launcher has started it."""
    return int(os.environ.get("RANK", "0"))


def rank_count() -> int:
    """How many processes the launcher has started in all."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def on_this_host() -> tuple[int, int]:
    """The number of this process among those of its host, and how many they are."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return local, int(os.environ.get("LOCAL_WORLD_SIZE", str(rank_count())))


@contextmanager
def joined(timeout_s: float, *, nccl: bool = False) -> Iterator[Store]:
    """Join the ranks of the run, a single one where no launcher has started more.

    Yields a connection to the store of the run that nobody else uses. The backend is gloo, with
    ``nccl`` that one for tensors on CUDA devices. After an error the group is left as it is: to
    take it down might wait for a rank that is gone.

    Raises:
        RuntimeError: the others do not come up within the timeout.
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
    """A connection to the store at MASTER_ADDR, MASTER_PORT, which one rank or the launcher keeps.

    A launcher that starts all ranks again may keep its store, with the addresses of the ranks that
    are gone: every attempt has keys of its own.
    """
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
    """Let SIGTERM raise :class:`StoppedError`, so that there is time to find out why it came."""

    def stop(number: int, frame: object) -> None:
        raise StoppedError("the launcher stopped this rank")

    signal.signal(signal.SIGTERM, stop)
