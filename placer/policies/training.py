"""Trains a policy: PPO of stable-baselines3 on one-step decoding, several seeds, the best is kept.

    placer train --out trained_policies/generalist --seconds 100 --seeds 3

Seeds vary as much as training gains, so every seed's scores go into the card, beside those of an
untrained control: the best of sixteen random weights around HEFT.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import stable_baselines3
import torch
from numpy.typing import NDArray
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

from placer.policies.network import ACTION_SCALE, FORMAT, Policy
from placer.policies.params_env import ParamsBatch, pool_scale
from placer.policies.pool import Exercise, draw_pool, families
from placer.policies.threads import one_thread
from placer.search.decoder import HEFT, WEIGHT_COUNT
from placer.search.heuristics import ETF_NAME, HEFT_NAME, SINGLE

ENVIRONMENTS: Final = 64
SAMPLES: Final = 15
UNTRAINED_DEVIATION: Final = 0.4
HYPERPARAMETERS: Final[dict[str, Any]] = {
    "n_steps": 8,
    "batch_size": 256,
    "n_epochs": 6,
    "gamma": 1.0,
    "learning_rate": 1e-3,
    "policy_kwargs": {"net_arch": [64, 64], "log_std_init": -1.6},
}

Progress = Callable[[float, str], None]


def train(
    out: Path,
    *,
    seconds: float = 100.0,
    seeds: int = 3,
    first_seed: int = 0,
    chosen: Sequence[str] | None = None,
    graphs: int = 240,
    max_ops: int = 360,
    test_graphs: int = 56,
    test_max_ops: int = 800,
    progress: Progress | None = None,
) -> Policy:
    """Train one policy per seed and write the best of them to ``out``.safetensors and .json.

    Args:
        out: where to, without ending; its last part is the policy's name.
        seconds: of processor time for each seed, without drawing and testing.
        seeds: how many; they are ``first_seed``, ``first_seed + 1``, ...
        first_seed: of networks, sampling and graphs.
        chosen: families of :mod:`graphs.synthetic` to train on, by default all but chains. Tests
            are always on all of them.
        graphs: how many to train on.
        max_ops: size of the largest of them.
        test_graphs: as many, never seen in training, for choosing the seed, and again for the card.
        test_max_ops: size of the largest of these.
        progress: called with the done share, 0 .. 1, and what is going on.

    Returns:
        The policy that was written.

    Raises:
        ValueError: seconds or seeds is not above 0, or a family does not exist.
        OSError: the files cannot be written.
    """
    if not seconds > 0 or seeds < 1:
        raise ValueError(f"{seconds} s for {seeds} seeds: both must be above 0")
    tell = progress or _silent
    chosen = families(chosen)
    out.parent.mkdir(parents=True, exist_ok=True)
    tell(0.0, "drawing graphs")
    pool = draw_pool(1_000_000 + first_seed, graphs, max_ops, chosen)
    validation = draw_pool(2_000_000, test_graphs, test_max_ops)
    tests = draw_pool(3_000_000, test_graphs, test_max_ops)
    scale = pool_scale(pool)

    rows: list[dict[str, Any]] = []
    policies: list[Policy] = []
    for number in range(seeds):
        seed = first_seed + number
        tell(number / seeds, f"seed {seed}")
        model, spent_s = _learn(pool, seed, seconds, partial(_part, tell, number, seeds))
        policy = exported(model, out.name, *scale)
        policies.append(policy)
        alone, sampled = scores(policy, validation)
        rows.append(
            {
                "seed": seed,
                "decodes": int(model.num_timesteps),
                "processor_s": round(spent_s, 1),
                "validation": {"mean": _mean(alone), "best_of_16": _mean(sampled)},
                "test": _table(tests, *scores(policy, tests)),
            }
        )
        tell((number + 1) / seeds, f"seed {seed}: {rows[-1]['validation']}")
    best = min(range(seeds), key=lambda i: sum(rows[i]["validation"].values()))
    card = {
        "format": FORMAT,
        "name": out.name,
        "trained_on": {
            "families": list(chosen),
            "graphs": len(pool),
            "largest_ops": max(item.judge.problem.op_count for item in pool),
            "devices": "2 to 8, a quarter of the clusters with unequal ones",
        },
        "algorithm": {"name": "PPO (stable-baselines3)", **HYPERPARAMETERS},
        "seed": rows[best]["seed"],
        "selected_by": "lowest sum of both validation scores",
        "scores_are": "geometric mean of step / best of {single device, HEFT, ETF}, simulated",
        "seeds": rows,
        "baselines": baselines(tests),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "stable_baselines3": stable_baselines3.__version__,
        },
    }
    chosen_policy = policies[best]
    policy = Policy(
        name=out.name,
        card=card,
        feature_mean=chosen_policy.feature_mean,
        feature_deviation=chosen_policy.feature_deviation,
        layers=chosen_policy.layers,
        log_std=chosen_policy.log_std,
    )
    policy.save(out)
    return policy


def exported(
    model: PPO, name: str, mean: NDArray[np.float32], deviation: NDArray[np.float32]
) -> Policy:
    """The network of a trained model as a policy without a card."""
    state = {key: value.detach().cpu().numpy() for key, value in model.policy.state_dict().items()}
    hidden = sorted(
        key.removesuffix(".weight")
        for key in state
        if key.startswith("mlp_extractor.policy_net.") and key.endswith(".weight")
    )
    return Policy(
        name=name,
        card={},
        feature_mean=mean,
        feature_deviation=deviation,
        layers=tuple(
            (state[f"{layer}.weight"], state[f"{layer}.bias"]) for layer in [*hidden, "action_net"]
        ),
        log_std=state["log_std"],
    )


def scores(
    policy: Policy, pool: Sequence[Exercise]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Ratios to the reference (len(pool),): of one decode, and of the best of it and 15 samples."""
    alone, sampled = [], []
    for number, item in enumerate(pool):
        mean, deviation = policy.weights(item.summary)
        normal = np.random.default_rng(number).standard_normal((SAMPLES, WEIGHT_COUNT))
        costs = item.judge.decoded(np.vstack([mean, mean + deviation * normal]))[2]
        alone.append(item.ratio(int(costs[0])))
        sampled.append(item.ratio(int(costs.min())))
    return np.array(alone), np.array(sampled)


