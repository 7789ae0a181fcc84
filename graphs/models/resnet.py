"""ResNet with bottleneck blocks (He et al., arXiv 1512.03385, table 1); ResNet-50 by default.

A block that halves the image does so in its 3x3 convolution, as published weights expect. Modules
go by the names of those weights: ``conv1``, ``layer1.0.conv1``, ``layer1.0.downsample.0``, ``fc``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EXPANSION: Final = 4
"""Output channels of a bottleneck, in multiples of the channels within it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetConfig:
    """Sizes of the network: ``blocks`` per stage, channels within the first stage's blocks."""

    classes: int = 1000
    blocks: tuple[int, int, int, int] = (3, 4, 6, 3)
    width: int = 64


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution beside a shortcut, itself a convolution where shapes change."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, 4 width, H', W'), H' = ceil(H / stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return F.relu(self.bn3(self.conv3(x)) + shortcut)


class ResNet(nn.Module):
    """ResNet-50: 25,557,032 parameters at the published sizes."""

    def __init__(self, config: ResNetConfig | None = None) -> None:
        super().__init__()
        config = config or ResNetConfig()
        width = config.width
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _stage(width, width, config.blocks[0], stride=1)
        self.layer2 = _stage(EXPANSION * width, 2 * width, config.blocks[1], stride=2)
        self.layer3 = _stage(2 * EXPANSION * width, 4 * width, config.blocks[2], stride=2)
        self.layer4 = _stage(4 * EXPANSION * width, 8 * width, config.blocks[3], stride=2)
        self.fc = nn.Linear(8 * EXPANSION * width, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, 3, H, W) to logits (B, classes); published sizes are for 224x224."""
        x = F.relu(self.bn1(self.conv1(images)))
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
        return logits


def _stage(inputs: int, width: int, blocks: int, *, stride: int) -> nn.Sequential:
    """Return a stage, of which only the first block changes the shape."""
    later = (Bottleneck(EXPANSION * width, width, 1) for _ in range(blocks - 1))
    return nn.Sequential(Bottleneck(inputs, width, stride), *later)


def build() -> tuple[ResNet, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """Return the model, (images, labels) of a batch of two, and the loss."""
    torch.manual_seed(0)
    model = ResNet().train()
    images = torch.randn(2, 3, 224, 224)
    return model, (images, torch.randint(1000, (2,))), F.cross_entropy
