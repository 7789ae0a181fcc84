"""Imitation: a short evolution finds weights for each graph, which the network learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from placer.policies.decoders import Decoders
from placer.policies.network import ACTION_SCALE
from placer.policies.training.config import Imitation
from placer.search.evolution import POPULATION, Evolution
from placer.search.list_scheduler.decoder import HEFT, WEIGHT_COUNT

BATCH: Final = 64


def evolved_actions(
    decoders: Decoders,
    numbers: NDArray[np.int64],
    imitation: Imitation,
    seed: int,
    tell: Callable[[float], None],
) -> NDArray[np.float32]:
    """Return actions (B, K) within -1 .. 1 for the best weights found for the graphs ``numbers``.

    All evolutions advance together, so that each call of the decoders has much to do.
    """
    evolutions = [
        Evolution(HEFT, sigma=imitation.sigma, seed=seed + int(number), population=POPULATION)
        for number in numbers
    ]
    best = np.tile(HEFT, (len(numbers), 1))
    least = decoders.costs(numbers, best)
    generations = max(imitation.decodes // POPULATION, 1)
    each = np.repeat(numbers, POPULATION)
    for generation in range(generations):
        rows = np.stack([_within(evolution.ask()) for evolution in evolutions])
        costs = decoders.costs(each, rows.reshape(-1, WEIGHT_COUNT)).reshape(-1, POPULATION)
        for i, evolution in enumerate(evolutions):
            evolution.tell(rows[i], costs[i])
            row = int(costs[i].argmin())
            if costs[i, row] < least[i]:
                least[i], best[i] = costs[i, row], rows[i, row]
        tell((generation + 1) / generations)
    return ((best - HEFT) / ACTION_SCALE).astype(np.float32)


def imitate(
    model: OnPolicyAlgorithm,
    observations: NDArray[np.float32],
    actions: NDArray[np.float32],
    imitation: Imitation,
    seed: int,
) -> float:
    """Fit the policy's mean to ``actions`` (B, K) for ``observations`` (B, F).

    Uses least squares by Adam, in batches; returns the remaining mean squared error.
    """
    order = np.random.default_rng(seed)
    seen = torch.as_tensor(observations, device=model.device)
    wanted = torch.as_tensor(actions, device=model.device)
    optimizer = torch.optim.Adam(model.policy.parameters(), imitation.learning_rate)
    for _ in range(imitation.epochs):
        shuffled = torch.from_numpy(order.permutation(len(seen))).to(model.device)
        for first in range(0, len(seen), BATCH):
            batch = shuffled[first : first + BATCH]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(_mean(model, seen[batch]), wanted[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with torch.no_grad():
        return float(torch.nn.functional.mse_loss(_mean(model, seen), wanted))


def _mean(model: OnPolicyAlgorithm, observations: torch.Tensor) -> torch.Tensor:
    policy: Any = model.policy
    mean: torch.Tensor = policy.get_distribution(observations).distribution.mean
    return mean


def _within(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Clip weights to the range of actions."""
    return np.asarray(np.clip(weights, HEFT - ACTION_SCALE, HEFT + ACTION_SCALE))
