"""Decoding on a Ray cluster of two nodes on this machine, one of which dies."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from placer.policies.decoders import RayTasks
from placer.policies.training import train
from placer.policies.training.config import Length
from tests.helpers.tiny_training import TINY, curve

torch.set_num_threads(1)

pytestmark = pytest.mark.slow
CONFIG = replace(TINY, length=Length(decodes=800))


@pytest.fixture
def ray() -> Any:
    """Import Ray, which takes a second, only where the tests run."""
    return pytest.importorskip("ray")


@pytest.fixture
def two_nodes(ray: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a cluster of two nodes with one processor each, and its second node."""
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "wait": False})
    try:
        second = cluster.add_node(wait=False, num_cpus=1)
        cluster.wait_for_nodes(timeout=300)
        yield cluster, second
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_training_goes_on_to_the_same_curve_when_a_node_dies(
    tmp_path: Path, two_nodes: tuple[Any, Any], ray: Any
) -> None:
    cluster, second = two_nodes
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
    config = replace(CONFIG, workers="ray", ray_address=cluster.address)
    train(tmp_path / "cluster", config, progress=hear)
    killers[0].join()
    assert processors[0] == 2
    assert processors[-1] == 1
    assert curve(tmp_path / "cluster") == curve(tmp_path / "alone")


def test_a_cluster_of_this_machine_is_not_reached_from_others(ray: Any) -> None:
    tasks = RayTasks([])
    try:
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
    finally:
        tasks.close()
