"""Models with a custom backward pass: extracted as torch runs them, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import function as autograd_function
from torch.autograd.function import Function
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from graphs.extract import ExtractionError, StepError, Workload, extract
from graphs.extract.extraction import EXTRACTORS
from tests.helpers import one_process
from tests.helpers.tiny_models import Plain, squared

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
EVERY_WAY = pytest.mark.parametrize("extractor", ["auto", *EXTRACTORS])


def two_layers(function: Callable[..., Any], training: bool = True) -> Workload:
    torch.manual_seed(0)
    model = Plain(function, first=nn.Linear(8, 8), second=nn.Linear(8, 8))
    return Workload.of(model, (X, X.flip(0)), squared, training=training)


def both(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.second(torch.relu(m.first(x)))
    return out


def checkpointed(m: Any, x: Tensor) -> Any:
    return checkpoint(lambda x: both(m, x), x, use_reentrant=False)


def reentrant(m: Any, x: Tensor) -> Any:
    return checkpoint(lambda x: both(m, x), x.requires_grad_(), use_reentrant=True)


class StraightThrough(Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def rounded(m: Any, x: Tensor) -> Any:
    return m.second(StraightThrough.apply(m.first(x) * 4))  # type: ignore[no-untyped-call]


class Hidden(Function):
    """Runs its input function, and later the backward pass of that itself."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.out = function(x.detach())
        out: Tensor = ctx.out.detach()
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        torch.autograd.backward(ctx.out, gradient)
        return None, torch.zeros_like(gradient)


def hidden(m: Any, x: Tensor) -> Any:
    return m.second(Hidden.apply(m.first, x.requires_grad_()))  # type: ignore[no-untyped-call]


def assert_is_recorded(function: Callable[..., Any], offset: int, reason: str) -> None:
    """Assert that an export is refused for a line of the function, and a recording is right."""
    step = two_layers(function)
    with pytest.raises(ExtractionError, match=reason) as refused:
        extract(step, "export")
    line = function.__code__.co_firstlineno + offset
    assert f'File "{__file__}", line {line}' in str(refused.value)
    extraction = extract(step)
    assert extraction.extractor == "dispatch"
    one_process.assert_runs_as_eager(extraction, exact=True)


def test_what_an_export_would_not_keep_is_recorded() -> None:
    assert_is_recorded(checkpointed, 1, "backward")


def test_a_checkpointed_step_counts_what_is_computed_again_and_saves_less() -> None:
    step = two_layers(checkpointed)
    extraction, plain = extract(step), extract(two_layers(both))
    with FlopCounterMode(display=False) as counter:
        squared(step.model(X), X).backward()  # type: ignore[no-untyped-call]
    nodes = [data for _, data in extraction.graph.nodes(data=True)]
    assert sum(data["flops"] for data in nodes) == counter.get_total_flops()
    saved = sum(data["saved_bytes"] for data in nodes)
    assert saved < sum(data["saved_bytes"] for _, data in plain.graph.nodes(data=True))


@pytest.mark.slow_repeats
@pytest.mark.parametrize("function", [checkpointed, reentrant, rounded])
def test_inference_has_no_backward_pass_to_settle(function: Callable[..., Any]) -> None:
    extraction = extract(two_layers(function, training=False))
    assert extraction.extractor == "export"
    assert extraction.fell_back == ()


def test_modules_do_not_show_what_is_computed_again() -> None:
    with pytest.raises(ExtractionError, match="activation checkpointing") as refused:
        extract(two_layers(checkpointed), "modules")
    assert not isinstance(refused.value, StepError)


@EVERY_WAY
def test_reentrant_checkpointing_is_refused_with_the_other_kind(extractor: str) -> None:
    with pytest.raises(StepError, match="give use_reentrant=False") as refused:
        extract(two_layers(reentrant), extractor)
    line = reentrant.__code__.co_firstlineno + 1
    assert f'File "{__file__}", line {line}' in str(refused.value)


@pytest.mark.parametrize("extractor", ["dispatch", "modules", "auto"])
def test_a_step_that_lacks_gradients_is_refused(extractor: str) -> None:
    with pytest.raises(ExtractionError, match=r"a gradient for first\.bias and 1 more, but"):
        extract(two_layers(hidden), extractor)


def test_a_parameter_that_the_loss_does_not_depend_on_needs_no_gradient() -> None:
    step = two_layers(lambda m, x: m.first(x) + m.second(x).detach())
    for extractor in EXTRACTORS:
        extraction = extract(step, extractor)
        if extractor != "modules":
            assert set(extraction.program.gradients) == {"first.weight", "first.bias"}
    assert all(own.grad is None for own in step.model.parameters())


@EVERY_WAY
def test_a_loss_without_a_backward_pass_is_a_fault_of_the_step(extractor: str) -> None:
    with pytest.raises(StepError, match="does not depend on any parameter") as refused:
        extract(two_layers(torch.no_grad()(both)), extractor)
    assert "torch.no_grad()" in str(refused.value)


@pytest.mark.slow
def test_a_backward_pass_that_only_tracing_cannot_see_is_no_fault_of_the_step() -> None:
    def either(m: Any, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, m.first, m.second, (x,))

    with pytest.raises(ExtractionError) as refused:
        extract(two_layers(either))
    assert "does not depend on any parameter" not in str(refused.value)


