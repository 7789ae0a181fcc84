"""A placement of ops by module: the device with most of the work of each module."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from torch import nn

from envs.cluster import Cluster, Device
from envs.placement import Placement
from graphs.extract import Extraction, Step
from graphs.extract.call_graph import call_graph
from graphs.extract.extraction import ties_of
from graphs.graph import PHASES, GraphArrays
from placer.export.call_keys import call_keys
from placer.export.renaming import check_renamed, why_no_torch

if TYPE_CHECKING:
    from placer.export.price import Price

FORWARD, BACKWARD = PHASES.index("forward"), PHASES.index("backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedOp:
    """One op of a forward or backward pass and its device."""

    call: str  # key of its forward call
    module: str
    is_repeated: bool  # in a second or later call of its module
    device: str
    flops: int
    moved_bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedModules:
    """The forward ops of a placed step in program order, and their model.

    ``backward`` are the backward ops; if modules are placed, they run with their forward calls.
    ``main_device`` is the device of the model's inputs, None if the format decides. ``price``
    predicts steps of coarser placements, None if unknown (:mod:`placer.export.price`). ``no_torch``
    is a message about devices that torch lacks, or "".
    """

    extraction: Extraction
    ops: tuple[PlacedOp, ...]
    backward: tuple[PlacedOp, ...] = ()
    main_device: str | None = None
    no_torch: str = ""
    price: Price | None = None

    @classmethod
    def of(
        cls,
        extraction: Extraction,
        placement: Placement,
        *,
        renamed: Mapping[str, str] | None = None,
        main_device: str | None = None,
        price: Price | None = None,
    ) -> PlacedModules:
        """Return a placement by the modules of the model it was made for.

        Args:
            extraction: the model's step.
            placement: of its ops (devices ``core:N``) or of its calls (``cuda:N``, ``cpu``).
            renamed: {device of the placement: device to export}.
            main_device: device of the model's inputs.
            price: predicts steps of coarser placements.

        Raises:
            RenamingError: ``renamed`` names devices that do not exist.
            ValueError: the placement belongs to another graph.
        """
        names = dict(renamed or {})
        check_renamed(names, placement.device_names)
        graph = _graph_of(extraction, placement)
        devices = tuple(
            Device(name=name, kind=name, memory_bytes=0) for name in placement.device_names
        )
        fitting = placement.aligned(graph, Cluster(name=placement.cluster, devices=devices))
        path_of = canonical_paths(extraction.step.model)
        calls = call_keys(extraction, graph)
        of_phase: dict[int, list[PlacedOp]] = {FORWARD: [], BACKWARD: []}
        for i, op_id in enumerate(graph.ids):
            if graph.phase[i] not in of_phase:
                continue
            own = PlacedOp(
                call=calls[i],
                module=path_of.get(graph.modules[i], graph.modules[i]),
                is_repeated="@" in op_id.partition(":")[0],
                device=names.get(device := fitting.device_names[fitting.devices[i]], device),
                flops=int(graph.flops[i]),
                moved_bytes=int(graph.moved_bytes[i]),
            )
            of_phase[graph.phase[i]].append(own)
        ops = of_phase[FORWARD]
        found = cls(
            extraction=extraction,
            ops=tuple(ops),
            backward=tuple(of_phase[BACKWARD]),
            main_device=main_device,
            price=price,
        )
        missing = why_no_torch({op.device for op in ops}, names, placement.device_names)
        return replace(found, no_torch=missing)

    @property
    def step(self) -> Step:
        """Return the placed step."""
        return self.extraction.step

    @property
    def model(self) -> nn.Module:
        """Return the placed model."""
        return self.step.model

    @cached_property
    def _work(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Return {module: {device: (FLOPs, bytes moved) of the ops inside it}}."""
        found: dict[str, dict[str, tuple[int, int]]] = {}
        for op in self.ops:
            module = op.module
            while True:
                inside = found.setdefault(module, {})
                flops, size = inside.get(op.device, (0, 0))
                inside[op.device] = (flops + op.flops, size + op.moved_bytes)
                if not module:
                    break
                module = parent(module)
        return found

    def majority(self, modules: Iterable[str]) -> str | None:
        """Return the device with most FLOPs, then most bytes, in some modules; None without ops.

        The modules must not be nested.
        """
        work: dict[str, tuple[int, int]] = {}
        for module in modules:
            for device, (flops, size) in self._work.get(module, {}).items():
                known_flops, known_size = work.get(device, (0, 0))
                work[device] = (known_flops + flops, known_size + size)
        return max(work, key=lambda device: work[device], default=None)

    def home(self, module: str) -> str:
        """Return the device of a module, or of the nearest module around it that has ops."""
        found = self.majority([module])
        while found is None and module:
            module = parent(module)
            found = self.majority([module])
        return found or self.ops[0].device

    def moved(self, runs_on: Mapping[str, str]) -> tuple[PlacedOp, ...]:
        """Return the forward ops off their device in the placement if calls run on {call: device}.

        Ops of other calls count as not moved.
        """
        return _elsewhere(self.ops, runs_on)

    def moved_backward(self, runs_on: Mapping[str, str]) -> tuple[PlacedOp, ...]:
        """Return the backward ops off their device in the placement; see :meth:`moved`."""
        return _elsewhere(self.backward, runs_on)

    def by_module(self, device_of: Mapping[str, str]) -> dict[str, str]:
        """Return {call: device} for calls in the modules of {module: device}."""
        return {
            op.call: device_of[unit]
            for op in self.ops
            if (unit := around(op.module, device_of)) is not None
        }

    def units(self) -> list[str]:
        """Return the smallest modules that have a device of their own, in program order.

        A module with its own parameters or buffers is not divided; one without any inside is no
        unit. Units without ops come last.
        """
        return self.in_order(_units(self.model, ""))

    def in_order(self, modules: Iterable[str]) -> list[str]:
        """Return modules in order of the first op inside them; those without ops come last."""
        first: dict[str, int] = {}
        for place, op in enumerate(self.ops):
            first.setdefault(op.module, place)
        last = len(self.ops)

        def place_of(unit: str) -> int:
            inside = [place for module, place in first.items() if is_inside(module, unit)]
            return min(inside, default=last)

        return sorted(modules, key=place_of)

    def gates(self) -> frozenset[str]:
        """Return modules without parameters and submodules that a step calls once.

        A map need not name them. If it does, accelerate sends their inputs to their device.
        """
        units = set(self.units())
        path_of = canonical_paths(self.model)
        modules = dict(self.model.named_modules())
        calls: dict[str, set[str]] = {}
        for call in self.extraction.forward.calls:
            module = path_of.get(call.module, call.module)
            calls.setdefault(module, set()).add(call.key.partition(":")[0])
        return frozenset(
            module
            for module, own in calls.items()
            if module in modules
            and len(own) == 1
            and around(module, units) is None
            and not any(modules[module].children())
        )

    def tied_units(self, units: Collection[str]) -> list[tuple[str, ...]]:
        """Return groups of units that share a parameter and therefore a device."""
        together: dict[str, dict[str, None]] = {}
        for name, first in ties_of(self.step).items():
            owners = [owner for key in (first, name) if (owner := around(key, units)) is not None]
            together.setdefault(first, {}).update(dict.fromkeys(owners))
        return [tuple(group) for group in together.values() if len(group) > 1]


