"""The order in which the threads of hosts issue ops: by priority, backward as autograd does.

Of the ops whose inputs have been issued, that of highest priority is issued next, ties by index.
The order depends on priorities alone, so it is kept from step to step until they change.

With ``autograd`` that holds for the forward pass. The backward pass follows when all of it has been
issued: of the backward ops whose inputs have been issued, the one whose forward op was issued last
comes next, ties by index; updates of the optimizer come before all others. PyTorch's autograd runs
ready nodes in this order, whatever the priorities of backward ops are. It has a thread per
accelerator beside the one that issues the forward pass; steps recorded on a GPU beside a CPU were
predicted better without these, so one thread issues all.

Ops of the backward pass are those of phase "backward" or "optimizer" that no forward op depends on.
The forward op of a backward op is named by its id, as ``layer:mm`` by ``layer:backward/mm``; if
there is none, it is the last in topological order that the op reads, or else that of the first
backward op that it reads.
"""

from __future__ import annotations

import numpy as np

from envs.compiled import compiled_inline, index, int64
from envs.problem import Bools, Longs, Problem
from envs.simulator.kernel.arrays import ProblemArrays, Workspace
from envs.simulator.kernel.queues import add_ready, pop_bit, pop_ready, set_bit
from graphs.graph import PHASES, GraphArrays


def issued_by_autograd(problem: Problem) -> Bools:
    """Return which ops autograd issues, (N,): none without hosts that use it."""
    graph = problem.graph
    backward = np.zeros(len(graph), np.bool_)
    if problem.hosts is None or not problem.hosts.autograd:
        return backward
    backward[:] = graph.phase != PHASES.index("forward")
    start, successors = graph.successor_start.tolist(), graph.successors.tolist()
    for i in reversed(graph.topological.tolist()):
        if backward[i] and not all(backward[v] for v in successors[start[i] : start[i + 1]]):
            backward[i] = False
    return backward if not backward.all() else np.zeros(len(graph), np.bool_)


def forward_op_of(graph: GraphArrays, backward: Bools) -> Longs:
    """Return the forward op of every backward op, (N,), -1 for others."""
    number = {op_id: i for i, op_id in enumerate(graph.ids)}
    topological = graph.topological.tolist()
    rank = {i: k for k, i in enumerate(topological)}
    first = next(i for i in topological if not backward[i])
    start, predecessors = graph.predecessor_start.tolist(), graph.predecessors.tolist()
    of = np.full(len(graph), -1, np.int64)
    for i in topological:
        if not backward[i]:
            continue
        read = predecessors[start[i] : start[i + 1]]
        named = number.get(_forward_id(graph.ids[i]), -1)
        if named >= 0 and not backward[named]:
            of[i] = named
        elif forward := [u for u in read if not backward[u]]:
            of[i] = max(forward, key=rank.__getitem__)
        else:
            of[i] = of[read[0]] if read else first
    return of


def _forward_id(op_id: str) -> str:
    """Return the id of the forward op whose backward op has this id, "" if it is no such id."""
    module, colon, name = op_id.rpartition(":")
    phase, _, op = name.partition("/")
    return f"{module}{colon}{op}" if phase == "backward" else ""


@compiled_inline
def order_of_issue(arrays: ProblemArrays, work: Workspace) -> None:
    """List ops in the order of issue: by rank, but an op whose inputs are late right after them."""
    has_autograd = len(arrays.autograd) > 0
    count = len(work.ops)
    for k in range(count):
        i = index(k)
        inputs = arrays.ops[index(i + 1)].predecessor_start - arrays.ops[i].predecessor_start
        work.ops[i].remaining = inputs
    first = work.devices[0]  # its row holds ops that are late
    first.ready = 0
    first.lone = -1
    issued = int64(0)
    for rank in range(count):
        late = int64(work.order[rank])
        if work.ops[index(late)].remaining > 0:
            continue
        if has_autograd and arrays.autograd[index(late)].is_backward:
            continue
        while late >= 0:
            i = index(late)
            work.issued[index(issued)] = i
            issued += 1
            begin, end = arrays.ops[i].successor_start, arrays.ops[index(i + 1)].successor_start
            for k in range(begin, end):
                v = arrays.edges[index(k)].target
                op = work.ops[v]
                op.remaining -= 1
                if has_autograd and arrays.autograd[v].is_backward:
                    continue
                if op.remaining == 0 and op.rank < rank:
                    add_ready(work, v, 0)
            late = int64(pop_ready(work, 0))
    if has_autograd:
        _rank_backward(arrays, work, int(issued))
        _append_backward(arrays, work, int(issued))


@compiled_inline
def _rank_backward(arrays: ProblemArrays, work: Workspace, forward_ops: int) -> None:
    """Rank backward ops: those of the optimizer, then by their forward ops, the last one first."""
    rank = int64(0)
    for k in range(forward_ops + 1):
        row = index(len(work.issued))  # of the optimizer
        if k > 0:
            row = work.issued[index(forward_ops - k)]
        i = int64(arrays.autograd[row].first)
        while i >= 0:
            work.backward[index(rank)] = i
            work.ops[index(i)].latest = rank
            rank += 1
            i = int64(arrays.autograd[index(i)].next)


@compiled_inline
def _append_backward(arrays: ProblemArrays, work: Workspace, issued: int) -> None:
    """List backward ops after those issued before, in the way of :func:`order_of_issue`."""
    ready = 0  # number of those that are late, in the row of the first device
    for rank in range(len(work.backward)):
        late = int64(work.backward[rank])
        if work.ops[index(late)].remaining > 0:
            continue
        while late >= 0:
            i = index(late)
            work.issued[index(issued)] = i
            issued += 1
            begin, end = arrays.ops[i].successor_start, arrays.ops[index(i + 1)].successor_start
            for k in range(begin, end):
                op = work.ops[arrays.edges[index(k)].target]
                op.remaining -= 1
                if op.remaining == 0 and op.latest < rank:
                    set_bit(work, op.latest, 0)
                    ready += 1
            late = int64(-1)
            if ready > 0:
                ready -= 1
                late = int64(work.backward[index(pop_bit(work, 0))])
