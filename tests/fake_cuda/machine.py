"""The fake machine: its devices, their streams and memory, in the place of ``torch.cuda``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from tests.fake_cuda import cuda_module
from tests.fake_cuda.copies import Copier, Moved
from tests.fake_cuda.late_thread import LateThread
from tests.fake_cuda.memory import GARBAGE, Allocator, PageLocked
from tests.fake_cuda.streams import Queues, Stream, plainly
from tests.fake_cuda.tensors import (
    CPU,
    Call,
    CudaTensor,
    Place,
    bytes_of,
    devices_of,
    is_plain,
    settle,
)
from tests.fake_cuda.trees import leaves
from tests.helpers.vdev import TRANSFERS

PLENTY_BYTES: Final = 1 << 40
_MACHINES: list[Machine] = []


def machine() -> Machine:
    """Return the machine of the innermost :func:`fake_cuda`."""
    assert _MACHINES, "a tensor of a fake device is used when the device is gone"
    return _MACHINES[-1]


def is_fake() -> bool:
    """Return whether ``torch.cuda`` is that of a fake machine now."""
    return bool(_MACHINES)


class Machine:
    """Some fake devices; the seed decides the order of whatever may run in any order."""

    def __init__(self, devices: int, seed: int, memory_bytes: int) -> None:
        self.devices = [torch.device("cuda", index) for index in range(devices)]
        self.queues = Queues(seed)
        self.thread = LateThread(seed)  # that writes what is sent from the host
        self.allocators = [Allocator(self.queues, d, memory_bytes) for d in self.devices]
        self.current = [self.queues.new_stream(device) for device in self.devices]
        self.default = list(self.current)
        self.index = 0
        self.names = ["fake" for _ in self.devices]
        self.capabilities = [(7, 0) for _ in self.devices]  # too old for kernels that the CPU lacks
        self.refuses_kernels: dict[torch.device, str] = {}  # with these errors
        self.transfers: Any = TRANSFERS  # gets (source, destination, bytes)
        self.transfers.clear()
        self.page_locked = PageLocked()
        self.locked: list[range] = []  # addresses of memory that is page-locked as a whole
        self._copier = Copier(
            self.stream_of, self.is_pinned, lambda *row: self.transfers.append(row)
        )

    def device(self, given: Any = None) -> torch.device:
        """Return a device by what torch accepts: None, an index, a name or a device."""
        if given is None or given == "cuda":
            return self.devices[self.index]
        found = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
        if found.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {found}")
        index = self.index if found.index is None else found.index
        if index >= len(self.devices):
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        return self.devices[index]

    def stream_of(self, device: torch.device) -> Stream:
        return self.current[device.index]

    def allocator(self, given: Any = None) -> Allocator:
        return self.allocators[self.device(given).index]

    # --- ops

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Issue an op with tensors of a device."""
        self.queues.check()
        if func is torch.ops.aten.copy_.default:
            return self._copy_(*args, **kwargs)
        call = Call(func, args, kwargs)
        devices = devices_of(func, args, kwargs)
        if not devices:  # in the backward pass, before it is known where
            return self._anywhere(call)
        [device] = devices
        if device in self.refuses_kernels and not call.only_looks:
            raise torch.AcceleratorError(f"CUDA error: {self.refuses_kernels[device]}\nCompile it")
        settle(leaves((args, kwargs)), lambda place: self._settle(place, device))
        if call.is_product:
            self.allocator(device).load_libraries()
        stream = self.stream_of(device)
        if call.needs_values:
            stream.synchronize()
            return self._from_values(call, device)
        state = torch.get_rng_state() if call.is_random else None
        try:
            result, made = call.expect(lambda tensor: self._place(tensor, device))
        except IndexError as error:
            self.queues.fail(error)
        if not call.only_looks:
            self.queues.issue(stream, call.later(made, state))
        return result

    def _from_values(self, call: Call, device: torch.device) -> Any:
        with plainly():
            found = call.at_once(lambda tensor: tensor.elements)
        if isinstance(found, Tensor):
            return self.moved(found, device)
        if isinstance(found, tuple | list):
            return type(found)(self.moved(one, device) for one in found)
        return found

    def _anywhere(self, call: Call) -> Any:
        """Compute at once what is on the CPU, for all that is known."""
        if not any(is_plain(t) and t.dim() for t in leaves((call.args, call.kwargs))):
            return call.expect(lambda tensor: Place(bytes_of(tensor), None, None))[0]
        found = call.at_once(lambda tensor: tensor.expected)
        if not call.func._schema.is_mutable:
            return found
        # torch leaves this call untyped
        return return_and_correct_aliasing(call.func, call.args, call.kwargs, found)  # type: ignore[no-untyped-call]

    def floating(self, tensor: Tensor) -> CudaTensor:
        """Return a tensor that goes to the device of the first op that it takes part in."""
        return CudaTensor(tensor, Place(bytes_of(tensor), None, None))

    def _settle(self, place: Place, device: torch.device) -> None:
        stream = self.stream_of(device)
        before, size = place.memory.clone(), place.memory.nbytes
        block = self.allocator(device).allocate(size, stream)
        place.device, place.block, place.memory = device, block, block.memory
        to = block.memory[:size]
        self.queues.issue(stream, lambda: to.copy_(before))

    def _place(self, tensor: Tensor, device: torch.device) -> Place:
        size = tensor.untyped_storage().nbytes()
        block = self.allocator(device).allocate(size, self.stream_of(device))
        return Place(block.memory, device, block)

    def _copy_(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        known = [t.device for t in (to, source) if isinstance(t, CudaTensor) and t.is_cuda]
        if not known:
            self._anywhere(Call(torch.ops.aten.copy_.default, (to, source), {}))
            return to
        settle((to, source), lambda place: self._settle(place, known[0]))
        self._copier.copy(to, source, non_blocking=non_blocking)
        return to

    # --- devices of tensors

    def moved(self, tensor: Tensor, device: torch.device, *, non_blocking: bool = True) -> Tensor:
        """Return a copy of a tensor on a device or the host, without a gradient."""
        if isinstance(tensor, CudaTensor) and not tensor.is_cuda:
            if device == CPU:
                return tensor.expected
            self._settle(tensor.place, device)
        if tensor.device == device:
            return tensor
        like = tensor.expected if isinstance(tensor, CudaTensor) else tensor.detach()
        with plainly():
            room = torch.empty_like(like)
            if device == CPU:
                bytes_of(room).fill_(GARBAGE)
        to: Tensor = room if device == CPU else CudaTensor(room, self._place(room, device))
        if device == CPU and non_blocking:
            self.pin(room)
        self._copier.copy(to, tensor, non_blocking=non_blocking)
        return to

    def sent(self, tensor: Tensor, device: torch.device, *, non_blocking: bool) -> Tensor:
        """Return a tensor on a device, as ``to`` does, with a gradient if it needs one."""
        if tensor.device == device:
            return tensor

        def move(tensor: Tensor, to: torch.device, non_blocking: bool = non_blocking) -> Tensor:
            return self.moved(tensor, to, non_blocking=non_blocking)

        if tensor.requires_grad and torch.is_grad_enabled():
            # torch leaves this call untyped
            found: Tensor = Moved.apply(tensor, move, device)  # type: ignore[no-untyped-call]
            return found
        return move(tensor.detach(), device)

    def pin(self, tensor: Tensor) -> Tensor:
        """Count the memory of a tensor of the host as page-locked."""
        self.page_locked.add(tensor.untyped_storage())
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        if isinstance(tensor, CudaTensor):
            return False
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        return self.page_locked.holds(storage) or any(address in part for part in self.locked)


@contextmanager
def fake_cuda(
    devices: int = 1, *, seed: int = 0, memory_bytes: int = PLENTY_BYTES
) -> Iterator[Machine]:
    """Let ``torch.cuda`` be that of a machine with fake devices; real ones are hidden."""
    from tests.fake_cuda.modes import DispatchMode, FunctionMode

    made = Machine(devices, seed, memory_bytes)
    with pytest.MonkeyPatch.context() as patch:
        cuda_module.put_in_place(made, patch)
        _MACHINES.append(made)
        mode = FunctionMode(made)
        for module in (torch.autograd, torch.autograd.graph):
            run = module._engine_run_backward
            patch.setattr(module, "_engine_run_backward", mode.during_backward(run))
        try:
            with DispatchMode(made), mode:
                yield made
        finally:
            for allocator in made.allocators:
                allocator.is_open = False
            _MACHINES.remove(made)
