"""The processes of a run, as torchrun's environment variables describe them, and their groups."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

Store: TypeAlias = Any
"""``torch.distributed.Store``, which type checkers do not know."""


class StoppedError(BaseException):
    """The launcher stops this rank, which it does when another rank has failed.

    It can be raised anywhere, and code that tries something that may fail (an extractor) must let
    it pass.
    """


def own_rank() -> int:
    """Return the rank of this process, 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def rank_count() -> int:
    """Return the number of processes that the launcher has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class Joined(NamedTuple):
    """A connection to the store of a run, for one user alone, and the ranks that share GPUs."""

    store: Store
    sharing: Sequence[int] = ()


@contextmanager
def joined(timeout_s: float, *, gpus: Sequence[str] = ()) -> Iterator[Joined]:
    """Join the ranks of the run; without a launcher there is a single one.

    The backend is gloo; with ``gpus``, the identities of the GPUs of this rank, also NCCL for
    tensors on CUDA devices, unless ranks share a GPU, which NCCL does not allow. After an error the
    group is not destroyed, since that might wait for a rank that is gone.
    """
    rank, ranks = own_rank(), rank_count()
    if ranks == 1:
        store: Store = dist.HashStore()  # type: ignore[attr-defined]  # torch hides it
        second: Store = dist.HashStore()  # type: ignore[attr-defined]  # as before
    else:
        has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = _connected(timeout_s, is_master=rank == 0 and not has_agent)
        second = _connected(timeout_s, is_master=False)
    sharing = sharing_ranks(gpus_of_ranks(second, rank, ranks, gpus)) if gpus else []
    with batch_threads():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpus and not sharing else "gloo",
            store=store,
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout_s),
        )
    yield Joined(second, sharing)
    dist.destroy_process_group()


def gpus_of_ranks(store: Store, rank: int, ranks: int, gpus: Sequence[str]) -> list[list[str]]:
    """Return the identities of the GPUs of every rank; waits for all ranks."""
    store.set(f"gpus/{rank}", json.dumps(list(gpus)))
    return [json.loads(store.get(f"gpus/{each}")) for each in range(ranks)]


def sharing_ranks(gpus: Sequence[Sequence[str]]) -> list[int]:
    """Return the ranks that have a GPU in common with another one.

    >>> sharing_ranks([["GPU-a"], ["GPU-b"], ["GPU-c", "GPU-a"]])
    [0, 2]
    """
    users = Counter(gpu for own in gpus for gpu in set(own))
    return [rank for rank, own in enumerate(gpus) if any(users[gpu] > 1 for gpu in own)]


def _connected(timeout_s: float, *, is_master: bool) -> Store:
    # A launcher that restarts all ranks may keep its store, with the addresses of ranks that are
    # gone: every attempt has its own keys.
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch hides it from type checkers
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]  # as before


@contextmanager
def batch_threads() -> Iterator[None]:
    """Let threads that start in this context have the scheduling policy for batch work.

    Without it the kernel interrupts gloo's threads for one another at every message, which doubles
    the time of an all-reduce between ranks that share their cores with them.
    """
    before = os.sched_getscheduler(0)
    with suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setscheduler(0, before, os.sched_param(0))


def stop_on_sigterm() -> None:
    """Make SIGTERM raise :class:`StoppedError`, which leaves time to find out why it came."""

    def stop(number: int, frame: object) -> None:
        raise StoppedError("the launcher stopped this rank")

    signal.signal(signal.SIGTERM, stop)


def check_same(what: str, text: str, group: dist.ProcessGroup | None = None) -> None:
    """Raise a ValueError on every rank unless all of a group (None: all ranks) pass the same text.

    The message names ``what``, and which ranks have which digest.
    """
    ranks_of: dict[str, list[int]] = {}
    members = dist.get_process_group_ranks(group)
    for rank, digest in zip(members, digests(text, group), strict=True):
        ranks_of.setdefault(digest, []).append(rank)
    if len(ranks_of) > 1:
        by_size = sorted(ranks_of.items(), key=lambda item: -len(item[1]))
        holders = [f"{rank_list(ranks)}: {digest[:12]}" for digest, ranks in by_size]
        raise ValueError(f"{what}: ranks differ ({'; '.join(holders)})")


def digests(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return the SHA-256 of each rank's text, in hexadecimal digits."""
    digest = hashlib.sha256(text.encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=wire_device(group))
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    return [bytes(one.tolist()).hex() for one in gathered]


def wire_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device whose tensors the backend of a group takes: of CUDA the current one."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def rank_list(ranks: Sequence[int]) -> str:
    """Format ranks for messages.

    >>> rank_list([1]), rank_list([0, 2])
    ('rank 1', 'ranks 0, 2')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def new_group(ranks: Sequence[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
    """Create a group of some ranks, or of all, with the timeout of the default group.

    Only the member ranks take part. Torch gives a new group its own default of 30 minutes and has
    no public way to read another group's timeout.
    """
    whole = dist.group.WORLD
    assert whole is not None, "there is no process group yet"
    limit = whole._get_backend(wire_device(whole)).options._timeout
    with batch_threads():
        made: dist.ProcessGroup = dist.new_group(
            None if ranks is None else list(ranks),
            timeout=limit,
            backend=backend,
            use_local_synchronization=ranks is not None,
        )
    return made


def groups_of_slots(
    devices: Sequence[torch.device],
) -> Callable[[torch.device], dist.ProcessGroup | None]:
    """Create a group of all ranks for each device of a replica, so that none waits for another.

    Every rank passes equally many devices; the k-th devices of all ranks reduce with each other. A
    single device, or any other device, uses the default group.
    """
    groups = {device: new_group() for device in (devices if len(devices) > 1 else ())}
    return groups.get
