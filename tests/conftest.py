"""What several test files need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tiny_cluster import CLUSTER

from graphs.files import save_graph
from graphs.synthetic import layered


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps what tests measure out of the user's cache, and the user's cache out of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLACER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Writes a graph and a cluster of two devices."""

    def write(memory_bytes: int = 1 << 40) -> tuple[Path, Path]:
        graph, cluster = tmp_path / "graph.json", tmp_path / "cluster.toml"
        save_graph(layered(np.random.default_rng(0), ops=40, width=6), graph)
        cluster.write_text(CLUSTER.format(memory=memory_bytes))
        return graph, cluster

    return write
