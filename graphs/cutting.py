"""Cutting a topological order of groups into a limited number of pieces."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from graphs.graph import GraphArrays
from graphs.quotient import Quotient, edge_sources, renumbered

JUMP: Final = -1
"""Bond between consecutive groups without an edge, where the order jumps to another branch."""
HALVINGS: Final = 30
SLACK: Final = tuple(np.linspace(1.0, 1.5, 11).tolist())
"""Multiples of the lowest possible weight limit that are tried for the sake of better cuts."""


def cut(
    graph: GraphArrays,
    group_of: NDArray[np.int64],
    classes: NDArray[np.int64],
    weight: NDArray[np.float64],
    most: int,
) -> NDArray[np.int64] | None:
    """Return the groups of all ops, (N,), at most ``most`` of about the same weight.

    The result is None if the classes need more groups. The topological order follows one branch
    after another and stays within a class as long as it can. A piece of it holds groups of one
    class and ends where the order jumps to another branch or, if there is no such place, where the
    fewest bytes pass. All edges between pieces point forward in the order, so no cycle can arise.

    Args:
        graph: N ops.
        group_of: (N,), the groups to merge, without cycles between them.
        classes: (N,), only ops of one class share a piece; all ops of a group are of one class.
        weight: (N,), finite and not negative.
        most: maximum number of pieces, at least 1.
    """
    quotient = Quotient.of(graph, group_of)
    class_of = np.empty(quotient.count, np.int64)
    class_of[group_of] = classes
    order = quotient.depth_first(class_of)
    heavy = np.bincount(group_of, weight)[order].astype(np.float64)
    ends = [*(np.flatnonzero(np.diff(class_of[order])) + 1).tolist(), quotient.count]
    if len(ends) > most:
        return None
    pieces = _Pieces(heavy, ends, _bonds(graph, group_of, order))
    piece = np.empty(quotient.count, np.int64)
    cuts = np.array(pieces.best_cuts(most))
    piece[order] = np.searchsorted(cuts, np.arange(quotient.count), side="right")
    return renumbered(piece[group_of])


class _Pieces:
    """Cuts a sequence of G weights into pieces that weigh no more than a limit.

    ``ends`` are the mandatory cuts, the last is G; ``bond`` (G+1,) is the number of bytes that pass
    before each of the G groups, or JUMP.
    """

    def __init__(
        self, weight: NDArray[np.float64], ends: Sequence[int], bond: NDArray[np.int64]
    ) -> None:
        self.before = [0.0, *np.cumsum(weight).tolist()]
        self.ends = ends
        self.bond = bond

    def best_cuts(self, most: int) -> list[int]:
        """Return the ends of at most ``most`` pieces, most of them whole branches.

        Bisects for the lowest weight limit with few enough pieces; of that limit and some larger
        ones, takes the cuts with the smallest share in the middle of a branch.
        """
        low, high = 0.0, self.before[-1]
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if self.cuts(middle, most) is None:
                low = middle
            else:
                high = middle
        found = [cuts for more in SLACK if (cuts := self.cuts(more * high, most)) is not None]
        # Cutting at the ends alone is always possible, even if rounding hides it.
        return min(found or [list(self.ends)], key=self._share_within_branches)

    def _share_within_branches(self, cuts: list[int]) -> float:
        inner = self.bond[cuts[:-1]]
        return float((inner != JUMP).mean()) if len(inner) else 0.0

    def cuts(self, heaviest: float, most: int) -> list[int] | None:
        """Return where pieces end, the last at G; None if there are more than ``most``.

        Only a piece of one group may weigh more than ``heaviest``. A piece ends with the last
        branch that ends after half of that weight; if none does, at the weakest bond after four
        fifths.
        """
        cuts: list[int] = []
        start = 0
        for end in self.ends:
            while start < end:
                if len(cuts) == most:
                    return None
                full = self.before[start] + heaviest
                last = max(bisect_right(self.before, full) - 1, start + 1)
                if last < end:
                    half = self._place(start, heaviest / 2, last)
                    if self.bond[half : last + 1].min() != JUMP:
                        half = self._place(start, heaviest * 4 / 5, last)
                    last -= int(self.bond[half : last + 1][::-1].argmin())
                start = min(last, end)
                cuts.append(start)
        return cuts

    def _place(self, start: int, weight: float, last: int) -> int:
        return min(max(bisect_left(self.before, self.before[start] + weight), start + 1), last)


def _bonds(
    graph: GraphArrays, group_of: NDArray[np.int64], order: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the bytes from each group in the order to the next, (G+1,); JUMP without an edge.

    Entry p belongs to a cut between p-1 and p; the entries at both ends are unused.
    """
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    source = position[group_of[edge_sources(graph)]]
    target = position[group_of[graph.successors]]
    neighbours = target == source + 1
    bond = np.full(len(order) + 1, JUMP, np.int64)
    bond[target[neighbours]] = 0
    np.add.at(bond, target[neighbours], graph.edge_bytes[neighbours])
    return bond
