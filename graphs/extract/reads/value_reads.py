"""Reads of tensor values by Python, while tensors are traced by functionalization.

Torch's own ways to read go around the dispatcher and fail. Here each reads numbers by ops, which a
recording sees and marks as reads, or is refused. :func:`lines_that_read` finds them in its graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final, NoReturn

import torch
from torch import fx
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.functional import pad
from torch.nn.utils import rnn
from torch.utils._pytree import tree_leaves

from graphs.extract.errors import running_line
from graphs.extract.fx_nodes import constants_of
from graphs.extract.reads.known_values import OF_TORCH, decided_value, deciding_inputs
from graphs.workload import ExtractionError

PACK: Final = "_pack_padded_sequence"
PAD_AGAIN: Final = "_pad_packed_sequence"
"""Torch's kernels for packed sequences."""
READS_VALUES: Final = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
SELECTS: Final = "aten::index"  # depends on values only where the index is a mask
PACKS: Final = f"aten::{PACK}"  # which torch does not tag
SELECTS_MASKED: Final = "aten::masked_select"
READ_ARGUMENTS: Final = {
    "aten::_ctc_loss": (2, 3),
    **dict.fromkeys((SELECTS, SELECTS_MASKED, PACKS), (1,)),
}
"""Positions of the arguments whose values decide the size of a result, where not all do."""


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """Let traced tensors be read as lists, as texts, and as lengths of packed sequences."""
    kernels: Any = rnn._VF  # type: ignore[attr-defined]  # where torch looks its own kernel up
    original = getattr(kernels, PAD_AGAIN)

    def padded(data: torch.Tensor, sizes: torch.Tensor, *options: Any) -> Any:
        unpack = _padded if isinstance(sizes, FunctionalTensor) else original
        return unpack(data, sizes, *options)

    with contextlib.ExitStack() as restored:
        for owner, name, new in (
            (FunctionalTensor, "tolist", _listed),
            (FunctionalTensor, "numpy", _array),
            (FunctionalTensor, "__format__", _formatted),
            (kernels, PAD_AGAIN, padded),
        ):
            if name in vars(owner):
                restored.callback(setattr, owner, name, vars(owner)[name])
            else:
                restored.callback(delattr, owner, name)
            setattr(owner, name, new)
        yield


def _listed(tensor: torch.Tensor) -> Any:
    return [_listed(part) for part in tensor.unbind()] if tensor.dim() else tensor.item()


def _array(tensor: torch.Tensor, *, force: bool = False) -> NoReturn:
    line = running_line()
    raise ExtractionError(
        f"the model calls .numpy(){f' ({line})' if line else ''}, and what it computes outside of "
        "torch cannot be recorded; compute it by torch"
    )


def _formatted(tensor: torch.Tensor, form: str) -> str:
    return format(tensor.item(), form) if not tensor.dim() else object.__format__(tensor, form)


def _padded(
    data: torch.Tensor,
    sizes: torch.Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded sequences and their lengths, as torch's kernel does."""
    counts: list[int] = sizes.tolist()
    batch, length = counts[0], len(counts)
    if 0 < total_length < length:
        raise RuntimeError(
            "Expected total_length to be at least the length of the longest sequence in input, "
            f"but got total_length={total_length} and max sequence length being {length}"
        )
    beside = (0, 0) * (data.dim() - 1)
    rows = [
        pad(row, (*beside, 0, batch - count), value=padding_value)
        for row, count in zip(torch.split(data, counts), counts, strict=True)
    ]
    rows += [torch.full_like(rows[0], padding_value)] * (max(total_length, length) - length)
    lengths = [sum(count > i for count in counts) for i in range(batch)]
    return torch.stack(rows, 1 if batch_first else 0), torch.tensor(lengths)


def reads_values(func: Any, args: Any) -> bool:
    """Return whether an operator, called with these arguments, reads values of tensors."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    if func._schema.name == PACKS:
        return True
    if not READS_VALUES & set(func.tags):
        return False
    if func._schema.name != SELECTS:
        return True
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])


def lines_that_read(graph: fx.Graph, mark: str) -> tuple[str, ...]:
    """Return the lines that read values which come from inputs, state or a random generator.

    ``mark`` is the name under which nodes have these lines, in their meta.
    """
    from_data: set[fx.Node] = set()
    lines: dict[str, None] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            from_data.add(node)
        elif isinstance(node.target, torch._ops.OpOverload):
            random = torch.Tag.nondeterministic_seeded in node.target.tags
            random |= node.target.namespace not in OF_TORCH  # it may draw, too
            of_data = random or not from_data.isdisjoint(deciding_inputs(node))
            if of_data and decided_value(node) is None:
                from_data.add(node)
            if mark in node.meta and not from_data.isdisjoint(_read_nodes(node)):
                lines[node.meta[mark] or "a place that torch does not name"] = None
        elif not from_data.isdisjoint(node.all_input_nodes):
            from_data.add(node)
    return tuple(lines)


def steering(module: fx.GraphModule) -> tuple[torch.Tensor, ...]:
    """Return the tensors that are neither state nor inputs, and that decide what is read."""
    queue = [node for node in module.graph.nodes if "reads_values" in node.meta]
    seen = set(queue)
    while queue:
        new = set(queue.pop().all_input_nodes) - seen
        seen |= new
        queue += new
    held = constants_of(module)
    return tuple(
        source.tensor for node, source in held.items() if node in seen and source.tensor is not None
    )


def _read_nodes(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of a node whose values it reads."""
    assert isinstance(node.target, torch._ops.OpOverload)
    positions = READ_ARGUMENTS.get(node.target._schema.name, range(len(node.args)))
    read = [node.args[position] for position in positions]
    return [leaf for leaf in tree_leaves(read) if isinstance(leaf, fx.Node)]
