from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from in_turn import in_turn
from processes import all_end, descendants
from random_problems import keeps_groups, keeps_limits, random_problem
from sb3_contrib.common.wrappers import ActionMasker
from stable_baselines3.common.env_checker import check_env as check_env_of_sb3
from torch import nn
from torch.nn import functional as F
from two_devices import pair

from envs.backend import StepResult
from envs.cluster import Cluster, Device, Link
from envs.executor.fork_server import running_server
from envs.measurement import CONTENDED
from envs.placement import Placement
from envs.placement_env import INVALID_REWARD, PlacementEnv
from envs.registration import register_environments
from envs.simulator import Simulated
from envs.toy_problem import toy_problem
from placer.registration import register_environments as register_all

torch.set_num_threads(1)

CORES = sorted(os.sched_getaffinity(0))
IDS = ("placer/Placement-v0", "placer/PlacementParams-v0", "placer/GeneratedPlacement-v0")


@pytest.mark.parametrize("name", IDS)
def test_both_checkers_pass(name: str) -> None:
    environment = gym.make(name).unwrapped
    check_env(environment, skip_render_check=True)
    check_env_of_sb3(environment)


def test_checkers_pass_with_another_problem() -> None:
    problem = random_problem(4, devices=5, groups=True, pins=True, unequal=True)
    environment = gym.make(IDS[0], problem=problem).unwrapped
    check_env(environment, skip_render_check=True)
    check_env_of_sb3(environment)
    check_env_of_sb3(ActionMasker(environment, lambda inner: inner.action_masks()))  # type: ignore[attr-defined]  # gym.Env has no masks


def test_registering_again_changes_nothing() -> None:
    before = dict(gym.registry)
    register_environments()
    register_all()
    assert dict(gym.registry) == before


