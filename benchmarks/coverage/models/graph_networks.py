"""Graph networks of torch_geometric."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.coverage.case import CLASSES, Case, Cases

NODES: Final = 20
EDGES: Final = 60
WIDTH: Final = 8
GRAPHS: Final = 4


def _nn() -> Any:
    return import_module("torch_geometric.nn")


def _edges() -> Tensor:
    return torch.randint(NODES, (2, EDGES))


def _nodes() -> Tensor:
    return torch.randn(NODES, WIDTH)


def _graph(training: bool) -> tuple[Tensor, Tensor]:
    return _nodes(), _edges()


def _labels() -> Tensor:
    return torch.randint(CLASSES, (NODES,))


def _ready(name: str, **options: Any) -> nn.Module:
    """Return a network of several layers that the package has ready."""
    model: nn.Module = getattr(_nn(), name)(WIDTH, 16, 2, CLASSES, **options)
    return model


class TwoLayers(nn.Module):
    """Two layers of one kind, for classes of nodes; the graph may come as an object."""

    def __init__(self, make: Callable[[int, int], nn.Module], *, from_object: bool = False) -> None:
        super().__init__()
        self.first = make(WIDTH, 16)
        self.second = make(16, CLASSES)
        self.from_object = from_object

    def forward(self, x: Any, edges: Any = None, *others: Any) -> Any:
        if self.from_object:
            x, edges = x.x, x.edge_index
        return self.second(self.first(x, edges, *others).relu(), edges, *others)


class Pooled(nn.Module):
    """A layer, and one class for each graph of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = _nn().GraphConv(WIDTH, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, edges: Tensor, graph_of: Tensor) -> Any:
        pooled = _nn().global_mean_pool(self.layer(x, edges).relu(), graph_of, GRAPHS)
        return self.head(pooled)


class TwoKinds(nn.Module):
    """Nodes of two kinds, in dicts."""

    def __init__(self) -> None:
        super().__init__()
        made = _nn().SAGEConv
        self.layer = _nn().HeteroConv(
            {("a", "to", "b"): made((WIDTH, WIDTH), 4), ("b", "to", "a"): made((WIDTH, WIDTH), 4)}
        )

    def forward(self, nodes: dict[str, Tensor], forth: Tensor, back: Tensor) -> Any:
        return self.layer(nodes, {("a", "to", "b"): forth, ("b", "to", "a"): back})


def _layers(name: str, **options: Any) -> Callable[[], nn.Module]:
    def layer(width: int, out: int) -> nn.Module:
        made: nn.Module = getattr(_nn(), name)(width, out, **options)
        return made

    return lambda: TwoLayers(layer)


def _gps() -> nn.Module:
    model: nn.Module = _nn().GPSConv(WIDTH, _nn().GCNConv(WIDTH, WIDTH), heads=2)
    return model


def _data(training: bool) -> Any:
    data = import_module("torch_geometric.data")
    return (data.Data(x=_nodes(), edge_index=_edges()),)


def _related(training: bool) -> tuple[Tensor, ...]:
    return _nodes(), _edges(), torch.randint(3, (EDGES,))


def _batch(training: bool) -> tuple[Tensor, ...]:
    return _nodes(), _edges(), torch.randint(GRAPHS, (NODES,)).sort().values


def _kinds(training: bool) -> tuple[Any, ...]:
    return {"a": _nodes(), "b": _nodes()}, _edges(), _edges()


def _classes(model: Callable[[], nn.Module], inputs: Callable[[bool], Any] = _graph) -> Case:
    return Case(model, inputs, F.cross_entropy, _labels)


CASES: Final[Cases] = {
    **{
        name: _classes(partial(_ready, name))
        for name in ("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN")
    },
    "GAT, version 2": _classes(partial(_ready, "GAT", v2=True, heads=2)),
    "GCN, jumping knowledge": _classes(partial(_ready, "GCN", jk="cat")),
    **{
        name: _classes(_layers(name))
        for name in (
            "GraphConv",
            "TransformerConv",
            "SGConv",
            "TAGConv",
            "ARMAConv",
            "ClusterGCNConv",
            "LEConv",
            "GENConv",
            "ResGatedGraphConv",
            "MFConv",
        )
    },
    "ChebConv": _classes(_layers("ChebConv", K=2)),
    "RGCNConv": _classes(_layers("RGCNConv", num_relations=3), _related),
    "GPSConv": Case(_gps, _graph),
    "graph as an object": _classes(
        lambda: TwoLayers(lambda width, out: _nn().GCNConv(width, out), from_object=True), _data
    ),
    "graphs in a batch": Case(
        Pooled, _batch, F.cross_entropy, lambda: torch.randint(CLASSES, (GRAPHS,))
    ),
    "nodes of two kinds": Case(TwoKinds, _kinds),
    "GraphUNet": _classes(lambda: _nn().GraphUNet(WIDTH, 16, CLASSES, depth=1)),
}
