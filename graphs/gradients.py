"""Gradients of the parameters in a graph: sizes, home ops, and the ops that produce them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphs.graph import PHASES, GraphArrays, frozen
from graphs.synthetic.mirror import ACCUMULATES, backward_id


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gradients:
    """P gradients in the order in which they are expected: the last parameters first.

    Gradient k belongs to all parameters that live with op ``home[k]`` and is kept where they are.
    It is complete when the last of the ops ``makers[k]`` has ended.
    """

    home: NDArray[np.int32]  # (P,)
    size_bytes: NDArray[np.int64]  # (P,)
    makers: tuple[tuple[int, ...], ...]  # (P,) one or more ops each

    def __len__(self) -> int:
        """Return P, the number of gradients."""
        return len(self.home)


def gradients_of(graph: GraphArrays, known: Mapping[str, Sequence[str]] | None = None) -> Gradients:
    """Return the gradients of a training step, inferred from the attributes of its ops.

    Sizes are ``gradient_bytes``, or ``parameter_bytes`` (with buffers) if the graph has no gradient
    sizes, such as a file that gives costs and parameters alone. A graph does not say which ops
    produce a gradient. Without ``known``, a backward op that has some makes them itself; those of
    other ops are taken to be made by the mirror of the op that the parameters live with, as named
    by :func:`graphs.synthetic.mirror.with_backward`; else by all backward ops of the same module,
    except those that only add up gradients; else by the backward ops that read that op's output;
    else by the last backward op. Without a backward pass an op stands for forward and backward
    together and produces its own gradient; the order is then that of the ops.

    ``known`` maps ops that parameters live with to those that produce their gradients, see
    :func:`graphs.extract.placeable.gradient_makers`; ops that are not in the graph are ignored.
    """
    sizes = graph.gradient_bytes if graph.gradient_bytes.any() else graph.parameter_bytes
    homes = np.flatnonzero(sizes)
    is_backward = graph.phase == PHASES.index("backward")
    if not is_backward.any():
        makers: Sequence[tuple[int, ...]] = [(home,) for home in homes.tolist()]
    else:
        of_backward = is_backward[homes]  # they make their gradients themselves, in this order
        homes = np.concatenate([homes[~of_backward][::-1], homes[of_backward]])
        search = _Makers(graph, is_backward, known or {})
        makers = [search.of(home) for home in homes.tolist()]
    return Gradients(
        home=frozen(homes.astype(np.int32)),
        size_bytes=frozen(sizes[homes].astype(np.int64)),
        makers=tuple(makers),
    )


def no_gradients() -> Gradients:
    """Return the empty gradients of a step that does not train."""
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
        if makers := tuple(self.index[op_id] for op_id in known if op_id in self.index):
            return makers
        if self.is_backward[home]:
            return (home,)
        mirror = self.index.get(backward_id(graph.ids[home]))
        if mirror is not None and graph.ops[mirror] == f"{graph.ops[home]}_backward":
            return (mirror,)
        if graph.modules[home] and (inside := self.inside.get(graph.modules[home])):
            return tuple(inside)
        readers = graph.successors[graph.successor_start[home] : graph.successor_start[home + 1]]
        return tuple(readers[self.is_backward[readers]].tolist()) or (self.last,)
