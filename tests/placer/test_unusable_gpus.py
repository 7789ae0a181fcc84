"""GPUs that are counted but cannot be used, from the devices that are named to the result."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import placer
from graphs.extract import Workload

torch.set_num_threads(1)


def tiny() -> Workload:
    return Workload.of(nn.Linear(4, 4), (torch.ones(2, 4), torch.ones(2, 4)), nn.MSELoss())


@pytest.mark.parametrize("extractor", ["export", "modules"])
def test_the_cpu_alone_is_used_where_cuda_counts_devices_without_being_usable(
    extractor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    # other tests have made an accelerator of their own
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    result = placer.optimize(
        tiny(), devices="cpu", budget="1e", extractor=extractor, progress=False
    )
    assert result.best.measurement is not None
    assert result.best.measurement.ok
