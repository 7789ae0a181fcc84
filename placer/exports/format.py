"""The interface of export formats, and the comparison of an export with its placement.

A format says on which device each call runs once the runtime has loaded its output. From this
follow the number of ops that move and the predicted step.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np

from envs.backend import StepResult
from envs.hardware.units import milliseconds
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import Simulated
from graphs.extract import Extraction
from placer.exports.placed_modules import PlacedModules, call_keys
from placer.exports.renaming import check_main_device, renamed_devices

SMALLEST_CHANGE: Final = 0.01
"""Relative difference below which two step times count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatOutput:
    """The output of a format, and where the runtime then runs each call.

    Attributes:
        content: text, or plain data for JSON.
        runs_on: {call: device}; calls that are not listed run where they are placed.
        not_placed: calls in ``runs_on`` that the runtime does not place, such as those of the loss.
        is_predictable: False if ``runs_on`` does not determine the step.
        remedy: a sentence that the user must know to run the output, or "".
    """

    content: Any
    runs_on: Mapping[str, str]
    not_placed: Collection[str] = frozenset()
    is_predictable: bool = True
    remedy: str = ""


class Format(Protocol):
    """Writes placements for one runtime."""

    def __call__(self, placed: PlacedModules) -> FormatOutput:
        """Return the placement in the runtime's format."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A placement in the format of another runtime, compared with the placement.

    Attributes:
        content: text, or plain data for JSON.
        op_count: number of forward and backward ops.
        moved_op_count: number of those that the runtime runs elsewhere than they are placed.
        placed_on: the devices of the placement, for which steps are predicted.
        placed_step: predicted step as placed, None if op costs are unknown.
        exported_step: predicted step as exported, None if it is unknown.
        single_device: the device that is fastest alone, "" if it is unknown or the only one.
        single_step: predicted step with all on that device, by its name as exported.
        remedy: at most one sentence: what to do about the difference.
    """

    content: Any
    op_count: int
    moved_op_count: int
    placed_on: tuple[str, ...]
    placed_step: StepResult | None = None
    exported_step: StepResult | None = None
    single_device: str = ""
    single_step: StepResult | None = None
    remedy: str = ""

    @property
    def text(self) -> str:
        """Return the file content: JSON, or the text itself."""
        if isinstance(self.content, str):
            return self.content + "\n"
        return json.dumps(self.content, indent=1) + "\n"

    @property
    def summary(self) -> list[str]:
        """Return at most three sentences: ops that move, predicted steps, remedy."""
        moved = f"{self.moved_op_count} of {self.op_count} ops run elsewhere than placed"
        sentences = [moved if self.moved_op_count else f"all {self.op_count} ops run where placed"]
        if self.placed_step is not None:
            why = "" if self.exported_step is None else self.exported_step.why
            why = why or self.placed_step.why
            sentences.append(
                f"predicted step on {', '.join(self.placed_on)}: {_step_text(self.placed_step)} as "
                f"placed, {_step_text(self.exported_step)} as exported{self._single_text}"
                f"{why and f': {why}'}"
            )
        return [*sentences, self.remedy] if self.remedy else sentences

    @property
    def _single_text(self) -> str:
        if self.single_step is None:
            return ""
        text = f", {_step_text(self.single_step)} with all on {self.single_device}"
        exported = self.exported_step
        wins = exported is not None and is_faster(self.single_step, exported)
        return text + ", which is faster" if wins else text

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "content": self.content,
            "op_count": self.op_count,
            "moved_op_count": self.moved_op_count,
            "placed_step": _step_data(self.placed_step),
            "exported_step": _step_data(self.exported_step),
            "single_device": self.single_device,
            "single_step": _step_data(self.single_step),
            "remedy": self.remedy,
        }


