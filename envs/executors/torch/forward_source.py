"""The generated Python function that runs a forward pass with a device for each call.

A tensor that is needed on another device is sent there once; where it is written in between, once
for each state that is read. Free calls run on every device that reads their outputs. A tensor is
deleted after its last use. With ``overlap`` a tensor is sent as soon as it is made, and awaited
where it is read. :class:`LaunchOrder` is the order in which the process launches the calls.
"""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, Final

import torch

from envs.executors.state_devices import STATE_ROLES
from envs.executors.torch.call_text import CallText
from envs.executors.torch.streams import arrived, sending
from graphs.extract.export.forward import ForwardProgram
from graphs.extract.program import Ref

NAME: Final = "forward"
FILE: Final = "<placed forward>"


@dataclass(frozen=True, slots=True, eq=False)
class ForwardSource:
    """The source of ``forward(states, inputs, constants)`` and the names that it uses.

    ``states`` are the tensors of the program's parameters and buffers, each on its home device;
    ``inputs`` all leaves of the inputs; ``constants[device]`` the constants there. It returns the
    results of the program as a list. ``transfers`` counts the tensors that it sends, without
    inputs, which may already be where they are needed.
    """

    text: str
    names: Mapping[str, Any]
    transfers: int

    def compiled(self) -> Callable[..., list[Any]]:
        """Return the compiled function."""
        namespace = dict(self.names)
        exec(compile(self.text, FILE, "exec"), namespace)
        function: Callable[..., list[Any]] = namespace[NAME]
        return function

    def line_of(self, error: BaseException) -> str:
        """Return the line in which the function failed, or "" if it did not."""
        lines = self.text.splitlines()
        walked = traceback.walk_tb(error.__traceback__)
        at = [number for frame, number in walked if frame.f_code.co_filename == FILE]
        return lines[at[-1] - 1].strip() if at else ""


def forward_source(
    program: ForwardProgram,
    texts: Sequence[CallText],
    launched: Sequence[int],
    devices: Mapping[str, torch.device],
    homes: Mapping[int, torch.device],
    *,
    overlap: bool,
) -> ForwardSource:
    """Return the source for calls in launch order, ``devices`` by key, ``homes`` by value."""
    ahead: Mapping[int, Sequence[torch.device]] = {}
    if overlap:  # what is sent at all, may be sent ahead
        ahead = _Writer(program, texts, launched, devices, homes, ahead, overlap=True).sent
    return _Writer(program, texts, launched, devices, homes, ahead, overlap=overlap).finished()


