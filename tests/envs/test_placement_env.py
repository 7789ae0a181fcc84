from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.env_checker import check_env as check_env_of_sb3
from torch import nn
from torch.nn import functional as F

from envs.backend import StepResult
from envs.executors.cores.fork_server import running_server
from envs.hardware.cluster import Cluster, Device, Link
from envs.measured import Measured
from envs.measurement import CONTENDED
from envs.placement import Placement
from envs.placement_env import INVALID_REWARD, PlacementEnv
from envs.problem import toy_problem
from envs.simulator import Simulated
from envs.torch_runtime import TorchExecutor
from graphs.extract import Workload
from graphs.graph import add_edge, add_op, new_graph
from graphs.optimizer import Optimizer
from graphs.workload import ExtractionError
from placer.startup import register_environments
from tests.helpers.clusters import pair
from tests.helpers.processes import all_end, descendants
from tests.helpers.random_problems import keeps_groups, keeps_limits, random_problem
from tests.helpers.simulator_cases import one_kind
from tests.helpers.tiny_models import Plain

CORES = sorted(os.sched_getaffinity(0))
IDS = ("placer/Placement-v0", "placer/Scheduler-v0")


@pytest.mark.parametrize("name", IDS)
def test_both_checkers_pass(name: str) -> None:
    environment = gym.make(name, render_mode="ansi").unwrapped
    check_env(environment)
    check_env_of_sb3(environment, skip_render_check=False)


@pytest.mark.parametrize("name", IDS)
def test_a_graph_and_a_cluster_from_files_are_placed(
    name: str, files: Callable[..., tuple[Path, Path]]
) -> None:
    graph, cluster = files()
    environment = gym.make(name, graph=str(graph), cluster=cluster).unwrapped
    check_env_of_sb3(environment)
    with pytest.raises(ValueError, match="give a cluster"):
        gym.make(name, graph=graph)


def test_registering_again_changes_nothing() -> None:
    before = dict(gym.registry)
    register_environments()
    assert dict(gym.registry) == before


def test_the_partial_schedule_is_drawn_as_text() -> None:
    environment = gym.make(IDS[0], render_mode="ansi")
    environment.reset()
    for action in (0, 0, 1):  # the input, then two ops of a tower
        environment.step(np.int64(action))
    drawn = str(environment.render()).splitlines()
    assert drawn[0] == "two-towers: 3 of 14 ops placed, 2.16 ms"
    assert [line.rsplit("| ")[-1] for line in drawn[1:4]] == ["2 ops", "1 ops", "0 ops"]
    assert re.match(r"device:0 \|#+=+ *\|", drawn[1])
    assert re.match(r"device:1 \| +#+\|", drawn[2])
    assert drawn[4].startswith("next op: ")
    assert gym.make(IDS[0]).unwrapped.render() is None
    by_weights = gym.make(IDS[1], render_mode="ansi")
    by_weights.reset()
    by_weights.step(by_weights.action_space.sample() * 0)
    assert str(by_weights.render()).startswith("two-towers: 14 of 14 ops placed, ")


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
    environment = PlacementEnv(pool=[problem])
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
    assert played(PlacementEnv(pool=[random_problem(3, devices=3)]))[0] == 0.0


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
    environment = PlacementEnv(pool=[random_problem(3, devices=2)])
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
    assert played(PlacementEnv(pool=[problem]))[2] == units < problem.op_count


class Constant:
    """A backend for which every step takes two seconds."""

    def evaluate(self, placements: Sequence[Placement], progress: Any = None) -> list[StepResult]:
        return [StepResult(step_s=2.0, peak_memory_bytes={}, parts={"all": 2.0})] * len(placements)


