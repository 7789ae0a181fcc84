"""Placements without search: the initial candidates of every search, and placers of fixed rules.

Trivial placements, classic list schedulers, and layers in model order, as models are placed by hand
on devices that are too small for them. All respect the allowed devices of ops and keep a
co-location group on one device.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import permutations
from typing import ClassVar, Final

import numpy as np

from envs.placement import OBJECTIVES
from envs.problem import Floats, Ints, Longs, Problem
from envs.simulator import INFEASIBLE_NS, Simulator
from envs.simulator.max_load import max_load_ns
from placer.search.candidate import Candidate, Kind, ranked
from placer.search.contiguous.parts import pipeline_parts
from placer.search.evaluator import Evaluator
from placer.search.grouping import spread
from placer.search.list_scheduler.arrays import SchedulingArrays
from placer.search.list_scheduler.decoder import HEFT, decode
from placer.search.list_scheduler.etf import etf, memory_etf
from placer.search.request import MAX_LOAD, STEP_OBJECTIVES, SearchRequest

MOST_ORDERED: Final = 4
"""The most devices of which a layer split tries all orders."""


def heuristics(evaluator: Evaluator) -> list[Candidate]:
    """Return single devices, layer split, round robin, first layers, HEFT and ETF, in this order.

    "First layers" is included only if some single device cannot hold the model. Trivial placements
    run ready ops by upward rank.
    """
    problem, by_level = evaluator.problem, evaluator.scheduling.bottom_level
    singles = single_devices(evaluator)
    if problem.device_count == 1:
        return singles
    candidates = [
        *singles,
        evaluator.candidate(Kind.LAYER_SPLIT, layer_split(problem), by_level),
        evaluator.candidate(Kind.ROUND_ROBIN, round_robin(problem), by_level),
    ]
    if any(candidate.step_ns == INFEASIBLE_NS for candidate in singles):
        devices = first_layers(problem, by_level)
        candidates.append(evaluator.candidate(Kind.FIRST_LAYERS, devices, by_level))
    return [*candidates, heft_candidate(evaluator), etf_candidate(evaluator)]


def heft_candidate(evaluator: Evaluator) -> Candidate:
    """Return the placement of HEFT; see :func:`_listed`."""
    return _listed(evaluator, Kind.HEFT, lambda arrays: decode(arrays, HEFT))


def etf_candidate(evaluator: Evaluator) -> Candidate:
    """Return the placement of ETF; see :func:`_listed`."""
    return _listed(evaluator, Kind.ETF, etf)


def _listed(
    evaluator: Evaluator,
    kind: Kind,
    schedule: Callable[[SchedulingArrays], tuple[Ints, Floats]],
) -> Candidate:
    """Return the placement of a list scheduler.

    Where ops cost more under load, it plans with costs alone and with those while all other devices
    compute; the shorter simulated step wins.
    """
    candidate = evaluator.candidate(kind, *schedule(evaluator.scheduling))
    if evaluator.loaded_scheduling is None:
        return candidate
    loaded = evaluator.candidate(kind, *schedule(evaluator.loaded_scheduling))
    return min(candidate, loaded, key=lambda each: each.step_ns)


def single_devices(evaluator: Evaluator) -> list[Candidate]:
    """Return a candidate for each device; its name tells if some ops are not allowed there."""
    candidates = []
    for d, device in enumerate(evaluator.problem.cluster.names):
        devices = single_device(evaluator.problem, d)
        name = f"single {device}" if (devices == d).all() else f"{device} where allowed"
        by_level = evaluator.scheduling.bottom_level
        candidates.append(evaluator.candidate(Kind.SINGLE_DEVICE, devices, by_level, name=name))
    return candidates


def single_device(problem: Problem, device: int) -> Ints:
    """Place all ops on one device; ops that are not allowed there on their cheapest one."""
    return spread(problem, np.full(problem.op_count, device))


def layer_split(problem: Problem) -> Ints:
    """Return contiguous parts in topological order, one per device, in proportion to its speed."""
    order = problem.graph.topological
    total = np.where(problem.allowed, problem.cost_ns, 0).sum(axis=1)
    cost = (total / problem.allowed.sum(axis=1))[order]
    runs = problem.allowed.sum(axis=0)
    device_cost = np.where(problem.allowed, problem.cost_ns, 0).sum(axis=0) / np.maximum(runs, 1)
    speed = np.where(runs > 0, 1.0 / np.maximum(device_cost, 1.0), 0.0)
    borders = np.cumsum(speed)[:-1] / speed.sum() * cost.sum()
    wish = np.empty(problem.op_count, np.int64)
    wish[order] = np.searchsorted(borders, np.cumsum(cost) - cost / 2.0, side="right")
    return spread(problem, wish)


def round_robin(problem: Problem) -> Ints:
    """Assign ops in topological order to the devices in turn."""
    wish = np.empty(problem.op_count, np.int64)
    wish[problem.graph.topological] = np.arange(problem.op_count) % problem.device_count
    return spread(problem, wish)


def first_layers(problem: Problem, priority: Floats) -> Ints:
    """Return devices (N,) that fill up one after the other; the last takes the rest.

    Memory is the simulated peak with ops ordered by ``priority`` (N,). A co-location group goes
    with its first layer. An op that is not allowed on its device goes, with its group, to the last
    allowed one. Missing links count as links without delay: in trials the last device has the rest.
    """
    simulator = Simulator(replace(problem, connected=np.ones_like(problem.connected)))
    number = layer_numbers(problem)
    last = problem.device_count - 1
    ops = np.arange(problem.op_count)
    fallback = (last - problem.allowed[:, ::-1].argmax(axis=1)).astype(np.int32)
    devices = np.full(problem.op_count, last, np.int32)
    begin, count = 0, int(number.max()) + 1
    for d in range(last):
        low, high = begin, count  # the layers from begin to low fit
        while low < high:
            middle = (low + high + 1) // 2
            trial = np.where((number >= begin) & (number < middle), np.int32(d), devices)
            trial = np.where(problem.allowed[ops, trial], trial, fallback)
            peak = simulator.run(trial, priority).peak_bytes[d]
            low, high = (middle, high) if peak <= problem.memory_bytes[d] else (low, middle - 1)
        devices[(number >= begin) & (number < low)] = d
        begin = low
    return np.where(problem.allowed[ops, devices], devices, fallback)


def layer_numbers(problem: Problem) -> Longs:
    """Return the layer of every op (N,), in model order; a group is in its first layer."""
    graph = problem.graph
    layers: dict[str, int] = {}
    for op in graph.topological.tolist():
        layers.setdefault(layer_of(graph.modules[op]), len(layers))
    number = np.array([layers[layer_of(module)] for module in graph.modules], np.int64)
    grouped = graph.group >= 0
    first = np.full(int(graph.group.max(initial=-1)) + 1, len(layers), np.int64)
    np.minimum.at(first, graph.group[grouped], number[grouped])
    number[grouped] = first[graph.group[grouped]]
    return number


def layer_of(module: str) -> str:
    """Return a module path up to the first number in it.

    >>> layer_of("decoder.layers.3.mlp.0"), layer_of("head"), layer_of("2.conv")
    ('decoder.layers.3', 'head', '2')
    """
    match = re.match(r"(.*?\.)?\d+(?=\.|$)", module)
    return match[0] if match else module


def ranked_by(objective: str, problem: Problem, candidates: list[Candidate]) -> list[Candidate]:
    """Return the candidates sorted by step time or maximum load (stable)."""
    if objective != MAX_LOAD:
        return ranked(candidates)
    loads = max_load_ns(problem, np.array([candidate.devices for candidate in candidates]))
    return [candidates[i] for i in np.argsort(loads, kind="stable").tolist()]


class Rule(ABC):
    """Base class of placers with a few fixed placements, whatever budget and seed."""

    objectives: ClassVar[tuple[str, ...]] = OBJECTIVES

    @abstractmethod
    def candidates(self, evaluator: Evaluator) -> Iterable[Candidate]:
        """Yield the placements, at least one; see :meth:`Evaluator.candidate`."""

    def place(self, request: SearchRequest) -> list[Candidate]:
        """Return all candidates, best first."""
        problem = request.problem
        return ranked_by(request.objective, problem, list(self.candidates(Evaluator(problem))))


class SingleDevice(Rule):
    """One placement per device; ops that are not allowed there go to their cheapest device."""

    def candidates(self, evaluator: Evaluator) -> Iterable[Candidate]:
        """Return the placement on each device, in cluster order."""
        return single_devices(evaluator)


class RoundRobin(Rule):
    """Assigns ops in topological order to the devices in turn."""

    def candidates(self, evaluator: Evaluator) -> Iterable[Candidate]:
        """Yield one placement."""
        devices = round_robin(evaluator.problem)
        yield evaluator.candidate(Kind.ROUND_ROBIN, devices, evaluator.scheduling.bottom_level)


class LayerSplit(Rule):
    """The split whose slowest part is fastest, optimal if links are equal and nothing is grouped.

    Of long graphs, from some 4,000 ops on, only evenly spaced borders are considered.

    With few devices all their orders are tried, with many theirs in the cluster. Memory is counted
    as if all outputs stayed; where that does not fit, only parameters count and the simulator
    decides.
    """

    def candidates(self, evaluator: Evaluator) -> Iterable[Candidate]:
        """Yield one placement."""
        problem, by_level = evaluator.problem, evaluator.scheduling.bottom_level
        splits = _splits(problem, keep_outputs=True)
        costs = max_load_ns(problem, splits)
        if costs.min() == INFEASIBLE_NS:
            splits = _splits(problem, keep_outputs=False)
            costs = evaluator.costs(splits, np.broadcast_to(by_level, splits.shape))
        devices, name = splits[int(costs.argmin())], "layer split, balanced"
        yield evaluator.candidate(Kind.LAYER_SPLIT, devices, by_level, name=name)


def _splits(problem: Problem, *, keep_outputs: bool) -> Ints:
    """Return the best contiguous parts (B, N) for each order of the devices."""
    count, order = problem.device_count, problem.graph.topological
    device_orders = permutations(range(count)) if count <= MOST_ORDERED else [range(count)]
    return np.array(
        [pipeline_parts(problem, order, row, keep_outputs=keep_outputs) for row in device_orders]
    )


class Heft(Rule):
    """Places ops by upward rank, each where it finishes first."""

    objectives: ClassVar[tuple[str, ...]] = STEP_OBJECTIVES

    def candidates(self, evaluator: Evaluator) -> Iterable[Candidate]:
        """Yield one placement."""
        yield heft_candidate(evaluator)


class Etf(Rule):
    """Repeatedly places the op and device that can start first."""

    objectives: ClassVar[tuple[str, ...]] = STEP_OBJECTIVES

    def candidates(self, evaluator: Evaluator) -> Iterable[Candidate]:
        """Yield one placement."""
        yield etf_candidate(evaluator)


class MemoryEtf(Rule):
    """ETF that excludes devices without room for an op's parameters and output to stay."""

    objectives: ClassVar[tuple[str, ...]] = STEP_OBJECTIVES

    def candidates(self, evaluator: Evaluator) -> Iterable[Candidate]:
        """Yield one placement."""
        yield _listed(evaluator, Kind.M_ETF, memory_etf)
