"""The problem to solve: a graph and a cluster as flat arrays for the simulator and search.

Time is integer nanoseconds: an op's cost (seconds on the device's kind + the device's launch
overhead) and a transfer (latency + bytes / bandwidth) are each rounded once, half to even.

Placements are checked by :func:`device_rows` and :func:`priority_rows` before they are passed to
compiled code. :func:`toy_problem` is a small problem for defaults, examples and warm-up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from envs.compiled import compiled_inline
from envs.hardware.cluster import LONGEST_S, Cluster, Device, Link
from envs.hardware.discover import split_name
from envs.hardware.host import is_synchronous
from envs.hardware.link_tables import LinkTables
from graphs.graph import PHASES, GraphArrays, add_edge, add_op, frozen, new_graph

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Singles = NDArray[np.float32]

HORIZON_BITS: Final = 39
HORIZON_NS: Final = 1 << HORIZON_BITS
"""Upper bound on times that the compiled simulator counts, 550 s; longer ones see
:mod:`envs.simulator.time_units`."""
LARGEST_TOTAL_NS: Final = 1 << 61
"""Limit on the costs of all ops, 73 years, so that their sums stay within 63 bits."""
LARGEST_TOTAL_BYTES: Final = 2.0**62
"""Limit on the bytes of all ops and edges, so that their sums stay within 63 bits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostThreads:
    """The threads that issue the ops of D devices; a device that no host names has its own.

    With ``autograd`` backward ops are issued in reverse of the forward ops.
    """

    thread: Ints  # (D,) of every device
    launch_ns: Longs  # (D,) that a copy occupies its thread; 0 on synchronous devices
    op_launch_ns: Longs  # (N, D) that an op does; 0 on synchronous devices
    synchronous: Bools  # (D,) an op occupies its thread until it ends
    overlap: Bools  # (D,) copies from the device run beside its ops
    staging_bytes_per_s: Floats  # (D,) at which the thread writes what is sent so; may be inf
    autograd: bool

    @classmethod
    def of(cls, graph: GraphArrays, cluster: Cluster) -> HostThreads | None:
        """Return the threads of devices; None without hosts.

        An op whose launch the graph does not know takes the ``launch_s`` of its device.
        """
        hosts, devices = cluster.hosts, cluster.devices
        if not hosts:
            return None
        names = [device.name for device in devices]
        number = {name: k for k, host in enumerate(hosts) for name in host.devices}
        launched = [
            device.name in number and not is_synchronous(device.name, device.kind)
            for device in devices
        ]
        for name in names:
            number.setdefault(name, len(number) + len(hosts))
        threads = [number[name] for name in names]
        overlapping = {name for host in hosts if host.overlap for name in host.devices}
        launch_ns = _costs_ns(np.array([device.launch_s for device in devices]))
        of_ops = [graph.launches_for(device.kind) for device in devices]
        op_launch_ns = np.column_stack(
            [
                np.where(np.isnan(s), ns, _costs_ns(s))
                for s, ns in zip(of_ops, launch_ns, strict=True)
            ]
        )
        # an op that copies reads and writes every byte, if the rate of the device is known
        staging = np.nan_to_num([d.bandwidth_bytes_per_s / 2 for d in devices], nan=np.inf)
        return cls(
            thread=np.unique(threads, return_inverse=True)[1].astype(np.int32),
            launch_ns=np.where(launched, launch_ns, 0),
            op_launch_ns=frozen(np.where(launched, op_launch_ns, 0)),
            synchronous=~np.array(launched),
            overlap=np.array([name in overlapping for name in names]),
            staging_bytes_per_s=np.where(launched, np.inf, staging),
            autograd=any(host.autograd for host in hosts),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Load:
    """Extra costs of ops while other devices of their machine compute.

    With b of n such devices computing, an op costs ``extra_ns`` * b / n more, rounded half up.
    """

    extra_ns: Longs  # (N, D)
    machine: Ints  # (D,) the same number where devices slow each other down, -1 for none

    @classmethod
    def of(cls, graph: GraphArrays, cluster: Cluster, cost_ns: Longs) -> Load | None:
        """Return the load among devices of one machine whose kinds have loaded costs, if any."""
        if not graph.loaded_cost_s or cluster.hosts:
            return None
        extra_ns = np.zeros_like(cost_ns)
        machines: list[str | None] = [None] * len(cluster)
        for d, device in enumerate(cluster.devices):
            loaded_s = graph.loaded_costs_for(device.kind) + device.launch_s
            if not np.isnan(loaded_s).all():
                loaded_ns = _costs_ns(loaded_s)
                extra_ns[:, d] = (loaded_ns - cost_ns[:, d]).clip(0)
                machines[d] = split_name(device.name)[0]
        machine = [
            machines.index(m) if m is not None and machines.count(m) > 1 else -1 for m in machines
        ]
        if max(machine) < 0:
            return None
        return cls(extra_ns=frozen(extra_ns), machine=frozen(np.array(machine, np.int32)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """N ops of ``graph`` to be placed on the D devices of ``cluster``.

    Where ``allowed[i, d]`` is False, op i may not run on device d (its cost there is unknown, or
    the graph forbids it) and ``cost_ns[i, d]`` is 0. ``queue[s, d]`` is the index of the queue (of
    ``queue_count``) for transfers from s to d, -1 if they never queue; queues with
    ``queue_by_priority`` serve the transfer with the highest-priority consumer first.
    ``second_queue[s, d]`` is -1 except on half-duplex "egress" links and links with ``ingress``:
    there a transfer occupies the sender's port (``queue``) and the receiver's port
    (``second_queue``) at the same time; with half duplex a device has one port for both directions.
    ``connected[s, d]`` is False if no link joins s to d. Costs include the launch, unless it
    occupies a thread of ``hosts`` instead of the device.
    """

    graph: GraphArrays
    cluster: Cluster
    cost_ns: Longs  # (N, D)
    allowed: Bools  # (N, D)
    latency_s: Floats  # (D, D)
    bandwidth_bytes_per_s: Floats  # (D, D), may be inf
    connected: Bools  # (D, D), True on the diagonal
    queue: Ints  # (D, D)
    second_queue: Ints  # (D, D)
    queue_count: int
    queue_by_priority: Bools  # (queue_count,)
    memory_bytes: Longs  # (D,)
    held_bytes: Longs  # (N,) on the op's device from its start to the end of the step
    hosts: HostThreads | None = None  # None: a process drives each device
    load: Load | None = None  # None: costs do not depend on what other devices do

    def __post_init__(self) -> None:
        graph = self.graph
        sizes = (
            graph.output_bytes,
            graph.parameter_bytes,
            graph.gradient_bytes,
            graph.optimizer_bytes,
            graph.workspace_bytes,
            graph.edge_bytes,
            self.held_bytes,
        )
        total = sum(float(size.sum(dtype=np.float64)) for size in sizes)
        if total >= LARGEST_TOTAL_BYTES:
            raise ValueError(
                f"graph {graph.name!r} holds {total:.3g} bytes in all; a problem may have 2**62"
            )
        work_ns = float(self.cost_ns.max(axis=1, initial=0).sum(dtype=np.float64))
        if self.hosts is not None:
            work_ns += float(self.hosts.op_launch_ns.max(axis=1).sum(dtype=np.float64))
        if work_ns >= LARGEST_TOTAL_NS:
            raise ValueError(
                f"the ops of graph {graph.name!r} cost {work_ns / 1e9:.3g} s in all, each on its "
                f"slowest device; a problem may have {LARGEST_TOTAL_NS / 1e9:.2g} s: scale all "
                "costs down"
            )

    @property
    def op_count(self) -> int:
        """Number of ops, N."""
        return len(self.graph)

    @property
    def device_count(self) -> int:
        """Number of devices, D."""
        return len(self.cluster)

    @classmethod
    def of(cls, graph: GraphArrays, cluster: Cluster) -> Problem:
        """Build the problem of placing a graph on a cluster."""
        hosts = HostThreads.of(graph, cluster)
        allowed, cost_ns = _costs(graph, cluster, hosts)
        links = LinkTables.of(cluster)
        return cls(
            graph=graph,
            cluster=cluster,
            cost_ns=frozen(cost_ns),
            allowed=frozen(allowed),
            latency_s=frozen(links.latency_s),
            bandwidth_bytes_per_s=frozen(links.bandwidth_bytes_per_s),
            connected=frozen(links.connected),
            queue=frozen(links.queue),
            second_queue=frozen(links.second_queue),
            queue_count=len(links.by_priority),
            queue_by_priority=frozen(np.array(links.by_priority, np.bool_)),
            memory_bytes=frozen(np.array([d.memory_bytes for d in cluster.devices], np.int64)),
            held_bytes=frozen(held_bytes_of(graph)),
            hosts=hosts,
            load=Load.of(graph, cluster, cost_ns),
        )

    def cheapest_ns(self) -> Longs:
        """Return the cost of every op on the fastest device that may run it, (N,)."""
        never = np.iinfo(np.int64).max
        return np.asarray(np.where(self.allowed, self.cost_ns, never).min(axis=1), np.int64)

    def transfer_ns(self, size: int, source: int, destination: int) -> int:
        """Return the nanoseconds that ``size`` bytes take between two devices, without queueing."""
        seconds = (
            self.latency_s[source, destination]
            + size / self.bandwidth_bytes_per_s[source, destination]
        )
        return nanoseconds(float(seconds))


def without_hand_over(problem: Problem) -> Problem:
    """Return the problem of a step that runs in this process: it is handed to no workers."""
    return replace(problem, graph=replace(problem.graph, hand_over_s=0.0))


def nanoseconds(seconds: float, at_most: int = HORIZON_NS) -> int:
    """Return seconds as whole nanoseconds, no more than ``at_most``.

    >>> nanoseconds(1.5e-6), nanoseconds(1e30) == HORIZON_NS
    (1500, True)
    """
    return round(min(seconds * 1e9, float(at_most)))


def each_in_nanoseconds(seconds: NDArray[np.floating[Any]]) -> Longs:
    """Return every element of an array of seconds as nanoseconds, at most ``HORIZON_NS``."""
    return np.asarray(np.rint(np.minimum(seconds * 1e9, float(HORIZON_NS))), np.int64)


@compiled_inline
def transfer_ns(latency_s: float, size: int, bandwidth_bytes_per_s: float) -> int:
    """Return the nanoseconds of a transfer of ``size`` bytes, rounded as in :func:`nanoseconds`."""
    seconds = latency_s + size / bandwidth_bytes_per_s
    return int(np.rint(min(seconds * 1e9, float(HORIZON_NS))))


def _costs(graph: GraphArrays, cluster: Cluster, hosts: HostThreads | None) -> tuple[Bools, Longs]:
    count = len(graph)
    allowed = np.ones((count, len(cluster)), np.bool_)
    cost_ns = np.zeros((count, len(cluster)), np.int64)
    for d, device in enumerate(cluster.devices):  # one device at a time, to save memory
        on_device = hosts is None or hosts.synchronous[d]
        cost_s = graph.costs_for(device.kind) + (device.launch_s if on_device else 0.0)
        allowed[:, d] = ~np.isnan(cost_s)
        cost_ns[:, d] = _costs_ns(cost_s)
    for i, names in enumerate(graph.allowed):
        if names is not None:
            allowed[i] &= np.isin(np.array(cluster.names), np.array(names))
    grouped = np.flatnonzero(graph.group >= 0)
    of_group = np.ones((int(graph.group.max(initial=-1)) + 1, len(cluster)), np.bool_)
    np.logical_and.at(of_group, graph.group[grouped], allowed[grouped])
    allowed[grouped] = of_group[graph.group[grouped]]
    stuck = np.flatnonzero(~allowed.any(axis=1))
    if len(stuck):
        raise ValueError(_unplaceable(graph, cluster, int(stuck[0]), len(stuck)))
    cost_ns[~allowed] = 0
    too_long = np.argwhere(cost_ns >= LONGEST_S * 1e9)
    if len(too_long):
        i, d = too_long[0].tolist()
        device = cluster.devices[d]
        cost_s = graph.costs_for(device.kind)[i] + device.launch_s
        raise ValueError(
            f"op {graph.ids[i]!r} costs {cost_s:.3g} s on {device.name}; an op may take 63 "
            f"years ({LONGEST_S:g} s) at most: scale all costs down, or keep it off that device"
        )
    return allowed, cost_ns


def _costs_ns(cost_s: Floats) -> Longs:
    """Return the nanoseconds of costs, 0 where they are not known, at most ``LONGEST_S``."""
    shortest_s = np.minimum(np.nan_to_num(cost_s), LONGEST_S)
    return np.asarray(np.rint(shortest_s * 1e9), np.int64)


def _unplaceable(graph: GraphArrays, cluster: Cluster, op: int, count: int) -> str:
    """Return the reason that an op can run on no device."""
    known = [k for k, costs in graph.cost_s.items() if not np.isnan(costs[op])]
    kinds = sorted({device.kind for device in cluster.devices})
    limits = graph.allowed[op]
    more = f" (and {count - 1} more ops)" if count > 1 else ""
    text = (
        f"op {graph.ids[op]!r}{more} can run on no device of {cluster.name!r}: its costs are known "
        f"for kind {', '.join(known) or 'none'}, the devices are of kind {', '.join(kinds)}"
    )
    if limits is not None:
        text += f"; the graph allows only {', '.join(limits)}"
    if graph.group[op] >= 0:
        text += "; all ops of its co-location group need one common device"
    return text + ". Profile it on these devices, or name others."


def held_bytes_of(graph: GraphArrays) -> Longs:
    """Return the saved bytes of ops without a backward op in the graph, (N,), and 0 for the others.

    For the others, the edges to their backward ops keep the memory alive.
    """
    backward = PHASES.index("backward")
    has_backward = np.zeros(len(graph), np.bool_)
    source = np.repeat(np.arange(len(graph)), np.diff(graph.successor_start))
    has_backward[source[graph.phase[graph.successors] == backward]] = True
    return np.where(has_backward, 0, graph.saved_bytes)


def device_rows(problem: Problem, devices: ArrayLike) -> Ints:
    """Return placements (B, N), or one (N,), as a contiguous, writable int32 array (B, N).

    Copies only if necessary. Raises ValueError for a wrong shape, values that are not integers, or
    a device that does not exist.
    """
    array = _rows(problem, devices, "devices")
    if array.dtype.kind not in "iu":
        raise ValueError(f"devices are of type {array.dtype}, not whole numbers")
    if array.size and not 0 <= array.min() <= array.max() < problem.device_count:
        wrong = array[(array < 0) | (array >= problem.device_count)][0]
        raise ValueError(
            f"device {wrong} does not exist, {problem.cluster.name!r} has "
            f"{problem.device_count}: 0 to {problem.device_count - 1}"
        )
    return np.require(array, np.int32, ["C", "W"])


def device_row(problem: Problem, devices: ArrayLike) -> Ints:
    """Return one placement, (N,) or (1, N), as (N,)."""
    rows = device_rows(problem, devices)
    if len(rows) != 1:
        raise ValueError(f"this takes one placement, not {len(rows)}")
    return rows.ravel()


def priority_rows(problem: Problem, priority: ArrayLike) -> Floats:
    """Return finite priorities (B, N) or (N,) as (B, N), like :func:`device_rows`."""
    array = _rows(problem, priority, "priority")
    if array.dtype.kind not in "iuf":
        raise ValueError(f"priorities are of type {array.dtype}, not numbers")
    if not np.isfinite(array).all():
        raise ValueError("a priority is not a finite number")
    return np.require(array, np.float64, ["C", "W"])


def _rows(problem: Problem, values: ArrayLike, name: str) -> NDArray[Any]:
    array, count = np.asarray(values), problem.op_count
    if array.ndim > 2 or array.shape[-1:] != (count,):
        raise ValueError(f"{name} {array.shape} must be (B, {count}) or ({count},)")
    return array.reshape(-1, count)


def toy_problem() -> Problem:
    """Return a problem of two chains of six ops that join, on three equal devices."""
    graph = new_graph("two-towers")
    add_op(graph, "input", cost_s={"*": 1e-4}, output_bytes=100_000)
    for tower in ("left", "right"):
        for layer in range(6):
            name = f"{tower}.{layer}"
            add_op(graph, name, cost_s={"*": 1e-3}, output_bytes=500_000, parameter_bytes=4_000_000)
            add_edge(graph, f"{tower}.{layer - 1}" if layer else "input", name)
    add_op(graph, "join", cost_s={"*": 5e-4})
    for tower in ("left", "right"):
        add_edge(graph, f"{tower}.5", "join")
    names = ("device:0", "device:1", "device:2")
    link = Link(between=names, latency_s=1e-5, bandwidth_bytes_per_s=1e10)
    cluster = Cluster(
        name="three-devices",
        devices=tuple(Device(name=n, kind="device", memory_bytes=10**9) for n in names),
        links=(link,),
    )
    return Problem.of(GraphArrays.from_graph(graph), cluster)
