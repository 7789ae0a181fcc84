"""Decide which devices to rent: ``python examples/which_devices.py``.

Every part of a priced cluster is searched, and those on the Pareto front are marked: no other part
is as fast and as cheap. Nothing is run: op costs are the roofline of the rates below.
"""

from __future__ import annotations

from itertools import combinations, groupby

import torch
from torch import Tensor, nn

import placer


def gpu(name: str, memory_gb: int, tflop_per_s: float, price: float) -> placer.Device:
    return placer.Device(
        name=name,
        kind=name.partition(":")[0],
        memory_bytes=memory_gb * 10**9,
        peak_flop_per_s=tflop_per_s * 1e12,
        bandwidth_bytes_per_s=3e11,
        price_per_hour=price,
    )


# rates as in data sheets, prices made up
DEVICES = gpu("l4", 24, 30.3, 0.80), gpu("t4:0", 16, 8.1, 0.35), gpu("t4:1", 16, 8.1, 0.35)
NETWORK = placer.Link(between=("l4", "t4:0", "t4:1"), latency_s=1e-5, bandwidth_bytes_per_s=12e9)
SEARCH = placer.SearchConfig(budget="500e", measure=False)
CLUSTER = placer.Cluster(name="for rent", devices=DEVICES, links=(NETWORK,))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(4096, 4096) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([tower(x) for tower in self.towers]).mean()


def main() -> None:
    model, batch = Towers(), torch.randn(8192, 4096)
    parts = [CLUSTER.part(part) for n in (1, 2, 3) for part in combinations(range(3), n)]
    found: list[tuple[float, float, str]] = []
    for kinds, alike in groupby(parts, lambda part: [device.kind for device in part.devices]):
        part = next(alike)  # of equal devices only the number counts
        best = placer.optimize(model, batch, devices=part, search=SEARCH).best
        found.append((part.price_per_hour, best.predicted_s, " + ".join(kinds)))
    for price, step_s, names in sorted(found):
        rivals = [(p, s) for p, s, _ in found if (p, s) != (price, step_s)]
        mark = "" if any(p <= price and s <= step_s for p, s in rivals) else ", on the Pareto front"
        prices = f"{price:.2f} per hour, {price * step_s / 3600:.3g} per step"
        print(f"{names}: step {step_s * 1e3:.3f} ms, {prices}{mark}")


if __name__ == "__main__":
    main()
