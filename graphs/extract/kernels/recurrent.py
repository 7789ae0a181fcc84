"""Recurrent layers in traces of training steps, as torch trains them in eager mode.

Eager mode trains an LSTM on a CPU by kernels of oneDNN, one for each layer and direction. By itself
torch traces that kernel for inference only, which saves nothing for backward, and otherwise one op
for every gate and time step. It also leaves out the dropout between layers.

The kernel saves a workspace for backward. Its layout is that of the machine, so that only the
device that made it reads it (see :mod:`graphs.extract.dag`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._decomp import decompositions
from torch.nn import functional as F

LAYER: Final = "aten.mkldnn_rnn_layer.default"
LSTM: Final = 2  # ideep::rnn_kind
TENSORS: Final = 7  # inputs, weights, biases and states, the first arguments of a layer
WORKSPACE: Final = 3
"""Position of the workspace among the results of :data:`LAYER`."""
BACKWARD: Final = "aten.mkldnn_rnn_layer_backward.default"
BIAS_GRADIENTS: Final = (3, 4)
"""Positions of the gradients of both biases among the results of :data:`BACKWARD`. They are equal,
and one tensor by torch's fake kernel, unless its result comes from the cache of fake tensors."""
Layer = Callable[..., tuple[Tensor, tuple[Tensor, Tensor]]]


@contextlib.contextmanager
def layers_as_in_eager_mode() -> Iterator[None]:
    """Trace recurrent layers with the ops of eager mode, and with dropout between them."""
    helper: Callable[..., Any] = decompositions._rnn_helper
    replaced = {
        "_rnn_helper": functools.partial(_layer_by_layer, helper),
        "select_one_layer_lstm_function": _lstm_layer,
        "one_layer_rnn": _step_by_step,
    }
    with contextlib.ExitStack() as restored:
        for name, function in replaced.items():
            restored.callback(setattr, decompositions, name, getattr(decompositions, name))
            setattr(decompositions, name, function)
        yield


def _layer_by_layer(
    helper: Callable[..., tuple[Tensor, list[Any]]],
    inputs: Tensor,
    hidden: Sequence[Any],
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    layer: Layer,
) -> tuple[Tensor, list[Any]]:
    """Trace layers by torch's helper for all of them, which never drops anything."""
    outputs = inputs.transpose(0, 1) if batch_first else inputs
    directions = 2 if bidirectional else 1
    last: list[Any] = []
    for i in range(num_layers):
        if i and train and dropout:
            outputs = torch.dropout(outputs, dropout, train=True)
        own = slice(i * directions, (i + 1) * directions)
        outputs, states = helper(
            *(outputs, hidden[own], params[own], has_biases),
            *(1, 0.0, train, bidirectional, False, layer),
        )
        last += states
    return outputs.transpose(0, 1) if batch_first else outputs, last


def _lstm_layer(inputs: Tensor, states: Sequence[Tensor], params: Sequence[Any]) -> Layer:
    """Return the function that traces a layer, by the condition of ``use_mkldnn`` in RNN.cpp."""
    tensors = [inputs, *states, *chain.from_iterable(params)]
    kinds = {torch.float32}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        kinds.add(torch.bfloat16)
    is_fused = (
        torch._C._get_mkldnn_enabled()
        and all(tensor.device.type == "cpu" for tensor in tensors)
        and inputs.dtype in kinds
        and states[0].shape[-1] == states[1].shape[-1]  # else there are projections
        and inputs.numel() > 0
    )
    layer: Layer = _fused if is_fused else decompositions.one_layer_lstm
    return layer


def _fused(
    inputs: Tensor,
    hidden: tuple[Tensor, Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    reverse: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Run one direction of one layer by the kernel, as ``mkldnn_rnn`` in RNN.cpp does."""
    of_inputs, of_state, *biases = params
    hidden_size = hidden[0].shape[-1]
    if not has_biases:  # the kernel wants some and reads none
        biases = [of_inputs.new_zeros(4 * hidden_size) for _ in range(2)]
    out, last, cell, _ = torch.ops.aten.mkldnn_rnn_layer.default(
        *(inputs.contiguous(), of_inputs, of_state, *biases),
        *(state.unsqueeze(0).contiguous() for state in hidden),
        *(reverse, [], LSTM, hidden_size, 1, has_biases),
        *(False, False, torch.is_grad_enabled()),  # bidirectional, batch_first, train
    )
    return out, (last.squeeze(0), cell.squeeze(0))


def _step_by_step(
    inputs: Tensor,
    hidden: Tensor,
    params: Sequence[Tensor],
    has_biases: bool,
    hidden_fn: Callable[..., Tensor],
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run one direction of one layer, a GRU for one.

    States are matrices, as in eager mode. Torch traces them with a further dimension, which
    inputs lack: every gradient of an input is then a sum over that dimension.
    """
    of_inputs, of_state, *biases = params
    input_bias, state_bias = biases if has_biases else (None, None)
    steps = F.linear(inputs, of_inputs, input_bias).unbind(0)
    cell = _gru_cell if hidden_fn is decompositions.gru_cell else hidden_fn
    outputs: list[Tensor] = []
    for step in reversed(steps) if reverse else steps:
        hidden = cell(step, hidden, of_inputs, input_bias, of_state, state_bias)
        outputs.append(hidden)
    return torch.stack(outputs[::-1] if reverse else outputs), hidden


def _gru_cell(
    step: Tensor, hidden: Tensor, _: Tensor, __: Any, of_state: Tensor, bias: Tensor | None
) -> Tensor:
    """Return the next state (batch, features) from the products of a step's input."""
    own_reset, own_update, own_new = step.chunk(3, 1)
    reset, update, new = F.linear(hidden, of_state, bias).chunk(3, 1)
    new = (own_new + new * (reset + own_reset).sigmoid()).tanh()
    return (hidden - new) * (update + own_update).sigmoid() + new


def saves_workspace(target: str, args: Sequence[Any]) -> bool:
    """Return whether a call of a recurrent layer must save a workspace for backward."""
    return target == LAYER and bool(args[-1])


def workspace_shape(layer: fx.Node) -> tuple[int, ...]:
    """Return the shape of the workspace of a traced layer, which its fake kernel does not know."""
    tensors = [node.meta["val"] for node in layer.args[:TENSORS] if isinstance(node, fx.Node)]
    forms = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
    reverse, _, *options = layer.args[TENSORS:]
    return (_workspace_bytes(forms, (reverse, (), *options)),)


@functools.lru_cache(maxsize=64)
def _workspace_bytes(forms: tuple[Any, ...], options: tuple[Any, ...]) -> int:
    """Run the kernel on zeros: only oneDNN knows what it saves on this machine."""
    with torch.enable_grad():
        zeros = [torch.zeros(shape, dtype=dtype) for shape, dtype in forms]
        results = torch.ops.aten.mkldnn_rnn_layer.default(*zeros, *options)
    return int(results[WORKSPACE].numel())
