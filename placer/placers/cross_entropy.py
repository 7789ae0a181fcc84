"""The cross-entropy method."""

from __future__ import annotations

from typing import ClassVar

from placer.placers.sampling import Sampling
from placer.search.candidate import Kind
from placer.search.cross_entropy import cross_entropy
from placer.search.tally import Tally


class CrossEntropy(Sampling):
    """Device probabilities learned for one problem; see :mod:`placer.search.cross_entropy`."""

    kind: ClassVar[Kind] = Kind.CROSS_ENTROPY

    def sample(self, tally: Tally, seed: int) -> None:
        """Run the cross-entropy method."""
        cross_entropy(tally, seed)
