"""GPUs that cannot be used any more by an executor that goes on without them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

import torch

from envs.hardware import torch_devices
from envs.hardware.torch_devices import CPU, DeviceError, is_of_cuda, kernel_failures
from envs.measured import DevicesLostError
from graphs.text import first_line


class LostDevices:
    """Those of some devices that are lost, and why."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._reasons: dict[torch.device, str] = {}

    def __len__(self) -> int:
        return len(self._reasons)

    @property
    def usable(self) -> list[torch.device]:
        """Return the devices that are not lost."""
        return [device for device in self._devices if device not in self._reasons]

    def reason(self, devices: Iterable[torch.device]) -> str:
        """Return why the first lost one of these devices cannot be used, or ""."""
        return next((self._reasons[d] for d in devices if d in self._reasons), "")

    def find(self, error: str = "", *, must_fail: bool = False) -> None:
        """Mark devices that fail as lost, with the error.

        If some GPU ``must_fail`` but none does, all of them count.
        """
        gpus = [device for device in self.usable if device != CPU]
        failing = kernel_failures(gpus)
        if not failing and must_fail:
            failing = dict.fromkeys(gpus, error)
        reason = str(DeviceError([*failing], error or next(iter(failing.values()), "")))
        self._reasons |= dict.fromkeys(failing, reason)

    def others_limited(self, limits: Mapping[torch.device, int]) -> ExitStack:
        """Limit the memory of devices that do not fail now, and fork their random states.

        Return what ends both. Memory that they do not use is released before.

        Raises:
            DevicesLostError: no device can be used.
        """
        self.find()
        if not self.usable:
            raise DevicesLostError(self.reason(self._devices))
        with ExitStack() as opened:
            try:
                for device in self.usable:
                    torch_devices.release(device)
                for device in self.usable:  # each for itself: one may fail when it ends
                    limit = {device: limits[device]} if device in limits else {}
                    opened.enter_context(torch_devices.limited(limit))
                    opened.enter_context(torch_devices.forked_rng([device]))
            except RuntimeError as error:
                if not is_of_cuda(error):
                    raise
                raise DevicesLostError(first_line(error)) from error
            return opened.pop_all()
