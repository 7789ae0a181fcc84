from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from envs.simulator import INFEASIBLE_NS
from placer.policies import Policy, load, names
from placer.policies.network import FORMAT, RANGES
from placer.policies.pool import Clusters, draw_pool, exercise, families
from placer.policies.rewards import TOGETHER, WORST_REWARD, added_to_best, plain_rewards
from placer.policies.scheduler_env import SchedulerBatch, SchedulerEnv
from placer.policies.summary import FEATURES, summarise
from placer.policies.training import scores, train
from placer.policies.training.config import Ppo
from placer.policies.training.scores import untrained_scores
from placer.search.candidate import Kind
from placer.search.evaluator import Evaluator
from placer.search.heuristics import heuristics
from placer.search.list_scheduler.decoder import WEIGHT_COUNT
from placer.search.portfolio import Portfolio
from placer.search.request import Budget, SearchRequest
from tests.helpers.random_problems import random_problem
from tests.helpers.tiny_training import TINY


def made_up_policy(seed: int = 0) -> Policy:
    rng = np.random.default_rng(seed)
    sizes = (len(FEATURES), 8, WEIGHT_COUNT)
    return Policy(
        name="made-up",
        card={"format": FORMAT},
        feature_mean=rng.normal(size=len(FEATURES)).astype(np.float32),
        feature_deviation=rng.uniform(0.5, 2.0, len(FEATURES)).astype(np.float32),
        layers=tuple(
            (
                rng.normal(0.0, 0.3, (out, size)).astype(np.float32),
                rng.normal(0.0, 0.3, out).astype(np.float32),
            )
            for size, out in pairwise(sizes)
        ),
        log_std=np.full(WEIGHT_COUNT, -1.6, np.float32),
    )


def test_a_policy_that_was_saved_says_the_same(tmp_path: Path) -> None:
    policy = made_up_policy()
    policy.save(tmp_path / "here" / "made-up")
    again = load(str(tmp_path / "here" / "made-up"))
    assert again.name == "made-up"
    assert again.card == policy.card
    for seed in range(5):
        summary = np.random.default_rng(seed).normal(size=len(FEATURES))
        for ours, theirs in zip(policy.weights(summary), again.weights(summary), strict=True):
            assert (ours == theirs).all()
    assert sorted(p.name for p in (tmp_path / "here").iterdir()) == [
        "made-up.json",
        "made-up.safetensors",
    ]


def test_the_name_of_a_policy_may_have_dots(tmp_path: Path) -> None:
    policy = made_up_policy()
    policy.save(tmp_path / "mine.v2")
    for name in ("mine.v2", "mine.v2.safetensors", "mine.v2.json"):
        assert load(str(tmp_path / name)).name == "mine.v2"
    with pytest.raises(ValueError, match=r"mine\.v3\.safetensors does not exist"):
        load(str(tmp_path / "mine.v3"))
    with pytest.raises(ValueError, match="generalist"):
        load("generalst")
    with pytest.raises(ValueError, match="there is no policy ''"):
        load("")


def test_a_policy_keeps_the_proposals_of_other_seeds_beside_its_own(tmp_path: Path) -> None:
    first = made_up_policy()
    rest = tuple(
        replace(
            made_up_policy(seed),
            feature_mean=first.feature_mean,
            feature_deviation=first.feature_deviation,
        )
        for seed in range(1, 12)
    )
    replace(first, others=rest).save(tmp_path / "many")
    many = load(str(tmp_path / "many"))
    summary = np.random.default_rng(0).normal(size=len(FEATURES))
    means, deviations = many.proposals(summary)
    assert means.shape == deviations.shape == (12, WEIGHT_COUNT)
    for row, policy in enumerate((first, *rest)):
        assert (means[row] == policy.weights(summary)[0]).all()
        assert (deviations[row] == policy.weights(summary)[1]).all()


def test_files_that_are_no_policy_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    made_up_policy().save(path)
    card = path.with_suffix(".json")
    for text, message in [
        ("[]", "not an object"),
        ("{}", "the format is not"),
        ("{", "not JSON"),
        ('{"x": ' + 3000 * "[" + 3000 * "]" + "}", "nested too deeply"),
        (json.dumps({"format": FORMAT, "evaluations": [1]}), "evaluations"),
    ]:
        card.write_text(text)
        with pytest.raises(ValueError, match=message) as caught:
            load(str(path))
        assert str(caught.value).startswith(str(card))
    card.write_text(json.dumps({"format": FORMAT}))
    header = b'{"log_std": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}'
    content = len(header).to_bytes(8, "little") + header + bytes(2)
    path.with_suffix(".safetensors").write_bytes(content)  # a type that numpy lacks
    with pytest.raises(ValueError, match="dtype float32"):
        load(str(path))
    path.with_suffix(".safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a policy"):
        load(str(path))


