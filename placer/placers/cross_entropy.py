"""The cross-entropy method."""

from __future__ import annotations

from typing import ClassVar

from placer.placers.sampling import Sampling
from placer.search.cross_entropy import cross_entropy
from placer.search.tally import Tally


class CrossEntropy(Sampling):
    """Probabilities of devices, learned for one problem; see :mod:`placer.search.cross_entropy`."""

    name: ClassVar[str] = "cross-entropy"

    def sample(self, tally: Tally, seed: int) -> None:
        """Draw, move the probabilities to the best, draw again."""
        cross_entropy(tally, seed)
