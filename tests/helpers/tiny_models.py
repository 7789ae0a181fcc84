"""Small models, one for each case that extraction and the executor must handle."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from graphs.extract import Workload
from graphs.models import InceptionConfig, InceptionV3, Nmt, NmtConfig

NO_BF16_LSTM = (
    "" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "this CPU runs no LSTM in bf16"
)
"""Reason why models with such layers cannot run here, in eager mode either; "" if they can."""


class Plain(nn.Module):
    """Module that computes ``function(model, *inputs)`` with the given submodules."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return self.function(self, *inputs, **keywords)


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def conv_net() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 6, 3, stride=2),
        nn.Dropout(0.0),
        nn.Flatten(),
        nn.Linear(6 * 3 * 3, 5),
    )
    return Workload.of(model, (torch.randn(4, 3, 16, 16), torch.arange(4)), F.cross_entropy)


def channels_last() -> Workload:
    """Return ``conv_net`` in channels-last memory format."""
    step = conv_net()
    images, labels = step.inputs
    model = step.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's overloads forget it
    inputs = (images.to(memory_format=torch.channels_last), labels)
    return Workload.of(model, inputs, step.loss)


def tied_weights() -> Workload:
    """Return a model whose embedding is also its output projection."""
    torch.manual_seed(1)
    model = Plain(
        lambda m, tokens: m.head(torch.tanh(m.middle(m.embedding(tokens)))),
        embedding=nn.Embedding(11, 6),
        middle=nn.Linear(6, 6),
        head=nn.Linear(6, 11, bias=False),
    )
    model.get_submodule("head").weight = model.get_submodule("embedding").weight
    tokens = torch.randint(11, (3, 4))
    return Workload.of(
        model, (tokens, tokens), lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())
    )


def norm_twice() -> Workload:
    """Return a model that calls a batch norm twice; the second call reads the first's update."""
    torch.manual_seed(2)
    model = Plain(
        lambda m, x: m.norm(m.first(x)) + m.norm(m.second(x) * 2),
        first=nn.Linear(6, 4),
        second=nn.Linear(6, 4),
        norm=nn.BatchNorm1d(4),
    )
    return Workload.of(model, (torch.randn(5, 6), torch.randn(5, 4)), squared)


def views() -> Workload:
    def forward(m: Any, x: Tensor) -> Tensor:
        left, right = m.first(x).chunk(2, 1)
        part = m.second(left[:, 1:].transpose(0, 1).reshape(5, -1)).split([1, 2], 1)
        wide = part[1].unsqueeze(2).expand(-1, -1, 3).contiguous()
        rows = torch.stack(wide.unbind(2), 0)[1]
        return torch.cat([part[0] * right.select(1, 0).view(5, 1), rows], 1)

    torch.manual_seed(3)
    model = Plain(forward, first=nn.Linear(7, 8), second=nn.Linear(3, 3))
    return Workload.of(model, (torch.randn(5, 7), torch.randn(5, 3)), squared)


def transposed_output() -> Workload:
    """Return a loss whose gradient has another layout than in the trace: a view becomes a copy."""
    torch.manual_seed(13)
    model = Plain(lambda m, x: m.linear(x).transpose(0, 1), linear=nn.Linear(4, 3))
    return Workload.of(model, (torch.randn(5, 2, 4), torch.randn(2, 5, 3)), nn.functional.mse_loss)


def lstm() -> Workload:
    """Return two recurrent layers, each of which torch trains by one kernel."""
    torch.manual_seed(4)
    model = Plain(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(4, 3, 2))
    return Workload.of(model, (torch.randn(3, 2, 4), torch.randn(3, 2, 3)), squared)