def test_a_policy_of_another_format_is_told_apart_with_the_command_that_trains_it_anew(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine"
    replace(made_up_policy(), card={"format": "placer-policy/0"}).save(path)
    with pytest.raises(ValueError, match="'placer-policy/0', of another version") as caught:
        load(str(path))
    assert str(caught.value).endswith(f"placer train --config CONFIG.toml --out {path}")
    (tmp_path / "mine.toml").write_text("")
    with pytest.raises(ValueError, match=rf"--config {path}\.toml --out {path}$"):
        load(str(path))


@pytest.mark.parametrize("key", [*RANGES, "layers.0.weight", "layers.0.bias", "layers.1.weight"])
def test_tensors_of_another_shape_type_or_range_are_refused(key: str) -> None:
    tensors = made_up_policy().tensors()
    if key == "layers":
        with pytest.raises(ValueError, match="there are no layers"):
            Policy.of("x", {}, {k: v for k, v in tensors.items() if not k.startswith("layers.")})
        return
    low, high = RANGES[key.partition(".")[0]]
    own = tensors[key]
    for other in (
        np.zeros((), np.float32),
        own[..., None],
        own.astype(np.int64),
        own.astype(np.bool_),
        own.astype(np.complex64),
        *(
            np.full_like(own, value)
            for value in (math.nan, math.inf, 3e38, -3e38, low - 1, 2 * high)
        ),
    ):
        with pytest.raises(ValueError, match=key.partition(".")[0]) as caught:
            Policy.of("x", {}, tensors | {key: other})
        assert len(str(caught.value)) < 200
    with pytest.raises(ValueError, match=key.partition(".")[0]):
        Policy.of("x", {}, {k: v for k, v in tensors.items() if k != key})


def test_policies_at_the_ends_of_their_ranges_propose_finite_weights() -> None:
    tensors = made_up_policy().tensors()
    for end in (0, 1):
        filled = {
            k: np.full_like(v, RANGES[k.partition(".")[0]][end], np.float32)
            for k, v in tensors.items()
        }
        means, deviations = Policy.of("x", {}, filled).proposals(np.full(len(FEATURES), 1e3))
        assert np.isfinite(means).all()
        assert (deviations > 0).all()
        assert np.isfinite(deviations).all()


@pytest.mark.slow_repeats
@pytest.mark.parametrize("name", ["generalist", "synthetic-only"])
def test_the_shipped_policies_beat_heft_and_untrained_weights_on_unseen_graphs(name: str) -> None:
    assert name in names()
    pool = draw_pool(77, 21, 200) + draw_pool(79, 21, 300)
    alone, sampled = scores(load(name), pool)
    heft = [item.ratio(c.step_ns) for item in pool for c in item.known if c.kind is Kind.HEFT]
    assert np.log(alone).mean() < np.log(heft).mean()
    untrained = untrained_scores(math.exp(Ppo().log_std), pool)[1]
    assert np.log(sampled).mean() < np.log(untrained).mean() - 0.01


def test_a_search_with_a_policy_has_its_plan() -> None:
    problem = random_problem(2, ops=80, devices=4)
    found = Portfolio(load("generalist")).place(SearchRequest(problem, Budget(evaluations=60)))
    assert "policy" in {c.name for c in found}


@pytest.mark.parametrize("extreme", [{"ops": 1}, {"devices": 1}, {"memory_bytes": 0}, {}])
def test_a_summary_says_how_many_ops_and_devices_and_how_heuristics_compare(
    extreme: dict[str, Any],
) -> None:
    problem = random_problem(1, unequal=True, **extreme)
    evaluator = Evaluator(problem)
    summary = summarise(evaluator, heuristics(evaluator))
    assert summary.shape == (len(FEATURES),)
    assert np.isfinite(summary).all()
    assert summary[0] == pytest.approx(np.log(problem.op_count))
    assert summary[1] == pytest.approx(np.log2(problem.device_count))
    if not extreme:
        assert summary[19:21].min() == pytest.approx(1.0)


def test_a_pool_is_drawn_by_its_seed_and_families_take_turns() -> None:
    first, second = (draw_pool(5, 8, 120, ["layered", "grid"]) for _ in range(2))
    assert [item.family for item in first] == ["layered", "grid"] * 4
    for ours, theirs in zip(first, second, strict=True):
        assert (ours.summary == theirs.summary).all()
    with pytest.raises(ValueError, match="layered"):
        families(["layred"])


def test_unrelated_costs_are_drawn_for_every_op_and_device() -> None:
    def kinds_of(clusters: Clusters) -> list[int]:
        pool = draw_pool(5, 40, 100, ["grid"], clusters)
        return [len(np.unique(item.evaluator.problem.cost_ns, axis=1).T) for item in pool]

    counts = kinds_of(Clusters(devices=(6,), unrelated_share=0.5, unequal_share=0.5))
    assert {1, 2, 6} == set(counts)
    assert 8 < counts.count(6) < 32
    assert set(kinds_of(Clusters(devices=(6,)))) == {1, 2}


def test_samples_of_a_problem_are_rewarded_together() -> None:
    pool = draw_pool(5, 8, 100)
    batch = SchedulerBatch(pool, 3 * TOGETHER, seed=3, best_of=4)
    observations = batch.reset().reshape(3, TOGETHER, -1)
    assert (observations == observations[:, :1]).all()
    numbers = batch._current.copy()
    actions = np.random.default_rng(0).uniform(-1, 1, (3 * TOGETHER, WEIGHT_COUNT))
    _, rewards, done, infos = batch.step(actions.astype(np.float32))
    assert done.all()
    plain = plain_rewards(len(pool)).of(numbers, np.array([info["ratio"] for info in infos]))
    assert rewards.tolist() == added_to_best(plain.reshape(3, -1), 4).ravel().tolist()


def test_what_does_not_fit_is_the_worst_and_a_problem_where_nothing_fits_is_refused() -> None:
    problem = random_problem(3, devices=4, memory_bytes=12_000_000)
    environment = SchedulerEnv(pool=[exercise(problem)])
    fits = set()
    for seed in range(20):
        environment.reset(seed=0)
        action = np.random.default_rng(seed).uniform(-1, 1, WEIGHT_COUNT).astype(np.float32)
        _, reward, _, _, info = environment.step(action)
        fits.add(info["step_ns"] < INFEASIBLE_NS)
        assert (reward == WORST_REWARD) == (info["step_ns"] == INFEASIBLE_NS)
    assert fits == {True, False}
    with pytest.raises(ValueError, match="no heuristic placement fits into memory"):
        exercise(random_problem(3, devices=4, memory_bytes=10_000))


def test_zero_action_is_heft_in_the_environment() -> None:
    item = exercise(random_problem(3, devices=4), "made-up")
    environment = SchedulerEnv(pool=[item])
    environment.reset(seed=0)
    _, reward, ended, _, info = environment.step(np.zeros(WEIGHT_COUNT, np.float32))
    assert ended
    heft = next(c.step_ns for c in item.known if c.kind is Kind.HEFT)
    assert info == {"step_ns": heft, "reference_ns": item.reference_ns, "family": "made-up"}
    assert reward == pytest.approx(-10.0 * np.log(heft / item.reference_ns))


def test_the_same_seed_draws_the_same_problems() -> None:
    pool = draw_pool(5, 6, 100)
    observed = []
    for seed in (1, 1, 2):
        environment = SchedulerEnv(pool=pool)
        first = environment.reset(seed=seed)[0]
        observed.append(np.stack([first, *(environment.reset()[0] for _ in range(8))]))
    assert (observed[0] == observed[1]).all()
    assert (observed[0] != observed[2]).any()


def test_the_batch_rewards_as_the_plain_environment_does() -> None:
    pool = draw_pool(5, 4, 100)
    batch = SchedulerBatch(pool, 16, seed=3)
    observations = batch.reset()
    plain = [SchedulerEnv(pool=[item]) for item in pool]
    numbers = [
        int(np.flatnonzero((batch._observations == row).all(axis=1))[0]) for row in observations
    ]
    actions = np.random.default_rng(0).uniform(-1, 1, (16, WEIGHT_COUNT)).astype(np.float32)
    _, rewards, done, infos = batch.step(actions)
    assert done.all()
    for row, number in enumerate(numbers):
        plain[number].reset(seed=0)
        assert rewards[row] == np.float32(plain[number].step(actions[row])[1])
        assert (infos[row]["terminal_observation"] == observations[row]).all()


def test_learning_leaves_torchs_threads_as_they_were(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    try:
        train(tmp_path / "tiny", TINY)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
