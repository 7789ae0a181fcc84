"""Large graphs of training steps by somebody who had not seen the other families, nor the project.

Written on 2026-11-28; no policy was trained, and nothing tuned, on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Literal

import numpy as np

from benchmarks.large_graphs.foreign_tape import FeatureMap, ForeignOp, Rng, Tape


def lstm_attention(
    rng: Rng, *, batch: int = 256, layers: int = 4, steps: int = 40, words: int = 32000
) -> list[ForeignOp]:
    """Generate an unrolled translation LSTM with attention; sentences end at different steps."""
    tape, h, losses = Tape(), 1024, []
    ends = rng.integers(steps // 3, steps + 1, size=(2, batch))
    rows, out_rows = [[8 + int((e > t).sum()) // 8 * 8 for t in range(steps)] for e in ends]
    names = [f"{p}.layer{i}" for p in ("encoder", "decoder") for i in range(layers)]
    states = {n: [tape.source(n, batch * h) for _ in range(2)] for n in (*names, "encoder.back")}
    xs = [tape.embed("encoder.embedding", n, h, words) for n in rows]
    back = {t: tape.cell("encoder.back", xs[t], states, rows[t], h) for t in range(steps)[::-1]}
    for layer, name in enumerate(names[:layers]):
        for t, x in enumerate(xs):
            top = tape.cell(name, x, states, rows[t], 2 * h if layer == 1 else h)
            xs[t] = tape.op("add", name, (top, x)) if layer > 1 else top
            if layer == 0:
                xs[t] = tape.op("concat", name, (top, back[t]), 2 * rows[t] * h)
    memory = tape.op("concat", "attention.memory", xs, sum(rows) * h)
    keys = tape.linear("attention.keys", memory, sum(rows), h, h)
    context = tape.source("attention", batch * h)
    for n in out_rows:
        x, flops = tape.embed("decoder.embedding", n, h, words), 2.0 * n * steps * h
        for layer, name in enumerate(names[layers:]):
            joint = tape.op("concat", name, (x, context), 2 * n * h)
            top = tape.cell(name, joint, states, n, 2 * h)
            x = tape.op("add", name, (top, x)) if layer > 1 else top
            if layer == 0:
                query = tape.linear("attention.query", x, n, h, h)
                scores = tape.op("bmm", "attention", (query, keys), n * steps, flops)
                scores = tape.op("softmax", "attention", (scores,))
                context = tape.op("bmm", "attention", (scores, memory), n * h, flops)
        x = tape.op("tanh", "output", (tape.linear("output.mix", x, n, h, h),))
        losses.append(tape.entropy("output", tape.linear("output", x, n, h, words), n))
    return tape.update(losses, clip=True)


def transformer(
    rng: Rng,
    *,
    encoder: int = 0,
    decoder: int = 24,
    width: int = 2048,
    micro_batches: int = 6,
    tokens: int = 8192,
    words: int = 32768,
) -> list[ForeignOp]:
    """Generate a transformer in micro-batches of unequal lengths; `encoder=0`: decoder-only."""
    tape, alone = Tape(), encoder == 0
    for _ in range(micro_batches):
        source = 64 + int(rng.lognormal(6.5, 0.5)) // 64 * 64
        target = source if alone else 64 + int(source * rng.uniform(0.25, 1.1)) // 64 * 64
        batch, memory, x, rows = max(1, tokens // max(source, target)), -1, -1, 0
        stack = [("encoder", i, source) for i in range(encoder)]
        for part, layer, length in stack + [("decoder", i, target) for i in range(decoder)]:
            rows, name = batch * length, f"{part}.layer{layer}.ffn"
            if layer == 0:
                memory, x = x, tape.embed("embedding", rows, width, words)
            for label in ("self", "cross") if part == "decoder" and not alone else ("self",):
                at = f"{part}.layer{layer}.{label}"
                y = tape.op("layer_norm", at, (x,), weight=2 * width)
                seen, keys = (memory, source) if label == "cross" else (y, length)
                span = min(keys, 512) if alone and layer % 4 < 3 else keys
                q = tape.linear(f"{at}.q", y, rows, width, width)
                k, v = (
                    tape.linear(
                        f"{at}.{s}", seen, batch * keys, width, width // 4 if alone else width
                    )
                    for s in "kv"
                )
                size, flops = rows * span * (width // 128), 2.0 * rows * span * width
                y = tape.op("softmax", at, (tape.op("bmm", at, (q, k), size, flops),))
                y = tape.op("bmm", at, (y, v), rows * width, flops)
                x = tape.op("add", at, (x, tape.linear(f"{at}.out", y, rows, width, width)))
            y = tape.op("layer_norm", name, (x,), weight=2 * width)
            x = tape.op("add", name, (x, tape.feed(name, y, rows, width, 3 * width, alone)))
        # The output projection shares the table of the embedding.
        pair = (x, tape.weight("embedding", "embedding", words * width))
        logits = tape.op("matmul", "head", pair, rows * words, 2.0 * rows * width * words)
        tape.train([tape.entropy("head", logits, rows)])
    return tape.update(clip=True)


def moe(
    rng: Rng,
    *,
    layers: int = 12,
    experts: int = 32,
    top_k: int = 2,
    tokens: int = 8192,
    capacity: float = 1.25,
    inner: int = 4096,
    skew: float = 0.6,
) -> list[ForeignOp]:
    """Generate a mixture of experts; `capacity` caps loads in mean loads, infinite: dropless."""
    tape, losses, dropless, width = Tape(), [], math.isinf(capacity), 1536
    x = tape.embed("embedding", tokens, width, 32768)
    for layer in range(layers):
        name = f"decoder.layer{layer}.attention"
        y = tape.op("layer_norm", name, (x,), weight=2 * width)
        y = tape.linear(f"{name}.qkv", y, tokens, width, 3 * width)
        y = tape.op("flash_attention", name, (y,), tokens * width, 4.0 * tokens * 4096 * width)
        x = tape.op("add", name, (x, tape.linear(f"{name}.out", y, tokens, width, width)))
        name = f"decoder.layer{layer}.moe"
        y = tape.op("layer_norm", name, (x,), weight=2 * width)
        shares = tape.op("softmax", name, (tape.linear(name, y, tokens, width, experts),))
        routes = tape.op("top_k", name, (shares,), tokens * top_k)
        losses.append(tape.op("balance_loss", name, (shares, routes), 1))
        parts, p = [], rng.dirichlet([skew] * experts)
        for expert, load in enumerate(rng.multinomial(tokens * top_k, p).tolist()):
            unit = f"{name}.expert{expert}"
            rows = 16 + int(min(load, capacity * tokens * top_k / experts)) // 16 * 16
            z = tape.op("dispatch", unit, (y, routes), rows * width)
            z = tape.feed(unit, z, rows, width, inner, dropless)
            parts.append(tape.op("mul", unit, (z, shares)))
        x = tape.op("add", name, (x, tape.op("scatter_add", name, parts, tokens * width)))
    losses.append(tape.entropy("head", tape.linear("head", x, tokens, width, 32768), tokens))
    return tape.update(losses, clip=not dropless)


def inception_multitask(
    rng: Rng, *, views: int = 5, blocks: int = 4, pixels: int = 1 << 20, tasks: int = 6
) -> list[ForeignOp]:
    """Generate a multi-branch trunk over camera views and a pyramid with a head for each task."""
    tape, losses = Tape(), []
    plan = [
        [
            [
                [
                    ((1, 3, 7, 9, 25)[int(rng.integers(5))], int(rng.integers(2, 9)) * 16 << level)
                    for _ in range(int(rng.integers(1, 5)))
                ]
                for _ in range(int(rng.integers(3, 6)))
            ]
            for _ in range(blocks)
        ]
        for level in range(3)
    ]
    levels: list[list[FeatureMap]] = [[] for _ in plan]
    for _ in range(views):
        x = tape.conv("stem", (tape.source("camera", 3 * pixels), pixels, 3), 64, 49, 4)
        for level, modules in enumerate(plan):
            x = tape.conv(f"trunk.level{level}.reduce", x, 128 << level, 9, 4)
            for b, branches in enumerate(modules):
                name, outs = f"trunk.level{level}.block{b}", []
                for k, convs in enumerate(branches):
                    y = x if k else (tape.op("max_pool", name, (x[0],)), x[1], x[2])
                    for c, (area, width) in enumerate(convs):
                        y = tape.conv(f"{name}.branch{k}.conv{c}", y, width, area)
                    outs.append(y)
                x = tape.join(name, outs)
            levels[level].append(x)
    maps = [tape.conv(f"fuse{i}", tape.join(f"fuse{i}", m), 256) for i, m in enumerate(levels)]
    for i in (1, 0):
        up = tape.op("resize", f"pyramid{i}", (maps[i + 1][0],), maps[i][1] * 256)
        maps[i] = tape.op("add", f"pyramid{i}", (maps[i][0], up)), maps[i][1], 256
    for task in range(tasks):
        for i in {task % 3, *rng.integers(3, size=2).tolist()}:
            name, y = f"head.task{task}.level{i}", maps[i]
            for c in range(int(rng.integers(2, 7))):
                y = tape.conv(f"{name}.conv{c}", y, 256, 9)
            logits = tape.linear(name, y[0], y[1], 256, int(rng.integers(4, 90)))
            losses.append(tape.entropy(name, logits, y[1]))
    return tape.update(losses)


def nas_cells(
    rng: Rng, *, cells: int = 30, nodes: int = 6, width: int = 96, pixels: int = 1 << 18
) -> list[ForeignOp]:
    """Generate a stack of irregular cells, each drawn anew; two of them reduce the resolution."""
    tape, kinds = Tape(), ("identity", "max_pool", "avg_pool", *("dilated", "separable") * 2)
    before = x = tape.conv("stem", (tape.source("data", 12 * pixels), 4 * pixels, 3), width, 9, 4)
    for cell in range(cells):
        if cell in (cells // 3, 2 * cells // 3):
            width, pixels = 2 * width, pixels // 4
        states = [
            tape.conv(f"cell{cell}.adapt{i}", s, width, 1, s[1] // pixels)
            for i, s in enumerate((before, x))
        ]
        loose = {0, 1}
        for node in range(int(rng.integers(nodes - 2, nodes + 3))):
            name, parts = f"cell{cell}.node{node}", []
            for p in rng.choice(len(states), 2, replace=False).tolist():
                kind, area, y = str(rng.choice(kinds)), int(rng.choice([9, 25])), states[p][0]
                if kind.endswith("pool"):
                    y = tape.op(kind, f"{name}.from{p}", (y,))
                for i in range({"dilated": 1, "separable": 2}.get(kind, 0)):
                    at, flops = f"{name}.from{p}.{kind}{i}", 2.0 * pixels * width * area
                    y = tape.op("relu", at, (y,))
                    y = tape.op("depthwise_conv", at, (y,), 0, flops, width * area)
                    y = tape.linear(at, y, pixels, width, width)
                    y = tape.op("batch_norm", at, (y,), weight=2 * width)
                parts.append(y)
                loose.discard(p)
            loose.add(len(states))
            states.append((tape.op("add", name, parts), pixels, width))
        before, x = x, tape.join(f"cell{cell}", [states[i] for i in sorted(loose)])
    pooled = tape.op("avg_pool", "head", (x[0],), 256 * x[2])
    return tape.update([tape.entropy("head", tape.linear("head", pooled, 256, x[2], 1000), 256)])


def random_layered(
    rng: Rng, *, layers: int = 90, width: int = 22, skip: float = 0.2
) -> list[ForeignOp]:
    """Generate random layers with skip connections; flops and sizes have Pareto tails."""
    tape = Tape()
    rows = [[tape.source("data", 1 << 20)]]
    for layer in range(layers):
        row = []
        for unit in range(1 + int(rng.lognormal(math.log(width), 0.4))):
            name, fan = f"stage{layer // 8}.layer{layer}.unit{unit}", int(rng.geometric(0.55))
            picks: set[int] = set(rng.choice(rows[-1], min(fan, 4)).tolist())
            if layer and rng.random() < skip:
                picks.add(int(rng.choice(rows[max(1, layer - int(rng.geometric(0.15)))])))
            size, weight = (int(min(1e5 * (1.0 + rng.pareto(1.0)), 5e7)) for _ in range(2))
            flops, kind = min(2e8 * (1.0 + rng.pareto(0.7)), 2e12), int(rng.integers(5))
            if len(picks) == 2 and kind % 2:
                row.append(tape.op("bmm", name, sorted(picks), size, flops))
            elif len(picks) > 1:
                row.append(tape.op("mul" if kind else "concat", name, sorted(picks), size))
            elif layer and kind < 2:
                row.append(tape.op(("gelu", "softmax")[kind], name, list(picks)))
            else:
                row.append(tape.op("matmul", name, list(picks), size, flops, weight))
        rows.append(row)
    loose = sorted({i for row in rows for i in row} - {i for op in tape.ops for i in op.inputs})
    return tape.update([tape.op("mean_loss", f"head{i}", loose[i::16], 1) for i in range(16)])


_new = np.random.default_rng
PROBLEMS: Final[tuple[tuple[str, Callable[[], list[ForeignOp]], int, Literal["e", "u"]], ...]] = (
    ("lstm_attention", lambda: lstm_attention(_new(11)), 8, "e"),
    ("lstm_attention", lambda: lstm_attention(_new(12), batch=384, layers=6, steps=36), 16, "u"),
    ("transformer_micro", lambda: transformer(_new(13), micro_batches=7), 8, "e"),
    ("transformer_encdec", lambda: transformer(_new(14), encoder=12, decoder=12), 16, "u"),
    ("moe_capacity", lambda: moe(_new(15), skew=2.0), 8, "e"),
    ("moe_dropless", lambda: moe(_new(16), top_k=4, capacity=math.inf, inner=1536), 16, "u"),
    ("inception_multitask", lambda: inception_multitask(_new(17)), 8, "e"),
    ("nas_cells", lambda: nas_cells(_new(18)), 16, "u"),
    ("random_layered", lambda: random_layered(_new(19)), 8, "e"),
    ("random_layered", lambda: random_layered(_new(20), layers=50, width=44, skip=0.35), 16, "u"),
)
