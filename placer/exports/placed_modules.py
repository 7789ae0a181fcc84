"""A placement of ops by module: the device with most of the work of each module.

Modules are named by their path in the model; a layer is a member of a stack of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from envs.backend import StepResult
from envs.hardware.cluster import Cluster, Device
from envs.placement import Placement
from graphs.extract import Extraction, Workload
from graphs.extract.extraction import ties_of
from graphs.extract.module_calls import and_outer
from graphs.extract.placeable import call_graph, module_map
from graphs.graph import PHASES, GraphArrays
from placer.exports.model_alone import ModelPass, model_pass
from placer.exports.module_tree import (
    around,
    canonical_paths,
    check_has_weights,
    has_own,
    is_inside,
    parent,
    stacks,
    units_of,
    whole_modules,
)
from placer.exports.renaming import check_of_torch, renamed_devices

FORWARD, BACKWARD = PHASES.index("forward"), PHASES.index("backward")
PredictStep = Callable[[Mapping[str, str]], StepResult]
"""Predicts the step if calls run on {call: device}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedOp:
    """One op of a forward or backward pass and its device."""

    call: str  # key of its forward call
    module: str
    is_repeated: bool  # in a second or later call of its module, by whichever name
    device: str
    flops: int
    moved_bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedModules:
    """The forward ops of a placed step in program order, and their model.

    ``backward`` are the backward ops; if modules are placed, they run with their forward calls.
    ``placed_on`` are all devices of the placement, before they were renamed. ``main_device`` is the
    device of the model's inputs, None if the format decides.
    ``predict_step`` predicts the step if calls run on {call: device}, None if costs are unknown.
    ``known_forward`` is the forward pass of a step without one, if it was traced before.
    """

    extraction: Extraction
    ops: tuple[PlacedOp, ...]
    backward: tuple[PlacedOp, ...] = ()
    main_device: str | None = None
    placed_on: tuple[str, ...] = ()
    predict_step: PredictStep | None = None
    known_forward: ModelPass | None = None

    @classmethod
    def of(
        cls,
        extraction: Extraction,
        placement: Placement,
        *,
        renamed: Mapping[str, str] | None = None,
        main_device: str | None = None,
        predict_step: PredictStep | None = None,
        known_forward: ModelPass | None = None,
    ) -> PlacedModules:
        """Return a placement of ops (devices ``core:N``) or of calls by the model's modules."""
        names = renamed_devices(renamed or {}, placement.device_names)
        graph = _graph_of(extraction, placement)
        devices = tuple(
            Device(name=name, kind=name, memory_bytes=0) for name in placement.device_names
        )
        fitting = placement.aligned(graph, Cluster(name=placement.cluster, devices=devices))
        path_of = canonical_paths(extraction.step.model)
        calls = call_keys(extraction, graph)
        of_phase: dict[int, list[PlacedOp]] = {FORWARD: [], BACKWARD: []}
        name_of: dict[str, str] = {}  # of its first call
        for i, op_id in enumerate(graph.ids):
            if graph.phase[i] not in of_phase:
                continue
            module = path_of.get(name := graph.modules[i], name)
            called = op_id.rpartition(":")[0]
            op = PlacedOp(
                call=calls[i],
                module=module,
                is_repeated=called != name_of.setdefault(module, name),
                device=names.get(device := fitting.device_names[fitting.devices[i]], device),
                flops=int(graph.flops[i]),
                moved_bytes=int(graph.moved_bytes[i]),
            )
            of_phase[graph.phase[i]].append(op)
        ops = of_phase[FORWARD]
        return cls(
            extraction=extraction,
            ops=tuple(ops),
            backward=tuple(of_phase[BACKWARD]),
            main_device=main_device,
            placed_on=placement.device_names,
            predict_step=predict_step,
            known_forward=known_forward,
        )

    @property
    def step(self) -> Workload:
        """Return the placed step."""
        return self.extraction.step

    @property
    def model(self) -> nn.Module:
        """Return the placed model."""
        return self.step.model

    @property
    def is_exported(self) -> bool:
        """Return whether the ops stem from exported calls; else they were recorded, or modules."""
        return self.extraction.forward_program is not None

    @cached_property
    def forward(self) -> ModelPass:
        """Return the forward pass; of a step that was not exported that of the model alone."""
        if self.is_exported:
            return ModelPass(program=self.extraction.forward)
        return self.known_forward or model_pass(self.step)

    @property
    def forward_step(self) -> Workload:
        """Return the step that the forward pass is of: without a loss if it was not exported."""
        return self.step if self.is_exported else self.step.without_loss

    @cached_property
    def root_ops(self) -> frozenset[str]:
        """Return the ops of a graph of modules that are the code of the model itself."""
        units = zip(self.extraction.graph, self.extraction.units, strict=False)  # () if not modules
        return frozenset(op for op, unit in units if not unit.call.path and unit.call.number >= 0)

    def check_torch_devices(self) -> None:
        """Check that torch has the devices of all forward ops."""
        check_of_torch({op.device for op in self.ops}, self.placed_on)

    @cached_property
    def _work(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Return {module: {device: (FLOPs, bytes moved) of the ops inside it}}."""
        work: dict[str, dict[str, tuple[int, int]]] = {}
        for op in self.ops:
            module = op.module
            while True:
                inside = work.setdefault(module, {})
                flops, size = inside.get(op.device, (0, 0))
                inside[op.device] = (flops + op.flops, size + op.moved_bytes)
                if not module:
                    break
                module = parent(module)
        return work

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
        device = self.majority([module])
        while device is None and module:
            module = parent(module)
            device = self.majority([module])
        return device or self.ops[0].device

    def moved_ops(self, runs_on: Mapping[str, str]) -> list[PlacedOp]:
        """Return the ops off their device in the placement if calls run on {call: device}.

        Backward ops run with their forward call. Ops of other calls count as not moved.
        """
        return [
            op for op in (*self.ops, *self.backward) if runs_on.get(op.call, op.device) != op.device
        ]

    def by_module(self, device_of: Mapping[str, str]) -> dict[str, str]:
        """Return {call: device} for calls in the modules of {module: device}."""
        return {
            op.call: device_of[unit]
            for op in self.ops
            if (unit := around(op.module, device_of)) is not None
        }

    def units(self) -> list[str]:
        """Return the smallest modules that have a device of their own, in program order.

        A module with its own parameters or buffers is divided only if it is on several devices,
        and is the model itself or has a stack of layers inside. One without any is no unit. Units
        without ops come last.
        """
        check_has_weights(self.model)
        paths = [stack.path for stack in stacks(self.model)]
        with_weights = [path for path in paths if [*self.model.get_submodule(path).parameters()]]
        around_layers = {"", *(outer for path in with_weights for outer in and_outer(path))}

        def is_kept(module: nn.Module, path: str) -> bool:
            if not has_own(module):
                return False
            is_whole = path not in around_layers or len(self._work.get(path, ())) < 2
            return is_whole or not any(has_own(m) for m in module.modules() if m is not module)

        return self.in_order(units_of(self.model, "", is_kept))

    def map_units(self) -> list[str]:
        """Return the units of a device map: the model itself is always divided.

        Its own parameters and buffers, :meth:`own_tensors`, are units, too. What its library does
        not divide stays whole, see :func:`whole_modules`.
        """
        whole = whole_modules(self.model)

        def is_kept(module: nn.Module, path: str) -> bool:
            return path in whole or has_own(module)

        named = self.model.named_children()
        children = [unit for name, child in named for unit in units_of(child, name, is_kept)]
        return self.in_order([*self.own_tensors(), *children]) if children else self.units()

    def own_tensors(self) -> list[str]:
        """Return the names of the parameters and buffers that belong to the model itself."""
        own = (
            *self.model.named_parameters(recurse=False),
            *self.model.named_buffers(recurse=False),
        )
        return [name for name, _ in own]

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
        units = set(self.map_units())
        path_of = canonical_paths(self.model)
        modules = dict(self.model.named_modules())
        calls: dict[str, set[str]] = {}
        program = self.forward.program
        for call in program.calls if program is not None else ():
            module = path_of.get(call.module, call.module)
            calls.setdefault(module, set()).add(call.key.partition(":")[0])
        return frozenset(
            module
            for module, keys in calls.items()
            if module in modules
            and len(keys) == 1
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


def call_keys(extraction: Extraction, graph: GraphArrays) -> tuple[str, ...]:
    """Return the key of each op's forward call, (N,).

    For a step that was not exported, the key is the id of the op's forward op. ``graph`` has the
    ops or the calls of the extraction.
    """
    ids = tuple(extraction.graph)
    if graph.ids == ids and extraction.forward_program is not None:
        return extraction.call_of
    if graph.ids == ids:
        return tuple(
            ids[i if source is None else source] for i, source in enumerate(extraction.forward_of)
        )
    return tuple(map(_forward_id, graph.ids, graph.phase.tolist()))


def _forward_id(op_id: str, phase: int) -> str:
    module, _, op = op_id.rpartition(":")
    return f"{module}:{op.removeprefix(f'{PHASES[phase]}/')}"


def _graph_of(extraction: Extraction, placement: Placement) -> GraphArrays:
    if extraction.extractor == "modules":
        return GraphArrays.from_graph(module_map(extraction).graph)
    of_ops = GraphArrays.from_graph(extraction.graph)
    if extraction.forward_program is None or placement.graph == of_ops.hash:
        return of_ops
    if not placement.graph and set(of_ops.ids) <= set(placement.ops):
        return of_ops
    of_calls = GraphArrays.from_graph(call_graph(extraction).graph)
    if placement.graph == of_calls.hash:
        return of_calls
    ops = set(placement.ops)
    return of_ops if len(ops.intersection(of_ops.ids)) > len(ops & {*of_calls.ids}) else of_calls
