"""Asynchronous SGD: a parameter server applies every gradient when it arrives.

Dean et al., "Large scale distributed deep networks", NIPS 2012 (Downpour SGD).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from placer.parallel.grad_sync import broadcast_state
from placer.parallel.methods.block_averager import flat_of, write
from placer.parallel.methods.sync import GroupOf, MakeOptimizer
from placer.parallel.processes import new_group

PUSH: Final = 0
DONE: Final = 1


class AsyncSgd:
    """Pushes the gradients of a replica to the server on rank 0 and pulls its parameters.

    A gradient computed with parameters of version u and applied to version t has staleness t - u.
    The order in which gradients arrive depends on timing, and so do the results. Each replica keeps
    its own buffers until :meth:`finish`, which broadcasts those of rank 0.
    """

    def __init__(self, module: nn.Module, make_optimizer: MakeOptimizer, group_of: GroupOf) -> None:
        """Start the server on rank 0."""
        ranks = dist.get_world_size()
        for device in {parameter.device for parameter in module.parameters()}:
            if (size := dist.get_world_size(group_of(device))) < ranks:
                raise ValueError(  # one server would mix the parameters of several groups
                    f"asgd has one server for all {ranks} ranks, and this group has {size} of "
                    "them: stages of a pipeline need a sync that takes groups, such as allreduce"
                )
        broadcast_state(module, group_of)
        self._module = module
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        if not self._parameters:
            raise ValueError("no parameter needs a gradient: there is nothing for a server to do")
        if len(dtypes := {parameter.dtype for parameter in self._parameters}) > 1:
            raise ValueError(f"asgd needs parameters of one dtype, not of {len(dtypes)}")
        self._group = new_group(backend="gloo")
        self._version = 0
        self._server: Server | None = None
        if dist.get_rank() == 0:
            self._server = Server(self._parameters, make_optimizer, self._group)

    def zero_grad(self) -> None:
        """Begin a step."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Push the gradients, pull the parameters."""
        gradient = flat_of(
            (torch.zeros_like(p) if p.grad is None else p.grad).cpu() for p in self._parameters
        )
        if self._server is not None:
            self._version, flat = self._server.push(gradient, self._version)
        else:
            dist.send(torch.tensor([PUSH, self._version]), 0, group=self._group)
            dist.send(gradient, 0, group=self._group)
            version, flat = torch.zeros(1, dtype=torch.int64), gradient
            dist.recv(version, 0, group=self._group)
            dist.recv(flat, 0, group=self._group)
            self._version = int(version)
        write(self._parameters, flat)

    def finish(self) -> None:
        """Wait until the gradients of all ranks are applied, and take the final parameters."""
        if self._server is not None:
            write(self._parameters, self._server.finish())
        else:
            dist.send(torch.tensor([DONE, 0]), 0, group=self._group)
        broadcast_state(self._module)

    def state_dict(self) -> dict[str, Any]:
        """Raise a ValueError: asynchronous SGD cannot resume."""
        raise ValueError(
            "asynchronous SGD cannot resume from a checkpoint: gradients are always in transit"
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise the same error as :meth:`state_dict`."""
        self.state_dict()

    def report(self) -> dict[str, Any]:
        """Return the number of updates and their staleness, on rank 0; {} elsewhere."""
        return {} if self._server is None else self._server.report()


class Server:
    """Holds the parameters on the CPU and applies gradients one by one, in order of arrival."""

    def __init__(
        self, parameters: list[nn.Parameter], make_optimizer: MakeOptimizer, group: Any
    ) -> None:
        self._parameters = [nn.Parameter(p.detach().cpu().clone()) for p in parameters]
        self._optimizer = make_optimizer(self._parameters)
        given = {*map(id, self._parameters)}
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        if not given.issuperset(map(id, held)):
            raise ValueError(
                "the server of asgd has parameters of its own: make the optimizer of those that it "
                "is given, not of the module's"
            )
        self._group = group
        self._version = 0
        self._staleness: Counter[int] = Counter()
        self._failure: RuntimeError | None = None
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), daemon=True)
            for rank in range(1, dist.get_world_size(group))
        ]
        for thread in self._threads:
            thread.start()

    def push(self, gradient: torch.Tensor, version: int) -> tuple[int, torch.Tensor]:
        """Apply a gradient (P,) made at a version; return the new version and parameters (P,)."""
        self._check_complete()
        with self._lock:
            self._staleness[self._version - version] += 1
            gradients = [torch.empty_like(parameter) for parameter in self._parameters]
            write(gradients, gradient)
            for parameter, part in zip(self._parameters, gradients, strict=True):
                parameter.grad = part
            self._optimizer.step()
            self._version += 1
            return self._version, flat_of(self._parameters)

    def finish(self) -> torch.Tensor:
        """Wait for all workers and return the final parameters (P,); raise as :meth:`push` does."""
        for thread in self._threads:
            thread.join()
        self._check_complete()
        return flat_of(self._parameters)

    def report(self) -> dict[str, Any]:
        """Return the number of updates so far, and the mean and maximum staleness of gradients."""
        updates = sum(self._staleness.values())
        late = sum(staleness * count for staleness, count in self._staleness.items())
        return {
            "updates": updates,
            "staleness_mean": late / updates if updates else 0.0,
            "staleness_max": max(self._staleness, default=0),
        }

    def _check_complete(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the parameter server stopped: {self._failure}")

    def _serve(self, rank: int) -> None:
        header, gradient = torch.zeros(2, dtype=torch.int64), flat_of(self._parameters)
        try:
            while True:
                dist.recv(header, rank, group=self._group)
                kind, version = header.tolist()
                if kind == DONE:
                    return
                dist.recv(gradient, rank, group=self._group)
                now, flat = self.push(gradient, version)
                dist.send(torch.tensor([now]), rank, group=self._group)
                dist.send(flat, rank, group=self._group)
        except RuntimeError as error:  # raised by push and finish on the main thread
            self._failure = self._failure or RuntimeError(f"rank {rank} is gone: {error}")
