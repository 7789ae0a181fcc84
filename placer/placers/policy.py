"""The learned policy alone."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from placer.placers.sampling import Sampling
from placer.search.candidate import Kind
from placer.search.decoder import decode
from placer.search.heuristics import heuristics
from placer.search.portfolio import Proposer
from placer.search.tally import Tally


class Proposed(Sampling):
    """Decodes the policy's proposals, then samples around the best of them."""

    kind: ClassVar[Kind] = Kind.POLICY

    def __init__(self, policy: Proposer | None) -> None:
        if policy is None:
            raise ValueError("placer 'policy' is nothing without a trained policy: name one")
        self.policy = policy

    def sample(self, tally: Tally, seed: int) -> None:
        """Evaluate proposals and samples; the heuristics that the policy needs are not counted."""
        judge = tally.judge
        means, deviations = self.policy.propose(judge, heuristics(judge))
        costs: list[int] = []
        for mean in means:
            costs.append(tally.judged(*decode(judge.outline, mean)))
            if tally.over():
                return
        best = int(np.argmin(costs))
        random = np.random.default_rng(seed)
        while not tally.over():
            normal = random.standard_normal(len(means[best]))
            tally.judged(*decode(judge.outline, means[best] + deviations[best] * normal))