def gru(*, bias: bool = True) -> Workload:
    """Return two recurrent layers; the second is bidirectional with a computed initial state."""
    torch.manual_seed(14)

    def forward(m: Any, x: Tensor) -> Tensor:
        first, last = m.first(x)
        both, _ = m.both(first, m.start(last).unflatten(-1, (2, 3)).transpose(1, 2).flatten(0, 1))
        out: Tensor = m.head(both)
        return out

    layers = {
        "first": nn.GRU(4, 3, bias=bias),
        "both": nn.GRU(3, 3, bidirectional=True, bias=bias),
        "start": nn.Linear(3, 6),
        "head": nn.Linear(6, 2),
    }
    return Workload.of(
        Plain(forward, **layers), (torch.randn(5, 2, 4), torch.randn(5, 2, 2)), squared
    )


def attention() -> Workload:
    """Return a transformer layer, whose projection is split into query, key and value."""
    torch.manual_seed(5)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return Workload.of(model, (torch.randn(2, 3, 8), torch.randn(2, 3, 8)), squared)


def own_loss() -> Workload:
    """Return a step with keywords out of signature order, numbers, and an output with a loss."""

    class Scorer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.unused = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

        def forward(
            self, x: Tensor, times: int, mask: Tensor | None = None, y: Tensor | None = None
        ) -> SimpleNamespace:
            assert mask is not None
            assert y is not None
            assert isinstance(self.seen, Tensor)
            self.seen += 1
            return SimpleNamespace(loss=((self.linear(x) * times - y) * mask).pow(2).sum())

    torch.manual_seed(6)
    inputs = {"y": torch.randn(3, 4), "times": 3, "x": torch.randn(3, 4), "mask": torch.rand(3, 4)}
    return Workload.of(Scorer(), inputs)


def weighted_loss() -> Workload:
    """Return a step whose loss is a module with state, while a submodule is named loss."""
    torch.manual_seed(7)
    model = Plain(lambda m, x: m.loss(x), loss=nn.Linear(4, 3))
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]))
    return Workload.of(model, (torch.randn(5, 4), torch.tensor([0, 1, 2, 1, 0])), loss)


def decaying_weight() -> Workload:
    """Return a step whose forward pass changes a parameter."""

    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.linear.weight.mul_(0.9)
        out: Tensor = m.linear(x)
        return out

    torch.manual_seed(8)
    model = Plain(forward, linear=nn.Linear(4, 3))
    return Workload.of(model, (torch.randn(5, 4), torch.randn(5, 3)), squared)


def frozen_norm() -> Workload:
    """Return a training step with batch norm in eval mode, as in fine-tuning."""
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model[1].eval()
    return Workload.of(model, (torch.randn(5, 4), torch.randn(5, 3)), squared)


def nmt() -> Workload:
    torch.manual_seed(10)
    model = Nmt(NmtConfig(vocabulary=13, hidden=4, layers=2))
    source, target = torch.randint(13, (2, 3)), torch.randint(13, (2, 4))
    return Workload.of(
        model,
        (source, target, target),
        lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
    )


def inception(dropout: float = 0.0) -> Workload:
    """Return Inception-V3 with 1/64 of its channels, on the smallest image that it accepts."""
    torch.manual_seed(11)
    model = InceptionV3(InceptionConfig(classes=5, width=1 / 64, dropout=dropout, auxiliary=False))
    return Workload.of(model, (torch.randn(2, 3, 75, 75), torch.tensor([1, 3])), F.cross_entropy)


def structured_output() -> Workload:
    """Return an inference step that outputs inputs, parameters, constants and nested containers."""

    def forward(m: Any, x: Tensor) -> dict[str, Any]:
        hidden = m.linear(x)
        return {
            "hidden": hidden,
            "nothing": None,
            "number": 3,
            "same": x,
            "weight": m.linear.weight,
            "parts": [hidden[:, 0], (hidden.sum(), hidden.sum() * torch.tensor([2.0, 3.0]))],
        }

    torch.manual_seed(12)
    return Workload.of(Plain(forward, linear=nn.Linear(4, 3)), torch.randn(5, 4), training=False)


