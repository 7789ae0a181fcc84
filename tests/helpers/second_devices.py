"""Second torch devices for tests: vdev, fake CUDA devices in several orders, and real ones.

Fake CUDA shows missing waits. ``vdev`` computes at once, hides its memory, and is a device to
autograd itself, which moves gradients of writes across devices; machines with GPUs skip its tests.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import torch

from envs.measured import FEWEST_ROUNDS
from tests.fake_cuda import fake_cuda
from tests.helpers.vdev import vdev

CUDA: Final = torch.device("cuda", 0)
VDEV: Final = "vdev"
HAS_CUDA: Final = torch.cuda.is_available()
"""Whether there is a real one; ``torch.cuda`` itself may be fake at times."""
ORDERS: Final = 6
"""Orders of the streams of fake CUDA, by seed."""
FAKE: Final = "fake cuda"
FAKES: Final = [
    pytest.param(f"{FAKE} {seed}", id=f"fake{seed}", marks=[pytest.mark.slow] * (seed > 0))
    for seed in range(3)
]
DEVICES: Final = [VDEV, *FAKES]


@contextmanager
def opened_device(kind: str, test: str = "") -> Iterator[torch.device]:
    """Yield a second device: "vdev", "cuda", or "fake cuda", maybe with the seed of the order.

    Without one it is that of the test's name, so that tests run in all orders.
    """
    if kind == VDEV:
        if HAS_CUDA:
            pytest.skip("vdev would take CUDA's place")
        with vdev() as device:
            yield device
    elif kind == "cuda":
        yield CUDA
    else:
        seed = kind.removeprefix(FAKE) or zlib.crc32(test.encode()) % ORDERS
        with fake_cuda(2, seed=int(seed)):
            yield CUDA


def measure_briefly(patch: pytest.MonkeyPatch, *, large_bytes: int) -> None:
    """Measure on torch's devices in few and small calls."""
    from envs.costs import torch_speeds
    from envs.torch_runtime import executor, runtime

    patch.setattr(torch_speeds, "STREAM_BYTES", large_bytes)
    patch.setattr(torch_speeds, "LARGE_BYTES", large_bytes)
    patch.setattr(torch_speeds, "MOST_CALLS", 2)
    patch.setattr(torch_speeds, "HOPS", 4)
    patch.setattr(executor, "TURN_S", 0.0)
    patch.setattr(executor, "MOST_WARM_UP", 1)
    patch.setattr(runtime, "DEFAULT_ROUNDS", FEWEST_ROUNDS)


def second() -> torch.device:
    """Return the second device of a test that has one open."""
    return CUDA if torch.cuda.is_available() else torch.device(VDEV, 0)


def on_gpus(count: int, *values: Any) -> Any:
    """Return the values as parameters of a test that needs so many real CUDA devices."""
    enough = HAS_CUDA and torch.cuda.device_count() >= count
    reason = f"needs {count} CUDA device{'s' if count > 1 else ''}"
    marks = [pytest.mark.gpu, pytest.mark.skipif(not enough, reason=reason)]
    return pytest.param(*values, marks=marks, id=f"{'-'.join(map(str, values))}-gpu")


REAL: Final = on_gpus(1, "cuda")
