"""Random placements of calls that keep co-location groups together."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from graphs.extract import Extraction
from graphs.extract.placeable import call_graph
from graphs.graph import attributes_of


def random_devices(
    extraction: Extraction, devices: Sequence[torch.device | str], seed: int
) -> dict[str, torch.device | str]:
    """Return {call key: device} with co-location groups kept together; every device gets a call."""
    calls = call_graph(extraction)
    groups = [attributes_of(calls.graph, node)["colocate"] or node for node in calls.graph]
    randomly = random.Random(seed)
    chosen = {group: randomly.choice(devices) for group in dict.fromkeys(groups)}
    chosen |= dict(zip(randomly.sample(list(chosen), len(devices)), devices, strict=True))
    return calls.devices_of_calls([chosen[group] for group in groups])


def random_order(extraction: Extraction, seed: int) -> list[str]:
    """Return all calls in random order, for launches to follow as far as possible."""
    keys = [call.key for call in extraction.forward.placed_calls]
    random.Random(seed).shuffle(keys)
    return keys
