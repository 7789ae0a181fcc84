"""Pinned cores: the runtime, and the executor that measures placements on them."""

from envs.core_runtime.executor import CoreExecutor
from envs.core_runtime.runtime import CoreRuntime

__all__ = ["CoreExecutor", "CoreRuntime"]
