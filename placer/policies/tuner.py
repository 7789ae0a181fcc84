"""Learning from measured step times, and from a simulator fitted to them in between."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

import placer
from envs.fitting import Fit, fitted
from envs.measurement import contended, noise, tied
from envs.problem import Problem
from envs.simulator import OVERFULL_NS
from placer.policies.measuring import Fitted, Measuring, Run
from placer.policies.network import FORMAT, Policy
from placer.policies.params_env import ParamsBatch
from placer.policies.pool import CANNOT_RUN, exercise
from placer.policies.records import plain
from placer.policies.training.learner import Learner
from placer.policies.training.networks import exported, imported
from placer.policies.tuned import Tuned, Tuning
from placer.report.progress import Progress
from placer.rigs import Rig
from placer.search.candidate import Candidate, Kind
from placer.search.judge import Judge
from placer.search.portfolio import search
from placer.search.request import SearchRequest

FINALISTS: Final = 4
"""Number of fastest candidates that are run once more at the end."""


class Tuner:
    """A tuning of one problem; see :func:`placer.policies.tuning.tune`."""

    def __init__(
        self,
        problem: Problem,
        rig: Rig,
        policy: Policy,
        name: str,
        tuning: Tuning,
        hear: Progress,
    ) -> None:
        self.problem = problem
        self.rig = rig
        self.policy = policy
        self.name = name
        self.tuning = tuning
        self.hear = hear
        self.item = exercise(problem, "measured")
        self.judge = self.item.judge
        self.fit: Fit | None = None
        self.told: list[dict[str, Any]] = []
        self.began = time.perf_counter()

    def tuned(self) -> Tuned:
        """Run the tuning and return its result."""
        self.hear.stage("Searching with simulated reward")
        request = SearchRequest(
            self.problem,
            self.tuning.budget,
            seed=self.tuning.seed,
            progress=self.hear.advance,
        )
        found = search(request, self.policy)
        simulated = found[0]
        if simulated.step_ns >= OVERFULL_NS:
            raise ValueError(
                "no plan that was found keeps to the memory of the devices: search longer than "
                f"--budget {self.tuning.budget}, or add a device"
            )
        step_s = simulated.step_ns / 1e9
        with closing(self.rig.backend(self.problem, 10.0 * step_s, step_s)) as backend:
            measuring = Measuring(judge=self.judge, rig=self.rig, backend=backend, known=simulated)
            measuring.also += [
                own for own in found if own.kind is Kind.SINGLE_DEVICE and own.step_ns < OVERFULL_NS
            ]
            learner, batch = self._learner(measuring, simulated)
            self.hear.stage("Learning from what is measured")
            try:
                for number in range(self.tuning.rounds):
                    self._round(number, learner, batch, measuring)
                self.hear.stage("Running the fastest once more")
                measuring.run(_fastest(measuring.seen))
            except KeyboardInterrupt:
                if not measuring.seen:
                    raise
        return self._result(learner, measuring)

    def _learner(self, measuring: Measuring, known: Candidate) -> tuple[Learner, ParamsBatch]:
        item = replace(self.item, reference_ns=known.step_ns)
        scale = (self.policy.feature_mean, self.policy.feature_deviation)
        tuning = self.tuning
        batch = ParamsBatch([item], tuning.plans, tuning.seed, measuring, scale=scale)
        learner = Learner(tuning.training(self.policy), tuning.seed, batch)
        imported(learner.model.policy, self.policy)
        return learner, batch

    def _round(
        self, number: int, learner: Learner, batch: ParamsBatch, measuring: Measuring
    ) -> None:
        """Run samples and the current proposals, learn, fit the simulator, and learn from it."""
        tuning, before = self.tuning, len(measuring.seen)
        proposed = self._proposed(learner)
        measuring.also += [proposed] if proposed.step_ns < OVERFULL_NS else []
        batch.decoders = measuring
        learner.rollout()
        runs = [run for run in measuring.seen if np.isfinite(run.step_s)]
        self.fit = fit = fitted(
            self.problem, [run.placement for run in runs], [run.step_s for run in runs]
        )
        new = measuring.seen[before:]
        self.told.append(
            {
                "measured": len(new),
                "best_ratio": round(min(run.ratio for run in new), 4),
                "error_before_fit": round(fit.error_before, 4),
                "error_after_fit": round(fit.error, 4),
            }
        )
        batch.decoders = Fitted(Judge(fit.problem), measuring.known)
        until = learner.decodes + tuning.decodes
        while learner.decodes < until:
            learner.rollout()
        if number + 1 < tuning.rounds:
            measuring.also += self._searched(fit, number)
        done = (number + 1) / tuning.rounds
        best = min(run.ratio for run in measuring.seen)
        self.hear.advance(done, f"best {best:.3f} of what simulated reward chooses")

    def _proposed(self, learner: Learner) -> Candidate:
        scale = (self.policy.feature_mean, self.policy.feature_deviation)
        weights = exported(learner.policy, "", *scale).weights(self.item.summary)[0]
        devices, priority, _ = self.judge.decoded(weights[None])
        return self.judge.candidate(Kind.TUNED_POLICY, devices[0], priority[0])

    def _searched(self, fit: Fit, number: int) -> list[Candidate]:
        """Return the best candidate for the fitted simulator, with its unfitted step time."""
        seed = self.tuning.seed + number + 1
        found = search(SearchRequest(fit.problem, self.tuning.budget, seed=seed), self.policy)[0]
        name = f"{found.name}, fitted"
        plan = self.judge.candidate(found.kind, found.devices, found.priority, name=name)
        return [plan] if plan.step_ns < OVERFULL_NS else []

    def _result(self, learner: Learner, measuring: Measuring) -> Tuned:
        simulated, best = _chosen(measuring)
        seen = best.measurement
        placement = replace(
            best.placement,
            measured={
                "step_s": best.step_s,
                "simulated_choice_step_s": simulated.step_s,
                **_told_noise(best),
                "rounds": len(seen.wall_s),
            },
        )
        scale = (self.policy.feature_mean, self.policy.feature_deviation)
        policy = replace(
            exported(learner.policy, self.name, *scale),
            card=self._card(best, simulated, len(measuring.seen)),
            others=self.policy.others,
        )
        return Tuned(policy=policy, best=best, simulated=simulated, placement=placement)

    def _card(self, best: Run, simulated: Run, runs: int) -> dict[str, Any]:
        fit, tuning = self.fit, self.tuning
        names = self.problem.cluster.names
        return {
            "format": FORMAT,
            "name": self.name,
            "tuned_from": self.policy.name,
            "tuned_on": {
                "graph": self.problem.graph.name,
                "ops": self.problem.op_count,
                "devices": list(names),
            },
            "reward": "measured step, relative to the plan that simulated reward chooses",
            "config": plain(tuning.training(self.policy)),
            "tuning": {"rounds": tuning.rounds, "plans": tuning.plans, "decodes": tuning.decodes},
            "seed": tuning.seed,
            "seconds": round(time.perf_counter() - self.began, 1),
            "plans_measured": runs,
            "best": {"name": best.candidate.name, "step_s": best.step_s, "ratio": best.ratio},
            "simulated_choice": {"name": simulated.candidate.name, "step_s": simulated.step_s},
            "simulator_factors": None
            if fit is None
            else {
                **dict(zip(names, fit.device_factors, strict=True)),
                "transfers": fit.transfer_factor,
            },
            "rounds": self.told,
            "versions": {"placer": placer.__version__, "torch": torch.__version__},
        }


def _fastest(seen: Sequence[Run]) -> list[Candidate]:
    """Return the fastest distinct candidates relative to the reference."""
    order = sorted((run for run in seen if run.ratio < CANNOT_RUN), key=lambda run: run.ratio)
    found: dict[bytes, Candidate] = {}
    for run in order:
        key = run.candidate.devices.tobytes() + run.candidate.priority.tobytes()
        found.setdefault(key, run.candidate)
    return list(found.values())[:FINALISTS]


def _chosen(measuring: Measuring) -> tuple[Run, Run]:
    """Return the reference and the best run, of the last candidates that were run together."""
    last = max(i for i, run in enumerate(measuring.seen) if run.candidate is measuring.known)
    known, *others = measuring.seen[last:]
    loaded = contended([run.measurement for run in (known, *others)])
    best = min((known, *others), key=lambda run: run.step_s)
    if tied(best.measurement, known.measurement, loaded=loaded):
        best = known
    return known, best


def _told_noise(run: Run) -> dict[str, float]:
    told = noise(run.measurement)
    return {
        "wall_median_s": told["median_s"],
        "wall_min_s": told["min_s"],
        "spread": told["spread"],
        "rebuilt_s": told["rebuilt_s"],
        "contention": told["contention"],
    }
