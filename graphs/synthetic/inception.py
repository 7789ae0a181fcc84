"""Sketch of Inception-V3 (arXiv 1512.00567, table 1), all paddings "same"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import networkx as nx

from graphs.synthetic.sketches import Sketch

Convolution: TypeAlias = tuple[int, int, int]
"""Output channels, pixels of the kernel (9 for 3x3), stride."""

Row: TypeAlias = tuple[Convolution, ...]

# Parallel rows of convolutions in a block.
GRID_35: Final[tuple[Row, ...]] = (
    ((64, 1, 1),),
    ((48, 1, 1), (64, 25, 1)),
    ((64, 1, 1), (96, 9, 1), (96, 9, 1)),
)
TO_GRID_17: Final[tuple[Row, ...]] = (((384, 9, 2),), ((64, 1, 1), (96, 9, 1), (96, 9, 2)))
TO_GRID_8: Final[tuple[Row, ...]] = (
    ((192, 1, 1), (320, 9, 2)),
    ((192, 1, 1), (192, 7, 1), (192, 7, 1), (192, 9, 2)),
)
GRID_8: Final[tuple[Row, ...]] = (((320, 1, 1),),)
GRID_8_FANS: Final[tuple[Row, ...]] = (((384, 1, 1),), ((448, 1, 1), (384, 9, 1)))


def inception(*, batch: int = 32, blocks: int = 11) -> nx.DiGraph[str]:
    """Sketch Inception-V3 up to its ``blocks``-th mixed block (at most 11), for 299x299 pixels."""
    image = _Images(Sketch("inception"), batch)
    x = image.row("stem.0", None, (3, 299), ((32, 9, 2), (32, 9, 1), (64, 9, 1)))
    x = image.pool("stem.0:max_pool", x, 2)
    x = image.row("stem.1", x, image.shape[x], ((80, 1, 1), (192, 9, 1)))
    x = image.pool("stem.1:max_pool", x, 2)
    for number, block in enumerate(_BLOCKS[:blocks]):
        x = block(image, f"mixed.{number}", x)
    sketch = image.sketch
    channels = image.shape[x][0]
    pooled = sketch.op("pool:mean", [x], outputs=batch * channels)
    logits = sketch.linear("fc", pooled, rows=batch, inputs=channels, outputs=1000)
    sketch.op("loss:cross_entropy", [logits], outputs=1)
    return sketch.training_step()


class _Images:
    """Adds image layers to a sketch; tracks channels and pixels per side of each op's output."""

    def __init__(self, sketch: Sketch, batch: int) -> None:
        self.sketch = sketch
        self.batch = batch
        self.shape: dict[str, tuple[int, int]] = {}

    def add(
        self,
        op_id: str,
        inputs: Sequence[str],
        shape: tuple[int, int],
        flops: int = 0,
        parameters: int = 0,
    ) -> str:
        channels, side = shape
        self.shape[op_id] = shape
        return self.sketch.op(
            op_id,
            inputs,
            outputs=self.batch * channels * side * side,
            flops=flops,
            parameters=parameters,
        )

    def row(
        self, path: str, x: str | None, shape: tuple[int, int], row: Sequence[Convolution]
    ) -> str:
        """Add convolution, batch norm and ReLU for each convolution; return the last id."""
        for number, (channels, kernel, stride) in enumerate(row):
            inputs, side = shape
            side = -(-side // stride)
            shape = (channels, side)
            parameters = inputs * channels * kernel
            layer = f"{path}.{number}"
            flops = 2 * self.batch * side * side * parameters
            x = self.add(f"{layer}:convolution", [x] if x else [], shape, flops, parameters)
            x = self.add(f"{layer}:batch_norm_relu", [x], shape, parameters=2 * channels)
        assert x is not None
        return x

    def pool(self, op_id: str, x: str, stride: int) -> str:
        channels, side = self.shape[x]
        return self.add(op_id, [x], (channels, -(-side // stride)))

    def join(self, path: str, branches: list[str]) -> str:
        channels = sum(self.shape[branch][0] for branch in branches)
        return self.add(f"{path}:concat", branches, (channels, self.shape[branches[0]][1]))


def _mixed(
    rows: Sequence[Row],
    pooled: int = 0,
    fans: Sequence[Row] = (),
) -> Callable[[_Images, str, str], str]:
    """Return a builder of blocks: rows, a pool (with a 1x1 row of ``pooled`` channels), forks."""

    def build(images: _Images, path: str, x: str) -> str:
        shape = images.shape[x]
        branches = [images.row(f"{path}.branches.{i}", x, shape, row) for i, row in enumerate(rows)]
        stride = rows[0][-1][2]
        pool = images.pool(f"{path}:pool", x, stride)
        if pooled:
            pool = images.row(f"{path}.pool", pool, images.shape[pool], [(pooled, 1, 1)])
        branches.append(pool)
        for i, row in enumerate(fans):
            shared = images.row(f"{path}.fans.{i}", x, shape, row)
            channels, side = images.shape[shared]
            branches += [
                images.row(f"{path}.fans.{i}.{end}", shared, (channels, side), [(384, 3, 1)])
                for end in ("wide", "tall")
            ]
        return images.join(path, branches)

    return build


def _grid_17(inner: int) -> Callable[[_Images, str, str], str]:
    first, factor, last = (inner, 1, 1), (inner, 7, 1), (192, 7, 1)
    rows = (((192, 1, 1),), (first, factor, last), (first, factor, factor, factor, last))
    return _mixed(rows, 192)


_BLOCKS: Final = (
    *(_mixed(GRID_35, pooled) for pooled in (32, 64, 64)),
    _mixed(TO_GRID_17),
    *(_grid_17(inner) for inner in (128, 160, 160, 192)),
    _mixed(TO_GRID_8),
    *[_mixed(GRID_8, 192, GRID_8_FANS)] * 2,
)
