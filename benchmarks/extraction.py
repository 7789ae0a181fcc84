"""Extraction time in multiples of torch.export alone, and the peak memory of extraction.

    python -m benchmarks extraction

Training steps of the reference models, and of a model with the shape of Llama-3-8B (batch 1 of 2048
tokens) that is built on the meta device: its parameters would take 32 GB. The latter runs in its
own process, whose peak memory is reported.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from benchmarks.record import Effort, Part
from benchmarks.tables import Table
from graphs.extract import Workload, extract
from graphs.extract.eager import without_meta
from graphs.workload import LossModule
from placer.sources.huggingface import SIZES, Request
from placer.sources.target import load_step

FOLDER: Final = Path(__file__).parents[1] / "graphs" / "models"
TARGETS: Final = (
    "two_towers.py:build",
    "resnet.py:build",
    "dlrm.py:build",
    "inception.py:build",
    "nasnet.py:build",
    "rnnlm.py:build",
    "nmt.py:build",
    "moe.py:build",
    "moe.py:build_stacked",
)
QUICK_TARGETS: Final = 2
TOKENS: Final = 2048


def parts(effort: Effort) -> dict[str, Part]:
    """Return a part for each reference model, and one for the large model."""
    count = effort.pick(quick=QUICK_TARGETS, normal=len(TARGETS), full=len(TARGETS))
    found: dict[str, Part] = {target: partial(reference, target) for target in TARGETS[:count]}
    if effort.level != "quick":
        found["Llama-3-8B"] = in_own_process
    return found


def reference(target: str, found: dict[str, Any]) -> Table:
    """Extract the training step of a reference model."""
    warm_up()
    found.update(times(load_step(f"{FOLDER}/{target}", training=True)))
    return table(target, found)


def in_own_process(found: dict[str, Any]) -> Table:
    """Extract the large model where the memory of other parts does not count."""
    command = [sys.executable, "-m", "benchmarks.extraction"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found.update(json.loads(printed.splitlines()[-1]))
    return table("shape of Llama-3-8B, on meta", found)


def table(name: str, found: dict[str, Any]) -> Table:
    """Return the times of one model."""
    extract_s, export_s = found["extract_s"], found["export_s"]
    peak_bytes = found.get("peak_bytes")
    row = (
        f"{found['ops']:,}",
        f"{extract_s:.1f}",
        f"{export_s:.1f}",
        f"{extract_s / export_s:.1f}x",
        "" if peak_bytes is None else f"{peak_bytes / 1e6:,.0f}",
    )
    return Table(
        "Extraction",
        "seconds, against torch.export alone",
        ("training step", "ops", "extract", "export", "ratio", "peak MB"),
        ((name, *row),),
    )


def times(step: Workload) -> dict[str, Any]:
    """Return the number of ops, the seconds of extraction and the seconds of torch.export alone."""
    start_s = time.perf_counter()
    with without_meta(step) as traceable:
        inputs, keywords = traceable.inputs, dict(traceable.keywords)
        torch.export.export(LossModule(traceable), inputs, keywords, strict=False)
    exported_s = time.perf_counter()
    ops = extract(step).program.op_count
    extract_s = time.perf_counter() - exported_s
    return {"ops": ops, "extract_s": extract_s, "export_s": exported_s - start_s}


def large(start_s: float) -> dict[str, Any]:
    """Extract the large model; the main function of its process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = Request.parse(SIZES["llama-3-8b"]).fields
    warm_up()
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    found = times(Workload.of(model, {"input_ids": tokens, "labels": tokens}))
    return found | {
        "process_s": time.perf_counter() - start_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def warm_up() -> None:
    """Extract a tiny model, so that torch's lazy loading is not timed."""
    x = torch.randn(2, 2)
    extract(Workload.of(nn.Linear(2, 2), (x, x), nn.functional.mse_loss))


if __name__ == "__main__":
    print(json.dumps(large(time.perf_counter())))
