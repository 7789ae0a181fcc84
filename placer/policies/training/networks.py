"""Conversion between networks of stable-baselines3 and policies."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.policies import BasePolicy

from placer.policies.network import Policy


def exported(
    network: BasePolicy,
    name: str,
    mean: NDArray[np.float32],
    deviation: NDArray[np.float32],
) -> Policy:
    """Return a trained network as a policy without a card."""
    state = {key: value.detach().cpu().numpy() for key, value in network.state_dict().items()}
    return Policy(
        name=name,
        card={},
        feature_mean=mean,
        feature_deviation=deviation,
        layers=tuple(
            (state[f"{layer}.weight"], state[f"{layer}.bias"]) for layer in _layers(state)
        ),
        log_std=state["log_std"],
    )


def imported(network: BasePolicy, policy: Policy) -> None:
    """Load a policy into a network with the same layers; its critic is not changed.

    Raises:
        ValueError: it has more or fewer layers.
    """
    state = network.state_dict()
    for layer, (matrix, bias) in zip(_layers(state), policy.layers, strict=True):
        state[f"{layer}.weight"] = torch.from_numpy(np.array(matrix))
        state[f"{layer}.bias"] = torch.from_numpy(np.array(bias))
    state["log_std"] = torch.from_numpy(np.array(policy.log_std))
    network.load_state_dict(state)


def _layers(state: Iterable[str]) -> list[str]:
    """Return the names of the layers that compute the mean of actions, in order."""
    prefix, ending = "mlp_extractor.policy_net.", ".weight"
    hidden = [key for key in state if key.startswith(prefix) and key.endswith(ending)]
    numbers = sorted(int(key.removeprefix(prefix).removesuffix(ending)) for key in hidden)
    return [*(f"{prefix}{number}" for number in numbers), "action_net"]
