"""Op costs on a cluster: measured once, then cached, and modelled for devices elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch
from torch import nn

from envs.core_runtime import CoreRuntime
from envs.costs import ops as module
from envs.costs.cache import CostCache, Session
from envs.costs.cached_costs import (
    MeasuredCosts,
    OpCosts,
    conditions_of,
    session_of,
    with_op_costs,
)
from envs.costs.hand_over import hand_over_signature
from envs.costs.ops import op_signatures, profile_runs
from envs.costs.roofline import check_cluster
from envs.hardware.cluster import Cluster, Device
from envs.hardware.discover import discover
from graphs.extract import Extraction, Workload, extract
from graphs.graph import add_op, attributes_of, new_graph
from tests.helpers import tiny_models

CORES = sorted(os.sched_getaffinity(0))
CORE = f"core:{CORES[0]}"
Profile: TypeAlias = Callable[[Sequence[Device]], dict[str, np.ndarray]]
GPU = Device(
    name="gpu:0", kind="gpu", memory_bytes=0, peak_flop_per_s=1e12, bandwidth_bytes_per_s=1e11
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CostCache:
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path))
    return CostCache()


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the devices of each profiling run."""
    seen: list[list[str]] = []

    def spy(extraction: Extraction, devices: list[Device], **options: object) -> object:
        seen.append([device.name for device in devices])
        return profile_runs(extraction, devices, repeats=3)

    monkeypatch.setattr(module, "profile_runs", spy)
    return seen


def op_costs(
    extraction: Extraction, cluster: Cluster, *, fresh: bool = False
) -> dict[str, OpCosts]:
    return CoreRuntime(extraction, cluster).op_costs(cluster, fresh=fresh)


def of(model: nn.Module, *shape: int) -> Extraction:
    return extract(Workload.of(model, torch.zeros(*shape), training=False))


# --- signatures


