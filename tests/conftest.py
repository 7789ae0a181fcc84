"""Hypothesis profiles and fixtures shared by test files."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from graphs.graph_file import save_graph
from graphs.synthetic.shapes import layered
from tests.helpers.clusters import CLUSTER
from tests.helpers.folders import ROOT
from tests.helpers.second_devices import (  # before the first backward pass of any test
    FAKE,
    REAL,
    VDEV,
    measure_briefly,
    opened_device,
)

# A shell makes its background jobs ignore Ctrl-C, which tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Results of placed models are compared exactly; on some processors the last bits of MKL's matrix
# products depend on where their operands lie in memory.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

# Modules of tests compute when they are imported, too; see one_thread_of_torch.
torch.set_num_threads(1)

# Every run draws the same examples, whatever the machine's load. `--hypothesis-profile=fuzz` draws
# new ones; it overrides the profile loaded here, because pytest reads it later.
settings.register_profile(
    "repeatable",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "fuzz", settings.get_profile("repeatable"), derandomize=False, max_examples=1000
)
settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but the first example of the tests that are marked ``slow_repeats`` as slow."""
    seen: set[str] = set()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if item.get_closest_marker("slow_repeats") and not item.get_closest_marker("slow"):
            if name in seen:
                item.add_marker(pytest.mark.slow)
            seen.add(name)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt the million objects of imports from garbage collection, and fix hypothesis's draws."""
    gc.collect()
    gc.freeze()
    if session.config.getoption("hypothesis_profile", None) is None:
        # Some draws are numbers in the source of modules that tests before have imported: other
        # examples in every order of tests. There is no public way to turn that off.
        assert {"_get_local_constants", "_local_constants"} <= vars(providers).keys()
        vars(providers)["_get_local_constants"] = lambda: providers._local_constants


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line per skip reason instead of one per test."""
    skipped = terminalreporter.getreports("skipped")
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"NOT RUN: {count} x {reason}", yellow=True)


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect() -> None:
    """Exempt what earlier modules imported: on torch's devices every measured turn collects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the measurements of tests out of the user's cache, and the user's cache out of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLACER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def same_free_memory() -> Iterator[None]:
    """Let devices of this machine be as large whatever else runs on it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("envs.hardware.discover.available_memory_bytes", lambda: 64 << 30)
        yield


@pytest.fixture(scope="session", autouse=True)
def brief_measurements() -> Iterator[None]:
    """Measure on cores in few runs: tests need times that are real, not that are accurate."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WARM_UP", "REPEATS", "HAND_OFF_REPEATS"):
            patch.setattr(f"envs.costs.calibrate.{name}", 1)
        patch.setattr("envs.measured.TURN_S", 0.0)
        patch.setattr("envs.core_runtime.runtime.FINAL_S", 0.0)
        patch.setattr("placer.parallel.trials.TRIALS_S", 0.0)
        patch.setattr("placer.parallel.trials.MOST_STEPS", 1)
        patch.setattr("placer.parallel.collectives.PAUSE_S", 0.0)
        yield


@pytest.fixture(autouse=True)
def one_thread_of_torch() -> Iterator[None]:
    """Let torch compute with one thread: the number changes the last bits of results."""
    torch.set_num_threads(1)
    yield
    assert torch.get_num_threads() == 1, "torch has another number of threads after this test"


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Seed the generators of models and inputs, so that the order of tests does not matter."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def same_dynamo() -> None:
    """Reset dynamo, whose list of skipped functions would change how later tests are traced."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel of this repository without network access."""
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--wheel-dir", str(out)]
    offline = ["--no-build-isolation", "--no-index"]
    subprocess.run([*build, *offline], check=True, capture_output=True)
    [wheel] = out.glob("*.whl")
    return wheel


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Return a function that writes a graph and a cluster of two devices."""

    def write(memory_bytes: int = 1 << 40) -> tuple[Path, Path]:
        graph, cluster = tmp_path / "graph.json", tmp_path / "cluster.toml"
        save_graph(layered(np.random.default_rng(0), ops=40, width=6), graph)
        cluster.write_text(CLUSTER.format(memory=memory_bytes))
        return graph, cluster

    return write


@pytest.fixture
def second_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    """Provide a second torch device, quick measurements, and a cache that is kept for one test.

    It is a fake ``cuda:0``, for tests marked ``gpu`` a real one, or what a test gives with
    ``indirect=True``.
    """
    from envs.torch_runtime import runtime

    monkeypatch.setenv("PLACER_CACHE", str(tmp_path / "cache"))
    measure_briefly(monkeypatch, large_bytes=1 << 20)
    is_real = request.node.get_closest_marker("gpu") is not None
    if not is_real:
        monkeypatch.setattr(runtime, "LIBRARY_BYTES", 0)  # fake CUDA has no libraries
    kind = getattr(request, "param", "cuda" if is_real else FAKE)
    with opened_device(kind, request.node.name):
        yield


@pytest.fixture(params=[VDEV, FAKE])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    with opened_device(request.param, request.node.name) as found:
        yield found


@pytest.fixture(params=[REAL, FAKE])
def cuda(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Provide a CUDA device: a real one, or a fake one."""
    with opened_device(request.param, request.node.name) as found:
        yield found
