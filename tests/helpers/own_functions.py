"""Steps with functions that have a backward of their own, which differs from that of their ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from graphs.extract import Workload
from tests.helpers.tiny_models import Plain, squared


class ClampedRoot(Function):
    """The root, with a gradient that is bounded: that of autograd is much larger near 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        root: Tensor = gradient / (4 * x).clamp(min=2.0).sqrt()
        return root


class Scaled(Function):
    """A product with twice its gradient; context and default argument apart."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, factor: float = 3.0) -> Tensor:
        return x * weight * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, ctx.factor = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = 2 * ctx.factor * (gradient * x).sum(0)
        return 2 * ctx.factor * gradient * weight, of_weight, None


class TopTwo(Function):
    """The two largest numbers, where they are, nothing, and a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        values, indices = x.topk(2)
        ctx.save_for_backward(indices)
        ctx.mark_non_differentiable(indices)
        ctx.width = x.shape[-1]
        return values, indices, None, 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Tensor:
        (indices,) = ctx.saved_tensors
        zeros = gradient.new_zeros(*gradient.shape[:-1], ctx.width)
        return zeros.scatter(-1, indices, gradient.sign())


class Reversed(Function):
    """The identity; the gradient changes its sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Recomputed(Function):
    """Computes a second time in its backward pass, and differentiates that by autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return ClampedRoot.apply((x @ weight).exp())  # type: ignore[no-any-return, no-untyped-call]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            out = (x @ weight).exp().sqrt()
        return torch.autograd.grad(out, (x, weight), 2 * gradient)


class Noisy(Function):
    """Adds noise, and doubles the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Summed(Function):
    """Adds tensors that come in a list, which get no gradient, and zeros of a device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, others: Any, device: torch.device) -> Tensor:
        with torch.enable_grad():
            root = ClampedRoot.apply(x.abs())  # type: ignore[no-untyped-call]
        zeros = torch.zeros(x.shape[-1], device=device)
        return root.detach() + others[0] * others[1] + zeros  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.sin(), None, None


class Folded(Function):
    """Another shape, which comes as an argument, with half the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: torch.Size, scale: Any) -> Any:
        ctx.shape, ctx.scale = x.shape, scale
        ctx.set_materialize_grads(False)
        return x.reshape(shape) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.reshape(ctx.shape) * 0.5, None, None


class Partly(Function):
    """Two results, of which one has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        sine, cosine = x.sin(), x.cos()
        ctx.mark_non_differentiable(cosine)
        return sine, cosine

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        return 3 * gradient


class Outer:
    class Inner(ClampedRoot):
        """A function in a class."""


root: Callable[..., Any] = ClampedRoot.apply
SCALE = torch.tensor(0.5)
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def own_step(function: Callable[..., Any], **modules: nn.Module) -> Workload:
    torch.manual_seed(0)
    model = Plain(function, first=nn.Linear(8, 8), second=nn.Linear(8, 8), **modules)
    return Workload.of(model, (X, X.flip(0)), squared)


def _top(m: Any, x: Tensor) -> Any:
    values, indices, nothing, count = TopTwo.apply(m.first(x))  # type: ignore[no-untyped-call]
    assert nothing is None
    return m.second(x).gather(1, indices).repeat(1, 4) + values.repeat(1, 4) * count


def _partly(m: Any, x: Tensor) -> Any:
    sine, cosine = Partly.apply(m.first(x))  # type: ignore[no-untyped-call]
    return m.second(sine) * cosine + cosine.exp()


def _local(m: Any, x: Tensor) -> Any:
    class Local(ClampedRoot):
        pass

    return m.second(Local.apply(m.first(x).sigmoid()))  # type: ignore[no-untyped-call]


STEPS: dict[str, Callable[..., Any]] = {
    "held": lambda m, x: m.second(root(m.first(x).sigmoid())),
    "twice": lambda m, x: root(m.second(root(m.second(x).sigmoid())).sigmoid()),
    "parameter": lambda m, x: m.second(Scaled.apply(x, m.first.bias)),  # type: ignore[no-untyped-call]
    "keyword": lambda m, x: Scaled.apply(m.first(x), m.second.bias, 0.5),  # type: ignore[no-untyped-call]
    "members": _top,
    "partly": _partly,
    "view": lambda m, x: m.second(Reversed.apply(m.first(x))),  # type: ignore[no-untyped-call]
    "recomputed": lambda m, x: Recomputed.apply(m.first(x), m.second.weight),  # type: ignore[no-untyped-call]
    "random": lambda m, x: m.second(Noisy.apply(m.first(x))),  # type: ignore[no-untyped-call]
    "lists": lambda m, x: Summed.apply(m.first(x), [x, m.second(x)], x.device),  # type: ignore[no-untyped-call]
    "constant": lambda m, x: m.second(Folded.apply(m.first(x), x.t().shape, SCALE).t()),  # type: ignore[no-untyped-call]
    "nested": lambda m, x: m.second(Outer.Inner.apply(m.first(x).sigmoid())),  # type: ignore[no-untyped-call]
    "local": _local,
    "unneeded": lambda m, x: m.first(root(x.sigmoid())),
}
"""Forward passes of :func:`own_step`, by what is special."""
