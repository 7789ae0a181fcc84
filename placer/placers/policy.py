"""The learned policy alone."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from placer.placers.sampling import Sampling
from placer.search.decoder import decode
from placer.search.heuristics import heuristics
from placer.search.portfolio import Proposer
from placer.search.tally import Tally


class Proposed(Sampling):
    """The plan that the policy's mean decodes to, then samples around it."""

    name: ClassVar[str] = "policy"

    def __init__(self, policy: Proposer | None) -> None:
        if policy is None:
            raise ValueError("placer 'policy' is nothing without a trained policy: name one")
        self.policy = policy

    def sample(self, tally: Tally, seed: int) -> None:
        """The policy sees how the heuristics do; that is not counted."""
        judge = tally.judge
        mean, deviation = self.policy.propose(judge, heuristics(judge))
        random = np.random.default_rng(seed)
        weights = mean
        while not tally.over():
            tally.judged(*decode(judge.outline, weights))
            weights = mean + deviation * random.standard_normal(len(mean))