def test_torch_is_left_as_it_was() -> None:
    replaced = (
        (autograd_function._SingleLevelFunction, "apply"),
        (autograd_function, "custom_function_call"),
        (saved_tensors_hooks, "__enter__"),
        (torch.Tensor, "grad_fn"),
    )
    before = [vars(owner).get(name) for owner, name in replaced]
    for function in (both, checkpointed, reentrant, rounded):
        for extractor in EXTRACTORS:
            try:
                extract(two_layers(function), extractor)
            except ExtractionError:
                assert function in (checkpointed, reentrant)
    assert [vars(owner).get(name) for owner, name in replaced] == before


@pytest.mark.parametrize(
    "register",
    [
        lambda module: module.register_full_backward_hook(lambda _, gradients, __: gradients),
        lambda module: module.register_full_backward_pre_hook(lambda _, gradients: gradients),
    ],
)
def test_a_module_with_a_hook_for_its_backward_pass_is_recorded(
    register: Callable[[nn.Module], object],
) -> None:
    step = two_layers(lambda m, x: m.second(m.first(x).tanh()))
    register(step.model.second)  # type: ignore[arg-type]
    extraction = extract(step)
    assert extraction.extractor == "dispatch"
    assert "second has a hook for its backward pass" in extraction.fell_back[0].reason


def test_a_parameter_with_a_hook_on_its_gradient_is_refused() -> None:
    step = two_layers(lambda m, x: m.second(m.first(x).tanh()))
    parameter = step.named_state()["first.weight"]
    parameter.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
    with pytest.raises(StepError, match=r"first\.weight .* has a hook on its gradient"):
        extract(step)


class Accumulating(Function):
    """A product whose backward adds half of the gradient of its weight to ``.grad`` itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        half = x.t() @ gradient / 2
        if ctx.weight.grad is None:
            ctx.weight.grad = torch.zeros_like(ctx.weight)
        ctx.weight.grad.add_(half)
        return gradient @ ctx.weight.t(), half


def accumulating(m: Any, x: Tensor) -> Any:
    return Accumulating.apply(m.first(x), m.second.weight)  # type: ignore[no-untyped-call]


class OfModel(Function):
    """The identity, whose backward assigns the gradient of a bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Any) -> Tensor:
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.model.second.bias.grad = gradient.sum(0)
        return gradient, None


def of_model(m: Any, x: Tensor) -> Any:
    return m.second(OfModel.apply(m.first(x), m))  # type: ignore[no-untyped-call]


def closed_over(m: Any, x: Tensor) -> Any:
    class Closed(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            m.second.bias.grad = gradient.sum(0)
            return gradient

    return m.second(Closed.apply(m.first(x)))  # type: ignore[no-untyped-call]


def by_hook(m: Any, x: Tensor) -> Any:
    def assign(gradient: Tensor) -> None:
        m.second.bias.grad = gradient.sum(0)

    y = m.first(x)
    y.register_hook(assign)
    return m.second(y)


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("function", "writer"),
    [
        (accumulating, "Accumulating"),
        (of_model, "OfModel"),
        (closed_over, "Closed"),
        (by_hook, "Plain"),
    ],
)
def test_a_gradient_that_a_backward_pass_writes_itself_is_in_no_trace(
    function: Callable[..., Any], writer: str
) -> None:
    step = two_layers(function)
    for extractor in ("export", "dispatch"):
        with pytest.raises(ExtractionError) as refused:
            extract(step, extractor)
        assert not isinstance(refused.value, StepError)
    message = str(refused.value)
    assert message.startswith(f"the backward pass of {writer} ")
    assert "writes the gradient of second." in message
    assert (f'File "{__file__}", line ' in message) is (writer != "Plain")
    assert extract(step).extractor == "modules"  # the model's own code
    assert all(own.grad is None for own in step.model.parameters())


def hook_of_node(m: Any, x: Tensor) -> Any:
    y = m.first(x).tanh()
    y.grad_fn.register_hook(lambda gradients, _: (3 * gradients[0],))
    return m.second(y)


def hook_before_node(m: Any, x: Tensor) -> Any:
    y = m.first(x).tanh()
    y.grad_fn.register_prehook(lambda gradients: (3 * gradients[0],))
    return m.second(y)


def hook_of_edge(m: Any, x: Tensor) -> Any:
    y = m.first(x).tanh()
    get_gradient_edge(y).node.register_prehook(lambda gradients: (3 * gradients[0],))
    return m.second(y)


@pytest.mark.parametrize("function", [hook_of_node, hook_before_node, hook_of_edge])
def test_hooks_of_nodes_of_autograd_are_recorded(function: Callable[..., Any]) -> None:
    assert_is_recorded(function, 2, "grad_fn")


@torch.inference_mode()
def inferred(m: Any, x: Tensor) -> Any:
    return m.first(x)


def inferred_within(m: Any, x: Tensor) -> Any:
    with torch.inference_mode():
        return m.first(x)


@pytest.mark.parametrize("first", [inferred, inferred_within])
def test_inference_mode_within_a_training_step_is_left_to_a_recording(
    first: Callable[..., Any],
) -> None:
    step = two_layers(lambda m, x: m.second(first(m, x).clone()))
    with pytest.raises(ExtractionError, match=r"without gradients .*inference_mode"):
        extract(step, "export")
    extraction = extract(step)
    assert extraction.extractor == "dispatch"
    assert set(extraction.program.gradients) == {"second.weight", "second.bias"}
    one_process.assert_runs_as_eager(extraction)
