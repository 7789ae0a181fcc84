"""Choose the devices of a rank: those of its group, or those that follow the previous rank's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from envs.discover import check_devices, is_here, shifted
from envs.host_names import hosts_of, split_name
from envs.placement import Placement
from placer.parallel.processes import on_this_host, own_rank


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
