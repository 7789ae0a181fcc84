"""CMA-ES, and a placer that evolves weights of the list scheduler by it.

Standard coefficients: Hansen, "The CMA Evolution Strategy: A Tutorial" (arXiv 1604.00772), table 1,
without negative weights. Samples are drawn with a Cholesky factor instead of the symmetric root,
and rounded, so that the last bit of a linear algebra library does not influence the result.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from envs.problem import Floats
from placer.search.candidate import Kind
from placer.search.list_scheduler.decoder import HEFT, decode
from placer.search.sampling import BudgetedEvaluator, Sampling

DECIMALS: Final = 9
POPULATION: Final = 10
SIGMA: Final = 0.5
SETTLED: Final = 1e-3
"""Below this standard deviation samples decode alike."""
LARGEST_CONDITION: Final = 1e14
"""Condition number of the covariance, estimated from its factor, above which rounding decides."""


class Evolution:
    """Minimizes a function of K numbers by an ask-and-tell interface.

    >>> evolution = Evolution(np.zeros(3), sigma=0.5, seed=0)
    >>> for _ in range(100):
    ...     samples = evolution.ask()
    ...     evolution.tell(samples, ((samples - 1.0) ** 2).sum(axis=1))
    >>> evolution.mean.round(3)
    array([1., 1., 1.])
    """

    def __init__(
        self,
        start: NDArray[np.floating[Any]],
        *,
        sigma: float,
        seed: int,
        population: int | None = None,
        spread: NDArray[np.floating[Any]] | None = None,
    ) -> None:
        """Start at ``start`` (K,) with standard deviation ``sigma`` in every direction.

        With ``spread`` (K,) the deviations are proportional to it, and ``sigma`` is their geometric
        mean.
        """
        size = len(start)
        self.population = population or 4 + int(3 * math.log(size))
        if not sigma > 0:
            raise ValueError(f"sigma is {sigma}, not above 0")
        self.mean = np.array(start, np.float64)
        self.sigma = float(sigma)
        self._random = np.random.default_rng(seed)
        parents = self.population // 2
        weights = math.log(self.population / 2 + 0.5) - np.log(np.arange(1, parents + 1))
        self._weights = weights / weights.sum()
        effective = 1.0 / float((self._weights**2).sum())
        self._effective = effective
        self._path_rate = (effective + 2) / (size + effective + 5)
        self._damping = (
            1 + 2 * max(0.0, math.sqrt((effective - 1) / (size + 1)) - 1) + self._path_rate
        )
        self._cumulation = (4 + effective / size) / (size + 4 + 2 * effective / size)
        self._rank_one = 2 / ((size + 1.3) ** 2 + effective)
        self._rank_mu = min(
            1 - self._rank_one, 2 * (effective - 2 + 1 / effective) / ((size + 2) ** 2 + effective)
        )
        self._expected = math.sqrt(size) * (1 - 1 / (4 * size) + 1 / (21 * size**2))
        first = np.ones(size)
        if spread is not None:
            first = spread / np.exp(np.log(spread).mean())
        self._covariance: NDArray[np.floating[Any]] = np.diag(first**2)
        self._factor: NDArray[np.floating[Any]] = np.diag(first)
        self._sigma_path = np.zeros(size)
        self._path = np.zeros(size)
        self._generation = 0

    @property
    def has_ended(self) -> bool:
        """Return whether further samples would be alike, or be drawn with rounding errors."""
        factor = np.diagonal(self._factor)  # above 0, as of any Cholesky factor
        too_long = factor.max() > math.sqrt(LARGEST_CONDITION) * factor.min()
        return self.sigma < SETTLED or bool(too_long)

    def ask(self) -> Floats:
        """Draw samples (population, K) to be evaluated."""
        normal = self._random.standard_normal((self.population, len(self.mean)))
        samples = self.mean + self.sigma * normal @ self._factor.T
        return np.asarray(samples.round(DECIMALS))

    def tell(self, samples: Floats, costs: NDArray[np.floating[Any] | np.integer[Any]]) -> None:
        """Update the distribution from costs (population,) of ``samples``; ties go to the first."""
        self._generation += 1
        best = np.argsort(costs, kind="stable")[: len(self._weights)]
        steps = (samples[best] - self.mean) / self.sigma
        step = self._weights @ steps
        self.mean = self.mean + self.sigma * step

        rate = self._path_rate
        self._sigma_path *= 1 - rate
        self._sigma_path += math.sqrt(rate * (2 - rate) * self._effective) * np.linalg.solve(
            self._factor, step
        )
        length = float(np.linalg.norm(self._sigma_path))
        decay = math.sqrt(1 - (1 - rate) ** (2 * self._generation))
        calm = length / decay < (1.4 + 2 / (len(self.mean) + 1)) * self._expected

        rate = self._cumulation
        self._path *= 1 - rate
        if calm:
            self._path += math.sqrt(rate * (2 - rate) * self._effective) * step
        kept = 1 - self._rank_one - self._rank_mu + (not calm) * self._rank_one * rate * (2 - rate)
        self._covariance = (
            kept * self._covariance
            + self._rank_one * np.outer(self._path, self._path)
            + self._rank_mu * (steps.T * self._weights) @ steps
        )
        self._factor = np.linalg.cholesky(self._covariance)
        self.sigma *= math.exp(
            min(1.0, self._path_rate / self._damping * (length / self._expected - 1))
        )


class EvolutionPlacer(Sampling):
    """CMA-ES on the 21 weights of the decoder, starting from those of HEFT.

    When it has ended, it restarts with twice the population.
    """

    kind: ClassVar[Kind] = Kind.EVOLUTION

    def sample(self, budgeted: BudgetedEvaluator, seed: int) -> None:
        """Evaluate HEFT, then one population after the other."""
        scheduling = budgeted.evaluator.scheduling
        budgeted.evaluate(*decode(scheduling, HEFT))
        restarts = 0
        evolution = Evolution(HEFT, sigma=SIGMA, seed=seed, population=POPULATION)
        while not budgeted.over():
            if evolution.has_ended:
                restarts += 1
                evolution = Evolution(
                    HEFT, sigma=SIGMA, seed=seed + restarts, population=POPULATION << restarts
                )
            rows = evolution.ask()
            costs = []
            for row in rows:
                if budgeted.over():
                    return
                costs.append(budgeted.evaluate(*decode(scheduling, row)))
            evolution.tell(rows, np.array(costs))
