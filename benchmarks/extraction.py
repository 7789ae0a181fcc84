"""Extraction time in multiples of torch.export alone, and the peak memory of extraction.

    python -m benchmarks.extraction

Training steps of the examples, and of a model with the shape of Llama-3-8B (batch 1 of 2048 tokens)
that is built on the meta device: its parameters would take 32 GB. The latter runs in its own
process, whose peak memory is printed.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphs.extract import Step, extract
from graphs.extract.fake import without_meta
from graphs.extract.step import LossModule
from placer.sources.huggingface import SIZES
from placer.target import load_step

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = (
    "two_towers.py:build",
    "dlrm.py:build",
    "resnet.py:build",
    "inception.py:build",
    "nasnet.py:build",
    "rnnlm.py:build",
    "nmt.py:build",
    "moe.py:build",
    "moe.py:build_stacked",
)
TOKENS = 2048
LARGE = "large"


def main() -> None:
    warm_up()
    print(f"{'training step':28}{'ops':>7}{'extract':>10}{'export alone':>14}{'ratio':>7}")
    for target in EXAMPLES:
        line(target, seconds(load_step(f"{FOLDER}/{target}", training=True)))
    # In a separate process, so that the memory of the examples does not count.
    command = [sys.executable, "-m", "benchmarks.extraction", LARGE]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = json.loads(printed.splitlines()[-1])
    line("shape of Llama-3-8B, meta", found["seconds"])
    peak = f"{found['peak_bytes'] / 1e6:.0f} MB at most"
    print(f"  its process, torch loaded: {found['process_s']:.1f} s, {peak}")


def line(name: str, found: tuple[int, float, float]) -> None:
    ops, extract_s, export_s = found
    ratio = extract_s / export_s
    print(f"{name:28}{ops:7}{extract_s:8.1f} s{export_s:12.1f} s{ratio:6.1f}x", flush=True)


def seconds(step: Step) -> tuple[int, float, float]:
    """Return the number of ops, the seconds of extraction and the seconds of torch.export alone."""
    start_s = time.perf_counter()
    with without_meta(step) as traceable:
        inputs, keywords = traceable.inputs, dict(traceable.keywords)
        torch.export.export(LossModule(traceable), inputs, keywords, strict=False)
    exported_s = time.perf_counter()
    ops = extract(step).program.op_count
    return ops, time.perf_counter() - exported_s, exported_s - start_s


def large(start_s: float) -> None:
    """Extract the large model and print the results as JSON; the main function of its process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = dict(SIZES["llama-3-8b"][1])
    warm_up()
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    found = {
        "seconds": seconds(Step.of(model, {"input_ids": tokens, "labels": tokens})),
        "process_s": time.perf_counter() - start_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(found))


def warm_up() -> None:
    """Extract a tiny model, so that torch's lazy loading is not timed."""
    x = torch.randn(2, 2)
    extract(Step.of(nn.Linear(2, 2), (x, x), nn.functional.mse_loss))


if __name__ == "__main__":
    if LARGE in sys.argv[1:]:
        large(time.perf_counter())
    else:
        main()
