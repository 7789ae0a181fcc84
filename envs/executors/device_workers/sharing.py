"""Memory that processes of GPUs share: the only part that depends on CUDA beyond its streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import reduce_tensor

Handle = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
"""A function and its arguments that give a tensor of another process; can be pickled."""
OUT_OF_MEMORY: Final = 2
"""``cudaErrorMemoryAllocation``."""


class Sharing:
    """CUDA's ways to share memory; tests put those of a fake in its place."""

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Let a device be the current one of this process."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        yield

    def lock_pages(self, memory: torch.Tensor) -> None:
        """Let GPUs of this process copy from and to host memory without waiting."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        result = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if code := int(result):
            reason = "out of memory" if code == OUT_OF_MEMORY else f"error {code}"
            raise RuntimeError(
                f"cannot page-lock {memory.nbytes / 1e6:.1f} MB of host memory: CUDA {reason}"
            )

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, Handle]:
        """Return a new tensor on a GPU, and what another process opens."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        return tensor, reduce_tensor(tensor)  # type: ignore[no-untyped-call]  # as above

    def open(self, handle: Handle) -> torch.Tensor:
        """Return the tensor of another process."""
        rebuild, arguments = handle
        return rebuild(*arguments)


SHARING: Final = Sharing()
