"""Work of a step's module calls, and the tensors passed between them.

Readers are identified by the storages of the tensors that torch dispatches. If a tensor's origin is
unknown (numpy, say), its reader is ordered after everything that was there before. Plain tensors in
attributes of modules are constants.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphs.extract.constants import tensor_attributes
from graphs.extract.eager import run_step
from graphs.extract.errors import writes_input
from graphs.extract.fx_nodes import written_arguments
from graphs.extract.module_calls import ModuleCall, Unit, Units, module_paths
from graphs.flops import flops_by_formula, is_composite
from graphs.workload import Workload


class Work:
    """FLOPs and memory traffic of a unit in one direction."""

    def __init__(self) -> None:
        self.flops = 0
        self.moved_bytes = 0


class Flow(Units):
    """Records the work of a step's units, and the tensors passed between them."""

    def __init__(self, step: Workload) -> None:
        super().__init__(step)
        self.is_backward = False
        self._alive: dict[int, torch.UntypedStorage] = {}
        self.forward: dict[Unit, Work] = {}
        self.backward: dict[Unit, Work] = {}
        self.state = {
            self._key(part): (name, part)
            for name, tensor in reversed(step.named_state().items())
            for part in tensors_in(tensor)
        }
        self.trained = {id(p) for p in step.model.parameters()}
        if step.training and isinstance(step.loss, torch.nn.Module):
            self.trained |= {id(p) for p in step.loss.parameters()}
        self.with_gradient: set[str] = set()
        self.readers: defaultdict[str, dict[Unit, None]] = defaultdict(dict)
        self.written: set[str] = set()
        inputs = tensors_in((step.step_inputs, dict(step.keywords)))
        self.inputs = {self._key(tensor): position for position, tensor in enumerate(inputs)}
        attributes = tensor_attributes(module_paths(step))
        self.constants = {self._key(t) for *_, held in attributes for t in tensors_in(held)}
        self.maker: dict[int, Unit] = {}
        self.edges: defaultdict[tuple[Unit, Unit], dict[int, int]] = defaultdict(dict)
        self.kept: defaultdict[tuple[Unit, Unit], dict[int, int]] = defaultdict(dict)
        self.handed_on: defaultdict[Unit, dict[int, int]] = defaultdict(dict)
        self._watched = threading.local()
        self._pending: dict[ModuleCall, Any] = {}

    def run(self, step: Workload) -> None:
        """Run the step, in training with its backward pass."""
        with self.followed(), self._watching():
            output = run_step(step)
            self.claim(output, self.unit)
            for tensor in tensors_in(output):
                if (maker := self.maker.get(self._key(tensor))) is not None:
                    self.handed_on[maker][self._key(tensor)] = bytes_of(tensor)
            if not step.training:
                return
            self.is_backward = True
            assert isinstance(output, torch.Tensor)
            if output.requires_grad:
                trained = {name: t for name, t in self.state.values() if t.requires_grad}
                gradients = torch.autograd.grad(output, [*trained.values()], allow_unused=True)
                pairs = zip(trained, gradients, strict=True)
                self.with_gradient = {name for name, gradient in pairs if gradient is not None}

    def entered(self, call: ModuleCall, inputs: Any) -> None:
        """Track the call; watch a thread that the model started until it leaves the call."""
        super().entered(call, inputs)
        if not getattr(self._watched, "is_on", False):
            self._watched.until_left = contextlib.ExitStack()
            self._watched.until_left.enter_context(self._watching())
        if call.is_leaf:
            self._pending[call] = list(tensors_in(inputs))

    def left(self, call: ModuleCall, outputs: Any) -> None:
        """Attribute outputs that no known op has made to the call."""
        unit = self._unit(call)
        inputs = self._pending.pop(call, [])
        unknown = [t for t in tensors_in(outputs) if not self._is_known(t)]
        if unknown:
            self._work(unit)
        if unit in self.forward:
            for tensor in inputs:
                self._reads(unit, tensor)
        for tensor in unknown:
            self.maker[self._key(tensor)] = unit
        super().left(call, outputs)
        if not self.stack and hasattr(self._watched, "until_left"):
            self._watched.until_left.close()
            del self._watched.until_left

    def saw(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record one op that torch has dispatched."""
        made, read = list(tensors_in(result)), list(tensors_in((args, kwargs)))
        written = list(tensors_in(list(written_arguments(func, args, kwargs))))
        if not written and {*map(self._key, made)} <= {*map(self._key, read)}:
            return  # it only makes views of its inputs
        unit = self._undone() if self.is_backward else self.unit
        if unit is None:
            return
        work = self._work(unit)
        work.flops += flops_by_formula(func, args, kwargs, result) or 0
        work.moved_bytes += sum(map(bytes_of, made)) + sum(map(bytes_of, read))
        if self.is_backward:
            return
        for tensor in read:
            self._reads(unit, tensor)
        for tensor in (*made, *written):
            self._writes(unit, tensor)

    def _work(self, unit: Unit) -> Work:
        return (self.backward if self.is_backward else self.forward).setdefault(unit, Work())

    def _undone(self) -> Unit | None:
        node = torch._C._current_autograd_node()
        return None if node is None else self.unit_of.get(node)

    def _key(self, tensor: torch.Tensor) -> int:
        """Return the id of a tensor's storage, which is kept alive so that the id stays unique."""
        storage = tensor.untyped_storage()
        if not self.is_backward:
            self._alive.setdefault(storage._cdata, storage)
        return int(storage._cdata)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        key = self._key(tensor)
        return key in self.state or key in self.inputs or key in self.maker

    def _reads(self, unit: Unit, tensor: torch.Tensor) -> None:
        key = self._key(tensor)
        if key in self.state:
            self.readers[self.state[key][0]][unit] = None
        elif key in self.maker:
            self._edge(self.maker[key], unit, key, bytes_of(tensor))
        elif key not in self.inputs and key not in self.constants:
            with_readers = {source for source, _ in self.edges}
            for other in [u for u in self.forward if u not in with_readers]:
                self._edge(other, unit, key, bytes_of(tensor))
            self.maker[key] = unit

    def _edge(self, source: Unit, target: Unit, key: int, size: int) -> None:
        if source != target:
            for sizes in (self.edges[source, target], self.handed_on[source]):
                sizes[key] = max(size, sizes.get(key, 0))

    def _writes(self, unit: Unit, tensor: torch.Tensor) -> None:
        key = self._key(tensor)
        if key in self.inputs:
            raise writes_input(f"tensor {self.inputs[key]} of its inputs")
        if key in self.state:
            self.written.add(self.state[key][0])
            self.readers[self.state[key][0]][unit] = None
        else:
            self.maker[key] = unit

    def claimed(self, node: Node, unit: Unit) -> None:
        """Record what autograd has saved for the backward pass of a unit."""
        for tensor in _saved(node):
            key = self._key(tensor)
            if key in self.maker or not (self._is_known(tensor) or key in self.constants):
                self.kept[self.maker.setdefault(key, unit), unit][key] = bytes_of(tensor)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        self._watched.is_on = True
        try:
            with _Watch(self):
                yield
        finally:
            self._watched.is_on = False


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Reports to a flow what is dispatched in one thread."""

    supports_higher_order_operators = True

    def __init__(self, flow: Flow) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flow = flow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        result = func(*args, **kwargs)
        self.flow.saw(func, args, kwargs, result)
        return result


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, at most those of its storage."""
    size = tensor.numel() * tensor.element_size()
    return min(size, tensor.untyped_storage().nbytes()) or size


def tensors_in(tree: Any) -> Iterable[torch.Tensor]:
    """Return all tensors in containers that torch knows; of sparse ones their values."""
    for leaf in tree_leaves(tree):
        if not isinstance(leaf, torch.Tensor):
            continue
        match leaf.layout:
            case torch.strided:
                yield leaf
            case torch.sparse_coo:
                yield leaf._values()
            case _:
                yield leaf.values()


def _saved(node: Node) -> Iterator[torch.Tensor]:
    """Yield the tensors that a node of autograd keeps until it has run."""
    names = ["saved_tensors", *(name for name in dir(node) if name.startswith("_saved_"))]
    for name in names:
        # Torch raises for tensors overwritten since; then the backward pass fails too.
        with contextlib.suppress(RuntimeError):
            yield from tensors_in(getattr(node, name, None))
