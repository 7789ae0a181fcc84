"""One rank of a run: a replica of a placed model, trained in sync with those of all other ranks."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from envs.core_runtime.executor import runs_unplaced
from envs.executors.cores.pool import spread_seed
from envs.hardware.discover import cores_of, is_core
from envs.hardware.torch_devices import failures_named, uuid_of
from envs.placement import Placement
from envs.runtime import extraction_for, tensor_device
from graphs.extract import Workload
from placer.applying import apply_extracted, check_can_run
from placer.parallel.data import Batches, FromFunction, MadeUp, Shards
from placer.parallel.liveness import Liveness, RunStore, shared_secret
from placer.parallel.methods.registry import SyncConfig
from placer.parallel.methods.sync import MakeOptimizer, Sync, make_sync
from placer.parallel.plan import RunPlan, RunRequest, run_plan
from placer.parallel.processes import (
    StoppedError,
    check_same,
    groups_of_slots,
    joined,
    rank_count,
    rank_list,
    stop_on_sigterm,
)
from placer.parallel.rank_devices import on_own_devices
from placer.parallel.training import Checkpoint, Replica, Trained, train
from placer.sources.batches import batch_size, with_part_of_inputs
from placer.sources.target import load_function, load_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One rank's part in a run: its work, model and data."""

    request: RunRequest
    plan: RunPlan
    placement: Placement  # as in the file
    local: Placement  # on the devices of this rank
    is_shared: bool  # whether other ranks of this host use devices of the same names
    step: Workload
    batches: Batches

    @property
    def placement_json(self) -> str:
        """JSON of the parts of the placement that determine the run, without provenance."""
        content = self.placement.to_dict()
        keys = ("graph", "devices", "priority", "replicas")
        return json.dumps({key: content.get(key) for key in keys})

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that determine the losses."""
        names = ("target", "data", "optimizer", "lr", "seed", "dtype", "extractor")
        sync = self.plan.sync
        return {
            **{name: getattr(self.request, name) for name in names},
            "sync": sync.method,
            "accumulate": sync.accumulate,
            "bucket_bytes": sync.bucket_bytes,
            **sync.options,
            "placement": hashlib.sha256(self.placement_json.encode()).hexdigest()[:12],
        }


def prepare_run(request: RunRequest) -> Run:
    """Load the placement, model and data of this rank; nothing is sent yet."""
    placement = Placement.load(request.placement)
    plan = run_plan(
        placement, ranks=rank_count(), overrides=request.overrides, target=request.target
    )
    local, is_shared = on_own_devices(placement)
    check_can_run(local)
    torch.manual_seed(request.seed)  # the same model on all ranks
    step = replace(load_step(request.target, training=True), dtype=request.dtype)
    batches: Batches = MadeUp(step, request.seed)
    if request.data is not None:
        batches = FromFunction(load_function(request.data), step)
    if plan.parts > 1:
        batches = Shards(batches, plan.parts)
        part = with_part_of_inputs(step, plan.parts)
        if part is None:
            raise ValueError(
                f"the plan cuts a batch into {plan.parts} equal parts, but that of the target has "
                f"{batch_size(step)} samples: plan with the batch of this target"
            )
        step = part
    return Run(
        request=request,
        plan=plan,
        placement=placement,
        local=local,
        is_shared=is_shared,
        step=step,
        batches=batches,
    )


def train_rank(
    run: Run,
    started: Callable[[int, bool], None] = lambda ranks, is_shared: None,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> Trained:
    """Join the other ranks and train; returns when all ranks are done.

    On rank 0 ``started`` is called with the number of ranks and whether ranks share devices, when
    all have joined and agree, and ``progress`` with each step and its loss.
    """
    gpus = [torch.device(name) for name in run.local.device_names if name.startswith("cuda")]
    with failures_named(*gpus):
        use_first_gpu(run.local)
        uuids = [*map(uuid_of, gpus)]
    with joined(run.request.timeout_s, gpus=uuids) as (store, sharing), ExitStack() as opened:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        nccl = bool(gpus) and not sharing
        # shorter than the timeout of NCCL's watchdog, which would end the process first
        silence_s = 0.8 * run.request.timeout_s if nccl else None
        liveness = Liveness(RunStore(store, shared_secret()), rank, ranks, silence_s=silence_s)
        liveness.start()
        opened.callback(liveness.close)
        opened.enter_context(_cores_given_back())
        try:
            stop_on_sigterm()
            with failures_named(*gpus):
                check_agreement(run)
                check_sharing(run, sharing)
                if rank == 0:
                    started(ranks, bool(sharing) if gpus else run.is_shared)
                shown = progress if rank == 0 else lambda step, loss: None
                return _trained(run, opened, liveness.at, shown)
        except (RuntimeError, StoppedError) as error:
            raise liveness.error(error) from error


def check_agreement(run: Run) -> None:
    """Refuse ranks with other placements or options than those of this one."""
    request = run.request
    # the last may differ when a run is resumed, though not between ranks
    options = [run.settings, request.steps, request.checkpoint_every, request.resume]
    check_same("placements", run.placement_json)
    check_same("the options of the run", json.dumps(options))


def _trained(
    run: Run,
    opened: ExitStack,
    reached: Callable[[int], None],
    progress: Callable[[int, float], None],
) -> Trained:
    """Train the replica of this rank, which is closed with ``opened``."""
    request, config = run.request, run.plan.sync
    torch.manual_seed(spread_seed(request.seed, dist.get_rank()))  # dropout differs between them
    occupy(run.local)
    extraction = extraction_for(run.step, run.local.device_names, request.extractor)
    replica = opened.enter_context(closing(Replica(apply_extracted(extraction, run.local))))
    sync = synced(
        replica,
        run.local,
        lambda parameters: optimizer_of(request.optimizer, parameters, request.lr),
        config,
    )
    checkpoint = None
    if request.checkpoint is not None:
        settings = {name: str(v) for name, v in run.settings.items() if v is not None}
        checkpoint = Checkpoint(request.checkpoint, settings)
    return train(
        replica,
        sync,
        run.batches,
        steps=request.steps,
        accumulate=config.accumulate,
        checkpoint=checkpoint,
        checkpoint_every=request.checkpoint_every,
        resume=request.resume,
        save=request.save,
        reached=reached,
        progress=progress,
    )


def check_sharing(run: Run, sharing: Sequence[int]) -> None:
    """Refuse replicas that were planned on GPUs of their own if ranks share any."""
    if sharing and run.placement.replicas is not None:
        raise ValueError(
            f"{rank_list(sharing)} of this run share GPUs, but each replica of the plan has its "
            "own: let every rank see all GPUs of its host, or only those of its replica "
            "(CUDA_VISIBLE_DEVICES)"
        )


def synced(
    replica: Replica, local: Placement, make_optimizer: MakeOptimizer, config: SyncConfig
) -> Sync:
    """Create what keeps the replica of this rank in sync with those of all other ranks."""
    slots = dict.fromkeys(map(tensor_device, local.device_names))
    return make_sync(replica.module, make_optimizer, config, group_of=groups_of_slots(list(slots)))


def use_first_gpu(local: Placement) -> None:
    """Make the first GPU of a replica the current one, for tensors that NCCL makes itself."""
    if gpus := [name for name in local.device_names if name.startswith("cuda")]:
        torch.cuda.set_device(gpus[0])


def occupy(local: Placement) -> None:
    """Keep this process to the cores of its replica, with a thread on each if it is unplaced."""
    if not all(map(is_core, local.device_names)):
        return
    unplaced = runs_unplaced(local)
    names = local.used_devices if unplaced else local.device_names
    cores = {core for name in names for core in cores_of(name)}
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores) if unplaced else 1)


@contextmanager
def _cores_given_back() -> Iterator[None]:
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


def optimizer_of(kind: str, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Return torch's optimizer of a kind, one of :data:`placer.parallel.plan.OPTIMIZERS`."""
    match kind:
        case "sgd":
            return torch.optim.SGD(parameters, lr=lr)
        case "momentum":
            return torch.optim.SGD(parameters, lr=lr, momentum=0.9)
        case "adam":
            return torch.optim.Adam(parameters, lr=lr)
    return torch.optim.AdamW(parameters, lr=lr)
