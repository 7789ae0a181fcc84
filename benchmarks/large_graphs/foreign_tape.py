"""Records ops of a training step: forward ops, then the backward and update ops that they imply.

Weights are ``variable`` ops, so the ops that share a tensor (time steps, micro-batches) read it
from one place. Costs: roofline of an NVIDIA H100 SXM5 (989.4 TFLOP/s dense BF16, 66.9 TFLOP/s FP32,
3352 GB/s; "H100 Tensor Core GPU Architecture" white paper), with estimated efficiencies and launch
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from graphs.graph import Phase

Rng = np.random.Generator
FeatureMap = tuple[int, int, int]
"""An op, the pixels of the whole batch, and the channels."""

TENSOR_FLOPS: Final = 0.65 * 989.4e12
VECTOR_FLOPS: Final = 0.65 * 66.9e12
MEMORY_RATE: Final = 0.85 * 3352e9
LAUNCH_S: Final = 4e-6
RESIDENT_S: Final = 5e-7
_DENSE: Final = ("matmul", "bmm", "conv", "flash_attention")
_GATHERS: Final = ("dispatch", "embedding")
# The gradient of these kinds is the incoming gradient itself, so no kernel runs for it.
_PASSES: Final = ("add", "dispatch")
_READS_NOTHING: Final = ("concat", "scatter_add", "avg_pool", "resize", "loss_sum")
_READS_OUTPUT: Final = ("softmax", "relu", "tanh", "lstm_gates")
_READS_OTHERS: Final = ("matmul", "bmm", "conv", "depthwise_conv", "embedding", "mul")


@dataclass(frozen=True, slots=True)
class ForeignOp:
    """Describe one op of a training step.

    `cost_s` is in seconds on the fastest device. Updates write in place: their output is empty.
    `parameter_bytes` counts the state that lives with the op: the BF16 weights of a `variable`,
    or the FP32 master copy and the Adam moments of an update. `inputs` holds earlier indices.
    """

    name: str
    kind: str
    module: str
    phase: Phase
    cost_s: float
    output_bytes: int
    parameter_bytes: int
    inputs: tuple[int, ...]


class Tape:
    """Records forward ops and derives the rest."""

    def __init__(self) -> None:
        self.ops: list[ForeignOp] = []
        self._flops: dict[int, float] = {}
        self._needs: set[int] = set()
        self._variables: dict[tuple[str, str], int] = {}
        self._sums: dict[int, int] = {}
        self._mark = 0

    def _emit(
        self,
        kind: str,
        module: str,
        phase: Phase,
        inputs: Sequence[int],
        out: int,
        flops: float = 0.0,
        state: int = 0,
    ) -> int:
        moved, family = out + 2 * state, kind.split("_grad_", maxsplit=1)[0]
        # Gathers, and the slices of a gradient, read only as much as they return.
        short = family in _GATHERS or (family in _READS_NOTHING and phase == "backward")
        moved += out if short else sum(self.ops[i].output_bytes for i in inputs)
        work = flops / (TENSOR_FLOPS if family in _DENSE else VECTOR_FLOPS)
        cost = LAUNCH_S + max(work, moved / MEMORY_RATE) if inputs else RESIDENT_S
        name = f"{module}/{kind}_{len(self.ops)}"
        self.ops.append(ForeignOp(name, kind, module, phase, cost, out, state, tuple(inputs)))
        return len(self.ops) - 1

    def source(self, module: str, elements: int) -> int:
        """Add an input of the model."""
        return self._emit("input", module, "forward", (), 2 * elements)

    def weight(self, module: str, label: str, elements: int) -> int:
        """Return the variable of this name, added if it is new."""
        key, size = (module, label), 2 * elements
        if key not in self._variables:
            self._variables[key] = self._emit("variable", module, "forward", (), size, 0.0, size)
            self._needs.add(self._variables[key])
        return self._variables[key]

    def op(
        self,
        kind: str,
        module: str,
        inputs: Sequence[int],
        elements: int = 0,
        flops: float = 0.0,
        weight: int = 0,
    ) -> int:
        """Add a forward op; `weight` counts the elements of a variable that it reads too."""
        if weight:
            inputs = (*inputs, self.weight(module, kind, weight))
        out = 2 * elements or self.ops[inputs[0]].output_bytes
        op = self._emit(kind, module, "forward", inputs, out, flops or 4.0 * out)
        self._flops[op] = flops or 4.0 * out
        if kind != "top_k" and not self._needs.isdisjoint(inputs):
            self._needs.add(op)
        return op

    def linear(self, module: str, x: int, rows: int, width: int, out: int) -> int:
        """Add a matrix product with a variable (width, out)."""
        return self.op("matmul", module, (x,), rows * out, 2.0 * rows * width * out, width * out)

    def embed(self, name: str, n: int, width: int, words: int) -> int:
        """Add the lookup of n words."""
        return self.op("embedding", name, (self.source(name, n),), n * width, 0, words * width)

    def feed(self, name: str, x: int, rows: int, width: int, inner: int, gated: bool) -> int:
        """Add a feed-forward block, optionally gated."""
        y = self.op("gelu", name, (self.linear(f"{name}.in", x, rows, width, inner),))
        if gated:
            y = self.op("mul", name, (y, self.linear(f"{name}.gate", x, rows, width, inner)))
        return self.linear(f"{name}.out", y, rows, inner, width)

    def conv(
        self, name: str, x: FeatureMap, out: int, area: int = 1, shrink: int = 1
    ) -> FeatureMap:
        """Add a convolution with batch norm and ReLU; ``area`` is that of the kernel."""
        pixels, weight = x[1] // shrink, x[2] * out * area
        y = self.op("conv", name, (x[0],), pixels * out, 2.0 * pixels * weight, weight)
        y = self.op("batch_norm", name, (y,), weight=2 * out)
        return self.op("relu", name, (y,)), pixels, out

    def join(self, name: str, maps: Sequence[FeatureMap]) -> FeatureMap:
        """Add the concatenation of the channels of maps."""
        pixels, channels = maps[0][1], sum(m[2] for m in maps)
        return self.op("concat", name, [m[0] for m in maps], pixels * channels), pixels, channels

    def entropy(self, name: str, logits: int, rows: int) -> int:
        """Add a cross-entropy with labels of its own."""
        return self.op("cross_entropy", name, (logits, self.source(name, rows)), 1)

    def _merge(self, target: int, parts: Sequence[int]) -> int:
        op, some = self.ops[target], sorted(set(parts))
        if len(some) == 1:
            return some[0]
        return self._emit("grad_sum", op.module, "backward", some, op.output_bytes)

    def _gradient(self, index: int, x: int, incoming: int) -> int:
        op, target = self.ops[index], self.ops[x]
        weight, reads, out = target.kind == "variable", {incoming}, target.output_bytes
        if op.kind in _READS_OUTPUT:
            reads.add(index)
        elif op.kind not in _READS_NOTHING:
            reads |= set(op.inputs) - ({x} if weight or op.kind in _READS_OTHERS else set())
        # A lookup touches few rows: its gradient holds those rows, not the dense table.
        out = min(out, op.output_bytes) if op.kind == "embedding" else out
        flops = self._flops[index] * (2.5 if op.kind == "flash_attention" else 1.0)
        kind = f"{op.kind}_grad_{'weight' if weight else 'input'}"
        return self._emit(kind, op.module, "backward", sorted(reads), out, flops)

    def train(self, losses: Sequence[int]) -> None:
        """Add the backward pass of all ops since the last one."""
        root = self.op("loss_sum", "loss", losses, 1)
        grads: dict[int, list[int]] = {root: [root]}
        for i in range(root, self._mark - 1, -1):
            if i in grads and self.ops[i].kind != "variable":
                incoming, passes = self._merge(i, grads[i]), self.ops[i].kind in _PASSES
                for x in (x for x in self.ops[i].inputs if x in self._needs):
                    grad = incoming if passes else self._gradient(i, x, incoming)
                    grads.setdefault(x, []).append(grad)
        for v in (v for v in self._variables.values() if v in grads):
            self._sums[v] = self._merge(v, [self._sums.get(v, grads[v][0]), *grads[v]])
        self._mark = len(self.ops)

    def update(self, losses: Sequence[int] = (), clip: bool = False) -> list[ForeignOp]:
        """Return all ops, with updates by Adam, after a clipping of gradients if asked for."""
        if losses:
            self.train(losses)
        last = [
            self._emit("square_norm", self.ops[v].module, "optimizer", (grad,), 4)
            for v, grad in self._sums.items()
            if clip
        ]
        last = [self._emit("global_norm", "optimizer", "optimizer", last, 4)] if clip else []
        for v, grad in self._sums.items():
            size, module = self.ops[v].output_bytes, self.ops[v].module
            self._emit(
                "adam_update", module, "optimizer", (v, grad, *last), 0, 8.0 * size, 6 * size
            )
        return self.ops

    def cell(self, name: str, x: int, states: dict[str, list[int]], rows: int, width: int) -> int:
        """Add a step of an LSTM cell, which updates its states; return its output."""
        a = self.linear(f"{name}.input", x, rows, width, 4096)
        b = self.linear(f"{name}.recurrent", states[name][0], rows, 1024, 4096)
        gates = self.op("lstm_gates", name, (self.op("add", name, (a, b)),), weight=4096)
        memory = self.op("lstm_state", name, (gates, states[name][1]), rows * 1024)
        states[name] = [self.op("lstm_output", name, (gates, memory), rows * 1024), memory]
        return states[name][0]
