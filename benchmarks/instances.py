"""Problems of the benchmarks.

``judged`` are 430 to 3,270 ops of five families on 2 to 8 devices; ``u`` marks unequal devices. The
policy `synthetic-only` was trained on none of these families; `generalist` knows them all, but not
these graphs. Ideas were selected on these problems, so ``unseen`` are others of the same families,
on which no idea was selected. ``communicating`` are sharded matrix programs on links so slow that
sending every output once takes four times as long as all ops. ``planted`` have an optimum known by
construction. ``profiled`` are networks whose op times were published with PipeDream.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import networkx as nx
import numpy as np

from envs.hardware.cluster import Cluster, Device, Link, LinkOrder, Sharing
from envs.problem import Problem
from graphs.graph import ANY_KIND, GraphArrays, add_edge, add_op, new_graph
from graphs.synthetic import sketches
from graphs.synthetic.inception import inception as inception_sketch
from graphs.synthetic.planted import Planted, planted
from graphs.synthetic.shapes import Weights, layered
from placer.policies.pool import Exercise, exercise

COMMUNICATION: Final = 4.0
ROOMY_BYTES: Final = 1 << 45
PROFILES: Final = Path(__file__).parent / "data" / "pipedream"
PLANTED: Final = (  # devices, ops of each, inputs of an op
    (2, 100, 2.0),
    (4, 50, 2.0),
    (4, 250, 1.5),
    (8, 60, 2.0),
    (8, 250, 3.0),
    (16, 62, 2.0),
    (16, 312, 2.0),
    (2, 1000, 2.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Devices joined by one link; the first ``slow`` of them take ``factor`` times as long."""

    devices: int
    bandwidth_bytes_per_s: float
    latency_s: float = 15e-6
    sharing: Sharing = "egress"
    order: LinkOrder = "priority"
    slow: int = 0
    factor: float = 2.0

    def cluster(self) -> Cluster:
        """Return the devices and the link."""
        kinds = ["slow"] * self.slow + ["fast"] * (self.devices - self.slow)
        devices = tuple(
            Device(name=f"device:{i}", kind=kind, memory_bytes=ROOMY_BYTES)
            for i, kind in enumerate(kinds)
        )
        link = Link(
            between=tuple(device.name for device in devices),
            latency_s=self.latency_s,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            sharing=self.sharing,
            order=self.order,
        )
        return Cluster(name=f"{self.devices} devices", devices=devices, links=(link,))

    def problem(self, graph: nx.DiGraph[str]) -> Problem:
        """Return the problem of a graph with costs of any kind on these devices."""
        arrays = GraphArrays.from_graph(graph)
        cost = arrays.costs_for(ANY_KIND)
        arrays = replace(arrays, cost_s={"fast": cost, "slow": cost * self.factor})
        return Problem.of(arrays, self.cluster())


def judged() -> list[Exercise]:
    """Return problems of five families, of which `synthetic-only` has seen none."""
    rng = np.random.default_rng
    inception = inception_sketch(batch=32)
    nmt = sketches.nmt(layers=4, steps=24, batch=128)
    long_nmt = sketches.nmt(layers=4, steps=60, batch=128)
    moe = sketches.moe(rng(5), layers=6, experts=16, tokens=2048)
    large_moe = sketches.moe(rng(6), layers=16, experts=32, tokens=4096)
    transformer = sketches.transformer(layers=12, micro_batches=8, tokens=1024)
    random = layered(rng(7), ops=600, width=16, skip=0.1, weights=Weights(ratio=0.5))
    large_random = layered(rng(8), ops=2000, width=24, skip=0.1, weights=Weights(ratio=0.8))
    instances: list[tuple[str, nx.DiGraph[str], Machine]] = [
        ("inception 2", inception, Machine(devices=2, bandwidth_bytes_per_s=50e9)),
        ("inception 4", inception, Machine(devices=4, bandwidth_bytes_per_s=50e9)),
        ("inception 4u", inception, _unequal(4, 50e9, "none", slow=2)),
        ("nmt 4", nmt, Machine(devices=4, bandwidth_bytes_per_s=12e9)),
        ("nmt 8", nmt, Machine(devices=8, bandwidth_bytes_per_s=12e9)),
        ("nmt 4u", nmt, _unequal(4, 12e9, "pair", slow=2)),
        ("nmt, long 8", long_nmt, Machine(devices=8, bandwidth_bytes_per_s=50e9)),
        ("moe 4", moe, Machine(devices=4, bandwidth_bytes_per_s=50e9)),
        ("moe 8", moe, Machine(devices=8, bandwidth_bytes_per_s=50e9, order="fifo")),
        ("moe 4u", moe, _unequal(4, 25e9, "none", slow=1, factor=3.0)),
        ("moe, large 8", large_moe, Machine(devices=8, bandwidth_bytes_per_s=50e9)),
        ("transformer 4", transformer, Machine(devices=4, bandwidth_bytes_per_s=25e9)),
        ("transformer 4u", transformer, _unequal(4, 25e9, "pair", slow=2)),
        ("layered 4", random, Machine(devices=4, bandwidth_bytes_per_s=12e9)),
        ("layered 8", random, Machine(devices=8, bandwidth_bytes_per_s=12e9, order="fifo")),
        ("layered, large 8", large_random, Machine(devices=8, bandwidth_bytes_per_s=12e9)),
        ("layered, large 8u", large_random, _unequal(8, 12e9, "none", slow=4)),
    ]
    return [exercise(machine.problem(graph), name) for name, graph, machine in instances]


