"""What several test files need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from built_wheel import build_wheel
from tiny_cluster import CLUSTER
from vdev import vdev  # before the first backward pass of any test

from graphs.files import save_graph
from graphs.synthetic import layered


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps what tests measure out of the user's cache, and the user's cache out of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLACER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    return build_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Writes a graph and a cluster of two devices."""

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
    """A fake second device of torch, and calibration that is quick and kept for one test."""
    from envs import measured_module, torch_speeds

    monkeypatch.setenv("PLACER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch_speeds, "STREAM_BYTES", 1 << 20)
    monkeypatch.setattr(torch_speeds, "LARGE_BYTES", 1 << 20)
    monkeypatch.setattr(measured_module, "TURN_S", 0.0)
    if torch.cuda.is_available():
        if request.node.get_closest_marker("gpu") is None:
            pytest.skip("vdev would take CUDA's place")
        yield
        return
    with vdev():
        yield


@pytest.fixture
def device() -> Iterator[torch.device]:
    """A fake second device of torch."""
    with vdev() as found:
        yield found
