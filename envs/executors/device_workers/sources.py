"""A forward pass as one generated function per device, which the processes of the devices run.

All of them follow one launch order, so that workers that wait for each other always make progress.
In training the calls of a device form *stages*: a stage begins where the device waits for values of
others. What crosses into a later stage, here or on another device, is cut from autograd's graph;
stages are differentiated in reverse (:mod:`envs.executors.device_workers.tape`). Stages that
exchange values never wait for each other in a circle, since a stage has all that it receives before
its first call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from envs.executors.state_devices import STATE_ROLES
from envs.executors.torch.call_text import CallText
from envs.executors.torch.forward_source import function_text
from graphs.extract.export.forward import ForwardProgram
from graphs.extract.program import Ref

PARENT: Final = -1
"""The process of the model, among the indices of devices."""
PARAMETERS: Final = ("states", "inputs", "constants", "receive", "send", "passed", "give")


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor that one process writes and another reads, once in every step.

    ``back`` is the number of the edge that returns its gradient, if it has one.
    """

    source: int
    destination: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    back: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSource:
    """Text of the function that one device runs, and the names that the text uses.

    ``inputs`` are edges from the parent, and ``results`` edges to it, by value and by position
    among the results; ``states`` the values of the states whose home it is.
    """

    text: str
    names: Mapping[str, Any]
    inputs: Mapping[int, int]
    results: Mapping[int, int]
    states: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepSources:
    """The sources of all devices, and the edges between them."""

    devices: tuple[DeviceSource, ...]
    edges: tuple[Edge, ...]


def step_sources(
    program: ForwardProgram,
    launched: Sequence[int],
    places: Mapping[str, int],
    devices: Sequence[torch.device],
    trained: frozenset[int],
) -> StepSources:
    """Return the sources of a step.

    Args:
        program: its forward pass.
        launched: its placed calls in launch order.
        places: index of the device of each placed call, by key.
        devices: the devices.
        trained: values of the parameters that get a gradient; none for inference.

    Raises:
        ValueError: a call writes to a tensor in place after it was sent to another process.
    """
    writer = _Writer(program, launched, places, devices, trained)
    return writer.finished()


