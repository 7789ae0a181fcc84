"""PPO of stable-baselines3, which learns rollout by rollout and can be saved in between."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.policies import BasePolicy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from placer.policies.network import RANGES, Policy
from placer.policies.pool import CANNOT_RUN
from placer.policies.scheduler_env import SchedulerBatch
from placer.policies.training.config import TrainingConfig

LOGGED: Final = {
    "policy_loss": "train/policy_gradient_loss",
    "value_loss": "train/value_loss",
    "entropy_loss": "train/entropy_loss",
    "approx_kl": "train/approx_kl",
    "clip_fraction": "train/clip_fraction",
}
"""{column of the log: name in stable-baselines3}."""


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """Everything that determines the rest of a training."""

    tensors: Mapping[str, NDArray[Any]]
    data: Mapping[str, Any]  # JSON compatible


class Learner:
    """Network, optimizer, environments and random numbers of one seed.

    It uses the global random numbers of torch and numpy: to be reproducible, nothing else may draw
    from them during training.
    """

    def __init__(self, config: TrainingConfig, seed: int, batch: SchedulerBatch) -> None:
        self.batch = batch
        self.learning_rate = config.ppo.learning_rate
        self.model = _model(config, seed, batch, lambda _: self.learning_rate)
        self.failed = 0  # decodes so far whose placements cannot be run
        self._average = _average(self.model.policy, config.ppo.average_rollouts)
        self._ratios = _Ratios()

    @property
    def decodes(self) -> int:
        """Steps of all environments so far."""
        return int(self.model.num_timesteps)

    @property
    def policy(self) -> BasePolicy:
        """The exponential average of the network after each rollout so far."""
        begun = int(self._average.n_averaged) > 0
        return cast(BasePolicy, self._average.module) if begun else self.model.policy

    def rollout(self) -> dict[str, float]:
        """Collect a rollout and learn from it; return its row of the log.

        Its ratios are those of the placements that can be run.
        """
        self._ratios.ratios.clear()
        try:
            self.model.learn(1, self._ratios, log_interval=sys.maxsize, reset_num_timesteps=False)
        except ValueError:  # torch's message has all the numbers of a batch
            self._check_weights()
            raise
        self._check_weights()
        self._average.update_parameters(self.model.policy)
        values = self.model.logger.name_to_value
        ratios = np.array(self._ratios.ratios)
        ran = ratios[(ratios > 0.0) & (ratios < CANNOT_RUN)]
        failed = len(ratios) - len(ran)
        self.failed += failed
        return {
            "decodes": self.decodes,
            "mean_ratio": float(np.exp(np.log(ran).mean())) if len(ran) else np.nan,
            "best_ratio": float(ran.min()) if len(ran) else np.nan,
            "failed": failed,
            "log_std": float(self.model.policy.log_std.detach().mean()),
            **{column: float(values.get(name, np.nan)) for column, name in LOGGED.items()},
            "learning_rate": self.learning_rate,
        }

    def _check_weights(self) -> None:
        if not all(part.isfinite().all() for part in self.model.policy.parameters()):
            raise FloatingPointError(
                f"the training diverged after {self.decodes} decodes: the network's weights are "
                "no finite numbers any more; lower ppo.learning_rate, now "
                f"{self.learning_rate:g}"
            ) from None
        low, high = RANGES["log_std"]
        log_std = self.model.policy.log_std.detach()
        if not bool(((low <= log_std) & (log_std <= high)).all()):
            raise FloatingPointError(
                f"the training diverged after {self.decodes} decodes: deviations of actions are "
                f"not within exp({low:g}) .. exp({high:g}) any more; lower "
                f"ppo.entropy or ppo.learning_rate"
            ) from None

    def save(self) -> Saved:
        """Return the state for :meth:`restore`; call it between rollouts."""
        model, optimizer = self.model, self.model.policy.optimizer.state_dict()["state"]
        keys, random, position, has_gauss, gauss = np.random.get_state()
        tensors = {f"network.{k}": _array(v) for k, v in model.policy.state_dict().items()}
        tensors |= {f"average.{k}": _array(v) for k, v in self._average.state_dict().items()}
        for number, state in optimizer.items():
            tensors |= {f"optimizer.{number}.{k}": _array(v) for k, v in state.items()}
        tensors["random.torch"] = _array(torch.get_rng_state())
        tensors["random.numpy"] = np.asarray(random)
        if model.device.type == "cuda":
            tensors["random.cuda"] = _array(torch.cuda.get_rng_state(model.device))
        starts = model._last_episode_starts
        return Saved(
            tensors,
            {
                "decodes": self.decodes,
                "failed": self.failed,
                "updates": int(model._n_updates),
                "numpy": [keys, position, has_gauss, gauss],
                "batch": self.batch.state(),
                "starts": None if starts is None else starts.tolist(),
            },
        )

    def restore(self, saved: Saved) -> None:
        """Continue from a state, exactly as without interruption."""
        model, tensors, data = self.model, saved.tensors, saved.data
        try:
            model.policy.load_state_dict(_those(tensors, "network."))
            self._average.load_state_dict(_those(tensors, "average."))
            state: dict[int, dict[str, torch.Tensor]] = {}
            for key, value in _those(tensors, "optimizer.").items():
                number, _, name = key.partition(".")
                state.setdefault(int(number), {})[name] = value
            groups = model.policy.optimizer.state_dict()["param_groups"]
            model.policy.optimizer.load_state_dict({"state": state, "param_groups": groups})
            model.num_timesteps = data["decodes"]
            self.failed = data["failed"]
            model._n_updates = data["updates"]
            model._last_obs = self.batch.restore(data["batch"])
            starts = data["starts"]
            model._last_episode_starts = None if starts is None else np.array(starts, np.bool_)
            keys, position, has_gauss, gauss = data["numpy"]
            np.random.set_state((keys, tensors["random.numpy"], position, has_gauss, gauss))
            torch.set_rng_state(torch.from_numpy(tensors["random.torch"]))
            if model.device.type == "cuda":
                cuda = torch.from_numpy(tensors["random.cuda"])
                torch.cuda.set_rng_state(cuda, model.device)
        except (KeyError, TypeError, RuntimeError) as error:
            raise ValueError(f"it is not of this training: {error}") from error


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
    """Load a policy into a network with the same layers; its critic is not changed."""
    state = network.state_dict()
    layers = _layers(state)
    theirs = [len(bias) for _, bias in policy.layers]
    if theirs != [len(state[f"{layer}.bias"]) for layer in layers]:
        raise ValueError(f"start: {policy.name} needs ppo.layers = {theirs[:-1]}")
    for layer, (matrix, bias) in zip(layers, policy.layers, strict=True):
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


class _Ratios(BaseCallback):
    """Collects the ratios of the episodes of a rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.ratios: list[float] = []

    def _on_step(self) -> bool:
        self.ratios += [info["ratio"] for info in self.locals["infos"] if "ratio" in info]
        return True


