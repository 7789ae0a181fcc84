"""How well op times, measured in context, add up to the step: their sum over the eager step.

    python -m benchmarks.profiling

Training steps on one core. The profiler's worker and an eager process are pinned to the same core,
have one thread and the same memory allocator, and take turns; both read the thread's CPU clock, so
that other load costs neither of them much. Medians, with quartiles of the turns' ratios.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from envs.cluster import Device
from envs.executor.processes import MALLOC
from envs.profiling import Profiler
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
    print(f"{'sum of op times / eager step':34}{'ops':>6}{'sum':>10}{'eager':>10}   ratio")
    for name, target in MODELS.items():
        ops, profiled_s, eager_s = turns(target, core)
        low, middle, high = np.quantile(profiled_s / eager_s, [0.25, 0.5, 0.75])
        sums = f"{np.median(profiled_s) * 1e3:7.1f} ms{np.median(eager_s) * 1e3:7.1f} ms"
        verdict = "" if BAR[0] <= middle <= BAR[1] else f", outside {BAR[0]} .. {BAR[1]}"
        print(
            f"{name:34}{ops:6}{sums}   {middle:.2f} ({low:.2f} .. {high:.2f}){verdict}", flush=True
        )


def turns(target: str, core: int) -> tuple[int, NDArray[np.float64], NDArray[np.float64]]:
    """Ops, summed op seconds and eager seconds of every turn."""
    device = Device(name=f"core:{core}", kind="core", memory_bytes=0)
    extraction = extract(load_step(target, training=True))
    profiled_s, eager_s = [], []
    with Profiler(extraction, device) as profiler, Eager(target, core) as eager:
        for turn in range(WARM_UP + TURNS):
            step_s, alone_s = float(profiler.run().sum()), eager.run()
            if turn >= WARM_UP:
                profiled_s.append(step_s)
                eager_s.append(alone_s)
    return extraction.program.op_count, np.array(profiled_s), np.array(eager_s)


class Eager:
    """A process that runs the unplaced step when asked."""

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
        """CPU seconds of one step."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())


def serve(target: str, core: int) -> None:
    """Run an eager step for each line of standard input, answer with its CPU seconds."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    step = load_step(target, training=True)
    for _ in sys.stdin:
        print(eager_s(step), flush=True)


def eager_s(step: Step) -> float:
    """CPU seconds of forward and backward, gradients dropped before."""
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