def test_gymnasium_finds_them_by_module_and_name() -> None:
    name = f"envs.registration:{IDS[0]}"
    code = f"import gymnasium; print(gymnasium.make('{name}').reset(seed=0)[0].shape)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("(")


@pytest.mark.parametrize("name", in_turn(IDS, slow=IDS[1:]))
def test_placer_registers_them_for_who_uses_gymnasium(name: str) -> None:
    code = f"import gymnasium, placer; print(gymnasium.make('{name}').reset(seed=0)[0].shape)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("(")


def test_registration_loads_neither_torch_nor_numba() -> None:
    code = (
        "import sys, placer.registration\n"
        "print([m for m in ('torch', 'numba', 'stable_baselines3') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 6), st.booleans())
def test_masked_rollouts_end_in_placements_that_keep_all_rules(
    seed: int, devices: int, tight: bool
) -> None:
    problem = random_problem(
        seed,
        ops=20,
        devices=devices,
        groups=True,
        pins=True,
        unequal=True,
        memory_bytes=12_000_000 if tight else 10**12,
    )
    environment = PlacementEnv(problem)
    rng = np.random.default_rng(seed)
    observation, _ = environment.reset(seed=seed)
    ended, reward = False, 0.0
    info: dict[str, Any] = {}
    while not ended:
        assert environment.observation_space.contains(observation)
        mask = environment.action_masks()
        assert mask.any()
        assert reward == 0.0
        observation, reward, ended, _, info = environment.step(rng.choice(np.flatnonzero(mask)))
    placed = info["placement"].arrays()[0]
    assert keeps_groups(problem, placed)
    assert keeps_limits(problem, placed)
    if info["feasible"]:
        assert reward == pytest.approx(math.log(info["baseline_s"] / info["step_s"]))
    else:
        assert reward == INVALID_REWARD
        assert info["why"]


def played(
    environment: gym.Env[Any, Any], action: Callable[[], int] = lambda: 0
) -> tuple[float, dict[str, Any], int]:
    """Return reward and info of the last step of an episode, and the number of its steps."""
    environment.reset(seed=0)
    for steps in count(1):
        _, reward, ended, _, info = environment.step(np.int64(action()))
        if ended:
            return float(reward), info, steps
    raise AssertionError


def test_everything_on_the_best_device_is_worth_nothing() -> None:
    assert played(PlacementEnv(random_problem(3, devices=3)))[0] == 0.0


def test_a_split_of_two_towers_is_worth_more() -> None:
    environment = PlacementEnv()
    assert environment.problem.graph.name == toy_problem().graph.name
    environment.reset()
    rewards = []
    for op in environment.problem.graph.topological:
        on_right = environment.problem.graph.ids[op].startswith("right")
        rewards.append(environment.step(int(on_right))[1])
    assert rewards[:-1] == [0.0] * (len(rewards) - 1)
    assert rewards[-1] > 0.5


def test_a_device_that_is_masked_or_does_not_exist_ends_the_episode() -> None:
    environment = PlacementEnv(random_problem(3, devices=2))
    for action in (2, -1):
        environment.reset()
        _, reward, ended, _, info = environment.step(action)
        assert (reward, ended) == (INVALID_REWARD, True)
        assert "masked" in info["why"]
        with pytest.raises(RuntimeError, match="reset"):
            environment.step(0)


def test_a_group_is_placed_in_one_step() -> None:
    problem = random_problem(8, groups=True)
    group = problem.graph.group
    units = len(set(group[group >= 0].tolist())) + int((group < 0).sum())
    assert played(PlacementEnv(problem))[2] == units < problem.op_count


class Constant:
    """A backend for which every step takes two seconds."""

    def evaluate(self, placements: Sequence[Placement], progress: Any = None) -> list[StepResult]:
        return [StepResult(step_s=2.0, peak_memory_bytes={}, parts={"all": 2.0})] * len(placements)


def two_cores() -> Cluster:
    """Return a cluster with all speeds, so that nothing has to be calibrated."""
    names = tuple(f"core:{core}" for core in CORES[:2])
    devices = tuple(
        Device(
            name=name,
            kind="core",
            memory_bytes=1 << 30,
            peak_flop_per_s=1e11,
            bandwidth_bytes_per_s=1e10,
            launch_s=3e-6,
        )
        for name in names
    )
    link = Link(between=names, latency_s=2e-5, bandwidth_bytes_per_s=5e9)
    return Cluster(name="two-cores", devices=devices, links=(link,))


@pytest.mark.slow
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_a_model_is_placed_by_measured_steps_and_its_workers_end_with_the_environment() -> None:
    running_server()
    before = descendants()
    own: dict[str, Any] = {
        "model": nn.Linear(4, 3),
        "inputs": (torch.randn(5, 4), torch.randn(5, 3)),
    }
    made = gym.make(
        IDS[0], backend="measured", loss=F.mse_loss, devices=two_cores(), rounds=1, **own
    )
    environment = made.unwrapped
    assert isinstance(environment, PlacementEnv)
    assert len(descendants() - before) == 2
    check_env(environment, skip_render_check=True)
    assert environment.problem.cluster.names == two_cores().names
    reward, info, _ = played(made)
    assert info["feasible"]
    assert info["step_s"] == info["parts"]["median_s"] or info["parts"]["contention"] > CONTENDED
    assert reward == pytest.approx(math.log(info["baseline_s"] / info["step_s"]))
    made.close()
    made.close()
    assert all_end(descendants() - before)


@pytest.mark.usefixtures("second_device")
def test_on_devices_of_torch_a_model_is_placed_with_its_updates_and_in_bf16() -> None:
    own: dict[str, Any] = {
        "model": nn.Linear(4, 3),
        "inputs": (torch.randn(5, 4), torch.randn(5, 3)),
        "loss": F.mse_loss,
    }
    made = gym.make(
        IDS[0],
        backend="measured",
        devices=pair(),
        rounds=1,
        optimizer="adamw",
        dtype="bf16",
        overlap=True,
        **own,
    )
    environment = made.unwrapped
    assert isinstance(environment, PlacementEnv)
    assert getattr(environment.backend, "overlap", False)
    graph = environment.problem.graph
    plain = gym.make(IDS[0], devices=pair(), **own).unwrapped
    assert isinstance(plain, PlacementEnv)
    assert set(plain.problem.graph.ids) < set(graph.ids), "and the updates"
    assert graph.resident_bytes.sum() > plain.problem.graph.resident_bytes.sum(), "and their state"
    reward, info, _ = played(made, lambda: int(environment.action_masks().argmax()))
    assert info["feasible"], info["why"]
    assert reward == pytest.approx(math.log(info["baseline_s"] / info["step_s"]))
    made.close()


@pytest.mark.usefixtures("second_device")
def test_an_episode_over_the_limit_of_the_host_ends_with_the_amount() -> None:
    model = nn.Sequential(nn.Linear(8, 500), nn.ReLU(), nn.Linear(500, 4))
    made = gym.make(
        IDS[0],
        backend="measured",
        model=model,
        inputs=(torch.randn(500, 8), torch.randn(500, 4)),
        loss=F.mse_loss,
        devices="vdev:0,cpu",
        memory={"vdev:0": 1 << 30, "cpu": 1 << 20},  # weights fit, activations do not
        rounds=1,
    )
    reward, info, _ = played(made, lambda: 1)
    assert reward == INVALID_REWARD
    assert not info["feasible"]
    assert re.search(r"cpu needs [34]\.\d MB .* but has 1\.0 MB, [23]\.\d MB too", info["why"])
    made.close()


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_a_model_may_be_placed_by_simulated_steps() -> None:
    environment = PlacementEnv(
        model=nn.Linear(4, 3),
        inputs=torch.randn(5, 4),
        training=False,
        devices=two_cores(),
    )
    assert environment.problem.graph.ids == (":linear",)
    assert isinstance(environment.backend, Simulated)
    environment.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "mesured"}, "did you mean measured"),
        ({"backend": "measured"}, "model="),
        ({"model": nn.Linear(1, 1), "optimizer": "adamax"}, "'adamax'"),
        ({"model": nn.Linear(1, 1), "dtype": "fp8"}, "'fp8'"),
        ({"problem": toy_problem(), "model": nn.Linear(1, 1)}, "problem or a model"),
    ],
)
def test_a_backend_that_cannot_be_had_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlacementEnv(**given)


def test_the_reward_comes_from_the_given_backend() -> None:
    reward, info, _ = played(PlacementEnv(backend=Constant()), lambda: 1)
    assert reward == 0.0
    assert (info["step_s"], info["baseline_s"], info["parts"]) == (2.0, 2.0, {"all": 2.0})
