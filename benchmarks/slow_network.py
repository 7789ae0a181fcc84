"""Step times of two replicas over an emulated slow network: measured and predicted.

    python -m benchmarks.slow_network [--rate-mbit 200] [--out FILE]

Needs root and ``tc``: every replica runs in its own network namespace, whose interface is limited
to the rate in both directions; the network of the machine itself is not touched. Replicas share the
machine, and each may be slower than one that has it to itself. Two speed-ups are reported: against
a replica that trains alone while the other does the same beside it, which is also the basis of the
predictions, and against one that has the machine to itself. The cost of encoding gradients and of
ending a block is measured on the same tensors, without a network, and passed to the simulation of
replicas that plans use. On a machine with other load the numbers are noise, and a warning is
printed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
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

from benchmarks.coding import coding_bytes_per_s, median_s
from benchmarks.record import Record
from envs.replicas.collectives import Level
from envs.replicas.spec import Replication
from envs.replicas.step import ReplicaStep, SlotNetwork, replicated
from placer.parallel import BlockAverager, SyncConfig, make_sync
from placer.parallel.methods.block_averager import BMUF

RANKS = 2
PERIOD = 16
STEPS, ROUNDS = PERIOD, 7
LATENCY_S = 1e-4
WIDTH = 512  # 530 k parameters, 85 ms at 200 Mbit/s
BATCH = 768  # about 25 ms on an idle core
CARRIED = 1448 / 1514  # payload share of an Ethernet frame; the rest are TCP and other headers
MOST_LOAD = 1.5
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
    ip netns exec h$i {python} -m benchmarks.slow_network --rank {out} &
done
wait
"""


def measured() -> dict[str, Any]:
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
    for _ in range(ROUNDS):
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


def predicted(
    alone_s: float, rate_mbit: float, coding: Mapping[str, float | None]
) -> dict[str, float]:
    """Predict step times with a single bucket that is ready last, so that nothing overlaps."""
    bandwidth = CARRIED * rate_mbit * 1e6 / 8
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
        trained_bytes=size,
        peak_bytes=np.zeros(1, np.int64),
    )
    planned = {
        name: replace(reduction, coding_bytes_per_s=coding.get(name))
        for name, reduction in PLANNED.items()
    }
    return {name: replicated(replica, [network], how).step_s for name, how in planned.items()}


def row(
    name: str, step_s: float, expected_s: float, speed_up: float, speed_up_of_one: float
) -> str:
    """Format one line: measured, predicted and the bars; both speed-ups must keep the bar."""
    off = step_s / expected_s - 1
    bars = [f"within {MOST_APART:.0%}: {'yes' if abs(off) <= MOST_APART else 'NO'}"]
    if name in SPEED_UP:
        least, most = SPEED_UP[name]
        kept = least <= min(speed_up, speed_up_of_one) <= max(speed_up, speed_up_of_one) <= most
        bars.append(f"{least:g} .. {most:g}x: {'yes' if kept else 'NO'}")
    return (
        f"{name:10}{step_s * 1e3:9.1f} ms{expected_s * 1e3:9.1f} ms{off:+8.0%}{speed_up:9.2f}x"
        f"{speed_up_of_one:9.2f}x  {', '.join(bars)}"
    )


def on_hosts(rate_mbit: float) -> dict[str, Any]:
    """Run all ranks in network namespaces and return the measurements of rank 0."""
    with TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        script = HOSTS.format(ranks=RANKS, rate=rate_mbit, python=sys.executable, out=out)
        subprocess.run(["unshare", "-n", "-m", "bash", "-c", script], check=True)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def one_rank(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="env://")
    found = measured()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def table(found: Mapping[str, Any], rate_mbit: float) -> list[dict[str, Any]]:
    """Print and return a row for each method, from its fastest round and median encoding rate."""
    best = {name: min(rounds) for name, rounds in found["steps_s"].items()}
    coding = {
        name: statistics.median(rates) if None not in rates else None
        for name in PLANNED
        for rates in ([own[name] for own in found["coding_bytes_per_s"]],)
    }
    alone_s, one_s = best.pop("alone"), best.pop("one")
    expected = predicted(alone_s, rate_mbit, coding)
    print(
        f"{RANKS} replicas over {rate_mbit:g} Mbit/s, each for itself {alone_s * 1e3:.1f} ms a "
        f"step, one that has the machine to itself {one_s * 1e3:.1f} ms; fastest rounds"
    )
    print(
        f"{'sync':10}{'measured':>12}{'predicted':>12}{'apart':>8}{'speed-up':>10}{'of one':>10}  "
        "bars"
    )
    rows = []
    for name, step_s in best.items():
        speed_up, of_one = RANKS * alone_s / step_s, RANKS * one_s / step_s
        rate = coding[name]
        print(row(name, step_s, expected[name], speed_up, of_one))
        rows.append(
            {
                "sync": name,
                "measured_s": step_s,
                "predicted_s": expected[name],
                "speed_up": speed_up,
                "speed_up_of_one": of_one,
                "coding_s": 0.0 if rate is None else size_bytes() / rate,
            }
        )
    worst = max(abs(own["measured_s"] / own["predicted_s"] - 1) for own in rows)
    print(f"largest difference {worst:.0%}")
    return rows


def main(rate_mbit: float = 200.0, out: Path | None = None) -> None:
    if os.geteuid() or not all(map(shutil.which, ("unshare", "tc", "ip"))):
        print("skipped: an emulated network takes root, unshare, ip and tc")
        return
    load = os.getloadavg()[0]
    if load > MOST_LOAD:
        print(f"the machine does other work (load {load:.1f}): times mean little")
    record = Record(out, math.inf)
    found = on_hosts(rate_mbit)
    record.data["parts"][f"{rate_mbit:g} Mbit/s"] = {
        "ranks": RANKS,
        "size_bytes": size_bytes(),
        "rows": table(found, rate_mbit),
        **found,
    }
    record.save()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate-mbit", type=float, default=200.0)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results go (JSON)")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        one_rank(arguments.rank)
    else:
        main(arguments.rate_mbit, arguments.out)