def two_cores() -> Cluster:
    """Return a cluster with all speeds, so that nothing has to be calibrated."""
    names = tuple(f"core:{core}" for core in CORES[:2])
    core = Device(
        name="core:0",
        kind="core",
        memory_bytes=1 << 30,
        peak_flop_per_s=1e11,
        bandwidth_bytes_per_s=1e10,
        launch_s=3e-6,
    )
    devices = tuple(replace(core, name=name) for name in names)
    link = Link(between=names, latency_s=2e-5, bandwidth_bytes_per_s=5e9)
    return Cluster(name="two-cores", devices=devices, links=(link,))


def linear_step(**options: Any) -> Workload:
    return Workload.of(
        nn.Linear(4, 3), (torch.randn(5, 4), torch.randn(5, 3)), F.mse_loss, **options
    )


@pytest.mark.slow
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_a_model_is_placed_by_measured_steps_and_its_workers_end_with_the_environment() -> None:
    running_server()
    before = descendants()
    made = gym.make(
        IDS[0], workload=linear_step(), cluster=two_cores(), backend="measured", rounds=1
    )
    environment = made.unwrapped
    assert isinstance(environment, PlacementEnv)
    check_env(environment, skip_render_check=True)
    assert environment.problem.cluster.names == two_cores().names
    reward, info, _ = played(made)
    assert len(descendants() - before) == 2, "one worker a core, from the first measurement on"
    assert info["feasible"]
    assert info["step_s"] == info["parts"]["median_s"] or info["parts"]["contention"] > CONTENDED
    assert reward == pytest.approx(math.log(info["baseline_s"] / info["step_s"]))
    made.close()
    made.close()
    assert all_end(descendants() - before)


@pytest.mark.slow
@pytest.mark.usefixtures("second_device")
def test_on_devices_of_torch_a_model_is_placed_with_its_updates_and_in_bf16() -> None:
    updated = linear_step(optimizer=Optimizer(kind="adamw"), dtype="bf16")
    made = gym.make(
        IDS[0], workload=updated, cluster=pair(), backend="measured", rounds=1, overlap=True
    )
    environment = made.unwrapped
    assert isinstance(environment, PlacementEnv)
    assert isinstance(environment.backend, Measured)
    assert isinstance(environment.backend.executor, TorchExecutor)
    assert environment.backend.executor.overlap
    graph = environment.problem.graph
    plain = gym.make(IDS[0], workload=linear_step(), cluster=pair()).unwrapped
    assert isinstance(plain, PlacementEnv)
    assert set(plain.problem.graph.ids) < set(graph.ids), "and the updates"
    assert graph.resident_bytes.sum() > plain.problem.graph.resident_bytes.sum(), "and their state"
    reward, info, _ = played(made, lambda: int(environment.action_masks().argmax()))
    assert info["feasible"], info["why"]
    assert reward == pytest.approx(math.log(info["baseline_s"] / info["step_s"]))
    made.close()


@pytest.mark.slow
@pytest.mark.usefixtures("second_device")
def test_an_episode_over_the_limit_of_the_host_ends_with_the_amount() -> None:
    model = nn.Sequential(nn.Linear(8, 500), nn.ReLU(), nn.Linear(500, 4))
    made = gym.make(
        IDS[0],
        backend="measured",
        workload=Workload.of(model, (torch.randn(500, 8), torch.randn(500, 4)), F.mse_loss),
        cluster="cuda:0,cpu",
        memory={"cuda:0": 1 << 30, "cpu": 1 << 20},  # weights fit, activations do not
        rounds=1,
    )
    reward, info, _ = played(made, lambda: 1)
    assert reward == INVALID_REWARD
    assert not info["feasible"]
    assert re.search(r"cpu needs [34]\.\d MB .* but has 1\.0 MB, [23]\.\d MB too", info["why"])
    made.close()


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_a_model_may_be_placed_by_simulated_steps() -> None:
    step = Workload.of(nn.Linear(4, 3), torch.randn(5, 4), training=False)
    environment = PlacementEnv(workload=step, cluster=two_cores())
    assert environment.problem.graph.ids == (":linear",)
    assert isinstance(environment.backend, Simulated)
    environment.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "mesured"}, "did you mean measured"),
        ({"backend": "measured"}, "give a workload"),
        ({"pool": [toy_problem()], "graph": "graph.json"}, "one of workload, graph and pool"),
        ({"pool": [toy_problem()], "memory": {"a": 1}}, "those of a workload"),
        ({"overlap": True}, "those of a workload"),
        ({"pool": [toy_problem()] * 2, "backend": "measured"}, "of a pool are simulated"),
        (
            {"workload": linear_step(), "cluster": two_cores(), "memory": {"cpu": 1}},
            "leave memory out",
        ),
    ],
)
def test_a_backend_that_cannot_be_had_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlacementEnv(**given)


