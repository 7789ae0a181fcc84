"""The profiles in ``data/pipedream`` as placement problems.

An op of the problem is a node of the file, forward and backward together, as both use its
parameters and saved activations. A transfer is therefore counted once, for the output; the gradient
on the way back is not counted, because the max-load objective is defined by outputs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from envs.cluster import Cluster, Device, Link
from envs.problem import Problem
from graphs.graph import GraphArrays, add_edge, add_op, new_graph

FOLDER: Final = Path(__file__).parent / "data" / "pipedream"


def profile_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def profile_problem(name: str) -> Problem:
    """Return the placement problem of a profile, on the cluster that its file describes."""
    data: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    graph = new_graph(data["name"], {"gpu": data["source"]["path"]})
    ids = [node[0] for node in data["nodes"]]
    for op_id, op, forward_us, backward_us, output_bytes, parameter_bytes in data["nodes"]:
        add_op(
            graph,
            op_id,
            op=op,
            cost_s={"gpu": (forward_us + backward_us) / 1e6},
            output_bytes=output_bytes,
            parameter_bytes=parameter_bytes,
            gradient_bytes=parameter_bytes,
        )
    for source, target in data["edges"]:
        add_edge(graph, ids[source], ids[target])
    return Problem.of(GraphArrays.from_graph(graph), _cluster(data["devices"]))


def _cluster(devices: dict[str, Any]) -> Cluster:
    names = tuple(f"gpu:{d}" for d in range(devices["count"]))
    memory_bytes = devices["memory_bytes"]
    link = Link(
        between=names,
        latency_s=devices["latency_s"],
        bandwidth_bytes_per_s=devices["bandwidth_bytes_per_s"],
    )
    return Cluster(
        name="equal GPUs",
        devices=tuple(Device(name=name, kind="gpu", memory_bytes=memory_bytes) for name in names),
        links=(link,),
    )
