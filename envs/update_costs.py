"""Costs of optimizer updates on torch devices: the fused kernel, timed on zeros."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial

import torch

from envs.executor.updates import fused_update, updated_together
from envs.stopwatch import seconds_per_call
from envs.torch_devices import unless_out_of_memory
from envs.watchdog import timed_within_bounds
from graphs.extract import Extraction
from graphs.extract.call_graph import CallGraph
from graphs.optimizer import STATE, Optimizer


def update_costs(
    extraction: Extraction, calls: CallGraph, device: torch.device
) -> dict[int, float]:
    """Return the seconds of the updates of each call graph node; nan if memory does not suffice.

    Groups of parameters with equal shapes, strides and dtypes are timed once.
    """
    optimizer = extraction.step.optimizer
    if optimizer is None:
        return {}
    state = extraction.step.named_state()
    node_of = {id(state[n]): calls.node_of[op] for op, n in extraction.program.updates().items()}
    known: dict[object, float] = {}
    found: defaultdict[int, float] = defaultdict(float)
    for together in updated_together(extraction):
        parameters = [state[name] for name in together.names]
        form = tuple((tuple(p.shape), p.stride(), p.dtype) for p in parameters)
        if form not in known:
            known[form] = _seconds(optimizer, parameters, device)
        found[int(node_of[id(parameters[0])])] += known[form]
    return dict(found)


def _seconds(optimizer: Optimizer, parameters: list[torch.Tensor], device: torch.device) -> float:
    with timed_within_bounds(f"an update by {optimizer.kind}", device):
        found = unless_out_of_memory(partial(_timed, optimizer, parameters, device), device)
    return math.nan if found is None else found


def _timed(optimizer: Optimizer, parameters: list[torch.Tensor], device: torch.device) -> float:
    here = [torch.zeros_like(p, device=device).detach() for p in parameters]
    gradients = [torch.zeros_like(p) for p in here]
    kept = [[torch.zeros_like(p) for _ in STATE[optimizer.kind]] for p in here]
    counts = [torch.ones((), device=device) for _ in here]
    return seconds_per_call(
        partial(fused_update, optimizer, 0.0, here, gradients, kept, counts), [device]
    )
