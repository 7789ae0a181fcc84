"""Problem data for list schedulers: times in nanoseconds as floats, and features per op.

:class:`SchedulingArrays` are built once per problem and passed to compiled code. Their features do
not depend on how ops or devices are numbered.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from envs.compiled import by_pointer
from envs.problem import Bools, Floats, Ints, Problem, Singles
from envs.simulator.bounds import levels
from placer.search.list_scheduler.soft_log import soft_log

ScalarT = TypeVar("ScalarT", bound=np.generic)

OP_FEATURE_COUNT: Final = 7
BASE_ORDER_SCORE: Final = 10.0
"""Order score of the op with the highest upward rank when all learned weights are zero."""
SCALED_OPS: Final = 1000
"""From this many ops on, features of single ops count less; policies learn on smaller graphs."""
LONGEST_UNSCALED: Final = 100.0
"""Longest critical path of such a graph, in units of the scale, on which they count in full: the
longer it is, the closer are the ranks of neighbours."""
MOST_CONSUMERS: Final = 4
MOST_INPUTS: Final = 4
"""Siblings of an op are so many first inputs of so many first consumers."""
LANES: Final = 8
"""Rows of devices are filled up to a multiple of so many, which a loop takes together."""


@by_pointer
class SchedulingArrays(NamedTuple):
    """Arrays of N ops, E edges, D devices and C co-location groups, writable and contiguous.

    Mean costs and transfer times average over the allowed devices of an op and over the connected
    pairs of devices. ``edge_ns`` (E) is the mean transfer time of an incoming edge. Rows of R items
    are filled up to a multiple of :data:`LANES`, with devices where nothing is allowed.
    """

    device_count: int
    cost: Singles  # (N, R) ns, 0 where not allowed
    allowed: Bools  # (N, D)
    successor_start: Ints
    successors: Ints
    predecessor_start: Ints
    predecessors: Ints
    edge_bytes: Singles  # (E,) by target, as predecessors
    edge_ns: Singles  # (E,) by target
    inputs_ns: Singles  # (N,) sum of edge_ns of an op's inputs
    heaviest_input: Ints  # (N,) first op with the largest edge_ns, or -1
    sibling_start: Ints  # (N + 1,)
    siblings: Ints  # (S,) other inputs of an op's consumers, by op
    sibling_ns: Singles  # (S,) mean transfer times of those
    group: Ints  # (N,)
    latency: Singles  # (D, R) ns
    ns_per_byte: Singles  # (D, R)
    connected: Bools  # (D, D)
    all_connected: bool
    queue: Ints  # (D, R), queue_count if transfers never wait
    queue_count: int
    out_queue: Ints  # (R,) a queue that transfers from a device wait in, or queue_count
    once_per_destination: bool
    memory: Floats  # (D,) bytes
    memory_matters: bool  # False if everything fits on every device
    any_device: bool  # every op may run on every device: no groups, pins or missing links, and room
    resident: Floats  # (N,) bytes of parameters, gradients, optimizer state
    group_resident: Floats  # (C,) bytes
    output: Floats  # (N,) bytes
    held: Floats  # (N,) bytes
    workspace: Floats  # (N,) bytes
    order_base: Singles  # (N,) BASE_ORDER_SCORE * upward rank / its maximum
    op_features: Singles  # (7, N); those of single ops count less on long, large graphs
    bottom_level: Floats  # (N,) ns, with mean costs and transfers
    scale: float  # ns, mean over ops of the cheapest cost: time unit of all features
    critical_path: float  # ns, with mean costs and transfers

    @property
    def device_cost(self) -> Singles:
        """Return the costs on the devices alone (N, D), ns."""
        return self.cost[:, : self.device_count]


def scheduling_arrays(problem: Problem, *, loaded: bool = False) -> SchedulingArrays:
    """Return the arrays of a problem, with costs alone or while all other devices compute."""
    graph = problem.graph
    count = problem.op_count
    allowed = np.array(problem.allowed)
    cost = np.array(problem.cost_ns, np.float64)
    if loaded and problem.load is not None:
        cost += np.where(allowed, problem.load.extra_ns, 0)
    cheapest = np.where(allowed, cost, np.inf).min(axis=1)
    mean_cost = np.where(allowed, cost, 0.0).sum(axis=1) / allowed.sum(axis=1)
    scale = max(float(cheapest.mean()), 1.0)

    ns_per_byte = 1e9 / np.array(problem.bandwidth_bytes_per_s, np.float64)
    latency = np.array(problem.latency_s, np.float64) * 1e9
    edge_bytes = np.array(graph.edge_bytes[graph.predecessor_edge], np.float64)
    pairs = problem.connected & ~np.eye(problem.device_count, dtype=np.bool_)
    edge_ns = np.zeros(graph.edge_count)
    if pairs.any():
        edge_ns = float(latency[pairs].mean()) + edge_bytes * float(ns_per_byte[pairs].mean())
    mean_ns = edge_ns.astype(np.float32)

    start = np.array(graph.successor_start, np.int32)
    successors = np.array(graph.successors, np.int32)
    predecessor_start = np.array(graph.predecessor_start, np.int32)
    predecessors = np.array(graph.predecessors, np.int32)
    fan_in = np.diff(predecessor_start)
    off_device = 1.0 - 1.0 / problem.device_count
    head, tail = levels(graph, edge_ns * off_device, mean_cost)
    critical_path = max(float((head + tail).max()), 1.0)
    send_ns = np.zeros(count)
    np.maximum.at(send_ns, predecessors, edge_ns)
    single = 1.0
    if count >= SCALED_OPS:
        single = min(LONGEST_UNSCALED * scale / critical_path, 1.0)
    features = (
        soft_log(cheapest / scale) * single,
        soft_log(send_ns / scale) * single,
        head / critical_path,
        1.0 - (head / critical_path + tail / critical_path),
        soft_log(fan_in.astype(np.float64)) / 2.0 * single,
        soft_log(np.diff(start).astype(np.float64)) / 2.0 * single,
        soft_log(send_ns / scale / (cheapest / scale + 1e-3)) / 2.0 * single,
    )
    resident = np.array(graph.resident_bytes, np.float64)
    group = np.array(graph.group, np.int32)
    held = np.array(problem.held_bytes, np.float64)
    output = np.array(graph.output_bytes, np.float64)
    workspace = np.array(graph.workspace_bytes, np.float64)
    memory = np.array(problem.memory_bytes, np.float64)
    kept = np.maximum(output, _copy_bytes(problem))
    everything = resident.sum() + held.sum() + kept.sum() + workspace.max()
    roomy = bool(everything <= memory.min())
    any_device = roomy and bool(
        allowed.all() and problem.connected.all() and problem.graph.group.max() < 0
    )
    sibling_start, siblings = _sibling_edges(start, successors, predecessor_start, predecessors)
    queue = np.array(problem.queue, np.int32)
    out_queue = queue.max(axis=1)
    queue_count = int(problem.queue_count)
    return SchedulingArrays(
        device_count=problem.device_count,
        cost=filled_up(cost.astype(np.float32)),
        allowed=allowed,
        successor_start=start,
        successors=successors,
        predecessor_start=predecessor_start,
        predecessors=predecessors,
        edge_bytes=edge_bytes.astype(np.float32),
        edge_ns=mean_ns,
        inputs_ns=np.bincount(np.repeat(np.arange(count), fan_in), mean_ns, minlength=count).astype(
            np.float32
        ),
        heaviest_input=_heaviest_inputs(predecessors, fan_in, mean_ns),
        sibling_start=sibling_start,
        siblings=predecessors[siblings],
        sibling_ns=mean_ns[siblings],
        group=group,
        latency=filled_up(latency.astype(np.float32)),
        ns_per_byte=filled_up(ns_per_byte.astype(np.float32)),
        connected=np.array(problem.connected),
        all_connected=bool(problem.connected.all()),
        queue=filled_up(np.where(queue < 0, queue_count, queue).astype(np.int32), queue_count),
        queue_count=queue_count,
        out_queue=filled_up(
            np.where(out_queue < 0, queue_count, out_queue).astype(np.int32), queue_count
        ),
        once_per_destination=bool(problem.cluster.once_per_destination),
        memory=memory,
        memory_matters=not roomy,
        any_device=any_device,
        resident=resident,
        group_resident=np.bincount(
            group[group >= 0], resident[group >= 0], int(group.max()) + 1
        ).astype(np.float64),
        output=output,
        held=held,
        workspace=workspace,
        order_base=(BASE_ORDER_SCORE * tail / max(float(tail.max()), 1.0)).astype(np.float32),
        op_features=np.stack(features).astype(np.float32),
        bottom_level=tail,
        scale=scale,
        critical_path=critical_path,
    )


def _copy_bytes(problem: Problem) -> Floats:
    """Return the most bytes of received copies of an op's output on a device (N,)."""
    graph = problem.graph
    source = np.repeat(np.arange(problem.op_count), np.diff(graph.successor_start))
    together = np.maximum if problem.cluster.once_per_destination else np.add
    copies = np.zeros(problem.op_count)
    together.at(copies, source, graph.edge_bytes)
    return copies