class _Writer:
    """Writes the lines of one placement; ``ahead`` are values that are sent once they are made."""

    def __init__(
        self,
        program: ForwardProgram,
        texts: Sequence[CallText],
        launched: Sequence[int],
        devices: Mapping[str, torch.device],
        homes: Mapping[int, torch.device],
        ahead: Mapping[int, Sequence[torch.device]],
        *,
        overlap: bool,
    ) -> None:
        self.program = program
        self.texts = texts
        self.producers = program.producers()
        self.written = frozenset().union(*(call.writes for call in program.calls))
        self.devices = devices
        self.homes = homes
        self.ahead = ahead
        self.overlap = overlap
        self.device_names: dict[torch.device, str] = {}
        self.sent: defaultdict[int, list[torch.device]] = defaultdict(list)
        self.on_the_way: dict[tuple[int, torch.device], str] = {}
        self.names: dict[str, Any] = {"arriving": arriving, "sending": sending, "arrived": arrived}
        self.lines: list[tuple[str, list[str], list[str]]] = []  # text, names read, names made
        self.where: dict[int, torch.device] = {}  # device of the values of placed calls
        self.there: dict[tuple[int, torch.device, int], str] = {}
        self.writes = Counter[int]()  # of each storage, so far
        self.transfers = 0
        self.sources = {source.value: source for source in self.program.sources}
        self.states = self._numbered(*STATE_ROLES)
        self.constants = self._numbered("constant")
        for call in launched:
            self.launch(call)

    def _numbered(self, *roles: str) -> dict[int, int]:
        sources = (source for source in self.program.sources if source.role in roles)
        return {source.value: i for i, source in enumerate(sources)}

    def launch(self, index: int) -> None:
        """Write a call, preceded by whatever brings its inputs to its device."""
        call = self.program.calls[index]
        device = self.devices[call.key]
        self.where |= dict.fromkeys(call.made, device)
        self._call(index, device)
        for value in call.made:
            for destination in self.ahead.get(value, ()):
                self._send(value, self._value(value, device), destination)
        self.writes.update(call.writes)

    def finished(self) -> ForwardSource:
        results = [self._result(result) for result in self.program.results]
        self.lines.append((f"return [{', '.join(results)}]", results, []))
        text = function_text(("states", "inputs", "constants"), self.lines)
        return ForwardSource(text, self.names, self.transfers)

    def _result(self, result: Any) -> str:
        """Return the name of an output leaf; other values than tensors are known without a run."""
        if not isinstance(result, Ref):
            return "None"
        source = self.sources.get(result.value)
        if source is not None and source.role == "input":
            return f"inputs[{source.name}]"
        return self._value(result.value, self._home(result.value))

    def _call(self, index: int, device: torch.device) -> None:
        call, text = self.program.calls[index], self.texts[index]
        on = self._device(device)
        inputs = {f"v{value}": self._value(value, device) for value in call.reads}
        expression = text.template.format(device=on, **inputs)
        self.names |= text.names | text.on(device, on)
        made = {value: f"v{value}_{on}" for value in call.made}
        reads = list(inputs.values())
        expression += f"  # {call.key}"
        if not made:
            self.lines.append((expression, reads, []))
        elif not call.tuple_result:
            [name] = made.values()
            self.lines.append((f"{name} = {expression}", reads, [name]))
        else:
            whole = f"t{index}_{on}"
            self.lines.append((f"{whole} = {expression}", reads, [whole]))
            for value, name in made.items():
                member = call.outputs.index(value)
                self.lines.append((f"{name} = {whole}[{member}]", [whole], [name]))
        for value, name in made.items():
            self._keep(value, device, name)

    def _value(self, value: int, device: torch.device) -> str:
        """Return the name of a value on a device, once it has been brought there."""
        if (known := self.there.get(self._state(value, device))) is not None:
            return known
        producer = self.producers.get(value)
        source = self.sources.get(value)
        if producer is not None and self.program.calls[producer].is_free:
            self._call(producer, device)
            return self.there[self._state(value, device)]
        on = self._device(device)
        if source is not None and source.role == "constant":
            return f"constants[{on}][{self.constants[value]}]"
        if source is not None and source.role == "input":
            name = f"v{value}_{on}"
            self.lines.append((f"{name} = arriving(inputs[{source.name}], {on})", [], [name]))
            return self._keep(value, device, name)
        home = self._home(value)
        at_home = f"states[{self.states[value]}]" if value in self.states else ""
        if home == device:
            assert at_home, f"value {value} is read before it is made"
            return at_home
        sent = at_home or self._value(value, home)
        name = f"v{value}_{on}_{self.writes[self.program.storage_of[value]]}"
        if self.overlap and self._may_overlap(value, home, device):
            self.sent[value].append(device)
            way = self.on_the_way.get((value, device)) or self._send(value, sent, device)
            self.lines.append((f"{name} = arrived({way})", [way], [name]))
            return self._keep(value, device, name)
        # A copy to the CPU must have arrived before the CPU goes on, and a tensor that the CPU
        # may write next must have been sent.
        leaves = home.type != "cpu" or self._is_stable(value)
        waits = "" if device.type == "cpu" or not leaves else ", non_blocking=True"
        self.lines.append((f"{name} = {sent}.to({on}{waits})", [sent], [name]))
        self.transfers += 1
        return self._keep(value, device, name)

    def _send(self, value: int, sent: str, device: torch.device) -> str:
        """Write the start of a transfer, which is awaited at the first read; return its name."""
        on = self._device(device)
        name = f"s{value}_{on}"
        self.lines.append((f"{name} = sending({sent}, {on})", [sent], [name]))
        self.on_the_way[value, device] = name
        self.transfers += 1
        return name

    def _may_overlap(self, value: int, home: torch.device, device: torch.device) -> bool:
        """Return whether a value cannot be written before its copy is made.

        A copy to or from the host is awaited soon. A copy between accelerators is not, and a write
        to a parameter after the pass would not wait for it.
        """
        on_accelerators = "cpu" not in (home.type, device.type)
        return self._is_stable(value) and not (value in self.states and on_accelerators)

    def _is_stable(self, value: int) -> bool:
        """Return whether no call ever writes the value."""
        return self.program.storage_of[value] not in self.written

    def _keep(self, value: int, device: torch.device, name: str) -> str:
        self.there[self._state(value, device)] = name
        return name

    def _state(self, value: int, device: torch.device) -> tuple[int, torch.device, int]:
        """Return the key of a value on a device; away from home it counts the writes so far."""
        is_home = self.where.get(value) == device
        return value, device, 0 if is_home else self.writes[self.program.storage_of[value]]

    def _home(self, value: int) -> torch.device:
        """Return the device of a value's call or state; for a free call that of its first input."""
        if value in self.where:
            return self.where[value]
        if value in self.homes:
            return self.homes[value]
        producer = self.producers.get(value)
        reads = () if producer is None else self.program.calls[producer].reads
        return self._home(reads[0]) if reads else next(iter(self.devices.values()))

    def _device(self, device: torch.device) -> str:
        name = self.device_names.setdefault(device, f"d{len(self.device_names)}")
        self.names[name] = device
        return name


