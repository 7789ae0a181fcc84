"""Plan of a run of replicas: that of its placement file, unless the user overrides it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from envs.collectives import HIERARCHICAL
from envs.hardware.discover import hosts_of
from envs.replication import AUTO, Replication
from graphs.precision import FULL
from placer.parallel.methods.registry import DEFAULT, SyncConfig, method_named

if TYPE_CHECKING:
    from envs.placement import Placement

OPTIMIZERS: Final = ("sgd", "momentum", "adam", "adamw")
STEPS: Final = 100
_OF_PAYLOAD: Final = {"fp32": DEFAULT, "fp16": "fp16", "bf16": "bf16", "1-bit": "onebit"}
_BACKEND_CHOICES: Final = ((AUTO,), ("ring",))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Options of a run, as a user gives them; ``overrides`` are fields of :class:`SyncConfig`."""

    target: str
    placement: Path
    steps: int
    data: str | None = None
    optimizer: str = OPTIMIZERS[0]
    lr: float = 0.01
    seed: int = 0
    dtype: str = FULL
    extractor: str = "auto"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: Path | None = None
    checkpoint_every: int | None = None
    resume: bool = False
    save: Path | None = None
    timeout_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Settings of a run: how its ranks are kept in sync, and which batches they take.

    ``parts`` is the number of parts that a batch of the target is cut into, one per pass of each
    rank; 1 if every pass has its own batch. ``remarks`` say where the run differs from the plan.
    """

    sync: SyncConfig
    parts: int = 1
    remarks: tuple[str, ...] = ()


def run_plan(
    placement: Placement,
    *,
    ranks: int,
    overrides: Mapping[str, Any] | None = None,
    target: str = "TARGET",
) -> RunPlan:
    """Return how to run a placement on ``ranks`` ranks.

    ``overrides`` are fields of :class:`SyncConfig` that the user sets.
    """
    overrides, plan = dict(overrides or {}), placement.replicas
    if plan is None:
        return RunPlan(sync=SyncConfig(**overrides))
    count, width = len(plan.groups), len(plan.groups[0])
    if ranks != count:
        raise ValueError(
            f"the placement is planned for {count} replicas x {width} devices, but this run has "
            f"{ranks} rank{'s'[: ranks > 1]}: start {launch_command(plan, target)}"
        )
    passes = overrides.get("accumulate", plan.accumulate)
    if plan.batch == "global" and passes != plan.accumulate:
        raise ValueError(
            f"the plan cuts a batch for {count} replicas x {plan.accumulate} passes, not for "
            f"{passes}: leave accumulate out, or plan with it"
        )
    method, remarks = (overrides["method"], ()) if "method" in overrides else planned_method(plan)
    planned: dict[str, Any] = {
        "period": plan.average_every if plan.average_every > 1 else None,
        "levels": plan.levels or None,
    }
    accepted = method_named(method).options
    sync: dict[str, Any] = {
        "method": method,
        "accumulate": plan.accumulate,
        "bucket_bytes": plan.bucket_bytes,
        **{name: value for name, value in planned.items() if name in accepted},
    }
    return RunPlan(sync=SyncConfig(**(sync | overrides)), parts=plan.parts(count), remarks=remarks)


def planned_method(plan: Replication) -> tuple[str, tuple[str, ...]]:
    """Return the name of the method for a plan, and remarks on where it differs from the plan."""
    algorithms = plan.algorithms or (plan.reduction,)
    first, *others = algorithms
    is_hierarchical = first == HIERARCHICAL
    if plan.average_every > 1:
        return "ma", ("models are averaged in one level, not level by level",) * is_hierarchical
    method = _OF_PAYLOAD[plan.payload]
    if is_hierarchical and method == DEFAULT:
        remark = f"the plan reduces small buckets by {' and '.join(others)}: all go level by level"
        return HIERARCHICAL, (remark,) if others else ()
    if is_hierarchical:
        return method, (f"{plan.payload} gradients are reduced in one level, not level by level",)
    if plan.reduction == AUTO and algorithms in _BACKEND_CHOICES:
        return method, ()
    remark = f"the plan assumes {' and '.join(algorithms)}: gloo and NCCL choose an algorithm"
    return method, (f"{remark} themselves",)


def launch_command(
    plan: Replication, target: str, placement: str | Path = "placement.json", *options: str
) -> str:
    """Return the torchrun command that starts one rank per replica, on each host its replicas.

    It trains for 100 steps after the warm-up steps of the planned method.

    >>> from envs.replication import Replication
    >>> launch_command(Replication(groups=(("cuda:0",), ("cuda:1",))), "model.py:build", "p.json")
    'torchrun --nproc-per-node=2 -m placer.run model.py:build --placement p.json --steps 100'
    """
    ranks = Counter(hosts_of(group)[0] for group in plan.groups)
    launcher = ["torchrun"]
    if len(ranks) > 1:
        launcher += [f"--nnodes={len(ranks)}", "--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29500"]
    launcher += [f"--nproc-per-node={max(ranks.values())}"]
    steps = STEPS + method_named(planned_method(plan)[0]).warmup_steps
    run = ["-m", "placer.run", target, "--placement", str(placement), "--steps", str(steps)]
    return shlex.join([*launcher, *run, *options])
