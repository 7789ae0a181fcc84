"""Data parallelism: replicas of a placed model that are kept in sync.

Public names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from placer.parallel.data import Blocks
    from placer.parallel.grad_sync import GradSync
    from placer.parallel.methods.block_averager import BlockAverager, BlockUpdate
    from placer.parallel.methods.reductions import HookReduction
    from placer.parallel.methods.registry import SyncConfig
    from placer.parallel.methods.sync import Sync, make_sync
    from placer.parallel.pipelined import PipelinedReplica

__all__ = [
    "BlockAverager",
    "BlockUpdate",
    "Blocks",
    "GradSync",
    "HookReduction",
    "PipelinedReplica",
    "Sync",
    "SyncConfig",
    "make_sync",
]

_HOMES = {
    "BlockAverager": "methods.block_averager",
    "BlockUpdate": "methods.block_averager",
    "Blocks": "data",
    "GradSync": "grad_sync",
    "HookReduction": "methods.reductions",
    "PipelinedReplica": "pipelined",
    "Sync": "methods.sync",
    "SyncConfig": "methods.registry",
    "make_sync": "methods.sync",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'placer.parallel' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"placer.parallel.{_HOMES[name]}"), name)
