"""The processes of a run, as torchrun's environment variables describe them, and their devices."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from envs.hardware.discover import check_devices, hosts_of, is_here, shifted, split_name
from envs.placement import Placement
from placer.parallel.liveness import StoppedError, Store


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


def on_own_devices(placement: Placement) -> tuple[Placement, bool]:
    """Return a placement on this rank's devices, and whether other ranks of its host share them.

    Raises:
        ValueError: a device does not exist on this host, or as for :func:`on_own_group`.
    """
    (local, here), rank = on_this_host(), own_rank()
    if placement.replicas is None:
        own, is_shared = on_next_devices(placement, local, here)
    else:
        own, is_shared = on_own_group(placement, rank, rank - local, here), False
    try:
        check_devices(own.device_names)
    except ValueError as error:
        raise ValueError(f"rank {rank}, on {', '.join(own.device_names)}: {error}") from None
    return own, is_shared


def on_own_group(placement: Placement, rank: int, first: int, here: int) -> Placement:
    """Return a placement with replicas on the devices of a rank's group.

    Args:
        placement: placement on the first group; the k-th device of every group corresponds to the
            k-th of the first.
        rank: this rank; there are as many as groups.
        first: the first rank of this host.
        here: number of ranks on this host.

    Raises:
        ValueError: a group spans several hosts, the ranks of this host do not match its groups, or
            the placement uses devices outside the first group.
    """
    assert placement.replicas is not None, "replicas have groups"
    groups = placement.replicas.groups
    hosts = [hosts_of(group) for group in groups]
    if len(hosts[rank]) > 1:
        raise ValueError(
            f"replica {rank} is on {', '.join(groups[rank])}, devices of {len(hosts[rank])} hosts, "
            "and a rank has those of its own host: run its stages as a "
            "placer.parallel.PipelinedReplica from Python, or plan replicas within hosts"
        )
    own = range(first, first + here)
    alike = [k for k, found in enumerate(hosts) if found == hosts[rank]]
    if alike != list(own):
        raise ValueError(
            f"replicas {_numbers(alike)} are on host {hosts[rank][0] or 'of this run'}, and this "
            f"host has the ranks {_numbers(own)}: start as many ranks on every host as it has "
            "replicas"
        )
    known = dict(zip(groups[0], groups[rank], strict=True))
    if missing := [name for name in placement.device_names if name not in known]:
        raise ValueError(
            f"the placement uses {', '.join(missing)}, and its replicas are of "
            f"{', '.join(groups[0])}"
        )
    names = tuple(split_name(known[name])[1] for name in placement.device_names)
    return replace(placement, device_names=names)


def on_next_devices(placement: Placement, local_rank: int, here: int) -> tuple[Placement, bool]:
    """Return a placement without replicas on the devices of one of the ranks of this host.

    The first rank takes the devices of the placement, each further rank the same devices with their
    numbers shifted past the previous rank's, if all of them exist; the CPU is shared.

    Returns:
        The placement, and whether ranks share devices because there are too few.
    """
    renamed = [shifted(placement.device_names, k) for k in range(here)]
    if not all(is_here(name) for names in renamed for name in names):
        return placement, here > 1
    return replace(placement, device_names=renamed[local_rank]), False


def _numbers(found: Sequence[int]) -> str:
    return ", ".join(map(str, found)) or "none"