def test_the_reward_comes_from_the_given_backend() -> None:
    reward, info, _ = played(PlacementEnv(backend=Constant()), lambda: 1)
    assert reward == 0.0
    assert (info["step_s"], info["baseline_s"], info["parts"]) == (2.0, 2.0, {"all": 2.0})


@pytest.mark.parametrize("is_of_baseline", [False, True])
@pytest.mark.parametrize(
    ("times_s", "message"),
    [
        ([math.nan], "gave a step time of nan|gave 1 results for 3"),
        ([math.nan] * 3, "gave a step time of nan|gave 3 results for 1"),
        ([math.inf] * 3, "gave a step time of inf|gave 3 results for 1"),
        ([], "gave 0 results"),
    ],
)
def test_results_of_the_given_backend_are_checked(
    times_s: list[float], message: str, is_of_baseline: bool
) -> None:
    class Wrong(Constant):
        def evaluate(
            self, placements: Sequence[Placement], progress: Any = None
        ) -> list[StepResult]:
            results = super().evaluate(placements, progress)
            if (len(placements) > 1) is not is_of_baseline:
                return results
            return [replace(results[0], step_s=step_s) for step_s in times_s]

    with pytest.raises(ValueError, match=message):
        played(PlacementEnv(backend=Wrong()), lambda: 1)


def test_a_given_backend_can_evaluate() -> None:
    nothing: Any = object()
    with pytest.raises(TypeError, match=r"is no placer\.Backend"):
        PlacementEnv(backend=nothing)
    with pytest.raises(ValueError, match="of your own is for placer/Placement-v0"):
        gym.make(IDS[1], backend=Constant())


def test_ctrl_c_that_ends_measuring_ends_the_episode() -> None:
    class Stopped(Constant):
        interrupted = True

    made = PlacementEnv(backend=Stopped())
    with pytest.raises(KeyboardInterrupt):
        played(made, lambda: 1)
    made.close()


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_a_model_of_which_no_placement_can_be_run_is_refused_at_once() -> None:
    step = Workload.of(
        Plain(lambda m, x: m.linear(x) * float(x.sum()), linear=nn.Linear(4, 4)),
        (torch.ones(2, 4), torch.ones(2, 4)),
        F.mse_loss,
        optimizer="sgd",
    )
    with pytest.raises(ExtractionError, match="no placement can be run"):
        PlacementEnv(workload=step, cluster=two_cores(), backend="measured")


@pytest.mark.parametrize(("latency_s", "reward"), [(0.0, 0.0), (1e-3, math.log(1e-9 / 1e-3))])
def test_steps_without_any_time_have_a_reward(latency_s: float, reward: float) -> None:
    graph = new_graph("free")
    add_op(graph, "a", cost_s={"*": 0.0}, output_bytes=0)
    add_op(graph, "b", cost_s={"*": 0.0})
    add_edge(graph, "a", "b")
    made = gym.make(IDS[0], graph=graph, cluster=one_kind(2, latency_s=latency_s))
    devices = iter([0, 1])
    found, info, _ = played(made, lambda: next(devices))
    assert info["feasible"]
    assert found == pytest.approx(reward)
