"""The devices of each rank of a run, by its number among the ranks of its host."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from envs.hardware.discover import check_devices, hosts_of, is_here, shifted, split_name
from envs.hardware.torch_devices import cuda_devices
from envs.placement import Placement
from placer.parallel.processes import own_rank, rank_count, rank_list

LAUNCHERS: Final = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Variables of launchers: the number of a rank on its host, and that of the ranks there."""


def place_on_host() -> tuple[int, int]:
    """Return the number of this rank among the ranks of its host, and the number of these.

    They are those of torchrun, of an MPI launcher or of srun.

    Raises:
        ValueError: there are several ranks, and none of these says which are on this host.
    """
    for rank, ranks in LAUNCHERS:
        if rank in os.environ:
            return int(os.environ[rank]), int(os.environ.get(ranks) or rank_count())
    # a script of SLURM passes on the variables of its own task to whatever it starts
    if os.environ.get("SLURM_PROCID") == str(own_rank()) and rank_count() > 1:
        tasks = tasks_of_hosts(os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        host = int(os.environ.get("SLURM_NODEID", "0"))
        if host < len(tasks) and "SLURM_LOCALID" in os.environ:
            return int(os.environ["SLURM_LOCALID"]), tasks[host]
    if rank_count() > 1:
        raise ValueError(
            f"this is rank {own_rank()} of {rank_count()}, but nothing says which ranks are on "
            "this host: set LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun does"
        )
    return 0, 1


def tasks_of_hosts(text: str) -> list[int]:
    """Return the numbers of tasks on hosts, which SLURM writes in short.

    >>> tasks_of_hosts("4(x2),3")
    [4, 4, 3]
    """
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in parts for _ in range(int(times or 1))]


def on_own_devices(placement: Placement) -> tuple[Placement, bool]:
    """Return a placement on this rank's devices, and whether other ranks of its host share them.

    Only names of devices are compared: ranks that see one GPU each call it ``cuda:0``.
    """
    local_rank, local_ranks = place_on_host()
    rank, shares = own_rank(), False
    if placement.replicas is None:
        renamed, shares = on_next_devices(placement, local_rank, local_ranks)
    else:
        renamed = on_own_group(placement, rank, rank - local_rank, local_ranks)
        if local_ranks > 1:
            names = as_seen(renamed.device_names, len(cuda_devices()))
            renamed = replace(renamed, device_names=names)
    try:
        check_devices(renamed.device_names)
    except ValueError as error:
        where = f"rank {rank}, on {', '.join(renamed.device_names)}"
        raise type(error)(f"{where}: {error}") from None
    return renamed, shares


def as_seen(names: Sequence[str], seen: int) -> tuple[str, ...]:
    """Return the names of devices in a process that may see only its own GPUs.

    If some have no GPU, but there are as many as names, these are numbered from 0.

    >>> as_seen(("cuda:3", "cpu", "cuda:2"), 2), as_seen(("cuda:3",), 4)
    (('cuda:1', 'cpu', 'cuda:0'), ('cuda:3',))
    """
    numbers = sorted({torch.device(name).index for name in names if name.startswith("cuda:")})
    if len(numbers) != seen or numbers[-1:] < [seen]:
        return tuple(names)
    return tuple(
        f"cuda:{numbers.index(torch.device(name).index)}" if name.startswith("cuda:") else name
        for name in names
    )


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


def stage_devices(
    stages: Sequence[str], members: Sequence[tuple[int, int]], seen: int
) -> tuple[str, ...]:
    """Return the devices of the ranks of a host, given as (replica, stage).

    The first replica there takes the GPUs that ``stages`` name, the others those that are left of
    the ``seen`` ones, in order. A rank that sees one GPU among several ranks takes that.

    Raises:
        ValueError: there are more ranks than GPUs.

    >>> stage_devices(("cuda:0", "cuda:1"), [(0, 0), (0, 1), (1, 0), (1, 1)], 4)
    ('cuda:0', 'cuda:1', 'cuda:2', 'cuda:3')
    """
    index = {name: torch.device(name).index for name in stages if name.startswith("cuda:")}
    users = sorted(
        (replica, index[stages[stage]], rank)
        for rank, (replica, stage) in enumerate(members)
        if stages[stage] in index
    )
    if seen == 1 < len(users):
        return tuple("cuda:0" if stages[stage] in index else stages[stage] for _, stage in members)
    named = sorted({gpu for replica, gpu, _ in users if replica == users[0][0]})
    order = named + [gpu for gpu in range(seen) if gpu not in named]
    if len(users) > len(order):
        raise ValueError(
            f"{len(users)} ranks of this host run stages on GPUs, but there are {seen}: start "
            "fewer ranks on it"
        )
    own = {rank: f"cuda:{gpu}" for (_, _, rank), gpu in zip(users, order, strict=False)}
    return tuple(own.get(rank, stages[stage]) for rank, (_, stage) in enumerate(members))