def unseen() -> list[Exercise]:
    """Return other problems of the same five families, on which no idea was selected."""
    rng = np.random.default_rng
    instances: list[tuple[str, nx.DiGraph[str], Machine]] = [
        (
            "inception 8",
            inception_sketch(batch=16),
            Machine(devices=8, bandwidth_bytes_per_s=40e9),
        ),
        (
            "inception 2u",
            inception_sketch(batch=64),
            _unequal(2, 16e9, "pair", slow=1, factor=1.7),
        ),
        (
            "nmt 2",
            sketches.nmt(layers=3, steps=40, batch=96),
            Machine(devices=2, bandwidth_bytes_per_s=20e9, order="fifo"),
        ),
        ("nmt 8u", sketches.nmt(layers=5, steps=18, batch=200), _unequal(8, 40e9, "none", slow=3)),
        (
            "moe 2",
            sketches.moe(rng(15), layers=8, experts=12, tokens=3000),
            Machine(devices=2, bandwidth_bytes_per_s=30e9),
        ),
        (
            "moe 8u",
            sketches.moe(rng(16), layers=10, experts=24, tokens=1500),
            _unequal(8, 60e9, "egress", slow=4, factor=1.5),
        ),
        (
            "transformer 8",
            sketches.transformer(layers=10, micro_batches=12, tokens=700),
            Machine(devices=8, bandwidth_bytes_per_s=30e9, order="fifo"),
        ),
        (
            "layered 2",
            layered(rng(17), ops=900, width=10, degree=2.5, weights=Weights(ratio=1.0)),
            Machine(devices=2, bandwidth_bytes_per_s=12e9),
        ),
        (
            "layered 4u",
            layered(
                rng(18), ops=1500, width=30, degree=1.6, weights=Weights(ratio=0.3, spread=1.0)
            ),
            _unequal(4, 12e9, "egress", slow=2, factor=3.0),
        ),
    ]
    return [exercise(machine.problem(graph), name) for name, graph, machine in instances]


def communicating() -> list[Exercise]:
    """Return sharded matrix programs, with four times as much to send as to compute."""
    programs = {
        "chain, 2 shards": sketches.matrix_chain(shards=2),
        "chain, 3 shards": sketches.matrix_chain(shards=3),
        "feed-forward, 3 shards": sketches.sharded_feed_forward(shards=3),
        "layer, 2 shards": sketches.sharded_layer(shards=2),
        "layer, 3 shards": sketches.sharded_layer(shards=3),
    }
    found = []
    for name, graph in programs.items():
        nodes = [node for _, node in graph.nodes(data=True)]
        sent_bytes = sum(node["output_bytes"] for node in nodes)
        bandwidth = sent_bytes / (COMMUNICATION * sum(node["cost_s"][ANY_KIND] for node in nodes))
        for machine in (
            Machine(devices=4, bandwidth_bytes_per_s=bandwidth),
            Machine(devices=8, bandwidth_bytes_per_s=bandwidth, sharing="none", order="fifo"),
        ):
            label = f"{name}, {machine.devices}"
            found.append(exercise(machine.problem(graph), label))
    return found


def planted_machine(made: Planted, devices: int) -> Machine:
    """Return devices on whose links the largest output arrives within a gap, without waiting."""
    return Machine(
        devices=devices,
        bandwidth_bytes_per_s=made.largest_bytes / made.gap_s,
        latency_s=0.0,
        sharing="none",
        order="fifo",
    )


def planted_instances(count: int = len(PLANTED)) -> list[tuple[Exercise, Planted]]:
    """Return the first problems with the schedules that they were cut out of."""
    found = []
    for seed, (devices, each, degree) in enumerate(PLANTED[:count]):
        made = planted(
            np.random.default_rng(100 + seed),
            devices=devices,
            ops_per_device=each,
            degree=degree,
            step_s=each * 100e-6,
        )
        machine = planted_machine(made, devices)
        found.append((exercise(machine.problem(made.graph), f"{devices} x {each} ops"), made))
    return found


def profile_names() -> list[str]:
    """Return the names of the profiled networks."""
    return sorted(path.stem for path in PROFILES.glob("*.json"))


def profiled(name: str) -> Problem:
    """Return a profiled network on the cluster that its file describes.

    An op is a node of the file, forward and backward together, as both use its parameters and saved
    activations. A transfer is therefore counted once, for the output, and not for the gradient.
    """
    data: dict[str, Any] = json.loads((PROFILES / f"{name}.json").read_text(encoding="utf-8"))
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
    return Problem.of(GraphArrays.from_graph(graph), _equal_gpus(data["devices"]))


def _equal_gpus(devices: dict[str, Any]) -> Cluster:
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


def _unequal(
    devices: int, bandwidth: float, sharing: Sharing, *, slow: int, factor: float = 2.0
) -> Machine:
    return Machine(
        devices=devices,
        bandwidth_bytes_per_s=bandwidth,
        sharing=sharing,
        order="fifo",
        slow=slow,
        factor=factor,
    )
