"""All methods that synchronize replicas: bytes sent, and losses at equal samples.

    python -m benchmarks sync_methods [--quick] [--seeds N]

The short task of ``sync_quality``, trained by four gloo ranks. Bytes are counted on the loopback
device of a network namespace of their own, which needs root, TCP and IP headers included; without
root, bytes are not counted. They are counted in the last quarter of the steps, when all warm-ups
are over. Methods that reduce gradients use four times the learning rate of one worker, after a
warm-up, the best setting of synchronous SGD; methods that average models use that of one worker,
and so does asynchronous SGD, whose losses differ from run to run because the order of gradients
depends on timing. About six minutes a seed on two idle cores; one minute with --quick, an eighth of
the samples.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from benchmarks.record import Effort, Part
from benchmarks.replicas.sync_quality import (
    BATCH,
    LR,
    MOMENTUM,
    SHORT,
    WIDTHS,
    Data,
    Students,
    Task,
    judging,
    learning_rate,
)
from benchmarks.tables import Table
from placer.parallel import SyncConfig, make_sync
from placer.parallel.methods.registry import DEFAULT, METHODS, method_named

ASYNCHRONOUS = "asgd"
IN_OWN_NETWORK = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


def config_of(name: str, task: Task) -> SyncConfig:
    """Return a method's options: block period, warm-up as of the learning rate, two levels."""
    taken = method_named(name).options
    if "period" in taken:
        return SyncConfig(method=name, period=task.period)
    if "warmup_steps" in taken:
        return SyncConfig(method=name, warmup_steps=task.steps // 20)
    return SyncConfig(method=name, levels=(2, task.workers // 2) if "levels" in taken else None)


def student(seed: int) -> nn.Sequential:
    """Return one of :class:`benchmarks.replicas.sync_quality.Students` as an nn.Sequential."""
    one = Students(1, seed)
    parts = iter(torch.split(one.all.detach()[0], one.sizes))
    layers: list[nn.Module] = []
    for before, after in pairwise(WIDTHS):
        layer = nn.Linear(before, after)
        with torch.no_grad():
            layer.weight.copy_(next(parts).view(before, after).T)
            layer.bias.copy_(next(parts))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def trained(name: str, task: Task, seed: int) -> dict[str, Any]:
    """Train on all ranks of the group; return loss, bytes, and what the method reports."""
    rank, data, replica = dist.get_rank(), Data(seed), student(seed)
    is_asynchronous = name == ASYNCHRONOUS
    is_reducing = not is_asynchronous and "period" not in method_named(name).options

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
        sgd = torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)
        updates = count()

        def before_update(*_: object) -> None:
            number = next(updates) / (task.workers if is_asynchronous else 1)
            factor = task.workers if is_reducing else 1.0
            sgd.param_groups[0]["lr"] = learning_rate(number, task, factor)

        sgd.register_step_pre_hook(before_update)
        return sgd

    sync = make_sync(replica, optimizer, config_of(name, task))
    begin, counted = 0, task.steps // 4
    for number in range(task.steps):
        if number == task.steps - counted:
            begin = sent_bytes()
        inputs, labels = data.samples(task.workers, BATCH)
        sync.zero_grad()
        torch.autograd.backward(F.cross_entropy(replica(inputs[rank]), labels[rank]))
        sync.step()
    sent = sent_bytes() - begin
    sync.finish()
    inputs, labels = judging(seed)
    with torch.no_grad():
        loss = float(F.cross_entropy(replica(inputs[0]), labels[0]))
    per_step = sent / counted / task.workers
    return {"method": name, "seed": seed, "loss": loss, "bytes_per_step": per_step} | dict(
        sync.report()
    )


def sent_bytes() -> int:
    """Return the bytes sent over the loopback device so far, on every rank.

    Barriers on both sides exclude the traffic before and after.
    """
    dist.barrier()
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    [loopback] = [line for line in lines if line.strip().startswith("lo:")]
    sent = int(loopback.split(":")[1].split()[8])
    dist.barrier()
    return sent


def one_rank(out: Path, task: Task, seeds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="env://")
    found = []
    for method in METHODS:
        for seed in range(seeds):
            found.append(trained(method.name, task, seed))
            if dist.get_rank() == 0:
                told = f"{method.name}, seed {seed}: loss {found[-1]['loss']:.4f}"
                print(told, file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def on_ranks(task: Task, seeds: int) -> list[dict[str, Any]]:
    """Run all trainings; without a network namespace their bytes are None."""
    counts = not os.geteuid() and all(map(shutil.which, ("unshare", "ip")))
    if not counts:
        print("bytes are not counted: a network of their own takes root, unshare and ip")
    with TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += [
            "--local-addr=127.0.0.1",
            f"--nproc-per-node={task.workers}",
            "-m",
            "benchmarks.replicas.sync_methods",
            str(out),
            str(task.steps),
            str(seeds),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run([*(IN_OWN_NETWORK if counts else ()), *launch], check=True, env=environment)
        found: list[dict[str, Any]] = json.loads(out.read_text())
    return found if counts else [{**row, "bytes_per_step": None} for row in found]


def parts(effort: Effort) -> dict[str, Part]:
    """Return the part for all methods."""
    task = replace(SHORT, steps=SHORT.steps // effort.pick(quick=8, normal=1, full=1))
    seeds = effort.seed_count(quick=1, normal=1, full=1)
    return {f"{task.workers} workers": partial(compared, task, seeds)}


def compared(task: Task, seeds: int, found: dict[str, Any]) -> Table:
    """Train with all methods and compare their bytes and losses."""
    found.update(steps=task.steps, period=task.period, runs=on_ranks(task, seeds))
    found["rows"] = rows = means(found["runs"])
    return Table(
        "Synchronization methods",
        f"{task.workers} workers, {task.steps} steps of {BATCH}, blocks of {task.period} steps; "
        f"{ASYNCHRONOUS} differs in each run",
        ("method", "kB a step", "less by", "loss", "gap"),
        tuple(
            (
                row["method"],
                "-" if row["bytes_per_step"] is None else f"{row['bytes_per_step'] / 1e3:.1f}",
                "-" if row["times_less"] is None else f"{row['times_less']:.2f}x",
                f"{row['mean_loss']:.4f}",
                f"{row['gap']:+.1%}",
            )
            for row in rows
        ),
    )


def means(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each method: means over seeds, compared with synchronous SGD."""
    rows: list[dict[str, Any]] = [
        {
            "method": name,
            "bytes_per_step": _mean(row["bytes_per_step"] for row in runs if row["method"] == name),
            "mean_loss": _mean(row["loss"] for row in runs if row["method"] == name),
        }
        for name in dict.fromkeys(row["method"] for row in runs)
    ]
    [synchronous] = [row for row in rows if row["method"] == DEFAULT]
    for row in rows:
        size = row["bytes_per_step"]
        row["times_less"] = None if size is None else synchronous["bytes_per_step"] / size
        row["gap"] = row["mean_loss"] / synchronous["mean_loss"] - 1
    return rows


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


if __name__ == "__main__":
    out, steps, seeds = sys.argv[1:]
    one_rank(Path(out), replace(SHORT, steps=int(steps)), int(seeds))
