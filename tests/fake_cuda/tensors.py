"""Tensors of fake devices, and ops on them: issued now, computed when their stream runs.

To torch's C++ they are tensors of the CPU, so that autograd works on any number of fake devices,
and beside real ones; Python sees ``cuda:N``. Each has *expected* values, computed at once as a
device without streams would, which only tell its shape, strides and what it is a view of; and
memory, where its stream computes the values that anybody reads.

Collectives run twice, on both. The host waits for those in memory where CUDA would not, and gloo
pairs them by their order: streams of all ranks must issue and run the same ones in the same order.

C++ makes some tensors without saying where (zeros in the backward pass of a slice): they are
computed at once, and get their device from the first op that they share with one of a device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from tests.fake_cuda.memory import Block
from tests.fake_cuda.trees import leaves, mapped
from tests.helpers.vdev import ON_CPU

CPU: Final = torch.device("cpu")
PRODUCTS: Final = ("mm", "addmm", "bmm", "baddbmm", "convolution")
TAKES_INDICES: Final = ("index", "index_put", "index_put_", "_index_put_impl_")
"""Ops whose indices may be on the CPU while the tensor is on a device."""


class Place:
    """Where a tensor and its views are: on ``device`` in ``memory``; None if not known yet."""

    def __init__(self, memory: Tensor, device: torch.device | None, block: Block | None) -> None:
        self.memory = memory  # bytes
        self.device = device
        self.block = block


class CudaTensor(Tensor):
    """Tensor of a fake device."""

    place: Place
    expected: Tensor

    @staticmethod
    def __new__(
        cls, expected: Tensor, place: Place | None = None, requires_grad: bool = False
    ) -> Any:
        if place is None:  # by code that makes a parameter of the type of another one
            return nn.Parameter(expected, requires_grad)
        tensor = Tensor._make_wrapper_subclass(
            cls,
            expected.size(),
            strides=expected.stride(),
            storage_offset=expected.storage_offset(),
            dtype=expected.dtype,
            device=CPU,
        )
        tensor.expected = expected
        tensor.place = place
        return tensor

    def __init__(
        self, expected: Tensor, place: Place | None = None, requires_grad: bool = False
    ) -> None:
        pass

    # torch declares it as a method
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # an attribute of torch's
        return self.place.device or CPU

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]  # as above
        return self.place.device is not None

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]  # as above
        return self.place.device is None

    @property
    def elements(self) -> Tensor:
        """The values in memory, as a tensor of the CPU with the same strides."""
        return part_of(self.place.memory, self.expected)

    def record_stream(self, stream: Any) -> None:
        """Keep the memory from being reused before a stream has done its work so far."""
        assert self.place.device is not None
        if self.place.block is not None:  # not memory of another process
            self.place.block.record(stream)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made: Tensor | None = memo.get(id(self))
        if made is None:
            made = self.detach().clone().requires_grad_(self.requires_grad)
            made._is_param = getattr(self, "_is_param", False)  # of parameters
            memo[id(self)] = made
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # nothing may wait here
        return f"<{tuple(self.shape)} of {self.dtype} on {self.device}>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it wrongly
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        from tests.fake_cuda.machine import machine

        with torch._C.DisableTorchFunction():
            return machine().run(func, args, kwargs or {})


def part_of(memory: Tensor, like: Tensor) -> Tensor:
    """Return the part of the bytes in memory that a tensor has of its own storage."""
    made = torch.empty(0, dtype=like.dtype)
    start = memory.storage_offset() // like.itemsize + like.storage_offset()
    return made.set_(memory.untyped_storage(), start, like.size(), like.stride())


def devices_of(func: Any, args: Any, kwargs: Any) -> set[torch.device]:
    """Return the devices of the tensors of a call, without those that may be anywhere.

    Raises:
        RuntimeError: a tensor of the CPU is mixed with one of a device.
    """
    tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    found = {t.place.device for t in tensors if isinstance(t, CudaTensor) and t.place.device}
    others = {CPU for t in tensors if not isinstance(t, CudaTensor) and t.dim()}
    if others and func.overloadpacket.__name__ in TAKES_INDICES:
        others = set()
    if len(mixed := found | others) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {func} found "
            f"{', '.join(sorted(map(str, mixed)))}"
        )
    return found


class Call:
    """One op on tensors of a device, to be computed in its stream."""

    def __init__(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.func = func
        self.kernel = ON_CPU.get(func, func)  # some that CUDA has, the CPU lacks
        self.args = args
        self.kwargs = {k: v for k, v in kwargs.items() if k not in {"device", "pin_memory"}}
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.is_product = func.overloadpacket.__name__ in PRODUCTS
        self.only_looks = func.is_view or func is torch.ops.aten._unsafe_view.default

    @property
    def needs_values(self) -> bool:
        return _needs_values(self.func)

    def at_once(self, values: Callable[[CudaTensor], Tensor]) -> Any:
        """Compute on these values of each tensor."""

        def valued(leaf: Any) -> Any:
            return values(leaf) if isinstance(leaf, CudaTensor) else leaf

        with torch.no_grad():
            return self.kernel(*mapped(valued, self.args), **mapped(valued, self.kwargs))

    def expect(self, new_place: Callable[[Tensor], Place]) -> tuple[Any, list[CudaTensor]]:
        """Return the results, without values yet, and those of them that are not views.

        ``new_place`` gets memory for what a tensor has of its own.
        """
        places = {
            storage_of(leaf.expected): leaf.place
            for leaf in leaves((self.args, self.kwargs))
            if isinstance(leaf, CudaTensor)
        }
        made: list[CudaTensor] = []

        def placed(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            known = places.get(storage_of(leaf))
            place = known or places.setdefault(storage_of(leaf), new_place(leaf))
            tensor = CudaTensor(leaf, place)
            if known is None:
                made.append(tensor)
            return tensor

        wrapped = mapped(placed, self.at_once(lambda tensor: tensor.expected))
        result = return_and_correct_aliasing(  # type: ignore[no-untyped-call]  # torch leaves it so
            self.func, self.args, self.kwargs, wrapped
        )
        return result, made

    def later(self, made: list[CudaTensor], random_state: Tensor | None) -> Callable[[], None]:
        """Return the work that computes the values of the results in memory."""

        def held(leaf: Any) -> Any:
            if isinstance(leaf, CudaTensor):
                return leaf.elements
            return leaf.clone() if isinstance(leaf, Tensor) else leaf  # as the host has it now

        kernel = self.kernel  # not self, which keeps the tensors from being freed
        args, kwargs = mapped(held, self.args), mapped(held, self.kwargs)
        targets = [tensor.elements for tensor in made]
        storages = {storage_of(t) for t in leaves((args, kwargs)) if isinstance(t, Tensor)}

        def work() -> None:
            with _random_numbers(random_state):
                results = kernel(*args, **kwargs)
            for leaf in leaves(results):
                if isinstance(leaf, torch.ScriptObject):  # a collective, which other threads run
                    leaf.wait()  # type: ignore[attr-defined]  # torch declares no methods
            new = [t for t in leaves(results) if isinstance(t, Tensor)]
            new = [t for t in new if storage_of(t) not in storages]
            for target, result in zip(targets, new, strict=True):
                target.copy_(result)

        return work


@functools.cache
def _needs_values(func: Any) -> bool:
    """Return whether the host needs values: for a number, or for the shape of a result."""
    returns = {str(value.type) for value in func._schema.returns}
    shaped_by_values = torch.Tag.dynamic_output_shape in func.tags
    return shaped_by_values or bool(returns & {"number", "bool", "int", "float"})


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor of the CPU."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def is_plain(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, CudaTensor)


def settle(tensors: Iterable[Any], place: Callable[[Place], None]) -> None:
    """Give all tensors that may be anywhere their place."""
    for leaf in tensors:
        if isinstance(leaf, CudaTensor) and leaf.place.device is None:
            place(leaf.place)


@contextmanager
def _random_numbers(state: Tensor | None) -> Any:
    if state is None:
        yield
        return
    before = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(before)
