"""The process of one device: makes the places of its tensors, keeps its states, runs steps.

It is forked by :mod:`envs.executors.cores.fork_server`, a process that never used CUDA. The first
message on its pipe is a :class:`Start`, every other one the name of a method of :class:`Worker` and
its arguments; each is answered with what the method returns, or with :class:`DeviceFailed`.
"""

from __future__ import annotations

import io
import os
import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from envs.executors.cores.custom_ops import Registrations
from envs.executors.cores.worker import Failed, end_with_parent
from envs.executors.device_workers.sharing import Handle, Sharing
from envs.executors.device_workers.sources import DeviceSource, Edge
from envs.executors.device_workers.tape import Tape
from envs.executors.device_workers.transport import HostMemory, Transport
from envs.executors.torch.forward_source import FILE, NAME
from envs.executors.torch.updates import fused_update
from envs.hardware.torch_devices import (
    CPU,
    is_out_of_memory,
    limited,
    peak_bytes,
    peak_reserved_bytes,
)
from graphs.extract.autocast import autocasting
from graphs.optimizer import STATE, Optimizer
from graphs.text import first_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A step, and the part of one worker in it. ``optimizer`` is None for inference."""

    number: int
    devices: tuple[torch.device, ...]
    threads: int
    seed: int
    edges: tuple[Edge, ...]
    source: DeviceSource
    constants: Mapping[int, torch.Tensor]
    dtype: str
    default_dtype: torch.dtype
    optimizer: Optimizer | None


class Peaks(NamedTuple):
    """The most bytes of a GPU in tensors, and with the gaps between them."""

    tensors: int
    reserved: int


@dataclass(frozen=True, slots=True)
class DeviceFailed(Failed):
    """Also, where memory ran out, the peaks of the GPU."""

    peaks: Peaks | None


class Worker:
    """A device, the states whose home it is, and its part of the step."""

    def __init__(self, setup: Setup, sharing: Sharing, memory_file: int) -> None:
        torch.set_num_threads(setup.threads)
        torch.manual_seed(setup.seed)
        torch.set_default_dtype(setup.default_dtype)
        self.device = setup.devices[setup.number]
        self._setup = setup
        self._sharing = sharing
        memory = HostMemory(setup.edges, setup.devices)
        memory.map(memory_file)
        if self.device.type == "cuda":
            sharing.lock_pages(memory.bytes)
        self._transport = Transport(setup.number, setup.devices, setup.edges, memory)
        self._constants = {v: tensor.to(self.device) for v, tensor in setup.constants.items()}
        self._states: dict[int, torch.Tensor] = {}
        self._updates = Updates(setup.optimizer) if setup.optimizer is not None else None
        namespace = dict(setup.source.names)
        exec(compile(setup.source.text, FILE, "exec"), namespace)
        self._forward: Callable[..., None] = autocasting(
            namespace[NAME], setup.dtype, [self.device.type]
        )

    def shared(self) -> dict[int, Handle]:
        """Return by edge what the processes that write to this GPU open."""
        return self._transport.shared(self._sharing)

    def open(self, handles: Mapping[int, Handle]) -> None:
        """Open the memory of other GPUs."""
        self._transport.open(self._sharing, handles)

    def load_state(self, value: int, tensor: torch.Tensor, trained: bool) -> None:
        """Set a parameter or buffer; ``trained`` ones get a gradient."""
        with torch.no_grad():
            if value in self._states:
                self._states[value].copy_(tensor)
                return
            self._states[value] = tensor.to(self.device, copy=True)
        if trained:
            self._states[value].requires_grad_()
            if self._updates is not None:
                self._updates.add(value, self._states[value])

    def state(self, value: int) -> torch.Tensor:
        """Return a parameter or buffer, on the host."""
        return self._states[value].detach().to(CPU)

    def optimizer_state(self) -> dict[tuple[str, int], torch.Tensor]:
        """Return the optimizer state on the host, by slot and value."""
        if self._updates is None:
            return {}
        return {key: tensor.to(CPU) for key, tensor in self._updates.state().items()}

    def load_optimizer_state(self, state: Mapping[tuple[str, int], torch.Tensor]) -> None:
        """Load the state from :meth:`optimizer_state`."""
        if self._updates is not None:
            for key, tensor in self._updates.state().items():
                tensor.copy_(state[key])

    def run(self, step: int, learning_rate: float) -> None:
        """Run a step and wait for its end."""
        transport = self._transport
        training = self._updates is not None
        transport.begin(step)
        inputs = {v: transport.taken(edge) for v, edge in self._setup.source.inputs.items()}
        tape = Tape(transport, self._setup.edges, training=training)
        calls = tape.receive, tape.send, tape.passed, tape.give
        with torch.set_grad_enabled(training):
            self._forward(self._states, inputs, self._constants, *calls)
        if self._updates is not None:
            tape.backward()
            self._updates.apply(learning_rate)
        transport.end()

    def peaks(self) -> Peaks | None:
        """Return the peaks of the device so far; None for the CPU."""
        tensors, reserved = peak_bytes(self.device), peak_reserved_bytes(self.device)
        return None if tensors is None or reserved is None else Peaks(tensors, reserved)


class Updates:
    """The optimizer on one device, which updates all parameters at the end of a step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters: dict[int, torch.Tensor] = {}
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._counts: dict[int, torch.Tensor] = {}

    def add(self, value: int, parameter: torch.Tensor) -> None:
        """Update a parameter from now on."""
        self._parameters[value] = parameter
        slots = STATE[self._optimizer.kind]
        self._kept[value] = [torch.zeros_like(parameter).detach() for _ in slots]
        self._counts[value] = torch.zeros((), device=parameter.device)

    def state(self) -> dict[tuple[str, int], torch.Tensor]:
        """Return the optimizer state itself, by slot and value; ``step`` counts updates."""
        slots = STATE[self._optimizer.kind]
        state = {
            (slot, value): tensor
            for value, kept in self._kept.items()
            for slot, tensor in zip(slots, kept, strict=True)
        }
        if self._optimizer.counts_steps:
            state |= {("step", value): count for value, count in self._counts.items()}
        return state

    @torch.no_grad()
    def apply(self, learning_rate: float) -> None:
        """Update the parameters that have a gradient, and free the gradients."""
        if self._optimizer.counts_steps and self._counts:
            torch._foreach_add_(list(self._counts.values()), 1.0)
        by_dtype: defaultdict[torch.dtype, list[int]] = defaultdict(list)
        for value, parameter in self._parameters.items():
            if parameter.grad is not None:
                by_dtype[parameter.dtype].append(value)
        for values in by_dtype.values():
            parameters = [self._parameters[value] for value in values]
            fused_update(
                self._optimizer,
                learning_rate,
                parameters,
                [parameter.grad for parameter in parameters if parameter.grad is not None],
                [self._kept[value] for value in values],
                [self._counts[value] for value in values],
            )
            for parameter in parameters:
                parameter.grad = None


