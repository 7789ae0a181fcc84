"""Ops and edges of a report's graph, as columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from envs.placement import Placement
from envs.problem import Problem
from graphs.graph import PHASES


def ops_data(problem: Problem, placement: Placement) -> dict[str, Any]:
    """Return columns of N ops, by index, and of E edges.

    ::

        {"id": [str], "kind": [index into "kinds"], "kinds": [str], "phases": [str],
         "module": [index into "modules"], "modules": [str], "phase": [index into "phases"],
         "device": [index of device], "cost_ns": [on that device, launch included], "flops",
         "moved_bytes", "output_bytes", "parameter_bytes", "resident_bytes", "saved_bytes",
         "source": [op], "target": [op], "bytes": [int]}
    """
    graph = problem.graph
    devices, _ = placement.arrays()
    kinds, kind = _coded(graph.ops)
    modules, module = _coded(graph.modules)
    return {
        "id": list(graph.ids),
        "kinds": kinds,
        "kind": kind,
        "modules": modules,
        "module": module,
        "phases": list(PHASES),
        "phase": graph.phase.tolist(),
        "device": devices.tolist(),
        "cost_ns": problem.cost_ns[np.arange(len(graph)), devices].tolist(),
        "flops": graph.flops.tolist(),
        "moved_bytes": graph.moved_bytes.tolist(),
        "output_bytes": graph.output_bytes.tolist(),
        "parameter_bytes": graph.parameter_bytes.tolist(),
        "resident_bytes": graph.resident_bytes.tolist(),
        "saved_bytes": graph.saved_bytes.tolist(),
        "source": np.repeat(np.arange(len(graph)), np.diff(graph.successor_start)).tolist(),
        "target": graph.successors.tolist(),
        "bytes": graph.edge_bytes.tolist(),
    }


def _coded(names: tuple[str, ...]) -> tuple[list[str], list[int]]:
    """Return the distinct names in order of first use, and the index of each name."""
    index: dict[str, int] = {}
    codes = [index.setdefault(name, len(index)) for name in names]
    return list(index), codes
