"""A model with more weights than GPU memory: ``python examples/offload.py``.

With CUDA the step runs on ``cuda:0`` and ``cpu``; elsewhere it is simulated on
``small_gpu.toml``. The placement is exported for Hugging Face at the end.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

import placer

CAP = 256 << 20
WIDTH = 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


def build() -> nn.Sequential:
    """Return a model of twelve blocks of 34 MB each."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(12)))


def place(model: nn.Module, batch: Tensor) -> placer.Result:
    if not torch.cuda.is_available():
        cluster = Path(__file__).parent / "small_gpu.toml"
        return placer.optimize(model, batch, training=False, devices=cluster, budget="5s")
    return placer.optimize(
        model,
        batch,
        training=False,
        devices="cuda:0,cpu",
        constraints=placer.Constraints(memory={"cuda:0": CAP}),
        budget="5s",
    )


def main() -> None:
    model, batch = build(), torch.randn(64, WIDTH)
    weights_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    print(f"weights: {weights_bytes / 1e6:.0f} MB, the GPU may use {CAP / 1e6:.0f} MB")
    found = place(model, batch)
    print(found.verdict)
    for candidate in found.candidates:
        told = (
            f"{candidate.predicted_s * 1e3:.3f} ms" if candidate.can_run else f"no: {candidate.why}"
        )
        print(f"  {candidate.name}: {told}")
    for device, peak_bytes in found.best.peak_memory_bytes.items():
        print(f"{device}: {peak_bytes / 1e6:.0f} MB at its peak")

    simulated = {} if torch.cuda.is_available() else {"gpu": "cuda:0", "host": "cpu"}
    exported = placer.export(found, "device-map", renamed=simulated)
    print(f"device_map: {json.dumps(exported.content)}")
    for sentence in exported.summary:
        print(sentence)


if __name__ == "__main__":
    main()
