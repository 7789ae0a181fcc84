"""Gradients of parameters in a graph: how large, where they belong, and which ops make them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphs.frozen import frozen
from graphs.graph import PHASES, GraphArrays
from graphs.mirror import ACCUMULATES, backward_id


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gradients:
    """P gradients in the order in which they are expected: the last parameters first.

    Gradient k, of all parameters that live with op ``home[k]``, is complete when the last of the
    ops ``makers[k]`` has ended; it is kept where its parameters are.
    """

    home: NDArray[np.int32]  # (P,)
    size_bytes: NDArray[np.int64]  # (P,)
    makers: tuple[tuple[int, ...], ...]  # (P,) one or more ops each

    def __len__(self) -> int:
        """P."""
        return len(self.home)


def gradients_of(graph: GraphArrays, known: Mapping[str, Sequence[str]] | None = None) -> Gradients:
    """The gradients of a training step, by what its ops say of themselves.

    Sizes are ``gradient_bytes``; a graph without any, such as a file that gives costs and
    parameters alone, has as many as ``parameter_bytes``. A graph does not say which op makes a
    gradient. It is taken to be the mirror of the op that the parameters live with, as
    :func:`graphs.mirror.with_backward` names it; else all backward ops of the same module that do
    more than add up gradients; else those that read that op's output; else the last of the backward
    ops. Without a backward pass an op is one of forward and backward together, and makes its own
    gradient; the order is then that of the ops.

    Args:
        graph: of the step.
        known: {op that parameters live with: ops that make their gradients}, as
            :func:`graphs.extract.gradient_makers` finds them; ops that the graph has not do not
            count.
    """
    own = graph.gradient_bytes if graph.gradient_bytes.any() else graph.parameter_bytes
    homes = np.flatnonzero(own)
    is_backward = graph.phase == PHASES.index("backward")
    if not is_backward.any():
        makers: Sequence[tuple[int, ...]] = [(home,) for home in homes.tolist()]
    else:
        homes = homes[::-1]
        search = _Makers(graph, is_backward, known or {})
        makers = [search.of(home) for home in homes.tolist()]
    return Gradients(
        home=frozen(homes.astype(np.int32)),
        size_bytes=frozen(own[homes].astype(np.int64)),
        makers=tuple(makers),
    )


def no_gradients() -> Gradients:
    """Those of a step that does not train."""
    return Gradients(home=np.zeros(0, np.int32), size_bytes=np.zeros(0, np.int64), makers=())


class _Makers:
    """Looks up which backward ops make the gradients of an op's parameters."""

    def __init__(
        self,
        graph: GraphArrays,
        is_backward: NDArray[np.bool_],
        known: Mapping[str, Sequence[str]],
    ) -> None:
        self.graph = graph
        self.known = known
        self.is_backward = is_backward
        order = graph.topological[is_backward[graph.topological]]
        self.last = int(order[-1])
        self.index = {graph.ids[i]: i for i in order.tolist()}
        self.inside: defaultdict[str, list[int]] = defaultdict(list)
        for i in order.tolist():
            if not graph.ops[i].endswith(ACCUMULATES):
                self.inside[graph.modules[i]].append(i)

    def of(self, home: int) -> tuple[int, ...]:
        graph = self.graph
        known = self.known.get(graph.ids[home], ())
        if found := tuple(self.index[op_id] for op_id in known if op_id in self.index):
            return found
        mirror = self.index.get(backward_id(graph.ids[home]))
        if mirror is not None and graph.ops[mirror] == f"{graph.ops[home]}_backward":
            return (mirror,)
        if graph.modules[home] and (inside := self.inside.get(graph.modules[home])):
            return tuple(inside)
        readers = graph.successors[graph.successor_start[home] : graph.successor_start[home + 1]]
        return tuple(readers[self.is_backward[readers]].tolist()) or (self.last,)
