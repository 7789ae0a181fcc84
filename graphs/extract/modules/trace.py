"""The graph of module calls of a step, for models that no other extractor accepts.

Torch runs the step as it is, with hooks on its modules. An op of the graph is a unit: what a call
of a module does itself, from one call that it makes to the next; for a module that calls no other
it is the whole call. Units that only make views are left out. A backward op differentiates a unit
and shares its device.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx
import torch

from graphs.extract.calls import Homes
from graphs.extract.export.trace import cell_by_cell
from graphs.extract.gradients import check_gradients
from graphs.extract.modules.flow import Flow, Work, bytes_of
from graphs.extract.modules.units import Unit
from graphs.extract.refusals import explained, own_backward_refused, quiet
from graphs.extract.substitute import in_its_mode
from graphs.extract.trial import runnable, try_fakes
from graphs.graph import add_edge, add_op, new_graph, topological_order
from graphs.synthetic.mirror import backward_id
from graphs.workload import ExtractionError, StepError, Workload


@dataclass(frozen=True, slots=True)
class ModuleGraph:
    """A graph; ``units`` by op, also those of backward ops; ``forward_of`` as in an Extraction."""

    graph: nx.DiGraph[str]
    units: tuple[Unit, ...]
    forward_of: tuple[int | None, ...]


def module_graph(step: Workload) -> ModuleGraph:
    """Build the graph of the module calls of one step; the model is left as it was.

    Raises:
        StepError: the model runs no ops.
        ExtractionError: the model fails on the example inputs, its modules cannot be put in order,
            or an optimizer is in the step.
    """
    if step.optimizer is not None:
        raise ExtractionError("a graph of modules has no ops for an optimizer: leave it out")
    try:
        with quiet(), in_its_mode(step), runnable(step) as copy, cell_by_cell(step):
            try_fakes(copy)
            flow = Flow(copy)
            with own_backward_refused(step, saving=True):
                flow.run(copy)
    except ExtractionError:
        raise
    except Exception as error:
        raise ExtractionError(explained(step, error, "run module by module")) from error
    if not flow.forward:
        raise StepError(f"{type(step.model).__name__} runs no ops on these inputs")
    if step.training:
        check_gradients(step, flow.with_gradient)
    found = _Builder(flow, type(step.model).__name__).graph()
    try:
        topological_order(found.graph)
    except ValueError as error:
        raise ExtractionError(
            f"the modules of {type(step.model).__name__} cannot be put in order: {error}"
        ) from error
    return found


class _Builder:
    def __init__(self, flow: Flow, name: str) -> None:
        self.flow = flow
        self.forward = list(flow.forward)
        self.backward = [u for u in reversed(self.forward) if u in set(flow.unit_of.values())]
        if not flow.is_backward:
            self.backward = []
        self.ids = _ids(self.forward)
        self.back_ids = {unit: backward_id(self.ids[unit]) for unit in self.backward}
        self.home = self._homes()
        self.result = new_graph(name)

    def graph(self) -> ModuleGraph:
        """Add forward ops in the order in which they began, then backward ops in reverse order."""
        groups = self._groups()
        parameters: Counter[Unit] = Counter()
        gradients: Counter[Unit] = Counter()
        for name, unit in self.home.items():
            size = bytes_of(self._state[name])
            parameters[unit] += size
            gradients[unit] += size if name in self.flow.with_gradient else 0
        kept = self._kept()
        for unit in self.forward:
            work = self.flow.forward[unit]
            output = self.flow.handed_on[unit] | kept[unit]
            add_op(
                self.result,
                self.ids[unit],
                cost_s={},
                op=unit.op,
                module=unit.call.path,
                flops=work.flops,
                moved_bytes=work.moved_bytes,
                output_bytes=sum(output.values()),
                parameter_bytes=parameters[unit],
                gradient_bytes=gradients[unit],
                saved_bytes=sum(kept[unit].values()),
                colocate=groups.get(unit),
            )
        for unit in self.backward:
            work = self.flow.backward.get(unit) or Work()
            add_op(
                self.result,
                self.back_ids[unit],
                cost_s={},
                op=unit.op,
                phase="backward",
                module=unit.call.path,
                flops=work.flops,
                moved_bytes=work.moved_bytes,
                output_bytes=sum(
                    sum(sizes.values())
                    for (_, target), sizes in self.flow.edges.items()
                    if target == unit
                ),
                colocate=groups[unit],
            )
        self._add_edges()
        index = {unit: i for i, unit in enumerate(self.forward)}
        return ModuleGraph(
            self.result,
            (*self.forward, *self.backward),
            (*(None for _ in self.forward), *(index[unit] for unit in self.backward)),
        )

    @property
    def _state(self) -> dict[str, torch.Tensor]:
        return dict(self.flow.state.values())

    def _add_edges(self) -> None:
        for (source, target), sizes in self.flow.edges.items():
            add_edge(self.result, self.ids[source], self.ids[target], sum(sizes.values()))
        for (source, target), sizes in self.flow.edges.items():
            if source in self.back_ids and target in self.back_ids:
                back = self.back_ids[target], self.back_ids[source]
                add_edge(self.result, *back, sum(sizes.values()))
        saved = {(unit, unit): 0 for unit in self.backward}
        for (maker, reader), sizes in self.flow.kept.items():
            if reader in self.back_ids and maker in self.ids:
                saved[maker, reader] = sum(sizes.values())
        for (maker, reader), size in saved.items():
            add_edge(self.result, self.ids[maker], self.back_ids[reader], size)

    def _kept(self) -> defaultdict[Unit, dict[int, int]]:
        """Return {unit: bytes of the tensors that it makes and autograd saves, each once}."""
        kept: defaultdict[Unit, dict[int, int]] = defaultdict(dict)
        for (maker, _), sizes in self.flow.kept.items():
            kept[maker] |= sizes
        return kept

    def _homes(self) -> dict[str, Unit]:
        """Return {parameter: the unit it belongs to}: its first reader, else one of its module."""
        flow = self.flow
        homes: dict[str, Unit] = {}
        of_unread = Homes((unit, unit.call.path) for unit in self.forward)
        for name, tensor in flow.state.values():
            if id(tensor) not in flow.trained:
                continue
            readers = [unit for unit in flow.readers[name] if unit in flow.forward]
            homes[name] = readers[0] if readers else of_unread.of(name)
        return homes

    def _groups(self) -> dict[Unit, str]:
        """Return {unit: group} of units with a backward op, or with shared parameters or state."""
        together: nx.Graph[Unit] = nx.Graph()
        together.add_nodes_from(self.forward)
        shared: dict[Unit, str] = {}
        for name, tensor in self.flow.state.values():
            users = [unit for unit in self.flow.readers[name] if unit in self.flow.forward]
            if id(tensor) in self.flow.trained or name in self.flow.written:
                nx.add_path(together, users)
                shared |= dict.fromkeys(users[:-1], f"state {name}")
        groups: dict[Unit, str] = {}
        for members in nx.connected_components(together):
            names = sorted(shared[unit] for unit in members if unit in shared)
            if names:
                groups |= dict.fromkeys(members, names[0])
            else:
                groups |= {u: f"call {self.ids[u]}" for u in members if u in self.back_ids}
        return groups


def _ids(units: Sequence[Unit]) -> dict[Unit, str]:
    """Return keys ``module[@call]:class[#occurrence]``."""
    seen: Counter[str] = Counter()
    ids: dict[Unit, str] = {}
    for unit in units:
        key = f"{unit.call.key}:{unit.op}"
        ids[unit] = f"{key}#{seen[key]}" if seen[key] else key
        seen[key] += 1
    return ids
