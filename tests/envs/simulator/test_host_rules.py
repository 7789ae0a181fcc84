"""Host threads in the simulator: hand-checked steps."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import numpy as np
import pytest

from envs.hardware.cluster import Cluster, Device, Link
from envs.hardware.host import Host
from envs.problem import Problem
from envs.simulator import Simulator
from envs.simulator.bounds import lower_bound_ns
from envs.simulator.critical_path import critical_path
from envs.simulator.max_load import loads_of
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from placer.search.candidate import Kind
from placer.search.evaluator import Evaluator
from tests.helpers.simulator_cases import run


def machine(*, overlap: bool = False) -> Cluster:
    """Return two GPUs with launches of 10 us, and the CPU; copies of 1 byte take 100 us."""
    names = ("cuda:0", "cuda:1", "cpu")
    return Cluster(
        name="machine",
        devices=tuple(
            Device(
                name=name,
                kind=name.partition(":")[0],
                memory_bytes=10**9,
                launch_s=10e-6 if name != "cpu" else 0.0,
            )
            for name in names
        ),
        links=(
            Link(
                between=names, latency_s=100e-6, bandwidth_bytes_per_s=float("inf"), sharing="pair"
            ),
        ),
        hosts=(Host(devices=names, overlap=overlap),),
    )


def ops(costs_us: dict[str, float], edges: str = "") -> nx.DiGraph[str]:
    graph = new_graph("ops")
    for name, cost_us in costs_us.items():
        add_op(graph, name, cost_s={"*": cost_us * 1e-6}, output_bytes=1)
    for edge in edges.split():
        add_edge(graph, edge[0], edge[1])
    return graph


GPU, OTHER, CPU = 0, 1, 2


def test_launches_longer_than_the_simulator_counts_at_once_are_counted_in_full() -> None:
    devices = tuple(replace(device, launch_s=1000.0) for device in machine().devices)
    schedule = run(ops({"a": 1e6}), replace(machine(), devices=devices), [GPU])
    assert schedule.step_ns == 1001 * 10**9


@pytest.mark.parametrize("devices", [[GPU] * 4, [GPU, OTHER] * 2])
def test_a_second_gpu_gains_nothing_where_launches_take_longest(devices: list[int]) -> None:
    schedule = run(ops(dict.fromkeys("abcd", 1.0)), machine(), devices)
    assert schedule.start_ns.tolist() == [10_000, 20_000, 30_000, 40_000]
    assert schedule.step_ns == 41_000


def test_launches_run_ahead_of_a_long_op_and_small_ops_queue_behind_it() -> None:
    graph = ops({"a": 100.0, "b": 2.0, "c": 2.0, "d": 2.0})
    for name, launch_us in {"a": 20.0, "b": 30.0, "c": 10.0}.items():
        graph.nodes[name]["launch_s"] = {"*": launch_us * 1e-6}
    schedule = run(graph, machine(), [GPU] * 4, [4.0, 3.0, 2.0, 1.0])
    # Launched at 20, 50, 60 and, by the 10 us of the device, 70, while a runs until 120.
    assert schedule.start_ns.tolist() == [20_000, 120_000, 122_000, 124_000]
    last = run(graph, machine(), [GPU] * 4, [1.0, 4.0, 3.0, 2.0])
    # Each waits for its launch: at 30, 40, 50 and 70.
    assert last.start_ns.tolist() == [70_000, 30_000, 40_000, 50_000]
    assert run(graph, machine(), [CPU] * 4, [4.0, 3.0, 2.0, 1.0]).step_ns == 106_000


def test_ops_wait_in_the_queue_of_their_device() -> None:
    schedule = run(ops(dict.fromkeys("abc", 50.0)), machine(), [GPU, GPU, OTHER])
    assert schedule.start_ns.tolist() == [10_000, 60_000, 30_000]
    assert schedule.step_ns == 110_000


def test_an_op_on_the_cpu_delays_launches_that_come_after_it() -> None:
    graph = ops({"a": 5.0, "b": 200.0, "c": 5.0})
    first = run(graph, machine(), [GPU, CPU, GPU], [3.0, 2.0, 1.0])
    assert first.start_ns.tolist() == [10_000, 10_000, 220_000]
    last = run(graph, machine(), [GPU, CPU, GPU], [3.0, 1.0, 2.0])
    assert last.start_ns.tolist() == [10_000, 20_000, 20_000]
    assert (first.step_ns, last.step_ns) == (225_000, 220_000)


def test_a_copy_to_the_cpu_waits_for_the_whole_queue_and_blocks_the_thread() -> None:
    graph = ops({"a": 50.0, "b": 300.0, "c": 20.0, "d": 5.0}, "ac")
    schedule = run(graph, machine(), [GPU, GPU, CPU, OTHER], [4.0, 3.0, 2.0, 1.0])
    # b ends at 360; the copy takes 100, c 20, and only then d is launched.
    assert schedule.transfers.start_ns.tolist() == [360_000]
    assert schedule.start_ns.tolist() == [10_000, 60_000, 460_000, 490_000]
    beside = run(graph, machine(overlap=True), [GPU, GPU, CPU, OTHER], [4.0, 3.0, 2.0, 1.0])
    assert beside.transfers.start_ns.tolist() == [60_000]
    assert beside.start_ns.tolist() == [10_000, 60_000, 160_000, 190_000]


def test_a_copy_from_the_cpu_holds_the_thread_and_the_queue_of_its_destination() -> None:
    graph = ops({"a": 50.0, "b": 300.0, "c": 20.0, "d": 5.0}, "ac")
    schedule = run(graph, machine(), [CPU, GPU, GPU, OTHER], [4.0, 3.0, 2.0, 1.0])
    # b runs from 60 to 360; the copy is over at 460.
    assert schedule.start_ns.tolist() == [0, 60_000, 470_000, 480_000]


def test_a_copy_in_line_holds_the_queues_of_both_gpus() -> None:
    graph = ops({"a": 10.0, "b": 10.0, "c": 10.0, "d": 10.0}, "ab")
    schedule = run(graph, machine(), [GPU, OTHER, GPU, OTHER], [4.0, 3.0, 2.0, 1.0])
    # The copy takes from 20 to 120; the thread goes on.
    assert schedule.start_ns.tolist() == [10_000, 120_000, 120_000, 130_000]
    beside = run(graph, machine(overlap=True), [GPU, OTHER, GPU, OTHER], [4.0, 3.0, 2.0, 1.0])
    assert beside.start_ns.tolist() == [10_000, 120_000, 40_000, 130_000]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_copy_between_gpus_is_issued_as_an_op_is(overlap: bool) -> None:
    graph = ops({"a": 1.0, "b": 1.0, "c": 1.0}, "ab")
    schedule = run(graph, machine(overlap=overlap), [GPU, OTHER, CPU], [3.0, 2.0, 1.0])
    # a, its copy and b are issued; the copy is over at 120.
    assert schedule.transfers.start_ns.tolist() == [20_000]
    assert schedule.start_ns.tolist() == [10_000, 120_000, 30_000]


def test_the_thread_writes_what_leaves_the_cpu_beside_its_ops_to_page_locked_memory() -> None:
    graph = ops({"a": 50.0, "b": 1.0, "c": 1.0}, "ab")
    graph.nodes["a"]["output_bytes"] = graph.edges["a", "b"]["bytes"] = 30_000
    cluster = machine(overlap=True)
    *gpus, cpu = cluster.devices
    cpu = replace(cpu, bandwidth_bytes_per_s=2e9)  # a byte is read and written
    schedule = run(graph, replace(cluster, devices=(*gpus, cpu)), [CPU, GPU, CPU], [3.0, 2.0, 1.0])
    # 10 to issue the copy and 30 to write it; it takes from 90 to 190. b is launched until 100.
    assert schedule.transfers.start_ns.tolist() == [90_000]
    assert schedule.start_ns.tolist() == [0, 190_000, 100_000]


MIB = 1 << 20


def sending(mib: int, us_per_mib: float) -> tuple[nx.DiGraph[str], Cluster]:
    """Return ops a to d, where a is read by b, and a machine that writes a MiB in 0.5 us."""
    graph = ops({"a": 50.0, "b": 1.0, "c": 1.0, "d": 1.0}, "ab")
    graph.nodes["a"]["output_bytes"] = graph.edges["a", "b"]["bytes"] = mib * MIB
    cluster = machine(overlap=True)
    *gpus, cpu = cluster.devices
    cpu = replace(cpu, bandwidth_bytes_per_s=4e6 * MIB)
    (link,) = cluster.links
    link = replace(link, bandwidth_bytes_per_s=1e6 * MIB / us_per_mib)
    return graph, replace(cluster, devices=(*gpus, cpu), links=(link,))


@pytest.mark.parametrize(("us_per_mib", "start", "written"), [(10.0, 68, 328), (0.25, 84, 188)])
def test_another_thread_writes_large_tensors_in_pieces_and_waits_for_room(
    us_per_mib: float, start: int, written: int
) -> None:
    graph, cluster = sending(80, us_per_mib)
    schedule = run(graph, cluster, [CPU, GPU, CPU, CPU], [4.0, 2.0, 3.0, 1.0])
    # Issued at 60, written until 100, the first of five pieces until 68. On the slow link it ends
    # at 68 + 100 + 800; the last piece has room once 16 MiB are sent, 640 before. On the fast link
    # four pieces are sent in 16, so the copy starts 16 before the last is written if that has room
    # at once; it has once 16 MiB are sent, at 84 + 100 + 4. Meanwhile the first thread runs c; then
    # it waits until all is written, launches b in 10, and runs d.
    assert schedule.transfers.start_ns.tolist() == [start * 1000]
    end = int(schedule.transfers.end_ns[0])
    assert schedule.start_ns.tolist() == [0, end, 60_000, (written + 10) * 1000]


def test_the_other_thread_writes_one_tensor_after_the_other() -> None:
    graph, cluster = sending(40, 0.001)
    graph.nodes["c"]["output_bytes"] = 2 * MIB
    add_edge(graph, "c", "d")
    schedule = run(graph, cluster, [CPU, GPU, CPU, GPU], [4.0, 1.0, 3.0, 2.0])
    # a is written from 60 to 80 and sent in 100.04 from 0.024 before that on, which is what all but
    # its first piece takes. c is issued at 71, written from 80 to 81 and sent after a in 100.002.
    assert schedule.transfers.start_ns.tolist() == [79_976, 180_016]
    assert schedule.start_ns.tolist() == [0, 281_018, 60_000, 280_018]


def workers() -> Cluster:
    """Return the machine with a thread for each device, the CPU writing 1 GB/s."""
    cluster = machine()
    *gpus, cpu = cluster.devices
    cpu = replace(cpu, bandwidth_bytes_per_s=2e9)
    hosts = tuple(Host(devices=(name,), overlap=True) for name in cluster.names)
    return replace(cluster, devices=(*gpus, cpu), hosts=hosts)


def test_a_worker_waits_for_what_it_receives_before_it_launches_on() -> None:
    graph = ops({"a": 50.0, "b": 1.0, "c": 5.0}, "ab")
    schedule = run(graph, workers(), [GPU, OTHER, OTHER], [3.0, 2.0, 1.0])
    # a ends at 60, its copy at 160. Then b is launched, and c while b runs.
    assert schedule.start_ns.tolist() == [10_000, 170_000, 180_000]
    first = run(graph, workers(), [GPU, OTHER, OTHER], [3.0, 1.0, 2.0])
    assert first.start_ns.tolist() == [10_000, 170_000, 10_000]


def test_a_worker_launches_on_while_its_copies_run() -> None:
    graph = ops({"a": 50.0, "b": 1.0, "c": 5.0}, "ab")
    schedule = run(graph, workers(), [GPU, CPU, GPU], [3.0, 2.0, 1.0])
    # Launch of a, issue of its copy, launch of c.
    assert schedule.start_ns.tolist() == [10_000, 160_000, 60_000]


def test_what_the_worker_of_the_cpu_wrote_is_copied_in_the_queue_of_the_gpu() -> None:
    graph = ops({"a": 50.0, "b": 20.0, "c": 5.0, "d": 80.0}, "ac")
    graph.nodes["a"]["output_bytes"] = graph.edges["a", "c"]["bytes"] = 30_000
    schedule = run(graph, workers(), [CPU, CPU, GPU, GPU], [4.0, 3.0, 1.0, 2.0])
    # a is written from 50 to 80, which holds b up. d runs until 90, when the copy has been issued;
    # it ends at 190, c was launched meanwhile.
    assert schedule.transfers.start_ns.tolist() == [90_000]
    assert schedule.start_ns.tolist() == [0, 80_000, 190_000, 10_000]


def two_branches(forward_us: float = 1.0, backward_us: float = 1.0) -> nx.DiGraph[str]:
    """Return a training step of x and y, whose sum is the loss, which takes 1 us."""
    graph = new_graph("branches")
    for name in ("x", "y", "sum"):
        before, after = (forward_us, backward_us) if name != "sum" else (1.0, 1.0)
        add_op(graph, name, cost_s={"*": before * 1e-6}, output_bytes=1)
        of = f"backward/{name}"
        add_op(graph, of, cost_s={"*": after * 1e-6}, output_bytes=1, phase="backward")
        add_edge(graph, name, f"backward/{name}")
    for name in "xy":
        add_edge(graph, name, "sum")
        add_edge(graph, "backward/sum", f"backward/{name}")
    return graph


@pytest.mark.parametrize(("first", "second"), ["xy", "yx"])
def test_autograd_issues_the_backward_ops_in_reverse_of_the_forward_ops(
    first: str, second: str
) -> None:
    graph = two_branches()
    cluster = replace(machine(), hosts=(Host(devices=("cuda:0", "cpu"), autograd=True),))
    wanted = {first: 9.0, f"backward/{first}": 8.0, f"backward/{second}": 7.0}
    schedule = run(graph, cluster, [GPU] * 6, [wanted.get(op, 0.0) for op in graph])
    assert schedule.issued is not None
    assert [list(graph)[i] for i in schedule.issued] == [
        first, second, "sum", "backward/sum", f"backward/{second}", f"backward/{first}",
    ]  # fmt: skip
    assert schedule.start_ns[schedule.issued].tolist() == [1000 * k for k in range(10, 70, 10)]


def test_autograd_updates_parameters_as_soon_as_their_gradients_are_there() -> None:
    graph = two_branches()
    add_op(graph, "update", cost_s={"*": 1e-6}, phase="optimizer")
    add_edge(graph, "backward/y", "update")
    cluster = replace(machine(), hosts=(Host(devices=("cuda:0", "cpu"), autograd=True),))
    schedule = run(graph, cluster, [GPU] * 7, [-float(op == "update") for op in graph])
    assert schedule.issued is not None
    issued = [list(graph)[i] for i in schedule.issued]
    assert issued[-3:] == ["backward/y", "update", "backward/x"]


def test_a_device_without_a_host_has_a_thread_of_its_own() -> None:
    hosts = (Host(devices=("cuda:0", "cpu")),)
    schedule = run(
        ops(dict.fromkeys("abcd", 1.0)), replace(machine(), hosts=hosts), [GPU, OTHER] * 2
    )
    assert schedule.start_ns.tolist() == [10_000, 0, 20_000, 11_000]


def test_the_bound_counts_launches_of_the_thread() -> None:
    graph = ops(dict.fromkeys("abcdefgh", 1.0))
    for node in graph.nodes.values():
        node["devices"] = ("cuda:0", "cuda:1")
    problem = Problem.of(GraphArrays.from_graph(graph), machine())
    assert lower_bound_ns(problem) >= 80_000


def test_loads_count_launches() -> None:
    problem = Problem.of(GraphArrays.from_graph(ops({"a": 1.0, "b": 2.0})), machine())
    assert loads_of(problem, np.array([GPU, CPU], np.int32)).load_ns.tolist() == [11_000, 0, 2_000]


def test_the_path_names_the_launches_of_the_thread() -> None:
    graph = ops(dict.fromkeys("abc", 1.0))
    problem = Problem.of(GraphArrays.from_graph(graph), machine())
    schedule = Simulator(problem).run(np.zeros(3, np.int32), np.zeros(3))
    path = critical_path(problem, schedule)
    assert [(part.kind, part.end_ns) for part in path] == [
        ("host busy", 30_000),
        ("compute", 31_000),
    ]


def test_candidates_launch_before_ops_of_the_cpu_if_that_is_faster() -> None:
    problem = Problem.of(GraphArrays.from_graph(ops({"a": 200.0, "b": 200.0})), machine())
    devices, priority = np.array([CPU, GPU], np.int32), np.array([2.0, 1.0])
    evaluator = Evaluator(problem)
    assert evaluator.candidate(Kind.HEFT, devices, priority).step_ns == 210_000
    existing = evaluator.candidate(Kind.WARM_START, devices, priority)
    assert existing.step_ns == 410_000
    assert existing.priority.tolist() == priority.tolist()


def test_candidates_take_the_order_of_the_graph_if_autograd_is_then_faster() -> None:
    hosts = (Host(devices=("cuda:0", "cpu"), overlap=True, autograd=True),)
    graph = two_branches(forward_us=100.0, backward_us=200.0)
    problem = Problem.of(GraphArrays.from_graph(graph), replace(machine(), hosts=hosts))
    devices = np.array([CPU if op.endswith("x") else GPU for op in graph], np.int32)
    priority = np.array([float(op == "y") for op in graph])
    evaluator = Evaluator(problem)
    # y first: its backward op is launched when the CPU is done with that of x, from 322 to 522.
    assert evaluator.costs(devices[None], priority[None]).tolist() == [732_000]
    assert evaluator.candidate(Kind.HEFT, devices, priority).step_ns == 522_000
