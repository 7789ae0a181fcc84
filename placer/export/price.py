"""The cost of an export: its predicted step time against that of the placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.backend import StepResult
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import Simulated
from graphs.extract import Extraction
from placer.export.call_keys import call_keys
from placer.export.renaming import told_costs_of_others
from placer.milliseconds import milliseconds, ratio_of

SMALLEST_CHANGE: Final = 0.01
"""Relative difference below which two step times count as equal."""
SMALLEST_GAIN: Final = 0.05
"""Relative gain over one device below which several devices are not worthwhile."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Price:
    """Predicts the steps of exports of a placement.

    ``calls`` holds the call key of every op of the problem, ``renamed`` is {device of the
    placement: device of the export}.
    """

    problem: Problem
    placed: Placement
    calls: tuple[str, ...]
    renamed: Mapping[str, str]

    def step(self, runs_on: Mapping[str, str]) -> StepResult:
        """Predict the step if calls run on {call: device of the export}."""
        placement = coarsened(self.problem, self.placed, self.calls, runs_on, self.renamed)
        [found] = Simulated(self.problem).evaluate([placement])
        return found

    @cached_property
    def as_placed(self) -> StepResult:
        """Return the predicted step of the placement itself."""
        [found] = Simulated(self.problem).evaluate([self.placed])
        return found

    @cached_property
    def alone(self) -> tuple[str, float]:
        """Return the best single device and its predicted step time; inf if none can run it."""
        priority = _program_order(self.problem)
        single = [
            replace(self.placed, devices=(d,) * self.problem.op_count, priority=priority)
            for d in range(self.problem.device_count)
        ]
        steps = [
            (step.step_s if step.feasible else float("inf"))
            for step in Simulated(self.problem).evaluate(single)
        ]
        best = int(np.argmin(steps))
        return self.problem.cluster.names[best], steps[best]

    def is_lost(self, runs_on: Mapping[str, str]) -> bool:
        """Return whether the step gets noticeably slower as exported."""
        before, after = self.as_placed, self.step(runs_on)
        return after.step_s > before.step_s * (1 + SMALLEST_CHANGE)

    def is_won_back(self, runs_on: Mapping[str, str], otherwise: Mapping[str, str]) -> bool:
        """Return whether running calls otherwise would recover most of what an export loses."""
        before, after, then = self.as_placed, self.step(runs_on), self.step(otherwise)
        if not (before.feasible and after.feasible and then.feasible):
            return then.feasible and not after.feasible
        lost_s = after.step_s - before.step_s
        is_much = lost_s > SMALLEST_CHANGE * before.step_s
        return is_much and after.step_s - then.step_s > lost_s / 2

    def told(
        self, runs_on: Mapping[str, str], *, moved: bool = True, single_step: bool = True
    ) -> list[str]:
        """Return a sentence on the predicted step as exported, or none if the cost is negligible.

        A second sentence says whose costs it is predicted with, if devices are renamed.

        Args:
            runs_on: {call: device of the export}.
            moved: whether ops are off their device in the placement.
            single_step: whether the export should speed up single steps and so must beat one
                device; not so for pipelines with many micro-batches in flight.
        """
        before, after = self.as_placed, self.step(runs_on)
        if not before.feasible:
            why = f"no step is predicted, since as placed {before.why}"
            return [why] if moved or not after.feasible else []
        if not after.feasible:
            return [f"as exported a step is predicted to be impossible: {after.why}"]
        name, alone_s = self.alone
        more = ratio_of(after.step_s, before.step_s) - 1
        gain = ratio_of(alone_s, after.step_s)
        is_weighed = single_step and self.placed.objective != "max-load"
        several = len(set(runs_on.values())) > 1 or len(set(self.placed.devices)) > 1
        is_worth_it = not (is_weighed and several) or gain >= 1 + SMALLEST_GAIN
        if not moved and more < SMALLEST_CHANGE and is_worth_it:
            return []
        told = (
            f"as exported a step is predicted to take {milliseconds(after.step_s)} ms, "
            f"{abs(more):.1%} {'longer' if more >= 0 else 'less'} than the "
            f"{milliseconds(before.step_s)} ms as placed"
        )
        if is_weighed and np.isinf(alone_s):
            told += "; no device has room for it alone"
        elif is_weighed:
            then = f"as placed {ratio_of(alone_s, before.step_s):.2f}x"
            told += f": {gain:.2f}x as fast as {name} alone ({then})"
            told += "" if is_worth_it else ", which is not worth it"
        return [told, *told_costs_of_others(self.renamed, self.problem.cluster.names)]


def is_faster(found: StepResult, other: StepResult) -> bool:
    """Return whether a step is noticeably faster than another, or fits where the other does not."""
    if not (found.feasible and other.feasible):
        return found.feasible and not other.feasible
    return found.step_s < other.step_s * (1 - SMALLEST_CHANGE)


def price_of(
    problem: Problem, placement: Placement, extraction: Extraction, renamed: Mapping[str, str]
) -> Price:
    """Return a predictor of the exports of a placement.

    Args:
        problem: the placed problem.
        placement: the placement of its ops.
        extraction: the source of the ops.
        renamed: {device of the placement: device of the export}.

    Raises:
        ValueError: the placement belongs to another graph or has other devices.
    """
    return Price(
        problem=problem,
        placed=placement.aligned(problem.graph, problem.cluster),
        calls=call_keys(extraction, problem.graph),
        renamed=dict(renamed),
    )


def coarsened(
    problem: Problem,
    placed: Placement,
    calls: tuple[str, ...],
    runs_on: Mapping[str, str],
    renamed: Mapping[str, str],
) -> Placement:
    """Return the placement with all ops of a call on one device, in program order.

    Ops of calls that are not in ``runs_on``, or are there on devices that the placement lacks, keep
    their device; ops that must share a device follow the first of them.
    """
    graph, names = problem.graph, problem.cluster.names
    index = {renamed.get(name, name): d for d, name in enumerate(names)}
    devices = np.array(placed.devices)
    home: dict[int, int] = {}
    for i in graph.topological.tolist():
        own = index.get(runs_on.get(calls[i], ""), int(devices[i]))
        group = int(graph.group[i])
        devices[i] = own if group < 0 else home.setdefault(group, own)
    return replace(placed, devices=tuple(devices.tolist()), priority=_program_order(problem))


def _program_order(problem: Problem) -> tuple[float, ...]:
    rank: NDArray[np.float64] = np.empty(problem.op_count)
    rank[problem.graph.topological] = np.arange(problem.op_count, 0, -1)
    return tuple(rank.tolist())
