"""Step times of two replicas over an emulated slow network: measured and predicted.

    python -m benchmarks slow_network [--quick]

Needs root and ``tc``: every replica runs in its own network namespace, whose interface is limited
to the rate in both directions; the network of the machine itself is not touched. Replicas share the
machine, and each may be slower than one that has it to itself. Two speed-ups are reported: against
a replica that trains alone while the other does the same beside it, which is also the basis of the
predictions, and against one that has the machine to itself. The cost of encoding gradients and of
ending a block is measured on the same tensors, without a network, and passed to the simulation of
replicas that plans use. On a machine with other load the numbers are noise.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from benchmarks.record import Effort, Part
from benchmarks.replicas.coding import coding_bytes_per_s, median_s
from benchmarks.tables import Table
from envs.collectives import Level
from envs.replicas.reductions import replicated
from envs.replicas.step import ReplicaStep
from envs.replicas.topology import SlotNetwork
from envs.replication import Replication
from placer.parallel import BlockAverager, SyncConfig, make_sync
from placer.parallel.methods.block_averager import BMUF

RANKS = 2
PERIOD = 16
STEPS, ROUNDS = PERIOD, 7
RATE_MBIT = 200.0
LATENCY_S = 1e-4
WIDTH = 512  # 530 k parameters, 85 ms at 200 Mbit/s
BATCH = 768  # about 25 ms on an idle core
CARRIED = 1448 / 1514  # payload share of an Ethernet frame; the rest are TCP and other headers
MOST_APART = 0.15  # largest relative difference of measured and predicted
SPEED_UP = {"allreduce": (0.0, 0.7), "bmuf": (1.4, RANKS)}  # least, most; at 200 Mbit/s
PLANNED = {
    "allreduce": Replication(reduction="ring"),
    "fp16": Replication(reduction="ring", payload="fp16"),
    "onebit": Replication(reduction="ring", payload="1-bit"),
    "bmuf": Replication(reduction="ring", average_every=PERIOD),
}
HOSTS = """
set -e
mkdir -p /run/netns; mount -t tmpfs none /run/netns
ip link add br0 type bridge; ip link set br0 up
for i in $(seq 0 $(({ranks} - 1))); do
  ip netns add h$i
  ip link add v$i type veth peer name eth0 netns h$i
  ip link set v$i master br0 up
  ip -n h$i addr add 10.9.0.$((i + 1))/24 dev eth0
  ip -n h$i link set eth0 up; ip -n h$i link set lo up
  ip netns exec h$i tc qdisc add dev eth0 root tbf rate {rate}mbit burst 32kb latency 400ms
  tc qdisc add dev v$i root tbf rate {rate}mbit burst 32kb latency 400ms
done
sleep 1
for i in $(seq 0 $(({ranks} - 1))); do
  RANK=$i WORLD_SIZE={ranks} MASTER_ADDR=10.9.0.1 MASTER_PORT=29500 GLOO_SOCKET_IFNAME=eth0 \\
    ip netns exec h$i {python} -m benchmarks.replicas.slow_network {out} {rounds} &
done
wait
"""


def measured(rounds: int) -> dict[str, Any]:
    """Measure step seconds of all rounds (baselines and each method), and encoding rates.

    Every round runs all of them, so that a disturbance affects neighbours alike.
    """
    work: dict[str, Callable[[], float]] = {
        "one": partial(apart, ranks=1),
        "alone": partial(apart, ranks=RANKS),
    }
    work |= {name: partial(steps, name) for name in PLANNED}
    found: dict[str, list[float]] = {name: [] for name in work}
    rates: list[dict[str, float | None]] = []
    for _ in range(rounds):
        for name, step_s in work.items():
            found[name].append(step_s())
        rates.append({name: coding_rate(name) for name in PLANNED})
    return {"steps_s": found, "coding_bytes_per_s": rates}


def coding_rate(name: str) -> float | None:
    """Return the parameter bytes per second of a replica's encoding, or of its end of block."""
    replica = model()
    in_step = partial(backward, replica)
    dist.barrier()
    if name != "bmuf":
        sizes = [parameter.numel() for parameter in replica.parameters()]
        return coding_bytes_per_s(PLANNED[name].payload, sizes, RANKS, in_step)
    averager = BlockAverager(replica, BMUF, period=1, workers=RANKS, mean=lambda flat: flat)
    return size_bytes() / median_s(averager.after_step, in_step)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10)
    )


def apart(ranks: int) -> float:
    """Return the step seconds of the slowest of ``ranks`` independent replicas, others idle."""
    replica = model()
    sgd = torch.optim.SGD(replica.parameters(), lr=0.01)

    def step() -> None:
        sgd.zero_grad()
        backward(replica)
        sgd.step()

    return mean_s(step if dist.get_rank() < ranks else lambda: None)


def steps(name: str) -> float:
    options: dict[str, Any] = {"onebit": {"warmup_steps": 0}, "bmuf": {"period": PERIOD}}.get(
        name, {}
    )
    replica = model()
    make = partial(torch.optim.SGD, lr=0.01)
    sync = make_sync(replica, make, SyncConfig(method=name, **options))

    def step() -> None:
        sync.zero_grad()
        backward(replica)
        sync.step()

    return mean_s(step)


