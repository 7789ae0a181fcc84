"""What an op costs: FLOPs by torch's own formulas, and seconds that were measured elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import networkx as nx
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from graphs.graph import attributes_of


def call_flops(target: Any, args: Any, kwargs: Any, result: Any) -> int:
    """FLOPs of one torch call on fake tensors, 0 for operators that torch has no formula for.

    A multiply-add counts as two, as in torch.utils.flop_counter, whose formulas these are. An
    operator that is made of others, such as linear, counts as much as they do.
    """
    packet = getattr(target, "_overloadpacket", None)
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    if packet not in CPU_ATTENTION and not _is_composite(target):
        return 0
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        target(*args, **kwargs)
    return int(counter.get_total_flops())


def _is_composite(target: Any) -> bool:
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return isinstance(target, torch._ops.OpOverload) and bool(
        target.has_kernel_for_dispatch_key(composite)
    )


def _attention_flops(*inputs: Any, **_: Any) -> Any:
    return _forward(*inputs[:3])


def _attention_backward_flops(*inputs: Any, **_: Any) -> Any:
    return _backward(*inputs[:4])


# Torch counts attention on accelerators only.
_forward: Callable[..., Any] = sdpa_flop_count
_backward: Callable[..., Any] = sdpa_backward_flop_count
CPU_ATTENTION: Final = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


def with_costs(
    graph: nx.DiGraph[str],
    costs_s: Mapping[str, NDArray[np.float64]],
    source: Mapping[str, str],
) -> nx.DiGraph[str]:
    """A copy of a graph with seconds for further device kinds, {kind: (N,)} in node order.

    ``source`` says for each kind where its numbers come from.

    Raises:
        ValueError: a kind has more or fewer costs than the graph has ops.
    """
    costed: nx.DiGraph[str] = graph.copy()
    for kind, seconds in costs_s.items():
        if len(seconds) != len(costed):
            raise ValueError(
                f"{len(seconds)} costs for kind {kind!r}, but the graph has {len(costed)} ops"
            )
        for op_id, cost_s in zip(costed, seconds.tolist(), strict=True):
            known = attributes_of(costed, op_id)["cost_s"]
            costed.nodes[op_id]["cost_s"] = {**known, kind: cost_s}
    costed.graph["cost_source"] = {**graph.graph.get("cost_source", {}), **source}
    return costed
