"""Micro-batches: one step that runs the graph m times, pipelined over the devices.

The graph describes one micro-batch. A step of m micro-batches is simulated as a graph of m copies,
so that the simulator needs no special rules:

* Copies of an op share its device. Parameters, gradients, optimizer state and ops of phase
  "optimizer" exist once per step, in the first copy; activations belong to their micro-batch.
* Gradients accumulate: a backward op that is read by nothing but the optimizer receives the sum so
  far from its previous copy and passes it on; the optimizer reads the sum of the last copy.
* At most ``in_flight`` micro-batches are active at once: the first ops of the graph wait for a
  gate, which opens when the last backward op of an earlier micro-batch has ended. A gate takes no
  time and no memory; to other devices it is a transfer of 0 bytes.
* Ops are ordered as in 1F1B (Narayanan et al., PipeDream, SOSP 2019; arXiv 1806.03377): backward
  before forward, the earlier micro-batch first, then by the priority of the placement.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from envs.placement import check_micro_batches
from envs.problem import Problem, held_bytes_of
from envs.simulator.bounds import levels
from graphs.graph import PHASES, GraphArrays, csr, frozen

FORWARD: Final = PHASES.index("forward")
BACKWARD: Final = PHASES.index("backward")
OPTIMIZER: Final = PHASES.index("optimizer")
ONCE_PER_STEP: Final = frozenset({"parameter_bytes", "gradient_bytes", "optimizer_bytes"})
"""Columns of a graph that micro-batches share."""
LARGEST: Final = 1 << 24
"""Limit on copied ops and edges; the simulator takes fewer edges."""
_EDGE_COLUMNS: Final = frozenset(
    {"successor_start", "successors", "edge_bytes", "predecessor_start", "predecessors"}
    | {"predecessor_edge", "topological"}
)


class Pipeline:
    """A step of ``micro_batches`` copies of ``base`` (N ops), as a ``problem`` of M ops.

    The copies of an op are one co-location group of ``problem``, so any placer that supports groups
    can place it. First come all ops, as in the first micro-batch; then those of the other
    micro-batches; then the gates. Op j is the copy of op ``origin[j]`` for micro-batch
    ``batch[j]``, or, where ``is_gate[j]``, the gate of that micro-batch, which a copy of
    ``origin[j]`` opens. By default at most one micro-batch per device is in flight.
    """

    def __init__(self, base: Problem, micro_batches: int, *, in_flight: int | None = None) -> None:
        check_micro_batches(micro_batches, in_flight)
        graph, count = base.graph, base.op_count
        if micro_batches * max(count, graph.edge_count) >= LARGEST:
            raise ValueError(
                f"{micro_batches} micro-batches of {count} ops and {graph.edge_count} "
                f"edges are too large for the simulator, which takes {LARGEST - 1} in all"
            )
        self.base, self.micro_batches = base, micro_batches
        self._in_flight = base.device_count if in_flight is None else in_flight
        self._once = graph.phase == OPTIMIZER
        self._source = np.repeat(np.arange(count), np.diff(graph.successor_start))
        self._check_optimizer()
        again = np.flatnonzero(~self._once)
        self._number = np.tile(np.arange(count), (micro_batches, 1))  # [batch, op]
        copies = np.arange((micro_batches - 1) * len(again)).reshape(micro_batches - 1, len(again))
        self._number[1:, again] = count + copies
        self._last = _last_backward(base)
        gates = np.arange(max(micro_batches - self._in_flight, 0) if self._last >= 0 else 0)
        self._gates = count + copies.size + gates
        repeated = np.tile(again, micro_batches - 1)
        origin = [np.arange(count), repeated, np.full(len(gates), self._last)]
        later = np.repeat(np.arange(1, micro_batches), len(again))
        batch = [np.zeros(count), later, self._in_flight + gates]
        self.origin = frozen(np.concatenate(origin).astype(np.int32))  # (M,)
        self.batch = frozen(np.concatenate(batch).astype(np.int32))  # (M,)
        self.is_gate = frozen(np.arange(len(self.origin)) >= count + copies.size)  # (M,)
        copied = self._graph()
        cost_ns = base.cost_ns[self.origin]
        cost_ns[self.is_gate] = 0
        load, hosts = base.load, base.hosts
        if hosts is not None:
            op_launch_ns = np.where(self.is_gate[:, None], 0, hosts.op_launch_ns[self.origin])
            hosts = replace(hosts, autograd=False, op_launch_ns=frozen(op_launch_ns))
        if load is not None:
            extra_ns = np.where(self.is_gate[:, None], 0, load.extra_ns[self.origin])
            load = replace(load, extra_ns=frozen(extra_ns))
        self.problem = replace(
            base,
            graph=copied,
            cost_ns=frozen(cost_ns),
            allowed=frozen(base.allowed[self.origin]),
            held_bytes=frozen(held_bytes_of(copied)),
            load=load,
            hosts=hosts,
        )

    def devices(self, devices: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the devices of all copies, (..., M), from those of the ops, (N,) or (B, N)."""
        return devices[..., self.origin]

    def priority(self, priority: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return priorities of all copies, (..., M): 1F1B order, then ``priority`` of the ops."""
        count = self.base.op_count
        rank = np.empty(priority.shape, np.int64)
        order = np.argsort(-priority, axis=-1, kind="stable")
        np.put_along_axis(rank, order, np.broadcast_to(np.arange(count), order.shape), axis=-1)
        phase = self.problem.graph.phase
        urgency = np.select([self.is_gate, phase == BACKWARD, phase == OPTIMIZER], [0, 1, 2], 3)
        later = (urgency * self.micro_batches + self.batch) * count
        return -(later + rank[..., self.origin]).astype(np.float64)

    def _check_optimizer(self) -> None:
        graph, once = self.base.graph, self._once
        wrong = np.flatnonzero(once[self._source] & ~once[graph.successors])
        if len(wrong):
            u, v = int(self._source[wrong[0]]), int(graph.successors[wrong[0]])
            raise ValueError(
                f"optimizer op {graph.ids[u]!r} feeds {PHASES[graph.phase[v]]} op "
                f"{graph.ids[v]!r}: micro-batches need a step that ends with its optimizer"
            )

    def _graph(self) -> GraphArrays:
        base = self.base.graph
        source, target, size = self._edges()
        start, successors, order = csr(source, target, len(self.origin))
        by_target = csr(successors, source[order], len(self.origin))
        columns: dict[str, Any] = {
            f.name: self._column(f.name, getattr(base, f.name))
            for f in fields(base)
            if f.name not in _EDGE_COLUMNS
        }
        columns |= {
            "hash": f"{base.hash}*{self.micro_batches}",
            "ids": self._ids(),
            "phase": frozen(np.where(self.is_gate, FORWARD, base.phase[self.origin])),
            "group": frozen(self._groups()),
            "successor_start": frozen(start),
            "successors": frozen(successors),
            "edge_bytes": frozen(size[order]),
            "predecessor_start": frozen(by_target[0]),
            "predecessors": frozen(by_target[1]),
            "predecessor_edge": frozen(by_target[2]),
            "topological": frozen(self._topological()),
        }
        return GraphArrays(**columns)

    def _column(self, name: str, values: Any) -> Any:
        """Return one column of the copies; gates get 0 in the int64 and float64 columns."""
        if isinstance(values, str):
            return values
        if isinstance(values, float):
            return values
        if isinstance(values, tuple):
            return tuple(values[i] for i in self.origin.tolist())
        if isinstance(values, dict):
            return {key: self._column(key, value) for key, value in values.items()}
        copied = values[self.origin]
        if copied.dtype in (np.int64, np.float64):
            copied[self.is_gate] = 0
        if name in ONCE_PER_STEP:
            copied[self.batch > 0] = 0
        return frozen(copied)

    def _ids(self) -> tuple[str, ...]:
        ids = self.base.graph.ids
        rows = zip(self.origin.tolist(), self.batch.tolist(), self.is_gate.tolist(), strict=True)
        return tuple(
            f"gate[{k}]" if gate else ids[i] if self._once[i] else f"{ids[i]}[{k}]"
            for i, k, gate in rows
        )

    def _groups(self) -> NDArray[np.int32]:
        """Return the groups: the copies of each op without a group form one more."""
        group = self.base.graph.group.copy()
        alone = np.flatnonzero(group < 0)
        group[alone] = group.max(initial=-1) + 1 + np.arange(len(alone))
        return np.asarray(group[self.origin], np.int32)

    def _edges(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
        graph, number = self.base.graph, self._number
        u, v = self._source, graph.successors
        sums = np.flatnonzero(_accumulates(graph, self._source))
        read_once = np.zeros((self.micro_batches, len(u)), np.bool_)
        read_once[1:, self._once[u]] = True
        read_once[:-1, np.isin(u, sums) & self._once[v]] = True
        kept = ~read_once
        roots = np.flatnonzero((np.diff(graph.predecessor_start) == 0) & (graph.phase == FORWARD))
        opened = self._gates[:, None]
        parts: list[tuple[Any, Any, Any]] = [
            (
                number[:, u][kept],
                number[:, v][kept],
                np.tile(graph.edge_bytes, (self.micro_batches, 1))[kept],
            ),
            (number[:-1, sums], number[1:, sums], graph.output_bytes[sums]),
            (number[: len(self._gates), self._last], self._gates, 0),
            (opened, number[self._in_flight :, roots][: len(self._gates)], 0),
        ]
        rows = [np.broadcast_arrays(*part) for part in parts]
        source, target, size = (np.concatenate([row[k].ravel() for row in rows]) for k in range(3))
        return source.astype(np.int32), target.astype(np.int32), size.astype(np.int64)

    def _topological(self) -> NDArray[np.int32]:
        """Return an order: micro-batch by micro-batch, each after its gate; the optimizer last."""
        position = np.empty(self.base.op_count, np.int64)
        position[self.base.graph.topological] = np.arange(self.base.op_count)
        within_batch = np.where(self.is_gate, -1, position[self.origin])
        batch = np.where(self._once[self.origin], self.micro_batches, self.batch)
        return np.lexsort((within_batch, batch)).astype(np.int32)


def _accumulates(graph: GraphArrays, source: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which backward ops make gradients of parameters: only the optimizer reads them."""
    read = np.zeros(len(graph), np.bool_)
    read[source[graph.phase[graph.successors] != OPTIMIZER]] = True
    return np.asarray((graph.phase == BACKWARD) & ~read)


def _last_backward(base: Problem) -> int:
    """Return the backward op with the longest cost path to its end; -1 if there is none."""
    graph = base.graph
    cost = base.cheapest_ns().astype(np.float64)
    head, _ = levels(graph, np.zeros(graph.edge_count), cost)
    order = graph.topological[graph.phase[graph.topological] == BACKWARD]
    ends = (head + cost)[order]
    return int(order[np.flatnonzero(ends == ends.max())[-1]]) if len(order) else -1
