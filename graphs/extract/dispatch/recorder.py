"""Annotations of graph nodes while they are traced: module, phase, and lines that read values."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import fx
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphs.extract.calls import Calls, ModuleCall
from graphs.extract.refusals import running_line
from graphs.workload import ExtractionError, Workload

READS_VALUES: Final = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
SELECTS: Final = "aten::index"  # depends on values only where the index is a mask
ONLY_SHAPES: Final = ("_like", "aten::new_")
"""In names of ops that use only the shape of their input, not its values."""


class _Frames(Calls):
    """Records in which module call each autograd node was made, by sequence number."""

    def __init__(self, step: Workload) -> None:
        super().__init__(step)
        self.starts = [0]
        self.frames = [self.running]

    def entered(self, call: ModuleCall, inputs: Any) -> None:
        self._change()

    def left(self, call: ModuleCall, outputs: Any) -> None:
        self._change()

    def of(self, number: int) -> ModuleCall:
        return self.frames[bisect_right(self.starts, number) - 1]

    def _change(self) -> None:
        self.starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self.frames.append(self.running)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Annotates the nodes of the graph, as they appear, with what they belong to."""

    def __init__(self, step: Workload, graph: fx.Graph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = graph
        self.calls = _Frames(step)
        self.backward = False
        self.read: set[int] = set()  # ids of tensors that are not the step's own
        self.between = False  # autograd nodes, where the engine adds up gradients

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._check_written(func, args, kwargs)
        self.read.update(id(t) for t in tree_leaves((args, kwargs)) if _is_plain(t))
        last = next(iter(reversed(self.graph.nodes)))
        result = func(*args, **kwargs)
        meta = self._meta(func)
        if self._reads_values(func, args):
            meta["reads_values"] = True
        node = last.next
        while node is not self.graph._root:
            node.meta |= meta
            node = node.next
        return result

    def go_back_from(self, loss: torch.Tensor) -> None:
        """Treat everything dispatched from now on as the backward pass of ``loss``."""
        self.backward = True
        queue, seen = [loss.grad_fn], set()
        while queue:
            node = queue.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            node.register_prehook(lambda _: setattr(self, "between", False))
            node.register_hook(lambda *_: setattr(self, "between", True))
            queue += [below for below, _ in node.next_functions]

    def _meta(self, func: Any) -> dict[str, Any]:
        if not self.backward:
            number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
            meta = {"seq_nr": number, "nn_module_stack": _stack_of(self.calls.running)}
            if line := running_line():
                meta["stack_trace"] = line
            return meta
        meta = {"partitioner_tag": "is_backward"}
        differentiated = torch._C._current_autograd_node()
        if differentiated is not None:
            number = differentiated._sequence_nr()
            meta |= {"seq_nr": number, "fwd_nn_module_stack": _stack_of(self.calls.of(number))}
        if self.between and func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor):
            meta.pop("fwd_nn_module_stack", None)
            meta["is_gradient_acc"] = True
        return meta

    def _reads_values(self, func: Any, args: Any) -> bool:
        if not isinstance(func, torch._ops.OpOverload) or not READS_VALUES & set(func.tags):
            return False
        if func._schema.name != SELECTS:
            return True
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])

    def _check_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raise if a tensor that is not the step's is written: it would stay changed."""
        if not isinstance(func, torch._ops.OpOverload) or not func._schema.is_mutable:
            return
        arguments = func._schema.arguments
        for argument, given in [
            *zip(arguments, args, strict=False),
            *((a, kwargs[a.name]) for a in arguments if a.name in kwargs),
        ]:
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and any(_is_plain(t) for t in tree_leaves(given)):
                raise ExtractionError(
                    f"the model writes into a tensor that is neither a parameter nor a buffer "
                    f"({running_line()}); make it one with register_buffer"
                )


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, FunctionalTensor)


def _stack_of(call: ModuleCall) -> dict[str, tuple[str, str]]:
    return {call.key: (call.path, call.kind)}


def lines_that_read(graph: fx.Graph) -> tuple[str, ...]:
    """Return the lines that read values which come from inputs, state or a random generator."""
    from_data: set[fx.Node] = set()
    lines: dict[str, None] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            from_data.add(node)
        elif isinstance(node.target, torch._ops.OpOverload):
            name = node.target._schema.name
            random = torch.Tag.nondeterministic_seeded in node.target.tags
            reads = not from_data.isdisjoint(node.all_input_nodes)
            if random or (reads and not any(part in name for part in ONLY_SHAPES)):
                from_data.add(node)
            if reads and node.meta.get("reads_values"):
                lines[node.meta.get("stack_trace") or "a place that torch does not tell"] = None
        elif not from_data.isdisjoint(node.all_input_nodes):
            from_data.add(node)
    return tuple(lines)


@contextlib.contextmanager
def listable() -> Iterator[None]:
    """Let ``tolist`` of a traced tensor read numbers one by one, each seen by the recorder.

    Torch's own fails on tensors of more than one dimension.
    """
    own = FunctionalTensor.tolist
    FunctionalTensor.tolist = _listed  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        FunctionalTensor.tolist = own  # type: ignore[method-assign]


def _listed(tensor: torch.Tensor) -> Any:
    return [_listed(part) for part in tensor.unbind()] if tensor.dim() else tensor.item()
