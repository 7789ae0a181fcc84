"""Steps of two replicas over an emulated slow network: measured, and as the formulas say.

    python -m benchmarks.slow_network [--rate-mbit 200]

Needs root and ``tc``: every replica is in a network namespace of its own, whose interface is held
to the rate in both directions; the network of the machine itself is left alone. On a machine that
does other work the numbers are noise, and it says so. The formulas know bytes, not what it takes to
code them: 1-bit SGD is slower than they say.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from envs.collectives import Level, ring_s
from placer.parallel import Setup, SyncOptions, sync_named

RANKS = 2
PERIOD = 16
STEPS, ROUNDS = 2 * PERIOD, 3
LATENCY_S = 1e-4
WIDTH = 350  # 250 k parameters
BATCH = 256  # about 10 ms on an idle core
MOST_LOAD = 1.5
MOST_APART = 0.15  # of measured and predicted
SPEED_UP = {"allreduce": (0.0, 0.7), "bmuf": (1.4, RANKS)}  # least, most; at 200 Mbit/s
PAYLOAD = {"allreduce": 1.0, "fp16": 0.5, "onebit": 1 / 28, "bmuf": 1 / PERIOD}
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
  ip netns exec h$i tc qdisc add dev eth0 root tbf rate {rate}mbit burst 64kb latency 400ms
  tc qdisc add dev v$i root tbf rate {rate}mbit burst 64kb latency 400ms
done
sleep 1
for i in $(seq 0 $(({ranks} - 1))); do
  RANK=$i WORLD_SIZE={ranks} MASTER_ADDR=10.9.0.1 MASTER_PORT=29500 GLOO_SOCKET_IFNAME=eth0 \\
    ip netns exec h$i {python} -m benchmarks.slow_network --rank {out} &
done
wait
"""


def measured() -> dict[str, float]:
    """Seconds of a step: of one replica alone, and by method; the best of some rounds."""
    found = {"alone": best(alone)}
    for name in PAYLOAD:
        found[name] = best(partial(steps, name))
    return found


def best(step_s: Callable[[], float]) -> float:
    return min(step_s() for _ in range(ROUNDS))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10)
    )


def alone() -> float:
    """Both replicas at once, each for itself."""
    replica = model()
    sgd = torch.optim.SGD(replica.parameters(), lr=0.01)
    dist.barrier()
    start_s = time.perf_counter()
    for _ in range(STEPS):
        sgd.zero_grad()
        backward(replica)
        sgd.step()
    return (time.perf_counter() - start_s) / STEPS


def steps(name: str) -> float:
    options = {
        "onebit": SyncOptions(warmup_steps=0),
        "bmuf": SyncOptions(period=PERIOD),
    }.get(name, SyncOptions())
    replica = model()
    make = partial(torch.optim.SGD, lr=0.01)
    sync = sync_named(name, Setup(module=replica, make_optimizer=make, options=options))
    dist.barrier()
    start_s = time.perf_counter()
    for _ in range(STEPS):
        sync.zero_grad()
        backward(replica)
        sync.step()
    return (time.perf_counter() - start_s) / STEPS


def backward(replica: nn.Module) -> None:
    loss = F.mse_loss(replica(torch.randn(BATCH, WIDTH)), torch.randn(BATCH, 10))
    torch.autograd.backward(loss)


def predicted(alone_s: float, rate_mbit: float) -> dict[str, float]:
    """Compute, then a ring for what a step sends: one bucket, which comes last, hides nothing."""
    size_bytes = sum(4 * parameter.numel() for parameter in model().parameters())
    link = Level(ranks=RANKS, latency_s=LATENCY_S, bandwidth_bytes_per_s=rate_mbit * 1e6 / 8)
    return {name: alone_s + ring_s(size_bytes * share, link) for name, share in PAYLOAD.items()}


def row(name: str, step_s: float, expected_s: float, speed_up: float) -> str:
    """What was measured and predicted, and which bars that keeps."""
    apart = step_s / expected_s - 1
    bars = [f"within {MOST_APART:.0%}: {'yes' if abs(apart) <= MOST_APART else 'NO'}"]
    if name in SPEED_UP:
        least, most = SPEED_UP[name]
        kept = "yes" if least <= speed_up <= most else "NO"
        bars.append(f"{least:g} .. {most:g}x: {kept}")
    return (
        f"{name:10}{step_s * 1e3:9.1f} ms{expected_s * 1e3:9.1f} ms{apart:+8.0%}{speed_up:9.2f}x  "
        f"{', '.join(bars)}"
    )


def on_hosts(rate_mbit: float) -> dict[str, float]:
    """What rank 0 measured."""
    with TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        script = HOSTS.format(ranks=RANKS, rate=rate_mbit, python=sys.executable, out=out)
        subprocess.run(["unshare", "-n", "-m", "bash", "-c", script], check=True)
        found: dict[str, float] = json.loads(out.read_text())
        return found


def one_rank(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="env://")
    found = measured()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def main(rate_mbit: float = 200.0) -> None:
    if os.geteuid() or not all(map(shutil.which, ("unshare", "tc", "ip"))):
        print("skipped: an emulated network takes root, unshare, ip and tc")
        return
    load = os.getloadavg()[0]
    if load > MOST_LOAD:
        print(f"the machine does other work (load {load:.1f}): times mean little")
    found = on_hosts(rate_mbit)
    alone_s = found.pop("alone")
    expected = predicted(alone_s, rate_mbit)
    print(f"{RANKS} replicas over {rate_mbit:g} Mbit/s, one alone {alone_s * 1e3:.1f} ms a step")
    print(f"{'sync':10}{'measured':>12}{'predicted':>12}{'apart':>8}{'speed-up':>10}  bars")
    for name, step_s in found.items():
        print(row(name, step_s, expected[name], RANKS * alone_s / step_s))
    worst = statistics.fmean(abs(found[name] / expected[name] - 1) for name in found)
    print(f"mean difference {worst:.0%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate-mbit", type=float, default=200.0)
    parser.add_argument("--rank", type=Path, metavar="OUT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        one_rank(arguments.rank)
    else:
        main(arguments.rate_mbit)
