"""Sketches of models over sequences: translation, mixture of experts, transformer."""

from __future__ import annotations

import networkx as nx
import numpy as np

from graphs.synthetic.sketches.build import Sketch


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
            own = f"{path}.experts.{expert}"
            taken = sketch.op(f"{own}:gather", [x, routes], outputs=count * hidden)
            up = sketch.linear(f"{own}.up", taken, rows=count, inputs=hidden, outputs=4 * hidden)
            outputs.append(
                sketch.linear(f"{own}.down", up, rows=count, inputs=4 * hidden, outputs=hidden)
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
