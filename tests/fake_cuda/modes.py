"""Modes that send calls of torch which name a fake device, or have tensors there, to the machine.

A call that names a device runs where its tensors are, or on the CPU, and what it returns is moved.
Making a tensor on a device is so a copy from the host, for which nothing waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake_cuda.machine import Machine
from tests.fake_cuda.tensors import CPU, CudaTensor
from tests.fake_cuda.trees import leaves, mapped

NAMES_DEVICE_FIRST: Final = ("to", "cuda")
MAKES_DEVICES: Final = ("device", "_parse_to")


@contextlib.contextmanager
def _autocast_of_cuda() -> Iterator[None]:
    """Let autocast treat tensors, which are the CPU's to torch's C++, as it would on CUDA."""
    is_on, before = torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")
    if not is_on and not before:
        yield
        return
    dtype = torch.get_autocast_dtype("cpu")
    torch.set_autocast_enabled("cpu", is_on)
    torch.set_autocast_dtype("cpu", torch.get_autocast_dtype("cuda"))
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", before)
        torch.set_autocast_dtype("cpu", dtype)


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Finds devices for the tensors that C++ makes without saying where."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(tensor, CudaTensor) for tensor in tensors):
            return self.machine.run(func, args, kwargs)
        named = kwargs.get("device")
        if named is not None and named.type == "cuda":  # in a function of Python that torch has
            made = func(*args, **{**kwargs, "device": CPU})
            return self.machine.moved(made, self.machine.device(named))
        made = func(*args, **kwargs)
        if tensors or type(made) is not Tensor:
            return made
        if FunctionMode.inside is not None:
            return self.machine.moved(made, FunctionMode.inside)
        if FunctionMode.calls == 0 and torch._C._current_graph_task_id() != -1:
            return self.machine.floating(made)
        return made


def _device(named: str | int) -> torch.device:
    return torch.device("cuda", named) if isinstance(named, int) else torch.device(named)


class FunctionMode(TorchFunctionMode):
    """Handles calls from Python; ``inside`` is the device of the tensors of the current one."""

    inside: torch.device | None = None
    calls = 0

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine
        self._special: dict[str, Callable[..., Any]] = {
            "is_pinned": lambda tensor, *_: machine.is_pinned(tensor),
            "pin_memory": lambda tensor, *_: machine.pin(tensor.clone()),
            "_has_compatible_shallow_copy_type": self._is_compatible,
            "tolist": lambda tensor: machine.sent(tensor, CPU, non_blocking=False).tolist(),
            "numpy": lambda tensor: machine.sent(tensor, CPU, non_blocking=False).numpy(),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in MAKES_DEVICES:
            first = [_device(given) if isinstance(given, int) else given for given in args[:1]]
            return func(*first, *args[1:], **kwargs)
        if (special := self._special.get(name)) is not None:
            return special(*args, **kwargs)
        device, args, kwargs = self._without_device(name, args, kwargs)
        pins = kwargs.pop("pin_memory", False)
        given = leaves((args, kwargs))
        used = {leaf.place.device for leaf in given if isinstance(leaf, CudaTensor)}
        if device is None or (device == CPU and not used):
            found = self._call(func, args, kwargs, used)
            return self.machine.pin(found) if pins else found
        wants_gradient = not used and kwargs.pop("requires_grad", False)
        non_blocking = kwargs.pop("non_blocking", False)
        is_new = name.endswith("_like") or not any(isinstance(leaf, Tensor) for leaf in given)
        made = self._call(func, args, kwargs, used)
        moved = self.machine.sent(made, device, non_blocking=non_blocking or is_new)
        return moved.requires_grad_() if wants_gradient else moved

    def _call(self, func: Any, args: Any, kwargs: Any, used: set[torch.device | None]) -> Any:
        before = FunctionMode.inside
        FunctionMode.inside = next(iter(used - {None}), None)
        FunctionMode.calls += 1
        try:
            with contextlib.nullcontext() if FunctionMode.inside is None else _autocast_of_cuda():
                return func(*args, **kwargs)
        finally:
            FunctionMode.calls -= 1
            FunctionMode.inside = before

    def _without_device(
        self, name: str, args: Any, kwargs: dict[str, Any]
    ) -> tuple[torch.device | None, Any, dict[str, Any]]:
        """Return the device that a call names, and its arguments with the CPU in its place."""
        named: list[torch.device] = []

        def taken(leaf: Any) -> Any:
            if isinstance(leaf, torch.device) and leaf.type != "meta":
                named.append(leaf if leaf.type != "cuda" else self.machine.device(leaf))
                return CPU if leaf.type == "cuda" else leaf
            return leaf

        if isinstance(kwargs.get("device"), str | int):
            kwargs["device"] = _device(kwargs["device"])
        if name in NAMES_DEVICE_FIRST and len(args) > 1:
            if isinstance(args[1], str | int):
                args = (args[0], _device(args[1]), *args[2:])
            elif isinstance(args[1], Tensor):
                args = (args[0], args[1].device, args[1].dtype, *args[2:])
        if name == "cpu":
            named.append(CPU)
        if name == "cuda":
            named.append(self.machine.device(*args[1:2]))
        args, kwargs = mapped(taken, args), mapped(taken, kwargs)
        return (named[0] if named else None), args, kwargs

    def during_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return autograd's engine, which runs hooks and functions of Python with this mode.

        While a mode handles a call, as of ``backward``, torch leaves it out.
        """

        def with_mode(*args: Any, **kwargs: Any) -> Any:
            calls, FunctionMode.calls = FunctionMode.calls, 0
            inside, FunctionMode.inside = FunctionMode.inside, None
            try:
                with self:
                    return run(*args, **kwargs)
            finally:
                FunctionMode.calls, FunctionMode.inside = calls, inside

        return with_mode

    def _is_compatible(self, tensor: Tensor, other: Tensor) -> bool:
        if isinstance(tensor, CudaTensor) or isinstance(other, CudaTensor):
            return False
        return torch._has_compatible_shallow_copy_type(tensor, other)
