"""Replicas over several ranks: a placement that is a chain runs as the stages of a pipeline.

The ranks form a mesh of replicas by stages::

    mesh = init_device_mesh("cuda", (replicas, stages), mesh_dim_names=("dp", "place"))  # or "cpu"
    replica = PipelinedReplica(extraction, placement, mesh, micro_batches=4)
    sync = replica.make_sync(torch.optim.AdamW)
    for batch in shard:
        sync.zero_grad()
        loss = replica.backward(*batch)
        sync.step()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
from torch.utils._pytree import tree_map_only

from envs.hardware.torch_devices import cuda_devices
from envs.placement import Placement
from envs.runtime import tensor_device
from graphs.extract import Extraction
from placer.exports.pipelining import pipeline_stages
from placer.exports.placed_modules import PlacedModules
from placer.parallel.methods.registry import SyncConfig
from placer.parallel.methods.sync import MakeOptimizer, Sync, make_sync
from placer.parallel.rank_devices import place_on_host, stage_devices
from placer.sources.batches import part_of_batch

REPLICAS: Final = "dp"
STAGES: Final = "place"


class PipelinedReplica:
    """The stage of this rank, and the schedule of micro-batches through all stages.

    Gradients of a stage are ready in the backward pass of its last micro-batch, and are reduced
    with the same stage of the other replicas while earlier stages still compute.
    """

    def __init__(
        self,
        extraction: Extraction,
        placement: Placement,
        mesh: DeviceMesh,
        *,
        micro_batches: int,
        schedule: Callable[..., Any] = Schedule1F1B,
    ) -> None:
        """Split the model and keep this rank's stage, on its device, the current one if a GPU.

        Args:
            extraction: a training step with a loss function; its batch is that of one replica.
            placement: placement of its ops, a chain: no device is used again after it was left.
            mesh: device mesh with dimensions "dp" and "place".
            micro_batches: number of parts of a batch along the first dimension of its tensors.
            schedule: a schedule of ``torch.distributed.pipelining`` with one stage per rank.
        """
        step = extraction.step
        if step.loss is None:
            raise ValueError("a pipeline needs a loss function: its last stage calls it")
        stages, starts = pipeline_stages(PlacedModules.of(extraction, placement))
        self._stages = len(stages)
        if self._stages != mesh[STAGES].size():
            raise ValueError(
                f"the placement has {self._stages} stages, the mesh {mesh[STAGES].size()}"
            )
        device = self._own_device([stage.device for stage in stages], mesh)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # before NCCL, which uses the current one
        self._step, self._loss = step, step.loss
        self._mesh = mesh
        self.micro_batches = micro_batches
        self.index = mesh[STAGES].get_local_rank()
        pipe = pipeline(
            step.model,
            part_of_batch(step.model_inputs, micro_batches),
            part_of_batch(dict(step.keywords), micro_batches),
            split_spec=dict.fromkeys(starts, SplitPoint.BEGINNING),
        )
        # Shapes come from the traced graph: otherwise torch infers them with a backward pass,
        # whose gradients would be reduced.
        self.stage = pipe.build_stage(self.index, device, mesh[STAGES].get_group())
        # The loss is scaled, not the gradients: torch scales them after the last backward pass,
        # when they are being reduced.
        self.schedule = schedule(
            self.stage,
            n_microbatches=micro_batches,
            loss_fn=self._scaled_loss,
            scale_grads=False,
        )

    @staticmethod
    def _own_device(stages: Sequence[str], mesh: DeviceMesh) -> torch.device:
        """Return the device of this rank: that of its stage, for each replica its own GPU."""
        stage = mesh[STAGES].get_local_rank()
        if not any(name.startswith("cuda:") for name in stages):
            return tensor_device(stages[stage])
        local_rank, local_ranks = place_on_host()
        first = mesh.get_rank() - local_rank
        grid = mesh.mesh if mesh.mesh_dim_names == (REPLICAS, STAGES) else mesh.mesh.T
        place = {rank: (k, i) for k, row in enumerate(grid.tolist()) for i, rank in enumerate(row)}
        members = [place[first + number] for number in range(local_ranks)]
        devices = stage_devices(stages, members, len(cuda_devices()))
        return tensor_device(devices[local_rank])

    @property
    def module(self) -> nn.Module:
        """The stage's part of the model on its device; parameters keep their names."""
        return self.stage.submod

    def make_sync(self, make_optimizer: MakeOptimizer, config: SyncConfig | None = None) -> Sync:
        """Create what keeps this stage in sync with the same stage of the other replicas."""
        config = replace(config or SyncConfig(), accumulate=self.micro_batches)
        replicas = self._mesh[REPLICAS].get_group()
        return make_sync(self.module, make_optimizer, config, group_of=lambda device: replicas)

    def backward(self, *inputs: Any, **keywords: Any) -> float | None:
        """Add the gradients of a replica's batch, passed to all its ranks in any form of inputs.

        Returns:
            The loss on the last stage, None elsewhere.
        """
        (*model_inputs, target), named = self._step.unpacked(inputs, keywords)
        stage_inputs = model_inputs if self.index == 0 else ()
        options: Mapping[str, Any] = named if self.index == 0 else {}
        if self.index == self._stages - 1:
            losses: list[torch.Tensor] = []
            target = _moved(target, self.stage.device)
            self.schedule.step(*stage_inputs, target=target, losses=losses, **options)
            return float(torch.stack(losses).sum())
        self.schedule.step(*_moved(stage_inputs, self.stage.device), **options)
        return None

    def _scaled_loss(self, output: Any, target: Any) -> torch.Tensor:
        return self._loss(output, target) / self.micro_batches


def _moved(values: Any, device: torch.device) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), values)