# --- messages; tensors travel as bytes


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Name operators, which cannot be pickled."""
        if isinstance(value, torch._ops.OpOverload):
            return _operator, (str(value),)
        if isinstance(value, torch._ops.HigherOrderOperator):
            return _operator, (f"higher_order.{value._name}",)
        return NotImplemented


def packed(message: object) -> bytes:
    """Return a message as bytes, operators by their names."""
    data = io.BytesIO()
    _Pickler(data, pickle.HIGHEST_PROTOCOL).dump(message)
    return data.getvalue()


def _operator(name: str) -> Any:
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: what must be there before the :class:`Setup` in it can be read."""

    custom_ops: Registrations
    sharing: Sharing
    device: torch.device
    limit_bytes: int | None
    setup: bytes


@contextmanager
def _started(start: Start, memory_file: int) -> Iterator[Worker]:
    start.custom_ops.load()
    limits = {} if start.limit_bytes is None else {start.device: start.limit_bytes}
    with start.sharing.on(start.device), limited(limits):
        yield Worker(pickle.loads(start.setup), start.sharing, memory_file)


def serve(connection: Connection, memory_file: int) -> None:
    """Answer messages until the parent closes the pipe."""
    worker: Worker | None = None
    with ExitStack() as until_closed:
        while True:
            try:
                message = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            try:
                if worker is None:
                    worker = until_closed.enter_context(_started(message, memory_file))
                    answer = None
                else:
                    method, arguments = message
                    answer = getattr(worker, method)(**arguments)
            except Exception as error:  # noqa: BLE001 - whatever an op raises goes to the parent
                reason, no_memory = first_line(error), is_out_of_memory(error)
                peaks = worker.peaks() if no_memory and worker is not None else None
                answer = DeviceFailed(f"{type(error).__name__}: {reason}", no_memory, peaks)
            connection.send_bytes(packed(answer))


def work(descriptor: int, cores: Sequence[int], shared: Sequence[int]) -> None:
    """Serve the pipe with this file descriptor, in a process forked for it."""
    os.setpgid(0, 0)
    threading.Thread(target=end_with_parent, args=(descriptor,), daemon=True).start()
    os.sched_setaffinity(0, set(cores))
    serve(Connection(descriptor), *shared)
