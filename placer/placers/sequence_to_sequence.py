"""The sequence-to-sequence placement network of 2017, as a baseline."""

from __future__ import annotations

from typing import ClassVar

from placer.placers.samplers import Sampling
from placer.policies.sequence import learn, load_libraries
from placer.search.candidate import Kind
from placer.search.evaluator import BudgetedEvaluator


class SequenceToSequence(Sampling):
    """Learns one problem from scratch by REINFORCE; see :mod:`placer.policies.sequence`."""

    kind: ClassVar[Kind] = Kind.SEQUENCE_TO_SEQUENCE

    def prepare(self) -> None:
        """Load compiled code, and the modules that torch imports on the first training step."""
        super().prepare()
        load_libraries()

    def sample(self, budgeted: BudgetedEvaluator, seed: int) -> None:
        """Train by REINFORCE."""
        learn(budgeted, seed)
