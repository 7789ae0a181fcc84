"""Experts that are separate modules of a list have a device each, also in the device map."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import placer
from graphs.extract import Workload, extract
from placer.exports.device_map import device_map
from placer.exports.format import export_extracted
from tests.placer.exports.test_planned_maps import NAMES, cluster


class Mixture(nn.Module):
    """The weighted sum as a module: accelerate moves the inputs of modules."""

    def forward(self, weights: Tensor, *outputs: Tensor) -> Tensor:
        return torch.stack(outputs, -1) @ weights.unsqueeze(-1)


class Experts(nn.Module):
    """Every expert computes every token, and the router weighs them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 5)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(5)
        )
        self.mixture = Mixture()

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        out: Tensor = self.mixture(weights, *(expert(x) for expert in self.experts))
        return out


@pytest.mark.slow_repeats
@pytest.mark.parametrize("pinned", [True, False])
def test_experts_of_a_list_lie_on_two_devices_and_the_map_says_so(pinned: bool) -> None:
    torch.manual_seed(0)
    step = Workload.of(Experts(), torch.randn(64, 64), training=False)
    pins = {"experts.0": "slow", "experts.1": "fast"} if pinned else {}
    found = placer.optimize(
        step,
        devices=cluster(),
        search=placer.SearchConfig(budget="200e", measure=False),
        constraints=placer.Constraints(pins=pins, keep_together=tuple(paths())),
        progress=False,
    )
    placed = {path: set(found.placement.devices_of(path)) for path in paths()}
    assert all(len(devices) == 1 for devices in placed.values())
    assert set().union(*placed.values()) == set(NAMES)
    assert all(placed[path] == {device} for path, device in pins.items())
    content = export_extracted(
        device_map,
        extract(step),
        found.placement,
        renamed={"slow": "cuda:0", "fast": "cuda:1"},
    ).content
    assert {path: {NAMES[content[path]]} for path in paths()} == placed


def paths() -> list[str]:
    return [f"experts.{number}" for number in range(5)]
