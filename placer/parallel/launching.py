"""The command that starts the replicas of a plan."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from envs.host_names import hosts_of
from placer.parallel.planned_method import method_of
from placer.parallel.registry import method_named

if TYPE_CHECKING:
    from envs.replica_set import Replicas

STEPS: Final = 100


def launch_command(
    plan: Replicas, target: str, placement: str | Path = "placement.json", *options: str
) -> str:
    """Return the torchrun command that starts one rank per replica, on each host its replicas.

    It trains for 100 steps after the warm-up steps of the planned method.

    >>> from envs.replica_set import Replicas
    >>> launch_command(Replicas(groups=(("cuda:0",), ("cuda:1",))), "model.py:build", "p.json")
    'torchrun --nproc-per-node=2 -m placer.run model.py:build --placement p.json --steps 100'
    """
    ranks = Counter(hosts_of(group)[0] for group in plan.groups)
    launcher = ["torchrun"]
    if len(ranks) > 1:
        launcher += [f"--nnodes={len(ranks)}", "--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29500"]
    launcher += [f"--nproc-per-node={max(ranks.values())}"]
    steps = STEPS + method_named(method_of(plan)[0]).warmup_steps
    run = ["-m", "placer.run", target, "--placement", str(placement), "--steps", str(steps)]
    return shlex.join([*launcher, *run, *options])


def why_not_run(plan: Replicas) -> str:
    """Return why ``placer.run`` cannot start a plan, or "" if it can."""
    hosts = [hosts_of(group) for group in plan.groups]
    if max(map(len, hosts)) > 1:
        return (
            "A replica lies across hosts: this plan is simulated only; placer.run starts none, "
            "placer.parallel.PipelinedReplica runs a chain of stages from Python."
        )
    ranks = Counter(names[0] for names in hosts)
    if len(set(ranks.values())) > 1:
        told = ", ".join(f"{host}: {count}" for host, count in ranks.items())
        return f"Hosts have different numbers of replicas ({told}): give each torchrun its own."
    return ""
