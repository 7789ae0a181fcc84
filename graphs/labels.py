"""Co-location groups of a coarsened graph: which are united, and which span several groups."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from graphs.graph import GraphArrays


def united_labels(graph: GraphArrays, group_of: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the co-location group of every op, (N,), -1 for none.

    Co-location groups become one, named by the first, where a merged group has ops of both. One
    that lies within a single merged group is dropped: there is nothing left to keep together.
    """
    label_of = graph.group.astype(np.int64)
    count = int(label_of.max(initial=-1)) + 1
    inside = np.flatnonzero(label_of >= 0)
    pairs = np.unique(label_of[inside] * len(graph) + group_of[inside])
    labels, groups = (pairs // len(graph)).tolist(), (pairs % len(graph)).tolist()
    spread = np.bincount(pairs // len(graph), minlength=count)
    root = list(range(count))
    holder: dict[int, int] = {}
    for label, g in zip(labels, groups, strict=True):
        if spread[label] > 1:
            one, other = _find(root, holder.setdefault(g, label)), _find(root, label)
            root[max(one, other)] = min(one, other)
    first = np.array([_find(root, i) if spread[i] > 1 else -1 for i in range(count)], np.int64)
    # Ops without a label get that of their merged group.
    label_of_group = np.full(int(group_of.max()) + 1, -1, np.int64)
    np.maximum.at(label_of_group, group_of[inside], first[label_of[inside]])
    return label_of_group[group_of]


def _find(root: list[int], label: int) -> int:
    while root[label] != label:
        root[label] = root[root[label]]
        label = root[label]
    return label
