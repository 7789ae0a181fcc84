"""A placed step in its other mode: the same model for validation between epochs of training.

It is another program with its own calls. Each goes where the same call of the placed step is, or
where most calls of its module are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace

import torch

from graphs.extract import Extraction, extract
from graphs.extract.forward import ForwardProgram
from graphs.extract.keys import and_outer


def extracted_in_other_mode(extraction: Extraction) -> Extraction:
    """Extract the model of a training step for inference, or of an inference step for training.

    Raises:
        ExtractionError: it cannot be extracted in that mode.
    """
    step = replace(extraction.step, training=not extraction.step.training, optimizer=None)
    return extract(step, extraction.extractor)


def devices_in_other_mode(
    program: ForwardProgram, devices: Mapping[str, torch.device], other: ForwardProgram
) -> dict[str, torch.device]:
    """Return a device for every placed call of the other program, by key.

    Args:
        program: the program that was placed.
        devices: devices of its calls, by key.
        other: the program of the other mode.
    """
    used: defaultdict[str, Counter[torch.device]] = defaultdict(Counter)
    for call in program.placed_calls:
        for path in and_outer(call.module):
            used[path][devices[call.key]] += 1
    found = {
        call.key: devices.get(call.key)
        or next(_most(used[path]) for path in and_outer(call.module) if path in used)
        for call in other.placed_calls
    }
    for keys in other.together():
        found |= dict.fromkeys(keys, _most(Counter(found[key] for key in keys)))
    return found


def _most(used: Counter[torch.device]) -> torch.device:
    return used.most_common(1)[0][0]
