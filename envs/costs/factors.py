"""Factors of op costs by class of op, fitted to measured steps.

Ops are timed in a run of the whole step on one device. Beside other ops, on other devices and in
another order, those of one class (convolutions, copies, ...) tend to be off by the same factor. A
handful of measured placements tells such factors apart only roughly, so their logarithms have a
normal prior around 0 (D. J. C. MacKay, "Bayesian interpolation", Neural Computation 4 (3), 1992):
one deviation that all classes of a device kind share, and a smaller one of each class. Costs
while other devices compute have one more factor, since a placement on several devices also waits
where their ops take longer than usual. So have launches, which occupy the thread of a host.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from graphs.graph import attributes_of

Factors: TypeAlias = Mapping[str, Mapping[str, float]]
"""{device kind: {class of ops: factor}}."""
OTHER: Final = "elementwise"
PATTERNS: Final = {
    "convolution": "conv",
    "matrix product": r"\b(add|b|baddb)?mm|(?<!bi)linear|matmul|attention|einsum"
    r"|lstm|gru|rnn_layer",
    "reduction": r"norm|softmax|pool|loss|entropy|embedding dense|\b(mean|sum|topk|argmax|amax)",
    "copy": r"embedding|\b(cat|stack|split|slice|select|clone|copy|gather|scatter|index|pad|repeat"
    r"|unbind|zeros|ones|arange|full|permute|transpose|view|expand)",
}
"""Classes by the words in names of ops; the first that matches counts. All others are ``OTHER``."""
CLASSES: Final = (*PATTERNS, OTHER)
LOAD: Final = "load"
"""The further factor of costs while other devices of the machine compute, of all classes."""
LAUNCH: Final = "launch"
"""The factor of the launches of ops, of all classes."""
COMMON_DEVIATION: Final = 0.3
OWN_DEVIATION: Final = 0.1
NOISE: Final = 0.02
"""Standard deviations of the logarithms: of factors of a kind, of single classes, of steps."""
LARGEST: Final = 1.5
"""Factors of classes are within 1 / ``LARGEST`` and ``LARGEST``."""
LARGEST_UNPLACED: Final = 4.0  # for all ops at once: its own code runs, not its ops one by one
FITTED: Final = ", fitted to measured steps"

_KNOWN: Final = [(name, re.compile(words, re.I)) for name, words in PATTERNS.items()]


def class_of(op: str) -> str:
    """Return the class of an operation, or of a module, by its name.

    >>> class_of("convolution_backward.weight"), class_of("_softmax"), class_of("addmm")
    ('convolution', 'reduction', 'matrix product')
    """
    words = op.replace("_", " ")
    return next((name for name, pattern in _KNOWN if pattern.search(words)), OTHER)


def classes_of(graph: nx.DiGraph[str]) -> tuple[str, ...]:
    """Return the class of every op of a graph, (N,)."""
    return tuple(class_of(attributes_of(graph, op_id)["op"]) for op_id in graph)


def factors_of_ops(classes: Sequence[str], factors: Mapping[str, float]) -> NDArray[np.float64]:
    """Return the factor of every op, (N,), by its class; 1 where there is none."""
    return np.array([factors.get(name, 1.0) for name in classes], np.float64)


def fit(
    shares: NDArray[np.float64],
    error: NDArray[np.float64],
    kinds: Sequence[str],
    known: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Return logarithms of the most probable factors of C classes, (C,), within the limits.

    Args:
        shares: (B, C) share of each class in the predicted steps of B placements: the derivative of
            the logarithm of the step.
        error: (B,) logarithms of measured over predicted steps.
        kinds: device kind of each of the C classes.
        known: (C,) logarithms of the factors that the predictions contain, by default 0.
    """
    log_factors = np.zeros(len(kinds)) if known is None else known
    same_kind = np.array(kinds)[:, None] == np.array(kinds)[None]
    prior = COMMON_DEVIATION**2 * same_kind + OWN_DEVIATION**2 * np.eye(len(kinds))
    steps = shares @ prior @ shares.T + NOISE**2 * np.eye(len(error))
    best = prior @ shares.T @ np.linalg.solve(steps, error + shares @ log_factors)
    return np.asarray(np.clip(best, -math.log(LARGEST), math.log(LARGEST)), np.float64)


def scaled_loaded_s(
    loaded_s: NDArray[np.float64], cost_s: NDArray[np.float64], factors: Mapping[str, float]
) -> NDArray[np.float64]:
    """Return costs under load, times the factor of the load; none is below the cost alone.

    Both (N,) are already scaled by the factors of classes; nan where they are unknown.
    """
    return np.maximum(loaded_s * factors.get(LOAD, 1.0), cost_s)


def unplaced_factors(predicted_s: float, measured_s: float) -> dict[str, float]:
    """Return the factors of the unplaced model: measured over predicted, for everything."""
    factor = min(max(measured_s / predicted_s, 1.0 / LARGEST_UNPLACED), LARGEST_UNPLACED)
    return dict.fromkeys((*CLASSES, LAUNCH), factor)


def fitted_source(source: str) -> str:
    """Return the source of costs with the remark that they are fitted."""
    return source.removesuffix(FITTED) + FITTED
