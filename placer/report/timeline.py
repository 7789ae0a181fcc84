"""Chrome trace of a placement's simulated step."""

from __future__ import annotations

import json
from pathlib import Path

from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import Simulated
from envs.simulator.trace import chrome_trace
from graphs.files import write_whole


def write_timeline(problem: Problem, placement: Placement, path: Path) -> None:
    """Write the trace, whole or not at all; it opens in Perfetto and chrome://tracing.

    Raises:
        OSError: the file cannot be written.
    """
    simulated = Simulated(problem).run(placement)
    write_whole(path, json.dumps(chrome_trace(*simulated)))
