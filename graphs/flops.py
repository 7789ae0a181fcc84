"""FLOPs of torch calls, by torch's formulas and further ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
    shape_wrapper,
)


def call_flops(target: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of one torch call on fake tensors, 0 for operators without a formula.

    A multiply-add counts as two, as in torch.utils.flop_counter, whose formulas are used together
    with those of :func:`further_formulas`. A composite operator, such as linear, counts as the sum
    of its parts.
    """
    known = flops_by_formula(target, args, kwargs, result)
    if known is not None:
        return known
    if not is_composite(target):
        return 0
    with FlopCounterMode(display=False, custom_mapping=further_formulas()) as counter:
        target(*args, **kwargs)
    return int(counter.get_total_flops())


def flops_by_formula(target: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """Return the FLOPs of one torch call by the formula of its operator, None if it has none."""
    packet = getattr(target, "_overloadpacket", None)
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    further = further_formulas()
    if packet in further:
        return int(_of_shapes(further[packet])(*args, **kwargs, out_val=result))
    return None


def further_formulas() -> dict[Any, Callable[..., Any]]:
    """Return {operator: FLOP formula on argument shapes} where torch's counter has no formula.

    These are attention on CPUs (torch counts it on accelerators only), fused recurrent layers, and
    the products of stacked experts: torch's and, if it is loaded, those of transformers.
    """
    return {
        getattr(getattr(torch.ops, space), name): formula
        for (space, name), formula in FURTHER.items()
        if hasattr(getattr(torch.ops, space), name)
    }


def is_composite(target: Any) -> bool:
    """Return whether torch runs an operator by calls of other operators, also when it trains."""
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch._C._dispatch_has_kernel(target._schema.name)
        and torch._C._dispatch_has_kernel_for_dispatch_key(
            target._name, "CompositeImplicitAutograd"
        )
    )


def _attention_flops(queries: Any, keys: Any, values: Any, *_: Any, **__: Any) -> Any:
    return _forward(queries, *_for_every_head(queries, keys, values))


def _attention_backward_flops(
    gradient: Any, queries: Any, keys: Any, values: Any, *_: Any, **__: Any
) -> Any:
    return _backward(gradient, queries, *_for_every_head(queries, keys, values))


def _for_every_head(queries: Any, *shared: Any) -> list[Any]:
    """Return the shapes of keys or values, repeated for all query heads that share them."""
    return [(*shape[:1], queries[1], *shape[2:]) for shape in shared]


def _recurrent_flops(inputs: Any, *further: Any, **_: Any) -> int:
    """Return the FLOPs for inputs (..., features) of all steps; each multiplies by all matrices."""
    parameters: list[Any] = [group for group in further if isinstance(group, list)][-1]
    weights = sum(math.prod(shape) for shape in parameters if len(shape) == 2)
    return int(2 * math.prod(inputs[:-1]) * weights)


def _recurrent_kernel_flops(inputs: Any, of_inputs: Any, of_state: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of one layer in one direction: two weight matrices per step."""
    return int(2 * math.prod(inputs[:-1]) * (math.prod(of_inputs) + math.prod(of_state)))


def _recurrent_kernel_backward_flops(*inputs: Any, **_: Any) -> int:
    return 2 * _recurrent_kernel_flops(*inputs[:3])


def _grouped_product_flops(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of the products of G groups.

    (G, M, K) by (G, K, N) is one product per group. (S, K) by (G, K, N) and (M, K) by (K, N) split
    one dimension among the groups, so that they cost as much as one product.
    """
    groups = left[0] if len(left) == len(right) == 3 else 1
    return int(2 * groups * left[-2] * left[-1] * right[-1])


def _grouped_product_backward_flops(*inputs: Any, **_: Any) -> int:
    return 2 * _grouped_product_flops(*inputs[:2])


_of_shapes: Callable[..., Any] = shape_wrapper
_forward: Callable[..., Any] = sdpa_flop_count
_backward: Callable[..., Any] = sdpa_backward_flop_count
FURTHER: Final[Mapping[tuple[str, str], Callable[..., Any]]] = {
    ("aten", "_scaled_dot_product_flash_attention_for_cpu"): _attention_flops,
    ("aten", "_scaled_dot_product_flash_attention_for_cpu_backward"): _attention_backward_flops,
    ("aten", "lstm"): _recurrent_flops,
    ("aten", "gru"): _recurrent_flops,
    ("aten", "rnn_tanh"): _recurrent_flops,
    ("aten", "rnn_relu"): _recurrent_flops,
    ("aten", "mkldnn_rnn_layer"): _recurrent_kernel_flops,
    ("aten", "mkldnn_rnn_layer_backward"): _recurrent_kernel_backward_flops,
    ("aten", "_grouped_mm"): _grouped_product_flops,
    ("transformers", "grouped_mm_fallback"): _grouped_product_flops,
    ("transformers", "grouped_mm_fallback_backward"): _grouped_product_backward_flops,
}
