"""Unequal devices: ``python examples/mixed_cluster.py``.

``mixed.toml`` describes one fast and two slow GPUs. The best placement for three equal ones
(``equal.toml``) is simulated there unchanged and compared with a placement that is optimized for
the unequal devices. No GPU is needed: op costs are the roofline of the rates in the files.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn

import placer

HERE = Path(__file__).parent
WIDTHS = (512, 1024, 1024, 1536, 2048, 2048)


class Experts(nn.Module):
    """Experts of several sizes that all process the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(512, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
            for width in WIDTHS
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([expert(x) for expert in self.experts], dim=1)


def place(cluster: str, start_from: placer.Placement | None = None) -> placer.Result:
    torch.manual_seed(0)
    return placer.optimize(
        Experts(),
        torch.randn(4096, 512),
        training=False,
        devices=HERE / cluster,
        search=placer.SearchConfig(budget="3000e", start_from=start_from),
        progress=False,
    )


def tell(name: str, found: placer.Result) -> None:
    ops = Counter(found.placement.device_names[d] for d in found.placement.devices)
    shares = ", ".join(f"{device} {ops[device]}" for device in sorted(ops))
    print(f"{name}: step {found.best.predicted_s * 1e3:.3f} ms, ops: {shares}")
    for number, width in enumerate(WIDTHS):
        print(f"  expert {number}, width {width}: {found.device_of(f'experts.{number}')}")


def main() -> None:
    equal = place("equal.toml")
    tell("three equal GPUs", equal)
    mixed = place("mixed.toml", start_from=equal.placement)
    tell("one of them fast", mixed)
    [as_it_was] = [own for own in mixed.candidates if own.kind is placer.Kind.WARM_START]
    gain = as_it_was.predicted_s / mixed.best.predicted_s
    print(
        f"the placement for equal GPUs takes {as_it_was.predicted_s * 1e3:.3f} ms there: knowing "
        f"the difference is {gain:.2f}x faster"
    )


if __name__ == "__main__":
    main()