def inference(make: Callable[[], Workload]) -> Callable[[], Workload]:
    """Return a function that makes the same step without gradients."""

    def made() -> Workload:
        step = make()
        return Workload(step.model, step.inputs, step.keywords, step.loss, training=False)

    return made


TRAINING: dict[str, Callable[[], Workload]] = {
    make.__name__: make
    for make in (
        conv_net,
        channels_last,
        tied_weights,
        norm_twice,
        views,
        attention,
        own_loss,
        weighted_loss,
        decaying_weight,
        frozen_norm,
        transposed_output,
        nmt,
        inception,
    )
}
INFERENCE: dict[str, Callable[[], Workload]] = {
    "structured_output": structured_output,
    **{
        f"{make.__name__}_inference": inference(make)
        for make in (conv_net, channels_last, norm_twice, views, lstm, decaying_weight)
    },
}
STEPS = {**TRAINING, **INFERENCE}
"""Steps by name; placed, they all give bit for bit the results of torch."""


@dataclass(frozen=True)
class Outcome:
    """Results of a step."""

    output: Any
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def eager(step: Workload) -> Outcome:
    """Run the step in eager torch; the step's model is not changed."""
    step = copy.deepcopy(step)
    output = forward(step)
    if step.training:
        output.backward()
    return Outcome(output, gradients_of(step), state_of(step))


def forward(step: Workload) -> Any:
    """Return the loss (training) or the output (inference); changes the model's state."""
    if step.model.training is not step.training:
        step.model.train(step.training)
    mixed = torch.autocast("cpu", dtype=torch.bfloat16, enabled=step.dtype == "bf16")
    with torch.set_grad_enabled(step.training), mixed:
        output = step.model(*step.model_inputs, **step.keywords)
        if step.training:
            output = getattr(output, "loss", output)
            output = step.loss(output, step.inputs[-1]) if step.loss is not None else output
    return output


def gradients_of(step: Workload) -> dict[str, Tensor]:
    state = step.named_state()
    return {name: own.grad.clone() for name, own in state.items() if own.grad is not None}


def state_of(step: Workload) -> dict[str, Tensor]:
    return {name: own.detach().clone() for name, own in step.named_state().items()}


def assert_same(found: Any, expected: Any) -> None:
    """Assert bitwise equality, in nested containers too."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        assert torch.equal(found, expected), (found - expected).abs().max()
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, item in expected.items():
            assert_same(found[key], item)
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, SimpleNamespace):
        assert_same(vars(found), vars(expected))
    else:
        assert found == expected


def tied_gradients(gradients: dict[str, Tensor], step: Workload) -> dict[str, Tensor]:
    """Return gradients under all names of the state; tied parameters share one."""
    state = step.named_state()
    return {
        name: gradients[first]
        for name in state
        for first in gradients
        if state[name] is state[first]
    }


def saved_bytes(step: Workload) -> int:
    """Return the bytes saved from forward to backward; the step is not changed.

    Parameters, buffers and inputs exist anyway and do not count.
    """
    step = copy.deepcopy(step)
    leaves = tree_leaves((step.inputs, dict(step.keywords)))
    there = [*step.named_state().values(), *(x for x in leaves if isinstance(x, Tensor))]
    known = {tensor.untyped_storage().data_ptr() for tensor in there}
    saved: dict[int, int] = {}
    alive = []  # keeps storages from being reused

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            alive.append(tensor)
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward(step)
    assert loss.requires_grad
    return sum(saved.values())


def export_onnx(model: nn.Module, inputs: tuple[Any, ...], path: Path, **options: Any) -> Path:
    """Export with the exporter that needs no other package; inputs are named x0, x1, ..."""
    names = [f"x{i}" for i in range(len(inputs))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, but the new exporter needs onnxscript
        torch.onnx.export(model.eval(), inputs, path, dynamo=False, input_names=names, **options)
    return path
