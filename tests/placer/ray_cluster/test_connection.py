"""Ray clusters of several nodes on this machine: one dies, one is not as it should be, none is."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numba
import pytest

from placer.cli.main import main
from placer.job import SearchConfig
from placer.pipeline import optimize_problem
from placer.progress import Silent
from placer.ray_cluster.connection import MOST_DEATHS, RayCluster, check_versions, versions
from placer.ray_cluster.islands import Islands
from placer.result import Result
from placer.search.registry import placer_named
from placer.search.request import Budget, SearchRequest
from placer.startup import VERSION
from tests.helpers.folders import ROOT
from tests.helpers.random_problems import random_problem
from tests.helpers.ray_nodes import InTurn, ray_nodes

PROBLEM = random_problem(3, ops=1000, devices=6)
MOST_S = 10.0
"""Time in which a cluster that cannot be used is reported."""


def searched(address: str, budget: str = "16000e", progress: Silent | None = None) -> Result:
    config = SearchConfig(
        workers=f"ray://{address}", budget=budget, policy=None, measure=False, seed=4
    )
    return optimize_problem(PROBLEM, config, progress)


class Killer(Silent):
    """Kills a node while the first round of a search runs, and waits until that is known."""

    def __init__(self, cluster: Any, node: Any) -> None:
        self.ray: Any = pytest.importorskip("ray")
        self.processors: list[float] = []
        self.thread = threading.Thread(target=cluster.remove_node, args=(node, False))

    def advance(self, share: float, text: str = "") -> None:
        if not text.startswith("round"):
            return
        self.processors.append(self.ray.cluster_resources()["CPU"])
        if self.thread.ident is None:
            self.thread.start()
            while self.ray.cluster_resources()["CPU"] > 2:
                time.sleep(0.05)


@pytest.mark.slow
def test_a_search_gives_the_same_on_three_nodes_of_which_one_dies_and_on_two() -> None:
    request = SearchRequest(PROBLEM, Budget(evaluations=16_000), seed=4)
    expected = Islands(placer_named("portfolio"), InTurn()).place(request)
    with ray_nodes(3) as (cluster, others):
        killer = Killer(cluster, others[1])
        found = searched(cluster.address, progress=killer)
        killer.thread.join()
        assert killer.processors[0] == 3
        assert killer.processors[-1] == 2
        again = searched(cluster.address)
    kept = [(each.name, each.step_ns, each.devices.tolist()) for each in expected]
    for result in (found, again):
        assert [(c.name, c.step_ns, c.devices.tolist()) for c in result.candidates] == kept


def with_another(name: str, folder: Path) -> Path:
    """Return a folder with version 0.1 of a package, for the import path of a node."""
    if name == "torch":
        other = folder / "torch-0.1.dist-info"
        other.mkdir(parents=True)
        (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.1\n")
        return folder
    for package in ("placer", "envs", "graphs"):
        shutil.copytree(ROOT / package, folder / package)
    startup = folder / "placer" / "startup.py"
    startup.write_text(startup.read_text().replace(f'VERSION = "{VERSION}"', 'VERSION = "0.1"'))
    return folder


def refused(address: str, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the sentence in which a search on a cluster is refused."""
    graph, cluster = map(str, files)
    command = ["optimize", graph, "--cluster", cluster, "--out", f"{graph}.placement"]
    began = time.monotonic()
    assert main([*command, "--workers", f"ray://{address}", "--budget", "50e", "--quiet"]) == 2
    assert time.monotonic() - began < MOST_S
    lines = capsys.readouterr().err.splitlines()
    [line] = [each for each in lines if each.startswith("placer:")]
    return line


