"""Device maps by predicted time: ``python examples/device_map.py [NAME]``.

NAME is a model of transformers, as after ``hf:`` in targets. Its map is found beside those that
accelerate makes by bytes alone, under the same memory limits, on the GPUs of ``mixed.toml``, one
fast and two slow. Nothing is downloaded or run: op costs are the roofline of the rates in the file.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import placer

DEVICES = Path(__file__).parent / "mixed.toml"
LIMITS: dict[str | int, int | str] = {0: "2GB", 1: "1GB", 2: "1GB"}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "gpt2-medium?batch=8&sequence=512"
    found = placer.device_map(name, devices=DEVICES, memory=LIMITS, budget="500e", progress=False)
    for module, gpu in found.items():
        print(f"  {module}: {gpu}")
    print(f"modules by GPU: {dict(sorted(Counter(found.values()).items()))}")
    print(f"this map: {found.predicted_step_s * 1e3:.3f} ms")
    for other, map_step in found.others.items():
        step_ms = map_step.step_s * 1e3
        print(f"{other}: {f'impossible, {map_step.why}' if map_step.why else f'{step_ms:.3f} ms'}")


if __name__ == "__main__":
    main()
