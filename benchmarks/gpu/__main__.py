"""All measurements of torch devices, in one file.

    python -m benchmarks.gpu --out gpu.json

First the calibration. Then the first model: its profile, with the graph, costs and placements that
simulate all rows again (``python -m benchmarks hosts``); without a limit of memory predicted and
measured steps of everything on one device, of random placements and of search results; the placed
module on one device against the model itself; benchmarks/gpu/offload.py, limit by limit; copies
that overlap with compute against copies in line, one thread against a process for each device, the
same step in three processes, and ``torch.compile``. Of the other models what benchmarks/gpu/plan.py
says. What the time limit does not leave room for is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.gpu import offload, plan
from benchmarks.gpu.comparisons import compiled, overhead, overlapping, process_each
from benchmarks.gpu.models import models, two_devices
from benchmarks.gpu.plan import PROFILE, SHARES
from benchmarks.gpu.process import in_processes
from benchmarks.gpu.single_ops import single_ops
from benchmarks.gpu.table import offload_table
from benchmarks.gpu.workbench import Workbench, arguments, at_random, everything_on
from benchmarks.record import Record
from envs.hardware.cluster import Cluster
from envs.hardware.torch_devices import cuda_devices
from envs.runtime import calibrated
from graphs.graph_file import graph_to_dict
from placer.search.compilation import load_compiled_code

RANDOM_SHARES = (0.5, 0.9, 0.97)
"""Shares of the co-location groups that random placements put on the accelerator."""


def calibration(cluster: Cluster, results: dict[str, Any]) -> None:
    measured = calibrated(cluster, again=True)
    results["devices"] = {
        device.name: {
            "kind": device.kind,
            "memory_bytes": device.memory_bytes,
            "launch_s": device.launch_s,
            "flop_per_s": device.peak_flop_per_s,
            "memory_bytes_per_s": device.bandwidth_bytes_per_s,
        }
        for device in measured.devices
    }
    results["links"] = {
        " -> ".join(link.between): {
            "latency_s": link.latency_s,
            "bytes_per_s": link.bandwidth_bytes_per_s,
            "pinned_bytes_per_s": link.pinned_bandwidth_bytes_per_s,
        }
        for link in measured.links
    }


def profiled(bench: Workbench, results: dict[str, Any]) -> None:
    """Record the graph, which simulates rows again, and the memory that the whole step takes."""
    results.update(bench.seconds, graph=graph_to_dict(bench.runtime.graph))
    problem = bench.problem()
    [alone] = bench.measured(problem, [everything_on(problem, 0)], rounds=1)
    if alone["failure"]:
        raise RuntimeError(alone["failure"])
    peak_bytes = alone["measured_peak_bytes"].get(problem.cluster.names[0])
    results["peak_was_measured"] = bool(peak_bytes)
    results["peak_bytes"] = peak_bytes or alone["predicted_peak_bytes"][0]


def no_limit(record: Record, bench: Workbench, results: dict[str, Any]) -> None:
    """Measure placements of the whole step."""
    problem = bench.problem()
    state = bench.extraction.step.named_state().values()
    results.update(
        ops=problem.op_count,
        graph=problem.graph.hash,
        joint_ops=bench.extraction.program.op_count,
        state_bytes=sum(t.nbytes for t in {id(t): t for t in state}.values()),
        costs_ns=bench.costs_ns(),
    )
    plans = [everything_on(problem, d) for d in range(problem.device_count)]
    plans += at_random(problem, RANDOM_SHARES)
    plans += offload.found_by_search(problem, 2)
    results["rows"] = bench.measured(problem, plans)
    offload.print_rows(record, results["rows"])


class Parts:
    """The parts of all models, whose models are extracted and profiled on the way."""

    def __init__(self, record: Record, cluster: Cluster, *, small: bool, is_real: bool) -> None:
        self._record = record
        self._cluster = cluster
        self._small = small
        self._is_real = is_real
        self._benches: dict[str, Workbench] = {}

    def run(self, model: str, kind: str) -> None:
        """Measure one part, if its model could be profiled."""
        if kind == PROFILE or model in self._benches:
            work = partial(self._work, model, kind)
            expected_s = 0.0 if self._small else plan.expected_s(model, kind)
            self._record.part(f"{model}: {kind}", work, expected_s=expected_s)

    def _work(self, model: str, kind: str, results: dict[str, Any]) -> None:
        if kind == PROFILE:
            bench = Workbench(models(small=self._small)[model](), self._cluster)
            profiled(bench, results)
            self._benches[model] = bench  # the other parts need its peak of memory
            return
        record, cluster, bench = self._record, self._cluster, self._benches[model]
        if kind in SHARES:
            peak_bytes = record.data["parts"][f"{model}: {PROFILE}"]["peak_bytes"]
            offload.capped(record, bench, peak_bytes, SHARES[kind], results)
        backend = "inductor" if self._is_real else "eager"
        works: dict[str, Callable[[dict[str, Any]], None]] = {
            plan.NO_LIMIT: partial(no_limit, record, bench),
            plan.OVERHEAD: partial(overhead, bench, cluster),
            plan.SINGLE_OPS: partial(single_ops, bench, cluster),
            plan.INFERENCE: partial(offload.inference, record, cluster, bench.extraction.step),
            plan.OVERLAP: partial(overlapping, bench, cluster),
            plan.PROCESS_EACH: partial(process_each, bench, cluster),
            plan.IN_PROCESSES: partial(in_processes, model, small=self._small),
            plan.COMPILED: partial(compiled, bench, cluster, backend=backend),
        }
        if kind in works:
            works[kind](results)


def main() -> None:
    options = arguments("Everything of torch devices that can be measured.", plan.LIMIT_S)
    if options.table:
        print(offload_table(options.table).markdown(), end="")
        return
    chosen = options.models or plan.MODELS
    always = {"compiled code", PROFILE} if options.parts else set()
    record = Record(options.out, options.limit, kinds=always | set(options.parts))
    is_real = bool(cuda_devices())
    with two_devices() as cluster:
        record.part("calibration", partial(calibration, cluster))
        record.part("compiled code", lambda _: load_compiled_code())
        parts = Parts(record, cluster, small=options.small or not is_real, is_real=is_real)
        for model, kind in plan.parts(chosen):
            parts.run(model, kind)
    record.save()
    measured = {name.rpartition(": ")[2] for name in record.data["parts"]}
    if unknown := set(options.parts) - measured:
        raise SystemExit(f"nothing was measured for --parts {', '.join(sorted(unknown))}")
    record.say("done" if options.out is None else f"done: {options.out}")


if __name__ == "__main__":
    main()