@pytest.mark.slow
def test_a_node_with_another_version_is_named(
    tmp_path: Path,
    files: Callable[..., tuple[Path, Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # Ray puts this folder before the import path of nodes
    with ray_nodes(1) as (cluster, _):
        for name in ("placer", "torch"):
            place = {"PYTHONPATH": str(with_another(name, tmp_path / name))}
            odd = cluster.add_node(num_cpus=1, env_vars=place)
            sentence = refused(cluster.address, files(), capsys)
            node = rf"placer: node \S+:{odd.node_manager_port} of the Ray cluster"
            assert re.match(rf"{node} has {name} 0\.1, but this process has {name} \d", sentence)
            cluster.remove_node(odd)


@pytest.mark.slow
def test_an_address_from_which_nothing_comes_back_is_named(
    files: Callable[..., tuple[Path, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray")
    with ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # what waits to be accepted: the next one has no answer
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        address = f"127.0.0.1:{full.getsockname()[1]}"
        assert f"nothing answers at {address}" in refused(address, files(), capsys)


@pytest.mark.slow
def test_tasks_are_cancelled_or_fail_and_handlers_of_signals_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with RayCluster() as cluster:
        assert signal.getsignal(signal.SIGTERM) is before
        shared = cluster.share(30.0, _same)
        began = time.monotonic()
        ends = iter([False] * 5 + [True] * 100)
        assert cluster.run(_sleep, shared, [()] * 4, lambda _: next(ends)) == [None] * 4
        # The processors are free again.
        assert cluster.run(_same, shared, [()]) == [30.0]
        assert time.monotonic() - began < 20.0
        with pytest.raises(ZeroDivisionError):
            cluster.run(_fail, shared, [()])
        # What only this process can import, as a plug-in that is not installed there.
        (tmp_path / "only_here.py").write_text("class Thing: pass")
        monkeypatch.syspath_prepend(tmp_path)
        thing = importlib.import_module("only_here").Thing()
        with pytest.raises(OSError, match=r"node [\d.]+ .* cannot run the task: .*only_here"):
            cluster.run(_same, cluster.share(thing, _same), [()])


@pytest.mark.slow
def test_a_task_whose_processes_die_is_repeated_a_few_times(tmp_path: Path) -> None:
    with RayCluster() as cluster:
        shared = cluster.share(tmp_path, _same)
        names = [("first", MOST_DEATHS - 1), ("second", 0)]
        assert cluster.run(_die, shared, names) == ["first", "second"]
        with pytest.raises(OSError, match="on the Ray cluster died 5 times: is there memory"):
            cluster.run(_die, shared, [("third", MOST_DEATHS)])
    assert len([*tmp_path.glob("third*")]) == MOST_DEATHS


def _die(folder: Path, name: str, times: int) -> str:
    died = len([*folder.glob(f"{name}*")])
    if died < times:
        (folder / f"{name}{died}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return name


def _same(value: Any) -> Any:
    return value


def _sleep(seconds: float) -> None:
    for _ in range(round(seconds / 0.01)):
        time.sleep(0.01)


def _fail(value: float) -> float:
    return value / 0


@pytest.mark.slow
def test_a_cluster_of_this_machine_is_not_reached_from_others() -> None:
    ray: Any = pytest.importorskip("ray")
    with RayCluster():
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        assert host == "127.0.0.1"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # sends nothing, but chooses the source address
            except OSError:
                pytest.skip("no network")
            own = probe.getsockname()[0]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((own, int(port)), timeout=10)


@pytest.mark.slow
def test_what_answers_but_is_no_cluster_is_reported_in_time() -> None:
    pytest.importorskip("ray")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        began = time.monotonic()
        with pytest.raises(ConnectionError, match="no head of a Ray cluster"):
            RayCluster(f"127.0.0.1:{listening.getsockname()[1]}")
        assert time.monotonic() - began < MOST_S


@pytest.mark.slow
def test_an_address_that_does_not_answer_is_reported_at_once() -> None:
    pytest.importorskip("ray")
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=f"nothing answers at {address}"):
            RayCluster(f"ray://{address}")


@pytest.mark.parametrize("address", ["here", "ray://here", "here:there"])
def test_what_is_no_address_is_refused(address: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(ValueError, match="no address of a Ray cluster"):
        RayCluster(address)


def test_other_versions_are_named_with_their_node() -> None:
    ours = {"placer": "0.2.0", "torch": "2.13.0"}
    check_versions("a:1", ours, dict(ours))
    with pytest.raises(ValueError, match=r"node a:1 .* has placer 0\.1\.0, but this .* 0\.2\.0"):
        check_versions("a:1", ours, {**ours, "placer": "0.1.0"})


def test_versions_are_those_of_all_that_computes_plans() -> None:
    assert versions()["numba"] == numba.__version__
    assert {"placer", "torch", "numpy"} < versions().keys()
