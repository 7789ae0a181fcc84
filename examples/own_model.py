"""Place, save and train your own model: ``python examples/own_model.py``.

On a machine with GPUs it is placed on them and the CPU, elsewhere on the cores. The two
towers are independent, so two devices can run them in parallel; the head needs both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import placer

WIDTH = 512
FILE = "placement.json"


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = tower(), tower()
        self.head = nn.Linear(2 * WIDTH, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.cat([self.left(x), self.right(y)], dim=1))
        return logits


def tower() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def batch(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs of both towers and, last, the labels."""
    random = torch.Generator().manual_seed(number)
    x, y = (torch.randn(128, WIDTH, generator=random) for _ in range(2))
    return x, y, torch.randint(10, (128,), generator=random)


def main() -> None:
    torch.manual_seed(0)
    model = TwoTowers()
    found = placer.optimize(model, batch(0), loss=F.cross_entropy, devices="auto", budget="5s")
    print(found.verdict)
    for module in ("left", "right", "head"):
        print(f"{module}: {found.device_of(module)}, ops by device {found.devices_of(module)}")
    found.save(FILE)
    print(f"saved: {FILE}")

    # Another process needs only the file, the model and example inputs.
    with placer.apply(model, FILE, batch(0), loss=F.cross_entropy) as placed:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            optimizer.zero_grad()
            loss = placed.step(batch(number))
            optimizer.step()
            print(f"step {number}: loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
