"""Mixed precision: tracing a step with the casts that it makes under ``torch.autocast``.

Forward pass and loss run under autocast, the backward pass does not, as torch advises. Export keeps
composite operators, and autocast applies to the operators that they consist of: casts appear when
composites are decomposed. Both must therefore happen under autocast: export, because a model may
ask for the dtype of what it computed, and the tracing that follows.

Autocast casts a parameter once per step and keeps the result. While torch traces, it casts again
for every reader, and gradients would be added up in another dtype than they are; so the trace is
given a single cast.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

import torch
from torch import fx, nn

CAST: Final = torch.ops.aten._to_copy.default
FROM: Final = "cast_in"
"""Key of a node's own name in the metadata that nodes traced from it inherit."""
Result = TypeVar("Result")
TORCH_DTYPE: Final[Mapping[str, torch.dtype]] = {"bf16": torch.bfloat16}


@contextlib.contextmanager
def autocast(
    dtype: str, device_types: Iterable[str] = ("cpu",), *, keeps_casts: bool = True
) -> Iterator[None]:
    """Enter ``torch.autocast`` on devices for the name of a dtype; do nothing for fp32.

    With ``keeps_casts`` False, a parameter is cast anew for every reader.
    """
    with contextlib.ExitStack() as entered:
        for device_type in device_types if dtype in TORCH_DTYPE else ():
            entered.enter_context(
                torch.autocast(device_type, TORCH_DTYPE[dtype], cache_enabled=keeps_casts)
            )
        yield


def autocasting(
    run: Callable[..., Result], dtype: str, device_types: Iterable[str]
) -> Callable[..., Result]:
    """Return a function that runs under autocast in a way that dynamo can trace, too."""
    for device_type in device_types if dtype in TORCH_DTYPE else ():
        run = _within(run, TORCH_DTYPE[dtype], device_type)
    return run


def _within(
    run: Callable[..., Result], dtype: torch.dtype, device_type: str
) -> Callable[..., Result]:
    def within(*arguments: Any) -> Result:
        with torch.autocast(device_type, dtype):
            return run(*arguments)

    return within


@contextlib.contextmanager
def runs_under(module: fx.GraphModule, dtype: str) -> Iterator[None]:
    """Make an exported module enter autocast when it is run, and leave it at its end."""
    entered = contextlib.ExitStack()

    def enter() -> None:
        entered.enter_context(autocast(dtype))

    nodes = list(module.graph.nodes)
    first = next(node for node in nodes if node.op not in ("placeholder", "get_attr"))
    with module.graph.inserting_before(first):
        added = [module.graph.call_function(enter)]
    with module.graph.inserting_before(nodes[-1]):
        added.append(module.graph.call_function(entered.close))
    module.recompile()
    try:
        yield
    finally:
        entered.close()  # in case tracing failed in between
        for node in added:
            module.graph.erase_node(node)
        module.recompile()


def name_nodes(module: fx.GraphModule) -> None:
    """Tag the nodes of an exported module so that nodes traced from them carry their names.

    Functions of the model cast by themselves what they read, and are not tagged.
    """
    operators = torch._ops.OpOverload | torch._ops.HigherOrderOperator
    for node in module.graph.nodes:
        if isinstance(node.target, operators):
            node.meta["custom"] = {**node.meta.get("custom", {}), FROM: node.name}


def cast_once(module: fx.GraphModule, joint: fx.Graph) -> list[fx.Node]:
    """Cast each parameter once where its trace, ``joint``, has casts of it for several readers.

    If any casts are added to the exported module and returned, it must be traced again.
    """
    wanted: defaultdict[tuple[int, torch.dtype], list[str]] = defaultdict(list)
    for node in joint.nodes:
        if node.target is CAST and (tensor := _trained(module, node.args[0])) is not None:
            reader = node.meta.get("custom", {}).get(FROM)
            if reader is not None:
                wanted[id(tensor), node.kwargs["dtype"]].append(reader)
    nodes = {node.name: node for node in module.graph.nodes}
    added = [
        _share(module, tensor_id, dtype, [nodes[reader] for reader in dict.fromkeys(readers)])
        for (tensor_id, dtype), readers in wanted.items()
        if len(readers) > 1
    ]
    if added:
        module.recompile()
    return added


def without_casts(module: fx.GraphModule, added: Iterable[fx.Node]) -> None:
    """Undo :func:`cast_once`: where autocast is on, it casts once by itself."""
    for cast in added:
        cast.replace_all_uses_with(cast.all_input_nodes[0])
        module.graph.erase_node(cast)
    module.recompile()


def _trained(module: nn.Module, node: Any) -> nn.Parameter | None:
    """Return the parameter of a node of a joint graph, if it requires a gradient."""
    description = node.meta.get("desc") if isinstance(node, fx.Node) else None
    if type(description).__name__ != "ParamAOTInput":
        return None
    parameter = module.get_parameter(getattr(description, "target", ""))
    return parameter if parameter.requires_grad else None


def _share(
    module: fx.GraphModule, tensor_id: int, dtype: torch.dtype, readers: list[fx.Node]
) -> fx.Node:
    """Let all readers of a parameter read one cast of it, made before the first of them."""
    first = readers[0]

    def is_parameter(node: fx.Node) -> bool:
        return node.op == "get_attr" and id(module.get_parameter(str(node.target))) == tensor_id

    parameters = [n for reader in readers for n in reader.all_input_nodes if is_parameter(n)]
    with module.graph.inserting_before(first):
        cast = module.graph.call_function(torch.ops.aten.to.dtype, (parameters[0], dtype))
    cast.meta = {k: v for k, v in first.meta.items() if k != "val"}
    for reader in readers:
        for parameter in set(parameters) & set(reader.all_input_nodes):
            reader.replace_input_with(parameter, cast)
    return cast


def share_casts(graph: fx.Graph, parameters: set[fx.Node]) -> None:
    """Replace all equal casts of each parameter by the first, in a graph without gradients."""
    first: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is CAST and node.args[0] in parameters:
            kept = first.setdefault((node.args[0], node.kwargs["dtype"]), node)
            if kept is not node:
                node.replace_all_uses_with(kept)
                graph.erase_node(node)
