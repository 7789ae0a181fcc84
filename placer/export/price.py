"""What an export costs: the predicted step of what is exported, against that of the placement."""

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
"""Steps that differ by less are alike, to people."""
SMALLEST_GAIN: Final = 0.05
"""Over one device: less is not worth several."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Price:
    """Predicts steps of exports of a placement.

    ``calls`` has the call of every op of the problem, ``renamed`` is {device of the placement:
    device of the export}.
    """

    problem: Problem
    placed: Placement
    calls: tuple[str, ...]
    renamed: Mapping[str, str]

    def step(self, runs_on: Mapping[str, str]) -> StepResult:
        """The predicted step where calls run on these devices, {call: device of the export}."""
        placement = coarsened(self.problem, self.placed, self.calls, runs_on, self.renamed)
        [found] = Simulated(self.problem).evaluate([placement])
        return found

    @cached_property
    def as_placed(self) -> StepResult:
        """The predicted step of the placement itself."""
        [found] = Simulated(self.problem).evaluate([self.placed])
        return found

    @cached_property
    def alone(self) -> tuple[str, float]:
        """The best single device and its predicted step; inf if none can run it all."""
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
        """Whether an export costs anything, to people."""
        before, after = self.as_placed, self.step(runs_on)
        return after.step_s > before.step_s * (1 + SMALLEST_CHANGE)

    def is_won_back(self, runs_on: Mapping[str, str], otherwise: Mapping[str, str]) -> bool:
        """Whether an export would win most of what it loses if calls ran otherwise."""
        before, after, then = self.as_placed, self.step(runs_on), self.step(otherwise)
        if not (before.feasible and after.feasible and then.feasible):
            return then.feasible and not after.feasible
        lost_s = after.step_s - before.step_s
        is_much = lost_s > SMALLEST_CHANGE * before.step_s
        return is_much and after.step_s - then.step_s > lost_s / 2

    def told(
        self, runs_on: Mapping[str, str], *, moved: bool = True, single_step: bool = True
    ) -> list[str]:
        """What an export costs, in one sentence, and of what; none if it costs next to nothing.

        Args:
            runs_on: {call: device of the export}.
            moved: something is not where the placement has it, so that there is a price.
            single_step: it is to make single steps fast, which one device has to be beaten at;
                not so where many micro-batches are under way at once.
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
    """Whether a step is faster than another, to people, or fits where that does not."""
    if not (found.feasible and other.feasible):
        return found.feasible and not other.feasible
    return found.step_s < other.step_s * (1 - SMALLEST_CHANGE)


def price_of(
    problem: Problem, placement: Placement, extraction: Extraction, renamed: Mapping[str, str]
) -> Price:
    """What predicts exports of a placement.

    Args:
        problem: what was placed.
        placement: of its ops.
        extraction: what they are of.
        renamed: {device of the placement: device of the export}.

    Raises:
        ValueError: the placement is of another graph, or has other devices.
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
    """The placement with all ops of a call on its device, in the order of the program.

    Ops of calls that are not in ``runs_on``, or on devices that the placement has not, stay where
    they are; those that must share a device go with the first of them.
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
    """Priorities by which ops run in the order of the program, as other runtimes have it."""
    rank: NDArray[np.float64] = np.empty(problem.op_count)
    rank[problem.graph.topological] = np.arange(problem.op_count, 0, -1)
    return tuple(rank.tolist())
