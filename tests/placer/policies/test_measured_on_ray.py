"""Training by measured steps on Ray nodes of this machine, one of which dies in the middle."""

from __future__ import annotations

import csv
import os
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from envs.hardware.discover import present
from placer.cli.main import main
from placer.policies import load
from placer.policies.measured_decoders import MeasuredDecoders, OnNodes, OnThisMachine
from placer.policies.pool import exercise
from placer.policies.training import Length, config_of, train
from placer.ray_cluster.connection import RayCluster
from placer.ray_cluster.measuring import MeasuringNodes
from placer.ray_cluster.node_step import Runs
from tests.helpers.measured_machine import HANGS, Machine, Order, TimedStep
from tests.helpers.random_problems import random_problem
from tests.helpers.ray_nodes import kill, ray_nodes
from tests.helpers.tiny_training import curve
from tests.placer.policies.test_measured_training import MODEL

two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
pytestmark = [pytest.mark.slow, two_cores]
MOST_S = 10.0
FACTORS = (1.0, 3.0)
PROBLEM = random_problem(3, ops=60, devices=2)


def trained(
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    address: str = "",
    doomed: str = "",
    progress: Any = None,
) -> Counter[str]:
    """Return how many placements each node measured in a training, "" for this machine."""
    if address:
        cluster = RayCluster(address)
        step = TimedStep(PROBLEM, FACTORS, out.parent, doomed, after=6)
        nodes = MeasuringNodes(cluster, present(("core:0", "core:1")))
        nodes.load(step, groups=4)
        devices: Any = OnNodes(cluster, nodes, Runs())
    else:
        devices = OnThisMachine(Machine(PROBLEM, FACTORS, noise=0.0))  # type: ignore[arg-type]
    decoders = MeasuredDecoders(exercise(PROBLEM, "measured"), Order(), devices)  # type: ignore[arg-type]
    monkeypatch.setattr(MeasuredDecoders, "of", lambda *_: decoders)
    measured: Any = (None, None)
    config = config_of(backend="measured", length=Length(decodes=48))
    train(out, config, measured=measured, progress=progress)
    return decoders.measured


def test_a_training_on_three_nodes_of_which_one_dies_gives_the_same_as_on_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = trained(tmp_path / "alone", monkeypatch)
    with ray_nodes(3, processors=2) as (cluster, others):
        doomed = others[1]
        killed_at: list[float] = []

        def kill_what_hangs() -> None:
            while not (tmp_path / HANGS).exists() and not ended.is_set():
                time.sleep(0.05)
            cluster.remove_node(doomed, False)
            killed_at.append(shares[-1])

        shares, ended = [0.0], threading.Event()
        killer = threading.Thread(target=kill_what_hangs)
        killer.start()
        try:
            three = trained(
                tmp_path / "three",
                monkeypatch,
                cluster.address,
                doomed.node_id,
                lambda share, _: shares.append(share),
            )
        finally:
            ended.set()
            killer.join()
        two = trained(tmp_path / "two", monkeypatch, cluster.address)
    assert (tmp_path / HANGS).exists()
    assert 0.0 < killed_at[0] < 1.0
    assert len(three) == 3
    assert len(two) == 2
    assert three.total() == two.total()
    lost = {*three} - {*two}
    assert len(lost) == 1
    assert 0 < three[lost.pop()] < three.total() / 3
    assert curve(tmp_path / "three") == curve(tmp_path / "two") == curve(tmp_path / "alone")
    assert {*alone} == {""}


def test_real_steps_are_measured_on_three_nodes_of_which_one_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "layers.py").write_text(MODEL)
    made: list[MeasuredDecoders] = []
    of, costs = MeasuredDecoders.of, MeasuredDecoders.costs

    def kept(*arguments: Any) -> MeasuredDecoders:
        made.append(of(*arguments))
        (tmp_path / "layers.py").unlink()  # nodes need not have the file
        return made[0]

    alive: list[bool] = []  # before each batch

    def killing(own: MeasuredDecoders, numbers: Any, weights: Any) -> Any:
        alive.append(killer.ident is None)
        if len(own.measured) == 3 and alive[-1]:
            killer.start()
        found = costs(own, numbers, weights)
        if killer.ident is not None:
            killer.join()
        return found

    monkeypatch.setattr(MeasuredDecoders, "of", kept)
    monkeypatch.setattr(MeasuredDecoders, "costs", killing)
    with ray_nodes(3, processors=2) as (cluster, others):
        killer = threading.Thread(target=kill, args=(cluster, others[1]))
        command = ["train", "--backend", "measured", "--target", f"{tmp_path / 'layers.py'}:build"]
        command += ["--devices", "core:0,core:1", "--workers", f"ray://{cluster.address}"]
        command += ["--decodes", "40", "--out", str(tmp_path / "tuned")]
        assert main(command) == 0
    assert alive[0]
    assert not alive[-1]
    card = load(str(tmp_path / "tuned")).card
    assert card["measured_on"] == dict(made[0].measured)
    assert len(card["measured_on"]) == 3
    with (tmp_path / "tuned.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["decodes"]) for row in rows] == [8, 16, 24, 32, 40]
    assert all(0.1 < float(row["mean_ratio"]) < 100 for row in rows)
    assert {row["failed"] for row in rows} == {"0"}


def test_nodes_without_the_devices_end_a_training_and_a_search_runs_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "layers.py").write_text(MODEL)
    target, sentence = f"{tmp_path / 'layers.py'}:build", r"node \S+:\d+ .* offers 1, .* needs 2"
    with ray_nodes(2, processors=1) as (cluster, _):
        common = ["--devices", "core:0,core:1", "--workers", f"ray://{cluster.address}"]
        began = time.monotonic()
        command = ["train", "--backend", "measured", "--target", target, *common]
        assert main([*command, "--decodes", "8", "--out", str(tmp_path / "tuned")]) == 2
        assert time.monotonic() - began < MOST_S
        assert re.search(f"placer: {sentence}", capsys.readouterr().err)
        out = tmp_path / "placement.json"
        assert main(["optimize", target, *common, "--budget", "250e", "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert len(re.findall(f"Candidates run on this machine only: {sentence}", said)) == 1
