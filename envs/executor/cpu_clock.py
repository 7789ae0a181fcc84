"""The CPU-clock time of a step: its time without contention, computed from CPU times.

On a busy machine a worker loses its core now and then, and the wall clock counts that. The thread's
CPU clock does not: replaying the lists with CPU times gives the step time on a quiet machine. This
holds for devices of one core: the thread's clock misses the other threads of a core set.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from envs.executor.lists import Instruction, Receive, Send


def cpu_clock_s(
    lists: Sequence[Sequence[Instruction]],
    cpu_s: Sequence[NDArray[np.float64]],
    latency_s: float,
) -> float:
    """Return the seconds of a step in which every device runs its list in order.

    Args:
        lists: one instruction list per device, as run.
        cpu_s: per device the CPU seconds of every instruction, (instructions,).
        latency_s: from the end of a send until a waiting receiver goes on.
    """
    sent_s: dict[int, float] = {}
    clock_s = [0.0] * len(lists)
    position = [0] * len(lists)
    while any(p < len(own) for p, own in zip(position, lists, strict=True)):
        before = list(position)
        for d, own in enumerate(lists):
            while position[d] < len(own):
                instruction = own[position[d]]
                if isinstance(instruction, Receive):
                    if instruction.value not in sent_s:
                        break
                    if sent_s[instruction.value] > clock_s[d]:
                        clock_s[d] = sent_s[instruction.value] + latency_s
                clock_s[d] += float(cpu_s[d][position[d]])
                if isinstance(instruction, Send):
                    sent_s[instruction.value] = clock_s[d]
                position[d] += 1
        assert position != before, "the lists wait for each other"
    return max(clock_s, default=0.0)