def mean_s(step: Callable[[], None]) -> float:
    """Return the mean seconds of some steps, from a common start until all replicas are done."""
    dist.barrier()
    start_s = time.perf_counter()
    for _ in range(STEPS):
        step()
    dist.barrier()
    return (time.perf_counter() - start_s) / STEPS


def backward(replica: nn.Module) -> None:
    loss = F.mse_loss(replica(torch.randn(BATCH, WIDTH)), torch.randn(BATCH, 10))
    torch.autograd.backward(loss)


def size_bytes() -> int:
    return sum(parameter.nbytes for parameter in model().parameters())


def predicted(alone_s: float, coding: Mapping[str, float | None]) -> dict[str, float]:
    """Predict step times with a single bucket that is ready last, so that nothing overlaps."""
    bandwidth = CARRIED * RATE_MBIT * 1e6 / 8
    link = Level(ranks=RANKS, latency_s=LATENCY_S, bandwidth_bytes_per_s=bandwidth)
    network = SlotNetwork(levels=(link,), queues=frozenset())
    step_ns, size = round(alone_s * 1e9), np.array([size_bytes()])
    replica = ReplicaStep(
        step_ns=step_ns,
        pass_ns=step_ns,
        slot=np.zeros(1, np.int32),
        size_bytes=size,
        ready_ns=np.array([step_ns]),
        update_ns=np.zeros(1, np.int64),
        peak_bytes=np.zeros(1, np.int64),
    )
    planned = {
        name: replace(reduction, coding_bytes_per_s=coding.get(name))
        for name, reduction in PLANNED.items()
    }
    return {name: replicated(replica, [network], how).step_s for name, how in planned.items()}


def on_hosts(rounds: int) -> dict[str, Any]:
    """Run all ranks in network namespaces and return the measurements of rank 0."""
    with TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        script = HOSTS.format(
            ranks=RANKS, rate=RATE_MBIT, python=sys.executable, out=out, rounds=rounds
        )
        subprocess.run(["unshare", "-n", "-m", "bash", "-c", script], check=True)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def one_rank(out: Path, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="env://")
    found = measured(rounds)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def parts(effort: Effort) -> dict[str, Part]:
    """Return the part for all methods."""
    rounds = effort.pick(quick=1, normal=ROUNDS, full=ROUNDS)
    return {f"{RATE_MBIT:g} Mbit/s": partial(compared, rounds)}


def compared(rounds: int, found: dict[str, Any]) -> Table | None:
    """Measure and predict all methods; skipped without root."""
    if os.geteuid() or not all(map(shutil.which, ("unshare", "tc", "ip"))):
        found["skipped"] = "an emulated network takes root, unshare, ip and tc"
        return None
    found.update(on_hosts(rounds), ranks=RANKS, size_bytes=size_bytes())
    best = {name: min(of_rounds) for name, of_rounds in found["steps_s"].items()}
    alone_s, one_s = best.pop("alone"), best.pop("one")
    coding = coding_rates(found["coding_bytes_per_s"])
    expected = predicted(alone_s, coding)
    found["rows"] = rows = [
        {
            "sync": name,
            "measured_s": step_s,
            "predicted_s": expected[name],
            "speed_up": RANKS * alone_s / step_s,
            "speed_up_of_one": RANKS * one_s / step_s,
            "coding_s": 0.0 if (rate := coding[name]) is None else size_bytes() / rate,
        }
        for name, step_s in best.items()
    ]
    return Table(
        "Replicas over a slow network",
        f"{RANKS} replicas over {RATE_MBIT:g} Mbit/s, each for itself {alone_s * 1e3:.1f} ms a "
        f"step, one that has the machine to itself {one_s * 1e3:.1f} ms; fastest of {rounds} "
        "rounds",
        ("sync", "measured", "predicted", "apart", "speed-up", "of one", "bars hold"),
        tuple(map(cells, rows)),
    )


def coding_rates(rounds: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Return the median rate of each method, None where nothing is encoded."""
    found: dict[str, float | None] = {}
    for name in PLANNED:
        rates = [rate for own in rounds if (rate := own[name]) is not None]
        found[name] = statistics.median(rates) if rates else None
    return found


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a method: measured, predicted and the bars that both speed-ups keep."""
    off = row["measured_s"] / row["predicted_s"] - 1
    ups = row["speed_up"], row["speed_up_of_one"]
    least, most = SPEED_UP.get(row["sync"], (0.0, math.inf))
    holds = abs(off) <= MOST_APART and least <= min(ups) <= max(ups) <= most
    return (
        row["sync"],
        f"{row['measured_s'] * 1e3:.1f} ms",
        f"{row['predicted_s'] * 1e3:.1f} ms",
        f"{off:+.0%}",
        *(f"{up:.2f}x" for up in ups),
        "yes" if holds else "NO",
    )


if __name__ == "__main__":
    one_rank(Path(sys.argv[1]), int(sys.argv[2]))
