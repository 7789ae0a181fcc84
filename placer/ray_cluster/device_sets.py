"""Sets of devices of Ray nodes that can measure: as many, of the same kinds, as those here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from envs.hardware.core_sets import cores_named
from envs.hardware.discover import core_set, is_core, physical_cores
from placer.ray_cluster.connection import Node

BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
"""Identifies a machine, also for nodes in containers."""


class Machine(NamedTuple):
    """The machine of a node, and its cores that the node may use, one thread of each."""

    boot: str
    cores: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSet:
    """Devices of a node that run placements, in the order of the devices that these name.

    Of sets with a resource in common, which only nodes of one machine have, one runs at a time.
    """

    node: Node
    names: tuple[str, ...]
    cpus: int
    gpus: int
    resources: frozenset[str]


def this_machine() -> Machine:
    """Return the machine of this process."""
    return Machine(BOOT.read_text(encoding="ascii").strip(), tuple(physical_cores()))


def device_sets(node: Node, machine: Machine, names: Sequence[str]) -> list[DeviceSet]:
    """Return the sets of a node that can stand for the devices ``names`` of this machine.

    Raises:
        ValueError: the node has none; the message names it.
    """
    return _sets_of_cores(node, machine, names) if is_core(names[0]) else _sets_of_gpus(node, names)


def _sets_of_cores(node: Node, machine: Machine, names: Sequence[str]) -> list[DeviceSet]:
    sizes = [len(cores_named(name)) for name in names]
    needed, usable = sum(sizes), min(len(machine.cores), node.cpus)
    if usable < needed:
        raise ValueError(
            f"node {node.name} of the Ray cluster has {len(machine.cores)} cores and offers "
            f"{node.cpus}, but measuring on devices like {', '.join(names)} needs {needed}"
        )
    found = []
    for first in range(0, usable - needed + 1, needed):
        left = [*machine.cores[first : first + needed]]
        parts = [[left.pop(0) for _ in range(size)] for size in sizes]
        found.append(
            DeviceSet(
                node=node,
                names=tuple(map(core_set, parts)),
                cpus=needed,
                gpus=0,
                resources=frozenset(f"{machine.boot}:{core}" for part in parts for core in part),
            )
        )
    return found


def _sets_of_gpus(node: Node, names: Sequence[str]) -> list[DeviceSet]:
    """Return sets whose GPUs Ray numbers from 0 in each process; ``cpu`` takes all processors."""
    needed = sum(name.startswith("cuda") for name in names)
    if others := [name for name in names if not name.startswith("cuda") and name != "cpu"]:
        raise ValueError(f"on a Ray cluster cores, cpu and CUDA devices run, not {others[0]}")
    if node.gpus < needed:
        raise ValueError(
            f"node {node.name} of the Ray cluster offers {node.gpus} GPUs, but measuring on "
            f"devices like {', '.join(names)} needs {needed}"
        )
    alone = "cpu" in names
    count = 1 if alone else min(node.gpus // needed, node.cpus)
    numbers = iter(range(needed))
    own = tuple(f"cuda:{next(numbers)}" if name.startswith("cuda") else name for name in names)
    return [
        DeviceSet(
            node=node,
            names=own,
            cpus=node.cpus if alone else 1,
            gpus=needed,
            resources=frozenset((f"{node.key}:{number}",)),
        )
        for number in range(count)
    ]


def sets_of_all(
    machines: Mapping[Node, Machine], names: Sequence[str]
) -> tuple[list[DeviceSet], list[str]]:
    """Return the sets of all nodes, first one of each node, and why other nodes have none.

    Raises:
        ValueError: no node has any; the message names one.
    """
    of_nodes: list[list[DeviceSet]] = []
    reasons: list[str] = []
    for node, machine in machines.items():
        try:
            of_nodes.append(device_sets(node, machine, names))
        except ValueError as error:
            reasons.append(str(error))
    if not of_nodes:
        others = f", and {len(reasons) - 1} others lack them, too" if len(reasons) > 1 else ""
        raise ValueError(f"{reasons[0]}{others}")
    most = max(map(len, of_nodes))
    return [sets[k] for k in range(most) for sets in of_nodes if k < len(sets)], reasons