def baselines(pool: Sequence[Exercise]) -> dict[str, Any]:
    """Scores of the heuristics, and of the best of HEFT and 15 random weights around it."""
    found: dict[str, list[float]] = {"single": [], HEFT_NAME: [], ETF_NAME: [], "untrained": []}
    for number, item in enumerate(pool):
        for key, name in (("single", SINGLE), (HEFT_NAME, HEFT_NAME), (ETF_NAME, ETF_NAME)):
            best = min(c.step_ns for c in item.known if c.name.startswith(name))
            found[key].append(item.ratio(best))
        normal = np.random.default_rng(number).standard_normal((SAMPLES, WEIGHT_COUNT))
        rows = np.vstack([HEFT, HEFT + ACTION_SCALE * UNTRAINED_DEVIATION * normal])
        found["untrained"].append(item.ratio(int(item.judge.decoded(rows)[2].min())))
    names = {"untrained": "untrained, best of 16"}
    return {names.get(key, key): _mean(np.array(values)) for key, values in found.items()}


class _Clock(BaseCallback):
    """Ends the training after so many seconds of processor time."""

    def __init__(self, seconds: float, tell: Callable[[float], None]) -> None:
        super().__init__()
        self.seconds = seconds
        self.tell = tell
        self.began = time.process_time()

    def spent_s(self) -> float:
        return time.process_time() - self.began

    def _on_step(self) -> bool:
        return self.spent_s() < self.seconds

    def _on_rollout_end(self) -> None:
        self.tell(min(self.spent_s() / self.seconds, 1.0))


@one_thread()
def _learn(
    pool: Sequence[Exercise], seed: int, seconds: float, tell: Callable[[float], None]
) -> tuple[PPO, float]:
    environment = ParamsBatch(pool, ENVIRONMENTS, seed)
    model = PPO("MlpPolicy", environment, seed=seed, device="cpu", **HYPERPARAMETERS)
    with torch.no_grad():  # the first mean is HEFT itself
        for parameter in model.policy.action_net.parameters():
            parameter.zero_()
    clock = _Clock(seconds, tell)
    model.learn(sys.maxsize >> 1, callback=clock)
    return model, clock.spent_s()


def _table(
    pool: Sequence[Exercise], alone: NDArray[np.float64], sampled: NDArray[np.float64]
) -> dict[str, Any]:
    """Scores in all and by family."""
    table: dict[str, Any] = {"mean": _mean(alone), "best_of_16": _mean(sampled)}
    of_family = np.array([item.family for item in pool])
    for family in dict.fromkeys(of_family.tolist()):
        chosen = of_family == family
        table[family] = {"mean": _mean(alone[chosen]), "best_of_16": _mean(sampled[chosen])}
    return table


def _mean(ratios: NDArray[np.float64]) -> float:
    """Geometric mean, in the digits that mean something."""
    return round(float(np.exp(np.log(ratios).mean())), 4)


def _part(tell: Progress, number: int, seeds: int, share: float) -> None:
    """Tell how far all seeds are when this one has come so far."""
    tell((number + share) / seeds, "")


def _silent(share: float, text: str) -> None:
    """Tell nobody."""
