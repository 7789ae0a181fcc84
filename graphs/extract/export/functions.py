"""Functions with a backward of their own, kept as single calls of an exported forward pass.

torch.export traces into a ``torch.autograd.Function`` and loses its backward. While a training step
is exported, a call of one is recorded as that of an operator of ours, since exported programs call
operators only. In the module of the program an :class:`OwnFunction` takes its place: torch
devices call it as the model does, and AOTAutograd traces it with its own backward.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import HigherOrderOperator, _get_dispatch_mode_pre_dispatch
from torch.autograd.function import Function
from torch.fx.experimental.proxy_tensor import track_tensor_tree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from graphs.extract.errors import unkept_function, writes_gradient
from graphs.extract.model_state import GradientWatch
from graphs.workload import Workload

PLAIN: Final = (
    *(bool, int, float, complex, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types of arguments that a call can hold besides tensors, and tuples and lists of them."""
LIFTS: Final = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""Operators that take the real tensor of ``torch.tensor([1, 2])``."""


@dataclass(frozen=True, slots=True)
class OwnFunction:
    """The target of a call of a function with a backward of its own.

    ``is_random`` tells whether the call draws random numbers.
    """

    function: type[Function]
    is_random: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the function; autograd differentiates it by its own backward."""
        return self.function.apply(*args, **kwargs)  # type: ignore[no-untyped-call]  # untyped in torch

    @property
    def __name__(self) -> str:
        return self.function.__name__

    @property
    def qualified_name(self) -> str:
        """The name of the function with its module."""
        return f"{self.function.__module__}.{self.function.__qualname__}"


class _OwnCall(HigherOrderOperator):
    """Stands for the call of a function, whose number is its first argument; it is never run."""

    def __init__(self) -> None:
        super().__init__("placer_own_function")  # type: ignore[no-untyped-call]  # untyped in torch

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} stands for a function while torch exports")


OWN_CALL: Final = _OwnCall()


class KeptFunctions:
    """Keeps calls of functions while a step is exported, to be restored in the exported module."""

    def __init__(self, step: Workload) -> None:
        self._step = step
        self._calls: list[OwnFunction] = []
        self._is_running = False

    def call(
        self,
        cls: type[Function],
        apply: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Apply a function below the tracer of torch.export, and record that as one call.

        Raises:
            ExtractionError: the call is more than a computation on its arguments.
        """
        if self._is_running:  # another function calls it
            return apply(*args, **kwargs)
        mode: Any = _get_dispatch_mode_pre_dispatch(  # type: ignore[no-untyped-call]  # untyped in torch
            torch._C._TorchDispatchModeKey.PROXY
        )
        if mode is None:
            raise unkept_function(cls, "is called in a nested trace")
        arguments = [*args, *kwargs.values()]
        if odd := [type(one).__name__ for one in arguments if not _is_plain(one)]:
            raise unkept_function(cls, f"takes a {odd[0]}")
        if text := next(filter(_names_device, tree_leaves(arguments)), None):
            # only a torch.device in a call is replaced by the device where the call is placed
            raise unkept_function(cls, f"takes the device {text!r} as a text, not a torch.device")
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        before = [tensor._version for tensor in tensors]
        watch = _Watch(tensors)
        self._is_running = True
        try:
            with _below_export(), watch:
                result = apply(*args, **kwargs)
        finally:
            self._is_running = False
        if [tensor._version for tensor in tensors] != before:
            raise unkept_function(cls, "writes into its inputs")
        if watch.reads_others:
            raise unkept_function(cls, "reads tensors that it does not get as arguments")
        if not _is_recordable(result):
            raise unkept_function(cls, "returns something else than tensors")
        self._check_backward(cls, tensors, result)
        tracer = mode.tracer
        own, keywords = tree_map(tracer.unwrap_proxy, (tuple(args), dict(kwargs)))
        call = (len(self._calls), *own)
        proxy = tracer.create_proxy("call_function", OWN_CALL, call, keywords, cls.__name__)
        track_tensor_tree(result, proxy, constant=None, tracer=tracer)
        self._calls.append(OwnFunction(cls, watch.is_random))
        return result

    def _check_backward(
        self, cls: type[Function], tensors: Sequence[torch.Tensor], result: Any
    ) -> None:
        """Run the backward of a call; raise if it writes into the arguments or gradients.

        AOTAutograd would trace it without a word and leave out what it writes.
        """
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        outputs = [output for output in leaves if output.requires_grad]
        inputs = [tensor for tensor in tensors if tensor.requires_grad]
        if not (outputs and inputs):
            return
        before = [tensor._version for tensor in tensors]
        gradients = GradientWatch(self._step.named_state().items())
        self._is_running = True
        try:
            with _below_export():
                ones = [torch.ones_like(output) for output in outputs]
                torch.autograd.grad(outputs, inputs, ones, allow_unused=True, retain_graph=True)
        finally:
            self._is_running = False
        if [tensor._version for tensor in tensors] != before:
            raise unkept_function(cls, "writes into its inputs in its backward pass")
        if written := gradients.written():
            raise writes_gradient(cls, written)

    def restore(self, module: fx.GraphModule) -> None:
        """Put the functions into an exported module in place of what stands for them."""
        for part in module.modules() if self._calls else ():
            if isinstance(part, fx.GraphModule):
                for node in part.graph.find_nodes(op="call_function", target=OWN_CALL):
                    node.target, node.args = self._calls[node.args[0]], node.args[1:]
                    for user in list(node.users):
                        if user.target is operator.getitem and not user.users:
                            part.graph.erase_node(user)
                part.recompile()


@contextlib.contextmanager
def _below_export() -> Iterator[None]:
    """Hide operators, and changes of modes such as gradients off, from torch.export."""
    included = torch._C._dispatch_tls_local_include_set().remove(DispatchKey.PreDispatch)
    excluded = torch._C._dispatch_tls_local_exclude_set() | DispatchKeySet(DispatchKey.PreDispatch)
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch._C.DisableTorchFunction():
        yield


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Sees whether a function draws random numbers, and whether it reads hidden tensors."""

    def __init__(self, arguments: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.is_random = False
        self.reads_others = False
        self._known: dict[int, torch.UntypedStorage] = {}  # kept, as their ids may be reused
        self._add(arguments)

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(kwargs or {})
        self.is_random |= torch.Tag.nondeterministic_seeded in func.tags
        if func not in LIFTS:
            read = _storages(tree_leaves((args, keywords)))
            self.reads_others |= any(storage._cdata not in self._known for storage in read)
        result = func(*args, **keywords)
        self._add(tree_leaves(result))
        return result

    def _add(self, values: Iterable[Any]) -> None:
        self._known |= {storage._cdata: storage for storage in _storages(values)}


def _storages(values: Iterable[Any]) -> list[torch.UntypedStorage]:
    return [
        value.untyped_storage()
        for value in values
        if isinstance(value, torch.Tensor) and value.layout is torch.strided
    ]


def _is_plain(argument: Any) -> bool:
    if type(argument) in (tuple, list, torch.Size):
        return all(_is_plain(item) for item in argument)
    return isinstance(argument, (*PLAIN, torch.Tensor))


def _names_device(argument: Any) -> bool:
    if not isinstance(argument, str):
        return False
    try:
        torch.device(argument)
    except RuntimeError:
        return False
    return True


def _is_recordable(result: Any) -> bool:
    members = result if type(result) is tuple else (result,)
    return all(isinstance(member, (*PLAIN, torch.Tensor)) for member in members) and any(
        isinstance(member, torch.Tensor) for member in members
    )