class StepPredictor:
    """Predicts the steps of exports of a placement."""

    def __init__(
        self,
        problem: Problem,
        placement: Placement,
        extraction: Extraction,
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        """Take a placement of a problem's ops; ``renamed`` is {its device: exported device}."""
        self.problem = problem
        self.placement = placement.aligned(problem.graph, problem.cluster)
        self._calls = call_keys(extraction, problem.graph)  # of every op
        self._renamed = renamed or {}
        self._simulated = Simulated(problem)

    def step(self, runs_on: Mapping[str, str]) -> StepResult:
        """Predict the step if calls run on {call: device of the export}."""
        return self._simulated.evaluate([self.exported_placement(runs_on)])[0]

    @property
    def placed_step(self) -> StepResult:
        """Return the predicted step of the placement itself."""
        return self._simulated.evaluate([self.placement])[0]

    def best_single(self) -> tuple[str, StepResult]:
        """Return the fastest device alone, as exported, and the step with all calls on it."""
        names = [self._renamed.get(name, name) for name in self.problem.cluster.names]
        steps = {name: self.step(dict.fromkeys(self._calls, name)) for name in names}
        best = min(steps, key=lambda name: (not steps[name].feasible, steps[name].step_s))
        return best, steps[best]

    def exported_placement(self, runs_on: Mapping[str, str]) -> Placement:
        """Return the placement with all ops of a call on one device, in program order.

        Ops of calls that are not in ``runs_on``, or are there on devices that the placement lacks,
        keep their device; ops that must share a device follow the first of them.
        """
        graph, names = self.problem.graph, self.problem.cluster.names
        index = {self._renamed.get(name, name): d for d, name in enumerate(names)}
        devices = np.array(self.placement.devices)
        home: dict[int, int] = {}
        for i in graph.topological.tolist():
            device = index.get(runs_on.get(self._calls[i], ""), int(devices[i]))
            group = int(graph.group[i])
            devices[i] = device if group < 0 else home.setdefault(group, device)
        rank = np.empty(self.problem.op_count)
        rank[graph.topological] = np.arange(self.problem.op_count, 0, -1)
        return replace(
            self.placement, devices=tuple(devices.tolist()), priority=tuple(rank.tolist())
        )


def export_extracted(
    write: Format,
    extraction: Extraction,
    placement: Placement,
    *,
    problem: Problem | None = None,
    renamed: Mapping[str, str] | None = None,
    main_device: str | None = None,
) -> Exported:
    """Write a placement of ops or calls in a format and compare the result with the placement.

    ``problem`` is the placed graph with op costs, without which no step is predicted. ``renamed``
    is {device of the placement: device to write}, ``main_device`` that of the model's inputs.
    """
    names = renamed_devices(renamed or {}, placement.device_names)
    if main_device is not None:
        check_main_device(main_device, names, placement.device_names)
    predictor = None
    if problem is not None:
        predictor = StepPredictor(problem, placement, extraction, names)
    placed = PlacedModules.of(
        extraction,
        placement,
        renamed=names,
        main_device=main_device,
        predict_step=None if predictor is None else predictor.step,
    )
    output = write(placed)
    runs_on = {call: d for call, d in output.runs_on.items() if call not in output.not_placed}
    result = Exported(
        content=output.content,
        op_count=len(placed.ops) + len(placed.backward),
        moved_op_count=len(placed.moved_ops(runs_on)),
        placed_on=placement.device_names,
        remedy=output.remedy,
    )
    if predictor is None:
        return result
    step = predictor.step(output.runs_on) if output.is_predictable else None
    result = replace(result, placed_step=predictor.placed_step, exported_step=step)
    if len(predictor.problem.cluster) == 1:
        return result
    single_device, single_step = predictor.best_single()
    return replace(result, single_device=single_device, single_step=single_step)


def is_faster(step: StepResult, other: StepResult) -> bool:
    """Return whether a step is noticeably faster than another, or fits where the other does not."""
    if not (step.feasible and other.feasible):
        return step.feasible and not other.feasible
    return step.step_s < other.step_s * (1 - SMALLEST_CHANGE)


def _step_text(step: StepResult | None) -> str:
    if step is None:
        return "unknown"
    return f"{milliseconds(step.step_s)} ms" if step.feasible else "impossible"


def _step_data(step: StepResult | None) -> dict[str, Any] | None:
    if step is None:
        return None
    return {
        "step_s": step.step_s if step.feasible else None,
        "peak_memory_bytes": dict(step.peak_memory_bytes),
        "feasible": step.feasible,
        "why": step.why,
    }
