"""The simulated step of the best placement as a Chrome trace."""

from __future__ import annotations

import json
from pathlib import Path

from envs.simulator import Simulator
from envs.simulator.timeline import chrome_trace
from placer.outcome import Optimization


def write_timeline(found: Optimization, path: Path) -> None:
    """Write the trace; it opens in Perfetto and in chrome://tracing."""
    schedule = Simulator(found.problem).run(*found.placement.arrays())
    path.write_text(json.dumps(chrome_trace(found.problem, schedule)), encoding="utf-8")
