"""Functions with a backward of their own are single calls of an export, with that backward."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from graphs.extract import Extraction, ExtractionError, Workload, extract
from graphs.extract.export.functions import OwnFunction
from tests.helpers import one_process
from tests.helpers.extracted_steps import copied
from tests.helpers.own_functions import (
    STEPS,
    ClampedRoot,
    Noisy,
    Reversed,
    Summed,
    X,
    own_step,
    root,
)
from tests.helpers.placed_steps import by_calls
from tests.helpers.trained_alike import assert_trains_alike


def own_calls(extraction: Extraction) -> list[str]:
    calls = extraction.forward.calls
    return [call.key for call in calls if isinstance(call.target, OwnFunction)]


def exported(function: Callable[..., Any], **modules: nn.Module) -> Extraction:
    extraction = extract(own_step(function, **modules))
    assert extraction.fell_back == ()
    return extraction


@functools.cache
def exported_once(name: str) -> Extraction:
    return exported(STEPS[name])


@pytest.mark.slow_repeats
@pytest.mark.parametrize("name", STEPS)
def test_its_own_backward_is_that_of_the_step(name: str) -> None:
    extraction = copied(exported_once(name))
    assert own_calls(extraction)
    if name != "random":
        one_process.assert_runs_as_eager(extraction, exact=True)
    assert_trains_alike(
        copy.deepcopy(extraction.step), by_calls(extraction, ["cpu"]), tolerance=1e-9
    )


def test_autograd_of_what_it_computes_would_give_other_gradients() -> None:
    own = one_process.run_placed(exported(STEPS["held"]))
    traced = one_process.run_placed(exported(lambda m, x: m.second(m.first(x).sigmoid().sqrt())))
    torch.testing.assert_close(own.output, traced.output)
    assert not torch.allclose(own.gradients["first.weight"], traced.gradients["first.weight"])


@pytest.mark.parametrize("name", STEPS)
def test_all_that_it_does_stems_from_its_call(name: str) -> None:
    extraction = exported_once(name)
    keys, ops = own_calls(extraction), list(extraction.graph)
    for op, call, forward in zip(ops, extraction.call_of, extraction.forward_of, strict=True):
        if ":backward/" in op and not op.partition("#")[0].endswith(".gradient"):
            assert forward is not None
            if call in keys and name != "view":  # a view is no op
                assert extraction.call_of[forward] == call
    phases = {
        data["phase"]
        for data, call in zip(extraction.graph.nodes.values(), extraction.call_of, strict=True)
        if call in keys
    }
    expected = {"forward", "backward"} - ({"forward"} if name == "view" else set())
    assert phases == expected - ({"backward"} if name == "unneeded" else set())


def test_a_call_is_named_after_its_class_and_module() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return root(x.sigmoid())

    extraction = exported(lambda m, x: m.root(m.second(m.root(m.first(x)))), root=Root())
    assert own_calls(extraction) == ["root:ClampedRoot", "root@1:ClampedRoot"]
    assert {"root:sqrt", "root@1:sqrt", "root:backward/clamp"} <= set(extraction.graph)


def test_random_numbers_come_in_the_order_of_the_model() -> None:
    calls = exported(STEPS["random"]).forward.calls
    assert [call.key for call in calls if call.is_random] == [":Noisy"]


class Product(Function):
    """A product of matrices, which autocast makes in bf16, with twice its gradient in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        assert weight.dtype == torch.float32  # also where others read a cast of it
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        twice = 2 * gradient.float()
        return twice @ weight.t(), x.float().t() @ twice


def product_beside_a_layer(m: Any, x: Tensor) -> Any:
    return m.second(x) + Product.apply(m.first(x), m.second.weight) + m.second(m.first(x))  # type: ignore[no-untyped-call]


@pytest.mark.slow_repeats
@pytest.mark.parametrize("function", [STEPS["keyword"], product_beside_a_layer])
def test_functions_run_under_autocast_as_in_eager_mode(function: Callable[..., Any]) -> None:
    step = replace(own_step(function), dtype="bf16")
    extraction = extract(step)
    assert extraction.extractor == "export"
    one_process.assert_runs_as_eager(extraction)
    assert_trains_alike(step, by_calls(extraction, ["cpu"]), tolerance=1e-9)
    one_process.assert_runs_as_eager(extraction, exact=True)


def test_the_loss_may_be_what_a_function_returns() -> None:
    model = own_step(lambda m, x: root(m.second(m.first(x)).sigmoid().mean())).model
    step = Workload.of(model, X)
    extraction = extract(step)
    assert own_calls(extraction) == [":ClampedRoot"]
    one_process.assert_runs_as_eager(extraction, exact=True)
    assert_trains_alike(copy.deepcopy(step), by_calls(extraction, ["cpu"]), tolerance=1e-9)