class _Writer:
    def __init__(
        self,
        program: ForwardProgram,
        launched: Sequence[int],
        places: Mapping[str, int],
        devices: Sequence[torch.device],
        trained: frozenset[int],
    ) -> None:
        self.program = program
        self.places = places
        self.devices = devices
        self.texts = [CallText(i, call) for i, call in enumerate(program.calls)]
        self.producers = program.producers()
        self.sources = {source.value: source for source in program.sources}
        self.homes = {value: places[key] for value, key in program.first_readers().items()}
        self.differentiated = differentiated(program, trained)
        self.training = bool(trained)
        count = len(devices)
        self.lines: list[list[tuple[str, list[str], list[str]]]] = [[] for _ in range(count)]
        self.names: list[dict[str, Any]] = [{} for _ in range(count)]
        self.inputs: list[dict[int, int]] = [{} for _ in range(count)]
        self.results: list[dict[int, int]] = [{} for _ in range(count)]
        self.stage = [0] * count
        self.edges: list[Edge] = []
        self.sent: dict[tuple[int, int], int] = {}  # edges by value and destination
        self.exported: set[int] = set()  # storages of what was sent
        self.made: dict[tuple[int, int], tuple[str, int]] = {}  # name and stage, by value, device
        self.here: list[dict[int, str]] = [{} for _ in range(count)]  # names in the current stage
        self.wanted = self._wanted()
        for call in launched:
            self.launch(call)

    def finished(self) -> StepSources:
        for position, result in enumerate(self.program.results):
            if isinstance(result, Ref) and not self._is_input(result.value):
                self._give(position, result.value)
        sources = []
        for d in range(len(self.devices)):
            states = tuple(value for value, home in self.homes.items() if home == d)
            text = function_text(PARAMETERS, [*self.lines[d], ("return", [], [])])
            inputs, results = self.inputs[d], self.results[d]
            sources.append(DeviceSource(text, self.names[d], inputs, results, states))
        return StepSources(tuple(sources), tuple(self.edges))

    def launch(self, index: int) -> None:
        """Write a placed call, after all that its device waits for, and what it sends after it."""
        call = self.program.calls[index]
        device = self.places[call.key]
        self._receive_all(self._needed(call.reads), device)
        for storage in call.writes:
            self._check_write(call.key, storage, device)
        self._call(index, device)
        for value in call.made:
            self.made[value, device] = self.here[device][value], self.stage[device]
            for destination in self.wanted.get(value, ()):
                self._send(value, device, destination)

    def _wanted(self) -> dict[int, list[int]]:
        """Return {value of a placed call: other devices that read it}."""
        wanted: defaultdict[int, dict[int, None]] = defaultdict(dict)
        home = {v: self.places[call.key] for call in self.program.placed_calls for v in call.made}
        for call in self.program.placed_calls:
            for value in self._needed(call.reads):
                if home.get(value, self.places[call.key]) != self.places[call.key]:
                    wanted[value][self.places[call.key]] = None
        return {value: list(devices) for value, devices in wanted.items()}

    def _needed(self, values: Sequence[int]) -> list[int]:
        """Return sources and values of placed calls from which free calls make these values."""
        needed: dict[int, None] = {}
        for value in values:
            producer = self.producers.get(value)
            if producer is not None and self.program.calls[producer].is_free:
                needed |= dict.fromkeys(self._needed(self.program.calls[producer].reads))
            else:
                needed[value] = None
        return list(needed)

    def _receive_all(self, values: Sequence[int], device: int) -> None:
        """Let a device wait for values of others that it has not received; a stage begins there."""
        missing = [
            v for v in values if (v, device) not in self.made and not self._is_local(v, device)
        ]
        if not missing:
            return
        for value in missing:
            if (value, device) not in self.sent:
                self._send(value, self._holder(value), device)
        if self.training:
            self.stage[device] += 1
            self.here[device] = {}
        for value in missing:
            edge, name = self.sent[value, device], f"v{value}"
            text = f"{name} = receive({edge}, {self.stage[device]})"
            self.lines[device].append((text, [], [name]))
            self.made[value, device] = name, self.stage[device]

    def _is_local(self, value: int, device: int) -> bool:
        return self._is_anywhere(value) or self.homes.get(value) == device

    def _is_input(self, value: int) -> bool:
        return value in self.sources and self.sources[value].role == "input"

    def _check_write(self, key: str, storage: int, device: int) -> None:
        """Raise a ValueError for a write that readers elsewhere, or autograd, would not see."""
        is_cut = any(
            stage < self.stage[device]
            for (value, d), (_, stage) in self.made.items()
            if d == device
            and value in self.differentiated
            and self.program.storage_of[value] == storage
        )
        if storage in self.exported or is_cut:
            raise ValueError(
                f"{key} writes in place to a tensor that was handed on before, which processes of "
                "their own for the devices cannot run: let one process issue the ops of all "
                "devices ([[host]] of the cluster)"
            )

    def _call(self, index: int, device: int) -> None:
        """Write a call whose sources are all on the device."""
        call, text = self.program.calls[index], self.texts[index]
        inputs = {f"v{value}": self._name(value, device) for value in call.reads}
        expression = text.template.format(device="device", **inputs)
        names = {"device": self.devices[device], **text.on(self.devices[device], "device")}
        self.names[device] |= text.names | names
        expression += f"  # {call.key}"
        reads, lines = list(inputs.values()), self.lines[device]
        suffix = f"_{self.stage[device]}" if call.is_free else ""
        made = {value: f"v{value}{suffix}" for value in call.made}
        if not made:
            lines.append((expression, reads, []))
        elif not call.tuple_result:
            [name] = made.values()
            lines.append((f"{name} = {expression}", reads, [name]))
        else:
            whole = f"t{index}{suffix}"
            lines.append((f"{whole} = {expression}", reads, [whole]))
            for value, name in made.items():
                lines.append((f"{name} = {whole}[{call.outputs.index(value)}]", [whole], [name]))
        self.here[device] |= made

    def _name(self, value: int, device: int) -> str:
        """Return the name of a value in the current stage of a device."""
        if value in self.here[device]:
            return self.here[device][value]
        source, producer = self.sources.get(value), self.producers.get(value)
        if producer is not None and self.program.calls[producer].is_free:
            self._call(producer, device)
            return self.here[device][value]
        if source is not None and source.role == "constant":
            return f"constants[{value}]"
        if source is not None and source.role == "input":
            if value not in self.inputs[device]:
                self.inputs[device][value] = self._edge(value, PARENT, device)
            return f"inputs[{value}]"
        if (value, device) not in self.made:
            assert self.homes[value] == device, f"value {value} is read before it is made"
            return f"states[{value}]"
        name, stage = self.made[value, device]
        if stage < self.stage[device] and value in self.differentiated:
            cut = f"{name}_{self.stage[device]}"
            self.lines[device].append((f"{cut} = passed({stage}, {name})", [name], [cut]))
            name = cut
        self.here[device][value] = name
        return name

    def _send(self, value: int, source: int, destination: int) -> None:
        edge = self._edge(value, source, destination)
        back = None
        if value in self.differentiated:
            back = self._edge(value, destination, source)
            self.edges[edge] = replace(self.edges[edge], back=back)
        self.sent[value, destination] = edge
        self.exported.add(self.program.storage_of[value])
        name, stage = self.made.get((value, source), (f"states[{value}]", self.stage[source]))
        self.lines[source].append((f"send({edge}, {stage}, {name})", [name], []))

    def _edge(self, value: int, source: int, destination: int) -> int:
        shape, dtype = self.program.shapes[value], self.program.dtypes[value]
        self.edges.append(Edge(source, destination, shape, dtype))
        return len(self.edges) - 1

    def _give(self, position: int, value: int) -> None:
        """Write that the device where a result is hands it to the parent."""
        needed = self._needed([value])
        home = next((self._holder(v) for v in needed if not self._is_anywhere(v)), 0)
        self._receive_all(needed, home)
        name, stage = self.made.get((value, home)) or (self._name(value, home), self.stage[home])
        edge = self.results[home][position] = self._edge(value, home, PARENT)
        self.lines[home].append((f"give({edge}, {stage}, {name})", [name], []))

    def _is_anywhere(self, value: int) -> bool:
        return value in self.sources and self.sources[value].role not in STATE_ROLES

    def _holder(self, value: int) -> int:
        """Return the device that makes a value or is its home: the first of unread states."""
        if value in self.sources:
            return self.homes.setdefault(value, 0)
        return self.places[self.program.calls[self.producers[value]].key]


def differentiated(program: ForwardProgram, trained: frozenset[int]) -> frozenset[int]:
    """Return the values that may have a gradient: those that depend on trained parameters.

    What shares memory with one of these may have it, too, once a call has written there.
    """
    written = frozenset().union(*(call.writes for call in program.calls))
    found = set(trained)
    storages = {program.storage_of[value] for value in trained} & written
    for call in program.calls:
        depends = not found.isdisjoint(call.reads) or any(
            program.storage_of[value] in storages for value in call.reads
        )
        if call.op != "detach" and depends:
            found.update(call.made)
            storages |= {program.storage_of[value] for value in call.made} & written
    found |= {v for v, storage in enumerate(program.storage_of) if storage in storages}
    kinds = program.dtypes
    return frozenset(v for v in found if kinds[v].is_floating_point or kinds[v].is_complex)
