"""Decoding on a Ray cluster of two nodes on this machine, one of which dies."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from placer.policies.training import train
from placer.policies.training.config import Length
from tests.helpers.ray_nodes import ray_nodes
from tests.helpers.tiny_training import TINY, curve

pytestmark = pytest.mark.slow
CONFIG = replace(TINY, length=Length(decodes=800))


def test_training_goes_on_to_the_same_curve_when_a_node_dies(
    tmp_path: Path,
) -> None:
    ray: Any = pytest.importorskip("ray")
    killers: list[threading.Thread] = []
    processors: list[float] = []

    def hear(share: float, text: str) -> None:
        if not ray.is_initialized():
            return
        processors.append(ray.cluster_resources()["CPU"])
        if share > 0.3 and not killers:  # while tasks run
            killers.append(threading.Thread(target=cluster.remove_node, args=(second, False)))
            killers[0].start()
        while share > 0.8 and ray.cluster_resources()["CPU"] > 1:
            time.sleep(0.05)

    train(tmp_path / "alone", CONFIG)
    with ray_nodes(2) as (cluster, [second]):
        config = replace(CONFIG, workers=f"ray://{cluster.address}")
        train(tmp_path / "cluster", config, progress=hear)
        killers[0].join()
    assert processors[0] == 2
    assert processors[-1] == 1
    assert curve(tmp_path / "cluster") == curve(tmp_path / "alone")