@pytest.mark.slow
def test_shape_dtype_layout_arguments_and_shared_inputs_make_a_difference() -> None:
    class Calls(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = x + 1
            return y, y * y, y * x, y + 2, torch.softmax(y, 0), torch.softmax(y, 1), y.t().exp()

    plain = op_signatures(of(Calls(), 4, 4).program)
    assert len(set(plain)) == len(plain) == 7
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    first, second, last = op_signatures(of(layers, 2, 4).program)
    assert first == second
    assert last != first, "its output is a result of the step, which takes time to hand over"
    assert len(set(op_signatures(of(layers, 2, 4).program, alone=True))) == 1
    assert set(plain).isdisjoint(op_signatures(of(Calls(), 4, 5).program))
    doubled = extract(Workload.of(Calls(), torch.zeros(4, 4).double(), training=False))
    assert set(plain).isdisjoint(op_signatures(doubled.program))
    step = extract(tiny_models.conv_net())
    halves = zip(step.graph, op_signatures(step.program), strict=True)
    backward = [signature for op, signature in halves if "convolution_backward." in op]
    assert len(set(backward)) == len(backward) > 1, "they differ by what is read of them"
    turned = extract(Workload.of(Calls(), torch.zeros(4, 4).t(), training=False))
    assert set(plain) != set(op_signatures(turned.program))


# --- measured, then cached


def test_a_session_takes_the_median_over_runs_and_ops_of_a_signature() -> None:
    runs_s = np.array([[1.0, 2.0, 9.0], [1.0, 4.0, 9.0], [3.0, 6.0, 9.0]])
    measured = session_of(runs_s, ["a", "a", "b"], "2026-01-01")
    assert measured.cost_s == {"a": 2.5, "b": 9.0}
    assert measured.spread == pytest.approx((16.0 - 13.0) / 14.0)
    assert (measured.runs, measured.measured) == (3, "2026-01-01")


def test_the_noise_of_a_single_run_is_unknown_and_ops_that_did_not_fit_do_not_count() -> None:
    measured = session_of(
        np.array([[1.0, np.nan, 3.0, np.nan]]), ["a", "a", "b", "c"], "2026-01-01"
    )
    assert measured.spread is None
    assert (measured.cost_s["a"], measured.cost_s["b"]) == (1.0, 3.0)
    assert np.isnan(measured.cost_s["c"])


@pytest.mark.usefixtures("cache")
def test_cached_times_include_the_launch_that_costs_leave_out() -> None:
    (device,) = discover(CORE).devices
    costs = MeasuredCosts(
        profile=lambda devices: {device.kind: np.full((3, 1), 5.0) for device in devices},
        method="",
        signatures=["a"],
        launched=True,
    )
    measured = costs.costs({"core": replace(device, launch_s=2.0)})
    assert measured["core"].cost_s.tolist() == [5.0]
    cached = costs.costs({"core": replace(device, launch_s=3.0)})
    assert cached["core"].cost_s.tolist() == [5.0 + 2.0 - 3.0]


def test_what_was_measured_often_enough_is_not_measured_again(
    cache: CostCache, profiled: list[list[str]]
) -> None:
    extraction = extract(tiny_models.conv_net())
    cluster = discover(CORE)
    first = op_costs(extraction, cluster)["core"]
    assert profiled == [[CORE]]
    assert {source.partition(" 20")[0] for source in first.sources} == {"measured"}
    (holding,) = cache.holdings()
    assert holding.signatures == len(set(op_signatures(extraction.program)))
    for _ in range(2):  # a noisy machine measures three times
        op_costs(extraction, cluster)
    times = len(profiled)
    known = op_costs(extraction, cluster)["core"]
    assert len(profiled) == times
    assert {source.partition(" 20")[0] for source in known.sources} == {"cached, measured"}


def test_fresh_measures_anew_and_keeps_it(cache: CostCache, profiled: list[list[str]]) -> None:
    extraction = extract(tiny_models.conv_net())
    stored(cache, extraction, {})
    measured = op_costs(extraction, discover(CORE), fresh=True)["core"]
    assert {source.partition(" 20")[0] for source in measured.sources} == {"measured"}
    assert (measured.cost_s != 1.0).all()
    assert profiled == [[CORE]]
    assert cache.holdings()[0].sessions == 2


def test_ops_that_were_measured_on_different_days_say_so(
    cache: CostCache, profiled: list[list[str]]
) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    extraction = of(layers, 2, 4)
    stored(cache, extraction, {1: "2026-02-02"})
    measured = op_costs(extraction, discover(CORE))["core"]
    days = ["2026-01-01", "2026-02-02", "2026-01-01"]
    assert list(measured.sources) == [
        f"cached, measured {day} in runs of the whole step" for day in days
    ]
    assert measured.cost_s.tolist() == [1.0, 1.0, 1.0]
    assert profiled == []


def stored(cache: CostCache, extraction: Extraction, days: dict[int, str]) -> None:
    """Store one second for every op, measured on the first of January except for some ops."""
    (device,) = discover(CORE).devices
    on_day: dict[str, dict[str, float]] = {}
    for op, signature in enumerate(op_signatures(extraction.program)):
        on_day.setdefault(days.get(op, "2026-01-01"), {})[signature] = 1.0
    for day, cost_s in on_day.items():
        session = Session(cost_s=cost_s, runs=5, spread=0.0, measured=day)
        cache.store(conditions_of(device), session)


# --- described


@pytest.mark.usefixtures("cache")
def test_kinds_that_are_here_are_measured_and_others_get_the_roofline(
    profiled: list[list[str]],
) -> None:
    extraction = extract(tiny_models.conv_net())
    core = Device(name=CORE, kind="processor", memory_bytes=0)
    away = replace(GPU, name="core:9999", kind="processor")  # of a kind that this machine has
    cluster = Cluster(name="both", devices=(GPU, away, core))
    costs = op_costs(extraction, cluster)
    assert costs.keys() == {"processor", "gpu"}
    assert profiled == [[CORE]]
    nodes = [attributes_of(extraction.graph, op_id) for op_id in extraction.graph]
    by_hand = [max(node["flops"] / 1e12, node["moved_bytes"] / 1e11) for node in nodes]
    assert costs["gpu"].cost_s.tolist() == pytest.approx(by_hand)
    assert set(costs["gpu"].sources) == {"roofline of the cluster's rates"}
    assert all(source.startswith("measured") for source in costs["processor"].sources)


def test_a_device_that_is_not_here_needs_rates_even_if_one_of_its_kind_is() -> None:
    (core,) = discover(CORE).devices
    cluster = Cluster(name="both", devices=(core, replace(core, name="core:9999")))
    with pytest.raises(ValueError, match=r"no device core:9999.*add to .* peak_flop_per_s = "):
        check_cluster(cluster)


@pytest.mark.usefixtures("cache")
def test_a_model_without_memory_for_its_parameters_is_modelled_on_described_devices() -> None:
    with torch.device("meta"):
        model = nn.Linear(50_000, 50_000)
    extraction = extract(Workload.of(model, torch.zeros(4, 50_000, device="meta"), training=False))
    (cost_s,) = op_costs(extraction, Cluster(name="gpu", devices=(GPU,)))["gpu"].cost_s
    moved_bytes = 4 * (50_000 * 50_000 + 50_000 + 2 * 4 * 50_000)
    assert cost_s == pytest.approx(moved_bytes / 1e11)


# --- under load


def profile_of(times_s: dict[str, list[float]], seen: list[list[str]]) -> Profile:
    def profile(devices: Sequence[Device]) -> dict[str, np.ndarray]:
        seen.append([device.name for device in devices])
        return {kind: np.tile(row, (3, 1)) for kind, row in times_s.items()}

    return profile


@pytest.mark.usefixtures("cache")
def test_loaded_costs_are_cached_next_to_those_alone() -> None:
    (device,) = discover(CORE).devices
    seen: list[list[str]] = []
    times_s = {"core": [5.0, 2.0], "core, 2 at once": [7.0, 1.0]}
    costs = MeasuredCosts(
        profile=profile_of(times_s, seen), method="", signatures=["a", "b"], at_once={"core": 2}
    )
    devices = {"core": device}
    measured = costs.costs(devices)["core"]
    cached = costs.costs(devices)["core"]
    known = costs.known(devices)
    assert known is not None
    for found in (measured, cached, known["core"]):
        assert found.cost_s.tolist() == [5.0, 2.0]
        assert found.loaded_s is not None
        assert found.loaded_s.tolist() == [7.0, 2.0]  # none below the cost
    assert len(seen) == 1
    graph = new_graph("two")
    for name in "ab":
        add_op(graph, name, cost_s={})
    found_graph = with_op_costs(graph, {"core": measured})
    nodes = [attributes_of(found_graph, name) for name in "ab"]
    assert [node["loaded_cost_s"] for node in nodes] == [{"core": 7.0}, {"core": 2.0}]


@pytest.mark.usefixtures("cache")
def test_costs_that_were_only_measured_alone_are_measured_again_where_others_compute() -> None:
    (device,) = discover(CORE).devices
    seen: list[list[str]] = []
    times_s = {"core": [5.0], "core, 2 at once": [7.0]}
    costs = MeasuredCosts(profile=profile_of(times_s, seen), method="", signatures=["a"])
    alone = costs.costs({"core": device})["core"]
    assert alone.loaded_s is None
    loaded = replace(costs, at_once={"core": 2})
    assert loaded.known({"core": device}) is None
    assert loaded.costs({"core": device})["core"].loaded_s is not None
    assert loaded.known({"core": device}) is not None
    assert replace(costs, at_once={"core": 3}).known({"core": device}) is None
    assert len(seen) == 2


@pytest.mark.usefixtures("cache")
def test_factors_scale_loaded_costs_too() -> None:
    (device,) = discover(CORE).devices
    times_s = {"core": [5.0], "core, 2 at once": [7.0]}
    costs = MeasuredCosts(
        profile=profile_of(times_s, []),
        method="",
        signatures=["a"],
        classes=["copy"],
        at_once={"core": 2},
    )
    costs.costs({"core": device})
    costs.keep_factors({"core": device}, {"core": {"copy": 1.2}})
    fitted = costs.costs({"core": device})["core"]
    assert fitted.loaded_s is not None
    assert (fitted.cost_s.tolist(), fitted.loaded_s.tolist()) == ([6.0], [7.0 * 1.2])


def test_runs_are_scaled_to_their_median() -> None:
    runs = [np.array([1.0, 4.0]), np.array([2.0, 2.0]), np.array([3.0, 3.0])]
    scaled = module._to_median_run(runs)  # medians 2 and 3 of ops, 5 of runs: nothing to do
    assert scaled.tolist() == [[1.0, 4.0], [2.0, 2.0], [3.0, 3.0]]
    scaled = module._to_median_run([np.array([1.0, 2.0]), np.array([2.0, 1.0])] * 2)
    assert np.median(scaled, axis=0).sum() == np.median(scaled.sum(axis=1)) == 3.0


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_the_step_runs_alone_and_on_all_cores_at_once() -> None:
    extraction = extract(tiny_models.conv_net())
    devices = discover(",".join(f"core:{core}" for core in CORES[:2])).devices
    reports: list[tuple[int, int]] = []
    runs_s = profile_runs(
        extraction,
        devices,
        beside=devices,
        repeats=3,
        progress=lambda *at: reports.append(at),
    )
    ops = extraction.program.op_count
    assert runs_s.keys() == {"core", "core, 2 at once"}
    assert runs_s["core"].shape == (3, ops)
    assert len(runs_s["core, 2 at once"]) >= 4  # in two rounds, at least one on each core
    for times_s in runs_s.values():
        assert times_s.shape[1] == ops
        assert (np.median(times_s, axis=0) > 0).all()
    assert reports == [(i + 1, 5) for i in range(5)]


@pytest.mark.slow_repeats
@pytest.mark.parametrize(("long_step_s", "repeats"), [(np.inf, 5), (0.0, 3)])
def test_long_steps_are_run_less_often(
    long_step_s: float, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONG_STEP_S", long_step_s)
    extraction = extract(tiny_models.conv_net())
    reports: list[tuple[int, int]] = []
    runs_s = profile_runs(
        extraction, discover(CORE).devices, progress=lambda *at: reports.append(at)
    )
    assert runs_s["core"].shape == (repeats, extraction.program.op_count)
    assert reports == [(1, 7), (2, 7), *((2 + i, 2 + repeats) for i in range(1, repeats + 1))]


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.usefixtures("cache")
def test_two_cores_get_loaded_costs_and_one_core_none() -> None:
    extraction = extract(tiny_models.conv_net())
    pair = op_costs(extraction, discover(",".join(f"core:{core}" for core in CORES[:2])))["core"]
    assert pair.loaded_s is not None
    assert (pair.loaded_s >= pair.cost_s).all()
    assert op_costs(extraction, discover(CORE))["core"].loaded_s is None


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_cores_that_the_step_may_not_fit_on_do_not_run_it_at_once(cache: CostCache) -> None:
    extraction = extract(tiny_models.conv_net())
    signatures = op_signatures(extraction.program)
    names = ",".join(f"core:{core}" for core in CORES[:2])
    roomy = discover(names)
    small = replace(
        roomy, devices=tuple(replace(device, memory_bytes=100) for device in roomy.devices)
    )
    session = Session(
        cost_s=dict.fromkeys([*signatures, hand_over_signature(extraction)], 1.0),
        runs=5,
        spread=0.0,
        measured="2026-01-01",
    )
    cache.store(conditions_of(roomy.devices[0]), session)
    assert CoreRuntime(extraction, roomy).known_costs(roomy) is None
    known = CoreRuntime(extraction, small).known_costs(small)
    assert known is not None
    assert known.ops["core"].loaded_s is None
    assert known.hand_over_s == 1.0
