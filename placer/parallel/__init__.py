"""Data parallelism: replicas of a placed model that are kept in sync.

Public names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from placer.parallel.block_averager import BlockAverager, BlockUpdate
    from placer.parallel.blocks import Blocks
    from placer.parallel.ddp import ddp_hook
    from placer.parallel.grad_sync import GradSync
    from placer.parallel.options import SyncOptions
    from placer.parallel.pipelined import PipelinedReplica
    from placer.parallel.reductions import HookReduction
    from placer.parallel.registry import sync_named
    from placer.parallel.sync import Setup, Sync

__all__ = [
    "BlockAverager",
    "BlockUpdate",
    "Blocks",
    "GradSync",
    "HookReduction",
    "PipelinedReplica",
    "Setup",
    "Sync",
    "SyncOptions",
    "ddp_hook",
    "sync_named",
]

_HOMES = {
    "BlockAverager": "block_averager",
    "BlockUpdate": "block_averager",
    "Blocks": "blocks",
    "GradSync": "grad_sync",
    "HookReduction": "reductions",
    "PipelinedReplica": "pipelined",
    "Setup": "sync",
    "Sync": "sync",
    "SyncOptions": "options",
    "ddp_hook": "ddp",
    "sync_named": "registry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'placer.parallel' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"placer.parallel.{_HOMES[name]}"), name)
