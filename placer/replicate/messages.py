"""The sentences that users read about a plan of replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import isfinite
from typing import Final

from envs.hardware.discover import hosts_of, is_core
from envs.hardware.units import human_bytes, milliseconds
from envs.replication import Replication
from envs.runtime import reduces_in_backward
from graphs.graph import PHASES
from placer.messages.remarks import NO_OPTIMIZER, extraction_remarks
from placer.replicate.result import ReplicaPlan, Split

LARGEST_ERROR: Final = 0.1
"""Relative error of a prediction above which it is mentioned."""


def verdict_of(plan: ReplicaPlan) -> str:
    """Return the best split and how it compares to pure data parallelism and pure placement."""
    best, step = plan.best, plan.best.step
    assert step is not None
    if best.was_run:
        return _measured_verdict(plan)
    devices = "1 device" if best.devices_each == 1 else f"{best.devices_each} devices"
    replicas = "One replica on" if best.replicas == 1 else f"{best.replicas} replicas of"
    each = " each" if best.replicas > 1 else ""
    text = f"{replicas} {devices}{each}: {best.samples_per_s:.4g} samples/s{_gain(plan, best)}, "
    text += f"a step of {milliseconds(best.step_s)} ms"
    if plan.requested.accumulate > 1:
        text += f" in {plan.requested.accumulate} passes"
    if best.replicas > 1:
        text += (
            f", with {milliseconds(best.exposed_s)} ms of exposed and "
            f"{milliseconds(step.hidden_s)} ms of hidden communication"
        )
    others = (
        ("pure data parallelism", plan.pure(replicas=True)),
        ("pure placement", plan.pure(replicas=False)),
    )
    compared = [
        f"It is {name}." if other is best else _against(plan, name, other)
        for name, other in others
        if other is not None and best.devices > 1
    ]
    return " ".join([f"{text}.", *compared])


def _measured_verdict(plan: ReplicaPlan) -> str:
    """Return the best split of those that were run, and what it gains over each of the others."""
    best = plan.best
    cores = "1 device" if best.devices_each == 1 else f"{best.devices_each} devices"
    if best.joined and best.replicas == 1:
        where = f"all cores of {cores}" if is_core(best.groups[0][0]) else best.groups[0][0]
        start = f"Nothing to gain: leave the model unplaced, on {where}"
    elif best.joined:
        start = f"Leave the model unplaced: {best.replicas} replicas on {cores} each"
    else:
        replicas = "One replica on" if best.replicas == 1 else f"{best.replicas} replicas of"
        start = f"{replicas} {cores}{' each' if best.replicas > 1 else ''}"
    assert best.measured_s is not None, "the best split was run"
    text = f"{start}: {best.measured_samples_per_s:.4g} samples/s, measured, in steps of "
    text += f"{milliseconds(best.measured_s)} ms"
    others = [
        f"{best.measured_samples_per_s / other.measured_samples_per_s:.2f}x {other.name}"
        for other in sorted(plan.splits, key=lambda s: -(s.measured_samples_per_s or 0.0))
        if best.measured_samples_per_s and other.measured_samples_per_s and other is not best
    ]
    return f"{text}. That is {', '.join(others)}." if others else f"{text}."


def remarks_of(plan: ReplicaPlan) -> list[str]:
    """Return remarks that qualify the numbers of a plan, one sentence each."""
    remarks = [*_runs(plan), *_assumptions(plan), *_limits(plan)]
    if plan.extraction is not None:
        remarks += extraction_remarks(plan.extraction)
    return remarks


def _runs(plan: ReplicaPlan) -> Iterator[str]:
    """Yield what was run, and what that says about the predictions."""
    if not plan.was_run:
        why = f", as {plan.untried}" if plan.untried else ""
        yield f"Nothing was run{why}: all times are simulated, {_constants(plan)}."
        if plan.requested.average_every > 1:
            yield "Plans that average parameters are not run, as their steps are not alike."
    else:
        yield (
            f"Measured steps reduce the gradients and include the update, by {plan.optimizer}; the "
            "unplaced model is under DistributedDataParallel."
        )
    fastest = max(split.measured_samples_per_s or 0.0 for split in plan.candidates)
    if plan.best.measured_samples_per_s and plan.best.measured_samples_per_s < fastest:
        yield "The fastest are within noise, so the simplest of them was chosen."
    for split in plan.splits:
        if split.measurement is not None and not split.measurement.ok:
            yield f"{split.name} could not be run: {split.measurement.failure.rstrip('.')}."
    if plan.is_busy:
        yield (
            "Other processes used the cores when plans were run: times are not those of a quiet "
            "machine, and later predictions are not corrected by them; plan again when `placer "
            "machine` says good."
        )
    elif plan.best.measured_s is not None:
        error = plan.best.measured_s / plan.best.step_s - 1
        if abs(error) > LARGEST_ERROR:
            yield f"The prediction of the best was off by {error:+.0%}; later ones are corrected."


def _constants(plan: ReplicaPlan) -> str:
    """Return what the times of reductions follow from, with the numbers that are assumed."""
    if plan.reduces_as_measured and plan.collectives is not None:
        return f"reductions by times of {plan.collectives.backend} between these devices"
    levels = [level for network in plan.networks[:1] for level in network.levels]
    rates = "; ".join(
        f"{level.ranks} ranks, {1e6 * level.latency_s:.3g} us"
        + f", {human_bytes(level.bandwidth_bytes_per_s)}/s" * isfinite(level.bandwidth_bytes_per_s)
        for level in levels
        if level.ranks > 1
    )
    text = "reductions from the latency and bandwidth of links" + f" ({rates})" * bool(rates)
    return f"{text}, as {plan.uncalibrated.rstrip('.')}" if plan.uncalibrated else text


def run_obstacle(replicas: Replication) -> str:
    """Return why ``placer.run`` cannot start these replicas, or "" if it can."""
    hosts = [hosts_of(group) for group in replicas.groups]
    if max(map(len, hosts)) > 1:
        return (
            "A replica spans hosts, so this plan is simulated only; "
            "placer.parallel.PipelinedReplica runs a chain of stages from Python."
        )
    ranks = Counter(names[0] for names in hosts)
    if len(set(ranks.values())) > 1:
        counts = ", ".join(f"{host}: {count}" for host, count in ranks.items())
        return f"Hosts have different numbers of replicas ({counts}): start a torchrun on each."
    return ""


def _assumptions(plan: ReplicaPlan) -> Iterator[str]:
    best, requested, extraction = plan.best, plan.requested, plan.extraction
    trains = extraction is None or extraction.step.training
    phases = {PHASES[i] for i in set(plan.problem.graph.phase.tolist())}
    parts = [requested.parts(split.replicas) for split in plan.splits]
    if extraction is None and any(n > 1 and not requested.uneven_parts(n) for n in parts):
        yield (
            "Costs and activations of a smaller batch are those of the whole batch, divided: ops "
            "that need a large batch to use their device take longer."
        )
    if not trains:
        yield "Inference has no gradients: replicas do not wait for each other."
    elif "backward" not in phases:
        yield "The graph has no backward pass: gradients are ready at the end of each op."
    if requested.batch == "global" and requested.samples is None:
        yield "The batch size is not known, so the batch is divided into any number of parts."
    if trains and "optimizer" not in phases and not plan.was_run:
        yield NO_OPTIMIZER
    if best.replicas > 1 and best.devices_each > 1:
        yield "Contention between reductions and transfers within a replica is not simulated."
    if best.replicas > 1 and requested.payload != "fp32" and requested.coding_bytes_per_s is None:
        yield f"Encoding and decoding {requested.payload} gradients is assumed to take no time."
    if best.replicas > 1 and not (best.joined or reduces_in_backward(plan.problem.cluster)):
        how = "at the speed of their links; gloo is slower"
        if plan.collectives is not None and plan.reduces_as_measured:
            how = f"with all-reduces of {plan.collectives.backend} as measured between these cores"
        yield (
            "Pinned cores deliver all gradients at the end, so no communication is hidden. It is "
            f"simulated {how}."
        )
    if idle := plan.problem.device_count - best.devices:
        yield f"{idle} of {plan.problem.device_count} devices are left idle."


def _limits(plan: ReplicaPlan) -> Iterator[str]:
    if any(point.beyond_cluster for point in plan.curve):
        yield (
            f"Beyond {plan.problem.device_count} devices the outermost level of the network is "
            "assumed to have more ranks."
        )
    if large := [point.replicas for point in plan.curve if not point.fits]:
        yield (
            f"The batch does not fit on {max(large)} replicas or fewer: their steps are those "
            "of devices with more memory."
        )
    if obstacle := run_obstacle(plan.replicas):
        yield obstacle
    if plan.left_out:
        yield f"Stopped early: {plan.left_out} searches were not made."


def _gain(plan: ReplicaPlan, split: Split) -> str:
    single, is_shared = plan.pure(replicas=True), plan.requested.batch == "global"
    if single is None or single.step is None or split.devices == 1 or is_shared:
        return ""
    return f", {split.samples_per_s / single.one_samples_per_s:.3g}x one device"


def _against(plan: ReplicaPlan, name: str, other: Split) -> str:
    if other.step is None:
        return f"{name.capitalize()} ({other.name}) is not possible: {other.why.rstrip('.')}."
    ratio = plan.best.samples_per_s / other.samples_per_s
    details = f"steps of {milliseconds(other.step_s)} ms for {other.samples} samples"
    details += _gain(plan, other)
    if other.replicas > 1:
        details += f", {milliseconds(other.exposed_s)} ms of exposed communication"
    return f"That is {ratio:.2f}x {name} ({other.name}: {details})."