def filled_up(rows: NDArray[ScalarT], value: float = 0) -> NDArray[ScalarT]:
    """Return rows of devices with as many more items as make their number a multiple of 8."""
    missing = -rows.shape[-1] % LANES
    widths = [(0, 0)] * (rows.ndim - 1) + [(0, missing)]
    return np.pad(rows, widths, constant_values=value)


def _sibling_edges(
    successor_start: Ints, successors: Ints, predecessor_start: Ints, predecessors: Ints
) -> tuple[Ints, Ints]:
    """Return where the siblings of each op begin (N + 1,), and the edges from them (S,).

    Siblings of an op are the other inputs of its consumers, which it should be near to. Edges are
    numbered by target.
    """
    fan_out = np.diff(successor_start)
    place = np.arange(len(successors)) - np.repeat(successor_start[:-1], fan_out)
    ops = np.repeat(np.arange(len(fan_out)), fan_out)[place < MOST_CONSUMERS]
    consumers = successors[place < MOST_CONSUMERS]
    sizes = np.minimum(np.diff(predecessor_start)[consumers], MOST_INPUTS)
    edges = np.arange(sizes.sum())
    edges += np.repeat(predecessor_start[consumers] - (np.cumsum(sizes) - sizes), sizes)
    ops = np.repeat(ops, sizes)
    is_other = predecessors[edges] != ops
    start = np.zeros(len(fan_out) + 1, np.int32)
    start[1:] = np.cumsum(np.bincount(ops[is_other], minlength=len(fan_out)))
    return start, edges[is_other].astype(np.int32)


def _heaviest_inputs(predecessors: Ints, fan_in: Ints, edge_ns: Singles) -> Ints:
    """Return for each op the first input with the longest transfer (N,), -1 without inputs."""
    consumers = np.repeat(np.arange(len(fan_in)), fan_in)
    heaviest_first = predecessors[np.lexsort((-edge_ns, consumers))]
    heaviest = np.full(len(fan_in), -1, np.int32)
    heaviest[fan_in > 0] = heaviest_first[(np.cumsum(fan_in) - fan_in)[fan_in > 0]]
    return heaviest
