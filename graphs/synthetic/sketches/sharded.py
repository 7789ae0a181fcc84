"""Sketches of matrix programs cut into tiles, with many ops and more to send than to compute.

Every matrix is a square of ``shards`` x ``shards`` tiles; a product of two matrices is a sum of
tile products, as in the programs of DOPPLER (arXiv 2505.23131). Forward only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import networkx as nx

from graphs.synthetic.sketches.build import Sketch

Tiles: TypeAlias = list[list[str]]
"""Op ids of a matrix's tiles, by row and column."""


def matrix_chain(*, shards: int = 3, size: int = 2048) -> nx.DiGraph[str]:
    """Sketch A B + C (D E), in tiles of ``size`` x ``size``."""
    program = _Program("matrix-chain", shards, size)
    a, b, c, d, e = (program.matrix(name) for name in "abcde")
    program.add(
        "sum", program.product("ab", a, b), program.product("cde", c, program.product("de", d, e))
    )
    return program.sketch.graph


def sharded_feed_forward(*, shards: int = 3, size: int = 2048) -> nx.DiGraph[str]:
    """Sketch two linear layers with an activation between them, and a residual."""
    program = _Program("sharded-feed-forward", shards, size)
    program.feed_forward("ffn", program.matrix("x"))
    return program.sketch.graph


def sharded_layer(*, shards: int = 2, size: int = 2048) -> nx.DiGraph[str]:
    """Sketch a transformer layer: attention with four projections, then feed-forward."""
    program = _Program("sharded-layer", shards, size)
    x = program.matrix("x")
    q, k, v = (program.product(name, x, program.matrix(f"{name}.weight")) for name in "qkv")
    scores = program.each("softmax", program.product("scores", q, k))
    out = program.product("out", program.product("mixed", scores, v), program.matrix("out.weight"))
    program.feed_forward("ffn", program.add("residual", x, out))
    return program.sketch.graph


class _Program:
    """Adds operations on tiled matrices to a sketch."""

    def __init__(self, name: str, shards: int, size: int) -> None:
        if min(shards, size) < 1:
            raise ValueError(f"{shards} x {shards} tiles of {size} x {size}: both must be above 0")
        self.sketch = Sketch(name)
        self.shards = shards
        self.size = size

    def matrix(self, path: str) -> Tiles:
        return self._tiles(
            lambda i, j: self.sketch.op(f"{path}.{i}.{j}:input", outputs=self.size**2)
        )

    def each(self, path: str, x: Tiles) -> Tiles:
        """Apply an elementwise function."""
        return self._tiles(lambda i, j: self._op(f"{path}.{i}.{j}:each", [x[i][j]]))

    def add(self, path: str, x: Tiles, y: Tiles) -> Tiles:
        return self._tiles(lambda i, j: self._op(f"{path}.{i}.{j}:add", [x[i][j], y[i][j]]))

    def product(self, path: str, x: Tiles, y: Tiles) -> Tiles:
        flops = 2 * self.size**3

        def tile(i: int, j: int) -> str:
            parts = [
                self._op(f"{path}.{i}.{j}.{k}:product", [x[i][k], y[k][j]], flops)
                for k in range(self.shards)
            ]
            return self._op(f"{path}.{i}.{j}:sum", parts)

        return self._tiles(tile)

    def feed_forward(self, path: str, x: Tiles) -> Tiles:
        up = self.each(
            f"{path}.gelu", self.product(f"{path}.up", x, self.matrix(f"{path}.up.weight"))
        )
        down = self.product(f"{path}.down", up, self.matrix(f"{path}.down.weight"))
        return self.add(f"{path}.residual", x, down)

    def _op(self, op_id: str, inputs: list[str], flops: int = 0) -> str:
        return self.sketch.op(op_id, inputs, outputs=self.size**2, flops=flops)

    def _tiles(self, tile: Callable[[int, int], str]) -> Tiles:
        return [[tile(i, j) for j in range(self.shards)] for i in range(self.shards)]
