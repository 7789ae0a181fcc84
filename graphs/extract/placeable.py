"""Graphs that torch devices can run: with the exported calls of a step as nodes, or its modules.

Autograd runs the backward of a call on the device of the call. In a :class:`CallGraph` a call is
therefore a forward node and, if it has backward ops, a backward node in the same co-location group.

Autograd adds up gradients in place, as soon as each summand exists; a trace has an op for every
addition. As separate ops, each summand would wait for its addition, and each addition would write
another tensor. :func:`summed_in_place` corrects the memory of these ops: besides the sum only one
summand takes memory at a time.

In a :class:`ModuleMap` each module is placed as a whole. Code of a module between two of its calls
may use tensors from before them, so that all work that a module does itself, in every call, is on
one device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from graphs.coarsen.merging import Quotient, renumbered
from graphs.coarsen.sizes import GroupSizes
from graphs.extract.export.forward import ForwardProgram
from graphs.extract.extraction import Extraction
from graphs.extract.program import StepProgram
from graphs.graph import PHASES, GraphArrays, add_edge, add_op, attributes_of, frozen
from graphs.synthetic.mirror import ACCUMULATES


def summed_in_place(
    graph: GraphArrays, program: StepProgram, node_of: NDArray[np.int64]
) -> GraphArrays:
    """Return the graph with the memory that its ops take when autograd adds up gradients.

    In each sum the first summand is an output that stands for the sum. The others are workspace of
    the ops that make them, twice in the case of the second, since the first addition is not in
    place. Additions have no output. Unchanged are summands that other ops read, too, and sums whose
    additions are in several nodes; ``node_of`` (N,) is the node in which each op runs.
    """
    output, workspace = graph.output_bytes.copy(), graph.workspace_bytes.copy()
    makers = program.makers()
    for additions, summands in _sums(graph, program):
        if not summands or len(set(node_of[additions].tolist())) > 1:
            continue
        output[additions] = 0
        for number, value in enumerate(summands[1:], 1):
            op, size = makers[value], program.values[value].size_bytes
            output[op] -= size
            workspace[op] += 2 * size if number == 1 else size
    return replace(graph, output_bytes=frozen(output), workspace_bytes=frozen(workspace))


def _sums(graph: GraphArrays, program: StepProgram) -> list[tuple[list[int], list[int]]]:
    """Return for every sum the ops that add to it and, in order, the values only they read."""
    adds = [op.endswith(ACCUMULATES) for op in graph.ops]
    made = program.makers()
    readers: defaultdict[int, set[int]] = defaultdict(set)  # of a computed tensor or its views
    for call in program.op_calls:
        for root in program.roots(call.reads):
            if root in made:
                readers[root].add(call.op)
    returned = {program.values[result.value].root for result in program.results}
    sums: list[tuple[list[int], list[int]]] = []
    sum_of: dict[int, int] = {}  # value made by an addition -> position in sums
    for call in program.op_calls:
        if not adds[call.op]:
            continue
        read = program.roots(call.reads)
        at = next((sum_of[root] for root in read if root in sum_of), len(sums))
        if at == len(sums):
            sums.append(([], []))
        additions, summands = sums[at]
        additions.append(call.op)
        sum_of |= dict.fromkeys(call.made, at)
        summands += [
            root
            for root in read
            if root in readers and root not in sum_of and root not in returned
            if readers[root] == {call.op}
        ]
    return sums


FORWARD, BACKWARD = PHASES.index("forward"), PHASES.index("backward")
Device = TypeVar("Device")


@dataclass(frozen=True, slots=True, eq=False)
class CallGraph:
    """N ops of an extraction as G nodes, each the ops of one exported call in one phase.

    ``node_of`` (N,) int32 is the node of each op, by its position in ``graph``. Sizes are those of
    :class:`graphs.coarsen.sizes.GroupSizes`, sums are exact; gradients are added up in place
    (:func:`summed_in_place`). ``node_of_call`` gives, for the key of every call that has a
    device, the node whose device it has.
    """

    graph: nx.DiGraph[str]
    node_of: NDArray[np.int32]
    node_of_call: Mapping[str, int]

    def devices_of_calls(self, devices: Sequence[Device]) -> dict[str, Device]:
        """Return {key of a call: its device}, from the device of every node, (G,)."""
        if len(devices) != len(self.graph):
            raise ValueError(f"{len(devices)} devices are not for {len(self.graph)} nodes")
        return {key: devices[node] for key, node in self.node_of_call.items()}

    def launch_order(self, priority: Sequence[float]) -> tuple[str, ...]:
        """Return the keys of all calls by descending priority, from that of every node, (G,)."""
        if len(priority) != len(self.graph):
            raise ValueError(f"{len(priority)} priorities are not for {len(self.graph)} nodes")
        keys = self.node_of_call
        return tuple(sorted(keys, key=lambda key: -priority[keys[key]]))


def call_graph(extraction: Extraction) -> CallGraph:
    """Build the graph of an extraction with calls as nodes, acyclic and deterministic.

    A free call has no node: its backward ops belong to the first call that reads its output. Nodes
    on a cycle, which an in-place write through views may cause, are merged.
    """
    program = extraction.forward
    arrays = GraphArrays.from_graph(extraction.graph)
    phases = arrays.phase.tolist()
    forward = {
        key: None for key, phase in zip(extraction.call_of, phases, strict=True) if phase == FORWARD
    }
    carrier = _carriers(program, forward)
    number: dict[tuple[str, int], int] = {}
    numbers = [
        number.setdefault((carrier[key], phase), len(number))
        for key, phase in zip(extraction.call_of, phases, strict=True)
    ]
    node_of = _acyclic(arrays, np.array(numbers, np.int64))
    of_number = dict(zip(numbers, node_of.tolist(), strict=True))
    node_of_call = {
        call.key: of_number[number[carrier[call.key], FORWARD]] for call in program.placed_calls
    }
    keys = dict(zip(reversed(of_number.values()), reversed(number), strict=True))
    names = [_name(*keys[node]) for node in range(len(keys))]
    groups = _groups(_together(extraction, arrays, node_of, node_of_call), names)
    graph = _graph(extraction, arrays, node_of, keys, groups)
    return CallGraph(graph, frozen(node_of.astype(np.int32)), node_of_call)


def _carriers(program: ForwardProgram, computing: Iterable[str]) -> dict[str, str]:
    """Return {key of a call: the call that its ops belong to}: itself, if it has forward ops.

    Otherwise a call that it must share a device with; else the first that reads its output,
    directly or through other calls; else the one whose output it reads.
    """
    carrier = {key: key for key in computing}
    last_resort = next(iter(carrier))
    for keys in program.together():
        known = next((key for key in keys if key in carrier), None)
        for key in keys if known is not None else ():
            carrier.setdefault(key, carrier[known or key])
    reader: dict[int, str] = {}
    for call in reversed(program.calls):
        read_by = next((reader[value] for value in call.made if value in reader), None)
        if known := carrier.get(call.key, read_by):
            carrier[call.key] = known
            reader |= dict.fromkeys(call.reads, known)
    makers = program.producers()
    for call in program.calls:
        if call.key not in carrier:
            read = (program.calls[makers[v]].key for v in call.reads if v in makers)
            carrier[call.key] = next((carrier[key] for key in read), last_resort)
    return carrier


def _acyclic(arrays: GraphArrays, node_of: NDArray[np.int64]) -> NDArray[np.int64]:
    """Merge the nodes on each cycle."""
    quotient = Quotient.of(arrays, node_of)
    if not quotient.on_cycle().any():
        return node_of
    pairs = zip(quotient.source.tolist(), quotient.target.tolist(), strict=True)
    merged = np.arange(quotient.count)
    for component in nx.strongly_connected_components(nx.DiGraph(list(pairs))):
        merged[list(component)] = min(component)
    return renumbered(merged[node_of])


def _graph(
    extraction: Extraction,
    arrays: GraphArrays,
    node_of: NDArray[np.int64],
    keys: Mapping[int, tuple[str, int]],
    groups: Mapping[int, str],
) -> nx.DiGraph[str]:
    """Build the nodes by number, named by call and phase in ``keys``, and their edges."""
    position = np.empty(len(arrays), np.int64)
    position[arrays.topological] = np.arange(len(arrays))
    in_place = summed_in_place(arrays, extraction.program, node_of)
    sizes = GroupSizes.of(in_place, node_of, np.lexsort((position, node_of)))
    calls = {call.key: call for call in extraction.forward.calls}
    graph: nx.DiGraph[str] = nx.DiGraph(**extraction.graph.graph)
    for node in range(len(keys)):
        key, phase = keys[node]
        add_op(
            graph,
            _name(key, phase),
            op=calls[key].op,
            phase=PHASES[phase],
            module=calls[key].module,
            colocate=groups.get(node),
            devices=None,
            **sizes.attributes(node),
        )
    names = list(graph)
    for (source, target), size in sizes.edges.items():
        add_edge(graph, names[source], names[target], size)
    return graph


def _name(key: str, phase: int) -> str:
    module, _, op = key.rpartition(":")
    return key if phase == FORWARD else f"{module}:{PHASES[phase]}/{op}"


def _together(
    extraction: Extraction,
    arrays: GraphArrays,
    node_of: NDArray[np.int64],
    node_of_call: Mapping[str, int],
) -> nx.Graph[int]:
    """Return a graph with links between nodes that must share a device."""
    links: nx.Graph[int] = nx.Graph()
    for key, node in zip(extraction.call_of, node_of.tolist(), strict=True):
        links.add_edge(node, node_of_call[key])
    for keys in extraction.forward.together():
        nx.add_path(links, [node_of_call[key] for key in keys])
    for group in range(int(arrays.group.max(initial=-1)) + 1):
        nx.add_path(links, node_of[arrays.group == group].tolist())
    return links


def _groups(links: nx.Graph[int], names: Sequence[str]) -> dict[int, str]:
    """Return {node: co-location group} for linked nodes, groups named by their first node."""
    return {
        node: f"calls with {names[min(component)]}"
        for component in nx.connected_components(links)
        if len(component) > 1
        for node in component
    }


def gradient_makers(
    extraction: Extraction, calls: CallGraph | None = None
) -> dict[str, tuple[str, ...]]:
    """Return {op that parameters live with: ops that produce their gradients}, by id.

    It is empty without a program. A parameter lives with the first op that reads it. With
    ``calls``, ids are those of the nodes that the ops are in.
    """
    program = extraction.step_program
    if program is None:
        return {}
    ids = tuple(extraction.graph)
    if calls is not None:
        nodes = tuple(calls.graph)
        ids = tuple(nodes[node] for node in calls.node_of.tolist())
    names = {s.value: s.name for s in program.sources if s.role == "parameter"}
    home: dict[str, int] = {}
    for call in program.op_calls:
        for root in program.roots(call.reads):
            if root in names:
                home.setdefault(program.first_name(names[root]), call.op)
    makers = program.makers()
    made_by: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for name, value in program.gradients.items():
        reader = home.get(program.first_name(name))
        maker = makers.get(program.values[value].root)
        if reader is not None and maker is not None:
            made_by[ids[reader]][ids[maker]] = None
    return {op_id: tuple(ops) for op_id, ops in made_by.items()}


@dataclass(frozen=True, slots=True, eq=False)
class ModuleMap:
    """A graph of modules with N ops; op ``i`` belongs to the module with path ``modules[i]``."""

    graph: nx.DiGraph[str]
    modules: tuple[str, ...]

    def devices_of_calls(self, devices: Sequence[Device]) -> dict[str, Device]:
        """Return {path of a module: its device}, from the device of every op, (N,)."""
        if len(devices) != len(self.modules):
            raise ValueError(f"{len(devices)} devices are not for {len(self.modules)} ops")
        return dict(zip(self.modules, devices, strict=True))

    def launch_order(self, priority: Sequence[float]) -> tuple[str, ...]:
        """Return an empty order: the model's own code decides."""
        del priority
        return ()


def placeable(extraction: Extraction) -> CallGraph | ModuleMap:
    """Return the graph that torch devices can run: of the exported calls, else of the modules."""
    if extraction.extractor == "modules":
        return module_map(extraction)
    return call_graph(extraction)


def module_map(extraction: Extraction) -> ModuleMap:
    """Return the graph of a step extracted by its modules, the ops of each in one group."""
    graph: nx.DiGraph[str] = extraction.graph.copy()
    modules = tuple(unit.call.path for unit in extraction.units)
    together: nx.Graph[tuple[str, str]] = nx.Graph()
    for op, module in zip(graph, modules, strict=True):
        together.add_edge(("op", op), ("module", module))
        if (group := attributes_of(graph, op)["colocate"]) is not None:
            together.add_edge(("op", op), ("group", group))
    for members in nx.connected_components(together):
        ops = [name for kind, name in members if kind == "op"]
        group = min(f"module {name}" for kind, name in members if kind == "module")
        for op in ops if len(ops) > 1 else ():
            graph.nodes[op]["colocate"] = group
    return ModuleMap(graph, modules)
