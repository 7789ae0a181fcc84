"""Sketches of models as graphs, built from tensor sizes, in place of extracted ones.

Op costs follow the roofline of a V100-class device (NVIDIA V100 PCIe data sheet: 14 TFLOP/s in
fp32, of which convolutions and matrix products reach about 60 %, and 900 GB/s), plus 8 us to
launch. They hold for any device kind (``"*"``): the graphs are for training and testing placers,
not for predicting step times. All tensors are fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import networkx as nx
import numpy as np

from graphs.graph import ANY_KIND, add_edge, add_op, attributes_of, new_graph
from graphs.synthetic.mirror import WEIGHT, with_backward

REACHED_FLOP_PER_S: Final = 0.6 * 14e12
MEMORY_BYTES_PER_S: Final = 900e9
FLOOR_S: Final = 8e-6
ELEMENT_BYTES: Final = 4


class Sketch:
    """Builder of a forward graph."""

    def __init__(self, name: str) -> None:
        self.graph = new_graph(name, {ANY_KIND: "roofline of a V100-class device"})

    def op(
        self,
        op_id: str,
        inputs: Sequence[str] = (),
        *,
        outputs: int,
        flops: int = 0,
        parameters: int = 0,
        colocate: str | None = None,
    ) -> str:
        """Add an op by its id, ``module[@call]:op[#occurrence]``, and return the id.

        ``outputs`` and ``parameters`` are counts of elements.
        """
        module, _, name = op_id.partition("#")[0].rpartition(":")
        inputs = list(dict.fromkeys(inputs))
        read = sum(attributes_of(self.graph, source)["output_bytes"] for source in inputs)
        moved = read + ELEMENT_BYTES * (outputs + parameters)
        cost_s = FLOOR_S + max(flops / REACHED_FLOP_PER_S, moved / MEMORY_BYTES_PER_S)
        add_op(
            self.graph,
            op_id,
            cost_s={ANY_KIND: 0.0 if name == WEIGHT else cost_s},
            op=name,
            module=module.partition("@")[0],
            flops=flops,
            moved_bytes=moved,
            output_bytes=ELEMENT_BYTES * outputs,
            saved_bytes=0 if name == WEIGHT else ELEMENT_BYTES * outputs,
            parameter_bytes=ELEMENT_BYTES * parameters,
            colocate=colocate,
        )
        for source in inputs:
            add_edge(self.graph, source, op_id)
        return op_id

    def weight(self, module: str, elements: int, colocate: str | None = None) -> str:
        """Add parameters as an op of their own, whose output is sent to all ops that read them."""
        return self.op(
            f"{module}:{WEIGHT}", outputs=elements, parameters=elements, colocate=colocate
        )

    def linear(self, path: str, x: str, *, rows: int, inputs: int, outputs: int) -> str:
        """Add a matrix product with parameters of its own, (rows, inputs) to (rows, outputs)."""
        return self.op(
            f"{path}:linear",
            [x],
            outputs=rows * outputs,
            flops=2 * rows * inputs * outputs,
            parameters=inputs * outputs,
        )

    def training_step(self) -> nx.DiGraph[str]:
        """Return the graph with its backward pass."""
        return with_backward(self.graph)


def nmt(
    *,
    layers: int = 2,
    steps: int = 10,
    batch: int = 64,
    hidden: int = 1024,
    vocabulary: int = 8000,
) -> nx.DiGraph[str]:
    """Sketch an LSTM encoder and decoder with attention, unrolled over ``steps``."""
    sketch = Sketch("nmt")
    state = batch * hidden

    def lookups(side: str) -> list[str]:
        group = f"{side}.embedding"  # rows are sent, the table is not
        table = sketch.weight(group, vocabulary * hidden, colocate=group)
        return [
            sketch.op(f"{group}@{t}:embedding", [table], outputs=state, colocate=group)
            for t in range(steps)
        ]

    def unroll(side: str, last: list[str]) -> tuple[list[str], list[str]]:
        outputs = lookups(side)
        final: list[str] = []
        for number in range(layers):
            path = f"{side}.layers.{number}"
            weight = sketch.weight(path, 8 * hidden * hidden)
            before = last[number : number + 1]
            for t, x in enumerate(outputs):
                cell = sketch.op(
                    f"{path}@{t}:lstm_cell",
                    [x, *before, weight],
                    outputs=2 * state,
                    flops=16 * batch * hidden * hidden,
                )
                outputs[t] = cell
                before = [cell]
            final += before
        return outputs, final

    encoded, final = unroll("encoder", [])
    memory = sketch.op(":stack", encoded, outputs=steps * state)
    decoded, _ = unroll("decoder", final)
    score = sketch.weight("attention.score", hidden * hidden)
    combine = sketch.weight("attention.combine", 2 * hidden * hidden)
    projection = sketch.weight("projection", hidden * vocabulary)
    losses: list[str] = []
    for t, query in enumerate(decoded):
        context = sketch.op(
            f"attention.score@{t}:attention",
            [query, memory, score],
            outputs=state,
            flops=2 * batch * hidden * (hidden + 2 * steps),
        )
        mixed = sketch.op(
            f"attention.combine@{t}:linear",
            [context, query, combine],
            outputs=state,
            flops=4 * batch * hidden * hidden,
        )
        logits = sketch.op(
            f"projection@{t}:linear",
            [mixed, projection],
            outputs=batch * vocabulary,
            flops=2 * batch * hidden * vocabulary,
        )
        losses.append(sketch.op(f"loss@{t}:cross_entropy", [logits], outputs=1))
    sketch.op("loss:sum", losses, outputs=1)
    return sketch.training_step()


def moe(
    rng: np.random.Generator,
    *,
    layers: int = 4,
    experts: int = 8,
    tokens: int = 2048,
    hidden: int = 1024,
) -> nx.DiGraph[str]:
    """Sketch a transformer with mixtures of experts, whose uneven load is drawn from ``rng``.

    Each token goes to two experts.
    """
    sketch = Sketch("moe")
    state = tokens * hidden
    x = sketch.op("embedding:embedding", outputs=state, parameters=8000 * hidden)
    for number in range(layers):
        path = f"layers.{number}"
        qkv = sketch.linear(f"{path}.qkv", x, rows=tokens, inputs=hidden, outputs=3 * hidden)
        attended = sketch.op(
            f"{path}:attention", [qkv], outputs=state, flops=4 * tokens * hidden * 512
        )
        projected = sketch.linear(
            f"{path}.out", attended, rows=tokens, inputs=hidden, outputs=hidden
        )
        x = sketch.op(f"{path}.norm:add_norm", [projected, x], outputs=state)
        routes = sketch.linear(f"{path}.router", x, rows=tokens, inputs=hidden, outputs=experts)
        load = rng.multinomial(2 * tokens, rng.dirichlet(np.full(experts, 4.0)))
        outputs: list[str] = []
        for expert, count in enumerate(np.maximum(load, 1).tolist()):
            expert_path = f"{path}.experts.{expert}"
            taken = sketch.op(f"{expert_path}:gather", [x, routes], outputs=count * hidden)
            up = sketch.linear(
                f"{expert_path}.up", taken, rows=count, inputs=hidden, outputs=4 * hidden
            )
            outputs.append(
                sketch.linear(
                    f"{expert_path}.down", up, rows=count, inputs=4 * hidden, outputs=hidden
                )
            )
        x = sketch.op(f"{path}:combine", [*outputs, routes, x], outputs=state)
    logits = sketch.linear("head", x, rows=tokens, inputs=hidden, outputs=8000)
    sketch.op("loss:cross_entropy", [logits], outputs=1)
    return sketch.training_step()


def transformer(
    *, layers: int = 6, micro_batches: int = 4, tokens: int = 1024, hidden: int = 1024
) -> nx.DiGraph[str]:
    """Sketch a decoder-only transformer; micro-batches of the step read the same weights."""
    sketch = Sketch("transformer")
    state = tokens * hidden
    widths = {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
    table = sketch.weight("embedding", 8000 * hidden, colocate="embedding")
    weights = {
        (number, name): sketch.weight(f"layers.{number}.{name}", a * b * hidden * hidden)
        for number in range(layers)
        for name, (a, b) in widths.items()
    }
    head = sketch.weight("head", 8000 * hidden)
    losses: list[str] = []
    for m in range(micro_batches):
        x = sketch.op(f"embedding@{m}:embedding", [table], outputs=state, colocate="embedding")
        for number in range(layers):

            def product(name: str, source: str, number: int = number, m: int = m) -> str:
                a, b = widths[name]
                return sketch.op(
                    f"layers.{number}.{name}@{m}:linear",
                    [source, weights[number, name]],
                    outputs=b * state,
                    flops=2 * tokens * a * b * hidden * hidden,
                )

            qkv = product("qkv", x)
            attended = sketch.op(
                f"layers.{number}@{m}:attention",
                [qkv],
                outputs=state,
                flops=4 * tokens * hidden * 512,
            )
            x = sketch.op(
                f"layers.{number}.norm@{m}:add_norm", [product("out", attended), x], outputs=state
            )
            x = sketch.op(
                f"layers.{number}.norm@{m}:add_norm#1",
                [product("down", product("up", x)), x],
                outputs=state,
            )
        logits = sketch.op(
            f"head@{m}:linear", [x, head], outputs=8000 * tokens, flops=16_000 * state
        )
        losses.append(sketch.op(f"loss@{m}:cross_entropy", [logits], outputs=1))
    sketch.op("loss:sum", losses, outputs=1)
    return sketch.training_step()


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
    """Adds operations on tiled matrices to a sketch; forward only.

    A matrix has ``shards`` x ``shards`` tiles; a product of two matrices is a sum of tile products,
    as in the programs of DOPPLER (arXiv 2505.23131).
    """

    def __init__(self, name: str, shards: int, size: int) -> None:
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
