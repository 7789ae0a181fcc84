"""A placement of ops seen from the modules: on which device most of the work of each one is."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from torch import nn

from envs.cluster import Cluster, Device
from envs.host_names import is_core
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
    """One op of a forward or backward pass, and the device it is placed on."""

    call: str  # key of the call of the forward pass that it is of
    module: str
    is_repeated: bool  # in a second or later call of its module
    device: str
    flops: int
    moved_bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedModules:
    """The forward ops of a placed step in the order of the program, and the model they are of.

    ``backward`` are the backward ops; wherever modules are placed they run where their calls do.
    ``main_device`` is where the user of the export feeds the model, None where the format decides.
    ``price`` tells what coarser placements cost, where that is known (:mod:`placer.export.price`).
    ``no_torch`` is the sentence about devices that torch has not, "" if there are none.
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
        """What a placement means for the modules of the model it was made for.

        Args:
            extraction: the model's step.
            placement: of its ops (devices ``core:N``) or of its calls (``cuda:N``, ``cpu``).
            renamed: {device of the placement: device to export}.
            main_device: where the model will be fed.
            price: tells what coarser placements cost.

        Raises:
            RenamingError: ``renamed`` names devices that there are not.
            ValueError: the placement is of another graph.
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
        """The step that is placed."""
        return self.extraction.step

    @property
    def model(self) -> nn.Module:
        """The model that is placed."""
        return self.step.model

    @cached_property
    def _work(self) -> dict[str, dict[str, tuple[int, int]]]:
        """{module: {device: FLOPs and bytes of the ops inside it}}."""
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
        """The device of most FLOPs inside some modules, then of most bytes; None without ops.

        None of the modules is inside another.
        """
        work: dict[str, tuple[int, int]] = {}
        for module in modules:
            for device, (flops, size) in self._work.get(module, {}).items():
                known_flops, known_size = work.get(device, (0, 0))
                work[device] = (known_flops + flops, known_size + size)
        return max(work, key=lambda device: work[device], default=None)

    def home(self, module: str) -> str:
        """The device of a module, or of the nearest one around it that has ops."""
        found = self.majority([module])
        while found is None and module:
            module = parent(module)
            found = self.majority([module])
        return found or self.ops[0].device

    def moved(self, runs_on: Mapping[str, str]) -> tuple[PlacedOp, ...]:
        """The forward ops that are not where they are placed if calls run there: {call: device}.

        Ops of other calls count as not moved.
        """
        return _elsewhere(self.ops, runs_on)

    def moved_backward(self, runs_on: Mapping[str, str]) -> tuple[PlacedOp, ...]:
        """The same of the backward ops."""
        return _elsewhere(self.backward, runs_on)

    def by_module(self, device_of: Mapping[str, str]) -> dict[str, str]:
        """{call: device} where every module has one device, {module: device}; no other calls."""
        return {
            op.call: device_of[unit]
            for op in self.ops
            if (unit := around(op.module, device_of)) is not None
        }

    def units(self) -> list[str]:
        """The smallest modules that have a device of their own, in the order of the program.

        A module with parameters or buffers of its own is not divided; one without any inside is no
        unit. Those that run no op come last.
        """
        return self.in_order(_units(self.model, ""))

    def in_order(self, modules: Iterable[str]) -> list[str]:
        """Modules by the first op inside them; those that run no op come last."""
        first: dict[str, int] = {}
        for place, op in enumerate(self.ops):
            first.setdefault(op.module, place)
        last = len(self.ops)

        def place_of(unit: str) -> int:
            inside = [place for module, place in first.items() if is_inside(module, unit)]
            return min(inside, default=last)

        return sorted(modules, key=place_of)

    def gates(self) -> frozenset[str]:
        """Modules without parameters, or modules inside, that a step calls once.

        No map has to name them. If one does, accelerate sends what they read to their device.
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
        """Units that share a parameter, which therefore have one device."""
        together: dict[str, dict[str, None]] = {}
        for name, first in ties_of(self.step).items():
            owners = [owner for key in (first, name) if (owner := around(key, units)) is not None]
            together.setdefault(first, {}).update(dict.fromkeys(owners))
        return [tuple(group) for group in together.values() if len(group) > 1]


def parent(module: str) -> str:
    """The path of the module around another."""
    return module.rpartition(".")[0]


def around(path: str, modules: Container[str]) -> str | None:
    """The innermost of these modules that a path is in, None if it is in none."""
    while path not in modules:
        if not path:
            return None
        path = parent(path)
    return path


def canonical_paths(model: nn.Module) -> dict[str, str]:
    """{path of a module: its first one}; those of a module that has several differ."""
    first = {id(module): path for path, module in model.named_modules()}
    return {path: first[id(m)] for path, m in model.named_modules(remove_duplicate=False)}


def is_inside(module: str, outer: str) -> bool:
    """Whether a module is another one or in it."""
    return not outer or module == outer or module.startswith(outer + ".")


def _elsewhere(ops: Iterable[PlacedOp], runs_on: Mapping[str, str]) -> tuple[PlacedOp, ...]:
    return tuple(op for op in ops if runs_on.get(op.call, op.device) != op.device)


def _graph_of(extraction: Extraction, placement: Placement) -> GraphArrays:
    """The graph, of ops or of calls, that a placement is of."""
    of_ops = GraphArrays.from_graph(extraction.graph)
    if extraction.own_forward is None or placement.graph == of_ops.hash:
        return of_ops
    if not placement.graph and set(of_ops.ids) <= set(placement.ops):
        return of_ops
    of_calls = GraphArrays.from_graph(call_graph(extraction).graph)
    on_cores = all(map(is_core, placement.device_names))
    return of_ops if on_cores and placement.graph != of_calls.hash else of_calls


def _units(module: nn.Module, path: str) -> Iterator[str]:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if own:
        yield path
        return
    for name, child in module.named_children():
        yield from _units(child, f"{path}.{name}" if path else name)