def arriving(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an input on the device that reads it; pinned memory is sent without waiting."""
    if tensor.device == device:
        return tensor
    waits = device.type == "cpu" or not tensor.is_pinned()
    return tensor.to(device, non_blocking=not waits)


def function_text(
    parameters: Sequence[str], lines: Sequence[tuple[str, list[str], list[str]]]
) -> str:
    """Return the function of some lines, with a ``del`` after the last use of every name.

    A line is its text, the names that it reads and those that it makes.
    """
    made = {name for _, _, names in lines for name in names}
    last = {name: i for i, (_, reads, makes) in enumerate(lines) for name in (*makes, *reads)}
    ending: defaultdict[int, list[str]] = defaultdict(list)
    for name, i in last.items():
        if name in made and i < len(lines) - 1:
            ending[i].append(name)
    body = []
    for i, (text, _, _) in enumerate(lines):
        body.append(text)
        if ending[i]:
            body.append(f"del {', '.join(ending[i])}")
    return "\n    ".join([f"def {NAME}({', '.join(parameters)}):", *body]) + "\n"


class LaunchOrder:
    """Dependencies between placed calls, determined once; calls are numbered as in the program.

    A call comes after those whose results it reads and after earlier writes to storage that it
    reads, and before later writes. Calls that draw random numbers keep their order, so that a seed
    gives the same numbers in any launch order.
    """

    def __init__(self, program: ForwardProgram) -> None:
        self.placed = [i for i, call in enumerate(program.calls) if not call.is_free]
        self.number = {program.calls[i].key: i for i in self.placed}
        self.waits_for = _waits_for(program)
        self.followers: defaultdict[int, list[int]] = defaultdict(list)
        for call in self.placed:
            for earlier in self.waits_for[call]:
                self.followers[earlier].append(call)

    def of(self, devices: Mapping[str, torch.device], order: Sequence[str]) -> list[int]:
        """Return all placed calls in launch order.

        Of those that may come next the first in ``order`` is launched first, calls that are not in
        it last. Without an order, work for accelerators is launched before work on the CPU, which
        would delay further launches.
        """
        rank = {self.number[key]: i for i, key in enumerate(order)}
        last = len(rank)
        on_cpu = {i for key, i in self.number.items() if devices[key].type == "cpu"}
        left = {call: len(self.waits_for[call]) for call in self.placed}
        ready = [(rank.get(i, last), i in on_cpu, i) for i in self.placed if not left[i]]
        heapify(ready)
        launched = []
        while ready:
            _, _, call = heappop(ready)
            launched.append(call)
            for later in self.followers[call]:
                left[later] -= 1
                if not left[later]:
                    heappush(ready, (rank.get(later, last), later in on_cpu, later))
        assert len(launched) == len(self.placed)
        return launched


def _waits_for(program: ForwardProgram) -> dict[int, set[int]]:
    made_by: dict[int, set[int]] = {}  # by value: placed calls it depends on
    last_write: dict[int, int] = {}
    reads_since: defaultdict[int, set[int]] = defaultdict(set)
    waits_for: dict[int, set[int]] = {}
    last_random: set[int] = set()
    for i, call in enumerate(program.calls):
        earlier = {source for value in call.reads for source in made_by.get(value, ())}
        if not call.is_free:
            for storage in call.touches:
                earlier |= {last_write[storage]} if storage in last_write else set()
                if storage in call.writes:
                    earlier |= reads_since.pop(storage, set())
                    last_write[storage] = i
                else:
                    reads_since[storage].add(i)
            if call.is_random:
                earlier |= last_random
                last_random = {i}
            waits_for[i] = earlier
            earlier = {i}
        made_by |= dict.fromkeys(call.made, earlier)
    return waits_for
