"""Accuracy of op times measured in context: their sum over the eager step time.

    python -m benchmarks.profiling

Training steps on one core. The profiler's worker and an eager process are pinned to the same core,
with one thread and the same memory allocator, and take turns; both read the thread's CPU clock, so
that other load affects them little. Medians, with quartiles of the ratios of the turns. "cached" is
the sum of the values that the cost cache would keep of these runs (one time for all ops with the
same signature), in multiples of the sum of the op times.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from envs.cluster import Device
from envs.costs.cached_costs import session_of
from envs.costs.ops import Profiler
from envs.costs.signatures import op_signatures
from envs.executor.fork_server import MALLOC
from graphs.extract import Step, extract
from graphs.extract.step import LossModule
from placer.target import load_step

FOLDER = Path(__file__).parents[1] / "examples"
MODELS = {
    "BERT-base, batch 1 of 128 tokens": "hf:bert-base-uncased?batch=1&sequence=128",
    "GPT-2, batch 1 of 128 tokens": "hf:gpt2?batch=1&sequence=128",
    "ResNet-50, batch 2": f"{FOLDER}/resnet.py:build",
    "NMT with attention, batch 32": f"{FOLDER}/nmt.py:build",
}
WARM_UP = 2
TURNS = 7
BAR = (0.9, 1.1)


def main() -> None:
    core = min(os.sched_getaffinity(0))
    print(f"training steps on core {core}, {TURNS} turns, load {os.getloadavg()[0]:.1f}")
    print(f"{'sum of op times / eager step':34}{'ops':>6}{'sum':>10}{'eager':>10}  cached   ratio")
    for name, target in MODELS.items():
        found = turns(target, core)
        summed_s = found.runs_s.sum(axis=1)
        low, middle, high = np.quantile(summed_s / found.eager_s, [0.25, 0.5, 0.75])
        line = f"{name:34}{found.runs_s.shape[1]:6}"
        line += f"{np.median(summed_s) * 1e3:7.1f} ms{np.median(found.eager_s) * 1e3:7.1f} ms"
        line += f"{found.cached_s / np.median(summed_s):7.2f}x"
        line += f"   {middle:.2f} ({low:.2f} .. {high:.2f})"
        outside = "" if BAR[0] <= middle <= BAR[1] else f", outside {BAR[0]} .. {BAR[1]}"
        print(line + outside, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    runs_s: NDArray[np.float64]  # (turns, ops)
    eager_s: NDArray[np.float64]  # (turns,)
    cached_s: float  # sum over all ops of the costs that the cache would keep of these runs


def turns(target: str, core: int) -> Turns:
    """Run the profiled and the eager step in turn."""
    device = Device(name=f"core:{core}", kind="core", memory_bytes=0)
    extraction = extract(load_step(target, training=True))
    runs_s: list[NDArray[np.float64]] = []
    eager_s: list[float] = []
    with Profiler(extraction, device) as profiler, Eager(target, core) as eager:
        for turn in range(WARM_UP + TURNS):
            ops_s, alone_s = profiler.run(), eager.run()
            if turn >= WARM_UP:
                runs_s.append(ops_s)
                eager_s.append(alone_s)
    signatures = op_signatures(extraction.program)
    kept_s = session_of(np.stack(runs_s), signatures, day="").cost_s
    return Turns(
        runs_s=np.stack(runs_s),
        eager_s=np.array(eager_s),
        cached_s=sum(kept_s[signature] for signature in signatures),
    )


class Eager:
    """Process that runs the unplaced step on request."""

    def __init__(self, target: str, core: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.profiling", target, str(core)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | MALLOC | {"OMP_NUM_THREADS": "1"},
            text=True,
        )

    def __enter__(self) -> Eager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.communicate()

    def run(self) -> float:
        """Return the CPU seconds of one step."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())


def serve(target: str, core: int) -> None:
    """Run an eager step for each line of standard input and answer with its CPU seconds."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    step = load_step(target, training=True)
    for _ in sys.stdin:
        print(eager_s(step), flush=True)


def eager_s(step: Step) -> float:
    """Return the CPU seconds of forward and backward; gradients are cleared untimed."""
    module = LossModule(step)
    module.zero_grad(set_to_none=True)
    gc.disable()
    start_ns = time.thread_time_ns()
    module(*step.inputs, **step.keywords).backward()
    seconds = (time.thread_time_ns() - start_ns) * 1e-9
    gc.enable()
    return seconds


if __name__ == "__main__":
    if sys.argv[1:]:
        serve(sys.argv[1], int(sys.argv[2]))
    else:
        main()
