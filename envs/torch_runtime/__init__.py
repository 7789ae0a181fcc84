"""Torch devices: the runtime, and the executor that measures placements on them."""

from envs.torch_runtime.executor import TorchExecutor
from envs.torch_runtime.runtime import TorchRuntime

__all__ = ["TorchExecutor", "TorchRuntime"]
