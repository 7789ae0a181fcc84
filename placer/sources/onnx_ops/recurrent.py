"""Recurrent layers, whose gates have different orders in ONNX and torch."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from placer.sources.onnx_ops.rule import Function, Node, rule

GATES: Final = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
"""Positions in ONNX's weights (iofc, zrh) of the gates in torch's order (ifgo, rzn)."""
ACTIVATIONS: Final = {
    "LSTM": ("Sigmoid", "Tanh", "Tanh"),
    "GRU": ("Sigmoid", "Tanh"),
    "RNN": ("Tanh",),
}
LAYERS: Final[dict[str, type[nn.LSTM | nn.GRU | nn.RNN]]] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN": nn.RNN,
}


class Recurrent(nn.Module):
    """A recurrent layer of torch with the inputs and outputs of ONNX.

    Inputs: x (T, B, I); initial_h and initial_c (D, B, H), D directions. Outputs: y (T, D, B, H),
    the last h and, of an LSTM, the last c (D, B, H).
    """

    def __init__(self, layer: nn.RNNBase, *, backward: bool) -> None:
        super().__init__()
        self.layer = layer
        self.backward = backward

    def forward(self, x: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
        """Run all time steps."""
        initial = [*others[4:6], None, None][:2]
        directions = 2 if self.layer.bidirectional else 1
        size = (directions, x.shape[1], self.layer.hidden_size)
        h, c = (x.new_zeros(size) if state is None else state for state in initial)
        x = x.flip(0) if self.backward else x
        if isinstance(self.layer, nn.LSTM):
            y, last = self.layer(x, (h, c))
        else:
            y, one = self.layer(x, h)
            last = (one,)
        y = y.flip(0) if self.backward else y
        parts: Tensor = y.reshape(*y.shape[:2], directions, size[2]).transpose(1, 2)
        return (parts, *last)


@rule("LSTM", "GRU", "RNN")
def recurrent(node: Node) -> Function:
    """Return a layer of torch with the same weights."""
    direction = node.get("direction", "forward")
    directions = 2 if direction == "bidirectional" else 1
    usual = ACTIVATIONS[node.op] * directions
    given = tuple(node.get("activations") or usual)
    node.refuse_unless(given == usual, f"has the activations {', '.join(given)}")
    node.refuse_unless(node.get("clip") is None, "clips its gates")
    node.refuse_unless(node.get("layout", 0) == 0, "has the batch as its first dimension")
    node.refuse_unless(not node.get("input_forget", 0), "couples its gates")
    node.refuse_unless(not node.has(7), "has peepholes")
    after = node.op != "GRU" or bool(node.get("linear_before_reset", 0))
    node.refuse_unless(after, "resets before its linear layer, which no GRU of torch does")
    steps = node.ints(4) if node.has(4) else None
    node.refuse_unless(
        steps is None or set(steps) == {node.shape(0)[0]}, "has sequences of different lengths"
    )
    inputs, hidden, biases = node.value(1), node.value(2), node.value(3)
    assert inputs is not None
    assert hidden is not None
    layer = LAYERS[node.op](
        inputs.shape[2],
        hidden.shape[2],
        bias=biases is not None,
        bidirectional=directions == 2,
    )
    weights: list[Any] = []
    for d in range(directions):
        weights += [_reordered(node.op, inputs[d]), _reordered(node.op, hidden[d])]
        if biases is not None:
            weights += [_reordered(node.op, half) for half in biases[d].chunk(2)]
    with torch.no_grad():
        for parameter, weight in zip(layer.parameters(), weights, strict=True):
            parameter.data = weight.contiguous()
    layer.requires_grad_(False)
    return Recurrent(layer, backward=direction == "reverse")


def _reordered(op: str, weights: Tensor) -> Tensor:
    gates = weights.chunk(len(GATES[op]))
    return torch.cat([gates[i] for i in GATES[op]])
