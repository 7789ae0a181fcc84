"""The processes of a run, as torchrun's environment variables describe them: groups and devices."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from envs.hardware.discover import check_devices, hosts_of, is_here, shifted, split_name
from envs.placement import Placement

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


@contextmanager
def joined(timeout_s: float, *, nccl: bool = False) -> Iterator[Store]:
    """Join the ranks of the run; without a launcher there is a single one.

    Yields a separate connection to the store of the run, for the caller's use alone. The backend is
    gloo, or with ``nccl`` NCCL for tensors on CUDA devices. After an error the group is not
    destroyed, since that might wait for a rank that is gone.
    """
    rank, ranks = own_rank(), rank_count()
    if ranks == 1:
        store: Store = dist.HashStore()  # type: ignore[attr-defined]  # torch hides it
        second: Store = dist.HashStore()  # type: ignore[attr-defined]  # as before
    else:
        has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = _connected(timeout_s, is_master=rank == 0 and not has_agent)
        second = _connected(timeout_s, is_master=False)
    with batch_threads():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if nccl else "gloo",
            store=store,
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout_s),
        )
    yield second
    dist.destroy_process_group()


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
    """Return the device type whose tensors the backend of a group takes."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


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


def on_own_devices(placement: Placement) -> tuple[Placement, bool]:
    """Return a placement on this rank's devices, and whether other ranks of its host share them."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", str(rank_count())))
    rank, shares = own_rank(), False
    if placement.replicas is None:
        renamed, shares = on_next_devices(placement, local_rank, local_ranks)
    else:
        renamed = on_own_group(placement, rank, rank - local_rank, local_ranks)
    try:
        check_devices(renamed.device_names)
    except ValueError as error:
        raise ValueError(f"rank {rank}, on {', '.join(renamed.device_names)}: {error}") from None
    return renamed, shares


def on_own_group(placement: Placement, rank: int, first: int, local_ranks: int) -> Placement:
    """Return a placement with replicas on the devices of a rank's group.

    The placement is for the first group; the k-th device of every group corresponds to the k-th of
    the first. Ranks ``first`` .. ``first + local_ranks - 1`` are on this host.
    """
    assert placement.replicas is not None, "replicas have groups"
    groups = placement.replicas.groups
    hosts = [hosts_of(group) for group in groups]
    if len(hosts[rank]) > 1:
        raise ValueError(
            f"replica {rank} is on {', '.join(groups[rank])}, devices of {len(hosts[rank])} hosts: "
            "run its stages as a placer.parallel.PipelinedReplica, or plan replicas within hosts"
        )
    ranks = list(range(first, first + local_ranks))
    same_host = [k for k, names in enumerate(hosts) if names == hosts[rank]]
    if same_host != ranks:
        raise ValueError(
            f"replicas {', '.join(map(str, same_host))} are on host "
            f"{hosts[rank][0] or 'of this run'}, which has {rank_list(ranks)}: start as many "
            "ranks on every host as it has replicas"
        )
    device_of = dict(zip(groups[0], groups[rank], strict=True))
    if missing := [name for name in placement.device_names if name not in device_of]:
        raise ValueError(
            f"the placement uses {', '.join(missing)}, but its replicas are on "
            f"{', '.join(groups[0])}"
        )
    names = tuple(split_name(device_of[name])[1] for name in placement.device_names)
    return replace(placement, device_names=names)


def on_next_devices(
    placement: Placement, local_rank: int, local_ranks: int
) -> tuple[Placement, bool]:
    """Return a placement without replicas on the devices of one of the ranks of this host.

    The first rank takes the devices of the placement, each further rank the same devices with their
    numbers shifted past the previous rank's, if all of them exist; the CPU is shared. Also return
    whether ranks share devices because there are too few.
    """
    renamed = [shifted(placement.device_names, k) for k in range(local_ranks)]
    if not all(is_here(name) for names in renamed for name in names):
        return placement, local_ranks > 1
    return replace(placement, device_names=renamed[local_rank]), False