def _model(config: TrainingConfig, seed: int, batch: SchedulerBatch, learning_rate: Any) -> PPO:
    ppo = config.ppo
    with warnings.catch_warnings():
        # On a GPU, which the user has chosen.
        warnings.filterwarnings("ignore", "You are trying to run", UserWarning)
        model = PPO(
            "MlpPolicy",
            batch,
            learning_rate=learning_rate,
            n_steps=ppo.steps,
            batch_size=ppo.batch_size,
            n_epochs=ppo.epochs,
            gamma=1.0,
            gae_lambda=1.0,
            clip_range=ppo.clip,
            ent_coef=ppo.entropy,
            policy_kwargs={
                "net_arch": {"pi": list(ppo.layers), "vf": list(ppo.critic_layers)},
                "log_std_init": ppo.log_std,
            },
            seed=seed,
            device=config.device,
        )
    model.set_logger(Logger(folder=None, output_formats=[]))
    with torch.no_grad():  # the initial mean is HEFT
        for parameter in model.policy.action_net.parameters():
            parameter.zero_()
    return model


def _average(network: BasePolicy, rollouts: int) -> AveragedModel:
    """Return an exponential average over about this many rollouts; 1 gives the last network."""
    kept = 1.0 - 1.0 / rollouts
    return AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(kept))  # type: ignore[no-untyped-call]


def _those(tensors: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors with this name prefix, by the rest of their names."""
    return {
        k.removeprefix(prefix): torch.from_numpy(v)
        for k, v in tensors.items()
        if k.startswith(prefix)
    }


def _array(tensor: Any) -> NDArray[Any]:
    return torch.as_tensor(tensor).detach().cpu().numpy().copy()
