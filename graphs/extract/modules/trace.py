"""The graph of module calls of a step, for models that no other extractor accepts.

Torch runs the step as it is, with hooks on its modules. An op of the graph is a unit: what a call
of a module does itself, from one call that it makes to the next; for a module that calls no other
it is the whole call. Units that only make views are left out. A backward op differentiates a unit
and shares its device.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, TypeAlias

import networkx as nx

from graphs.extract.eager import check_gradients, runnable, try_fakes
from graphs.extract.errors import custom_backward_checked
from graphs.extract.fx_nodes import numbered
from graphs.extract.kernels.decomposed import trained_as_in_eager_mode
from graphs.extract.model_state import tracing
from graphs.extract.module_calls import Homes, Unit
from graphs.extract.modules.flow import Flow, Work, bytes_of
from graphs.graph import add_edge, add_op, new_graph, topological_order
from graphs.synthetic.mirror import backward_id
from graphs.workload import ExtractionError, StepError, Workload

ModuleGraph: TypeAlias = "tuple[nx.DiGraph[str], tuple[Unit, ...], tuple[int | None, ...]]"
"""A graph, the unit of each op, and the forward op of each backward op."""


def module_graph(step: Workload) -> ModuleGraph:
    """Build the graph of the module calls of one step; the model is left as it was."""
    name = type(step.model).__name__
    if step.optimizer is not None:
        raise ExtractionError("a graph of modules has no ops for an optimizer: leave it out")
    with tracing(step, "run module by module"), runnable(step) as copy, trained_as_in_eager_mode():
        try_fakes(copy)
        flow = Flow(copy)
        with custom_backward_checked(step, saving=True):
            flow.run(copy)
    if not flow.forward:
        raise StepError(f"{name} runs no ops on these inputs")
    if step.training:
        check_gradients(step, flow.with_gradient)
    builder = _Builder(flow, name)
    graph = builder.graph()
    try:
        topological_order(graph)
    except ValueError as error:
        raise ExtractionError(f"the modules of {name} cannot be put in order: {error}") from error
    index = {unit: i for i, unit in enumerate(builder.forward)}
    forward_of = (*(None for _ in index), *(index[unit] for unit in builder.backward))
    return graph, (*builder.forward, *builder.backward), forward_of


class _Builder:
    def __init__(self, flow: Flow, name: str) -> None:
        self.flow = flow
        self.forward = list(flow.forward)
        differentiated = set(flow.unit_of.values()) if flow.is_backward else set()
        self.backward = [unit for unit in reversed(self.forward) if unit in differentiated]
        keys = numbered(f"{unit.call.key}:{unit.op}" for unit in self.forward)
        self.ids = dict(zip(self.forward, keys, strict=True))
        self.back_ids = {unit: backward_id(self.ids[unit]) for unit in self.backward}
        self.result = new_graph(name)

    def graph(self) -> nx.DiGraph[str]:
        """Add forward ops in the order in which they began, then backward ops in reverse order."""
        groups = self._groups()
        parameters, gradients = self._parameter_bytes()
        kept: defaultdict[Unit, dict[int, int]] = defaultdict(dict)  # saved by autograd, each once
        for (maker, _), sizes in self.flow.kept.items():
            kept[maker] |= sizes
        for unit in self.forward:
            self._add(
                self.ids[unit],
                unit,
                self.flow.forward[unit],
                output_bytes=sum((self.flow.handed_on[unit] | kept[unit]).values()),
                parameter_bytes=parameters[unit],
                gradient_bytes=gradients[unit],
                saved_bytes=sum(kept[unit].values()),
                colocate=groups.get(unit),
            )
        returned: Counter[Unit] = Counter()  # gradients of what a unit read
        for (_, target), sizes in self.flow.edges.items():
            returned[target] += sum(sizes.values())
        for unit in self.backward:
            self._add(
                self.back_ids[unit],
                unit,
                self.flow.backward.get(unit) or Work(),
                phase="backward",
                output_bytes=returned[unit],
                colocate=groups[unit],
            )
        self._add_edges()
        return self.result

    def _add(self, op_id: str, unit: Unit, work: Work, **attributes: Any) -> None:
        add_op(
            self.result,
            op_id,
            cost_s={},
            op=unit.op,
            module=unit.call.path,
            flops=work.flops,
            moved_bytes=work.moved_bytes,
            **attributes,
        )

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

    def _parameter_bytes(self) -> tuple[Counter[Unit], Counter[Unit]]:
        """Return bytes of parameters and buffers, and of gradients, by the unit they belong to.

        That is the first reader, else a unit of their module.
        """
        flow = self.flow
        parameters: Counter[Unit] = Counter()
        gradients: Counter[Unit] = Counter()
        of_unread = Homes((unit, unit.call.path) for unit in self.forward)
        for name, tensor in flow.state.values():
            readers = (unit for unit in flow.readers[name] if unit in flow.forward)
            home = next(readers, None) or of_unread.of(name)
            parameters[home] += bytes_of(tensor)
            gradients[home] += bytes_of(tensor) if name in flow.with_gradient else 0
        return parameters, gradients

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