def parent(module: str) -> str:
    """Return the path of the module around another."""
    return module.rpartition(".")[0]


def around(path: str, modules: Container[str]) -> str | None:
    """Return the innermost of some modules that contains a path, None if there is none."""
    while path not in modules:
        if not path:
            return None
        path = parent(path)
    return path


def canonical_paths(model: nn.Module) -> dict[str, str]:
    """Return {path of a module: its first path}; a shared module has several paths."""
    first = {id(module): path for path, module in model.named_modules()}
    return {path: first[id(m)] for path, m in model.named_modules(remove_duplicate=False)}


def is_inside(module: str, outer: str) -> bool:
    """Return whether a module is another one or inside it."""
    return not outer or module == outer or module.startswith(outer + ".")


def _elsewhere(ops: Iterable[PlacedOp], runs_on: Mapping[str, str]) -> tuple[PlacedOp, ...]:
    return tuple(op for op in ops if runs_on.get(op.call, op.device) != op.device)


def _graph_of(extraction: Extraction, placement: Placement) -> GraphArrays:
    of_ops = GraphArrays.from_graph(extraction.graph)
    if extraction.own_forward is None or placement.graph == of_ops.hash:
        return of_ops
    if not placement.graph and set(of_ops.ids) <= set(placement.ops):
        return of_ops
    of_calls = GraphArrays.from_graph(call_graph(extraction).graph)
    if placement.graph == of_calls.hash:
        return of_calls
    ops = set(placement.ops)
    return of_ops if len(ops.intersection(of_ops.ids)) > len(ops & {*of_calls.ids}) else of_calls


def _units(module: nn.Module, path: str) -> Iterator[str]:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if own:
        yield path
        return
    for name, child in module.named_children():
        yield from _units(child, f"{path}.{name}" if path else name)