def test_a_function_may_be_called_within_an_autocast_block() -> None:
    def within(m: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            product = Product.apply(m.first(x), m.second.weight)  # type: ignore[no-untyped-call]
        return Noisy.apply(product.float())  # type: ignore[no-untyped-call]

    extraction = exported(within)
    assert own_calls(extraction) == [":Noisy"]  # the block is one call
    assert_trains_alike(
        copy.deepcopy(extraction.step), by_calls(extraction, ["cpu"]), tolerance=1e-9
    )


def test_a_model_without_values_has_them_too() -> None:
    step = own_step(STEPS["held"])
    known = list(extract(step).graph)
    step.model.to("meta")
    assert list(extract(step).graph) == known


class Weighted(Function):
    """A weighted sum; the weights are a constant of the function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.weights = torch.tensor([1.0, 2.0] * 4)
        return x * ctx.weights

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        doubled: Tensor = 2 * gradient * ctx.weights
        return doubled


def test_texts_that_name_no_device_are_arguments_like_others() -> None:
    tags = ["mean", "cpus", "cuda 0", ""]
    extraction = exported(lambda m, x: Tagged.apply(m.first(x), tags))  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert own_calls(extraction) == [":Tagged"]
    one_process.assert_runs_as_eager(extraction, exact=True)


def test_a_function_may_make_constants_of_its_own() -> None:
    extraction = exported(lambda m, x: Weighted.apply(m.first(x)))  # type: ignore[no-untyped-call]
    one_process.assert_runs_as_eager(extraction, exact=True)
    assert_trains_alike(copy.deepcopy(extraction.step), by_calls(extraction, ["cpu"]))


# --- refused


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.relu_()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient


class OfModule(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Linear) -> Tensor:
        return x * module.bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return 3 * gradient, None


class Listed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return (x.sin(), [x.cos()])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        return 3 * gradient


class Tagged(Function):
    """Takes texts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tags: list[str]) -> Tensor:
        return x.sin() if tags[0] == "mean" else x.cos()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return 3 * gradient, None


class Either(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin() if x.sum() > 0 else x.cos()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient


class Vmapped(Reversed):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


def closing_over(m: Any, x: Tensor) -> Any:
    class Closed(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            return x * m.second.bias

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 3 * gradient

    return Closed.apply(m.first(x))  # type: ignore[no-untyped-call]


def closing_over_in_backward(m: Any, x: Tensor) -> Any:
    class Closed(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            return x.sin()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return gradient * m.second.bias

    return Closed.apply(m.first(x))  # type: ignore[no-untyped-call]


class Counting(Function):
    """The identity, whose backward adds to a buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor) -> Tensor:
        ctx.total = total
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.total.add_(gradient.abs().mean())
        return gradient, None


def counting(m: Any, x: Tensor) -> Any:
    return Counting.apply(m.first(x), m.norm.running_mean)  # type: ignore[no-untyped-call]


def hooked(m: Any, x: Tensor) -> Any:
    y = m.first(x)
    y.register_hook(lambda gradient: 5 * gradient)
    return y.sigmoid()


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "in place": (
        lambda m, x: InPlace.apply(m.first(x) + 1),  # type: ignore[no-untyped-call]
        "writes into its inputs",
    ),
    "module": (
        lambda m, x: OfModule.apply(m.first(x), m.second),  # type: ignore[no-untyped-call]
        "takes a Linear",
    ),
    "list": (
        lambda m, x: Listed.apply(m.first(x))[0],  # type: ignore[no-untyped-call]
        "returns something else than tensors",
    ),
    "device as a text": (
        lambda m, x: Summed.apply(m.first(x), [x, m.second(x)], str(x.device)),  # type: ignore[no-untyped-call]  # torch leaves it untyped
        "takes the device 'cpu' as a text",
    ),
    "device in a list": (
        lambda m, x: Tagged.apply(m.first(x), ["mean", "cuda:0"]),  # type: ignore[no-untyped-call]  # torch leaves it untyped
        "takes the device 'cuda:0' as a text",
    ),
    "in place in backward": (counting, "writes into its inputs in its backward pass"),
    "hook on a gradient": (hooked, r"by a hook .*Tensor\.register_hook"),
    "closure": (closing_over, "reads tensors that it does not get as arguments"),
    "closure in backward": (closing_over_in_backward, "cannot be exported"),
    "values": (lambda m, x: Either.apply(m.first(x)), "depends on the values"),  # type: ignore[no-untyped-call]
    "vmap": (lambda m, x: torch.vmap(Vmapped.apply)(m.first(x)), r"torch\.func transforms"),
}


@pytest.mark.slow_repeats
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_more_than_a_computation_on_its_arguments_is_recorded(name: str) -> None:
    function, reason = REFUSED[name]
    step = own_step(function, norm=nn.BatchNorm1d(8))
    extraction = extract(step)
    assert extraction.extractor == "dispatch"
    [tried] = extraction.fell_back
    assert tried.reason.count(".py") == 1  # the line of the model
    with pytest.raises(ExtractionError, match=reason):
        extract(step, "export")
    one_process.assert_runs_as_eager(extraction, exact=True)


def test_the_call_is_of_the_class_itself() -> None:
    [call] = [c for c in exported(STEPS["held"]).forward.calls if c.op == "ClampedRoot"]
    assert call.target == OwnFunction(ClampedRoot, is_random=False)
    assert call.target.qualified_name == "tests.helpers.own_functions.ClampedRoot"
