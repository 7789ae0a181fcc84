"""NASNet-A (Zoph et al., arXiv 1707.07012, figure 4), without its auxiliary classifier.

A cell takes the outputs of the two cells before it and joins five pairs of branches: separable
convolutions, poolings, or the input as it is. "Same" padding is even on both sides, here as in
other ports to PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class NasNetConfig:
    """Sizes of the network, by default NASNet-A (4 @ 1056), the mobile one.

    ``filters`` are those of the first normal cells, a 24th of the penultimate layer's (4032 / 24 =
    168 for the large one); ``repeats`` is how many normal cells stand between two reductions.
    """

    classes: int = 1000
    stem: int = 32
    filters: int = 44
    repeats: int = 4
    dropout: float = 0.5


class Squeeze(nn.Module):
    """ReLU, 1x1 convolution, batch norm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.bn = _norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, outputs, H, W)."""
        normed: Tensor = self.bn(self.conv(F.relu(x)))
        return normed


class FactorizedReduction(nn.Module):
    """Halves the image without losing what lies between the pixels of a stride."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, bias=False)
        self.odd = nn.Conv2d(inputs, outputs // 2, 1, bias=False)
        self.bn = _norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, outputs, H', W'), H' = ceil(H / 2)."""
        x = F.relu(x)
        even = self.even(F.avg_pool2d(x, 1, stride=2))
        odd = self.odd(F.avg_pool2d(F.pad(x, (-1, 1, -1, 1)), 1, stride=2))
        normed: Tensor = self.bn(torch.cat([even, odd], 1))
        return normed


class Separable(nn.Module):
    """ReLU, depthwise and pointwise convolution, batch norm, all twice; the first may stride."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        pad = kernel // 2
        self.depthwise_1 = nn.Conv2d(inputs, inputs, kernel, stride, pad, groups=inputs, bias=False)
        self.pointwise_1 = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.bn_1 = _norm(outputs)
        self.depthwise_2 = nn.Conv2d(outputs, outputs, kernel, 1, pad, groups=outputs, bias=False)
        self.pointwise_2 = nn.Conv2d(outputs, outputs, 1, bias=False)
        self.bn_2 = _norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, outputs, H', W'), H' = ceil(H / stride)."""
        x = self.bn_1(self.pointwise_1(self.depthwise_1(F.relu(x))))
        normed: Tensor = self.bn_2(self.pointwise_2(self.depthwise_2(F.relu(x))))
        return normed


@dataclass(frozen=True, slots=True)
class Image:
    """Channels of a cell's output, and how many times the image has been halved."""

    channels: int
    halved: int


class NormalCell(nn.Module):
    """The cell that keeps the size of the image."""

    def __init__(self, before: Image, current: Image, filters: int) -> None:
        super().__init__()
        self.outputs = Image(6 * filters, current.halved)
        self.fit = _fit(before, current, filters)
        self.squeeze = Squeeze(current.channels, filters)
        self.first_left = Separable(filters, filters, 5)
        self.first_right = Separable(filters, filters, 3)
        self.second_left = Separable(filters, filters, 5)
        self.second_right = Separable(filters, filters, 3)
        self.fifth_left = Separable(filters, filters, 3)

    def forward(self, before: Tensor, current: Tensor) -> Tensor:
        """Join (B, C, H, W), or twice that size, and (B, C', H, W) to (B, 6 filters, H, W)."""
        p, h = self.fit(before), self.squeeze(current)
        pairs = [
            self.first_left(h) + self.first_right(p),
            self.second_left(p) + self.second_right(p),
            _average(h) + p,
            _average(p) + _average(p),
            self.fifth_left(h) + h,
        ]
        return torch.cat([p, *pairs], 1)


class ReductionCell(nn.Module):
    """The cell that halves the image; the first one has no cell before it, and no ``fit``."""

    def __init__(self, before: Image | None, current: Image, filters: int) -> None:
        super().__init__()
        self.outputs = Image(4 * filters, current.halved + 1)
        self.fit = nn.Identity() if before is None else _fit(before, current, filters)
        fitted = current.channels if before is None else filters
        self.squeeze = Squeeze(current.channels, filters)
        self.first_left = Separable(filters, filters, 5, stride=2)
        self.first_right = Separable(fitted, filters, 7, stride=2)
        self.second_right = Separable(fitted, filters, 7, stride=2)
        self.third_right = Separable(fitted, filters, 5, stride=2)
        self.fifth_left = Separable(filters, filters, 3)

    def forward(self, before: Tensor, current: Tensor) -> Tensor:
        """Join (B, C, H, W), or twice that size, and (B, C', H, W) to (B, 4 filters, H', W').

        H' = ceil(H / 2).
        """
        p, h = self.fit(before), self.squeeze(current)
        peaks = F.max_pool2d(h, 3, stride=2, padding=1)
        first = self.first_left(h) + self.first_right(p)
        second = peaks + self.second_right(p)
        third = _average(h, stride=2) + self.third_right(p)
        fourth = _average(first) + second
        fifth = self.fifth_left(first) + peaks
        return torch.cat([second, third, fourth, fifth], 1)


class NasNet(nn.Module):
    """NASNet-A: 5,289,978 parameters at the mobile sizes, 88,753,150 at the large ones."""

    def __init__(self, config: NasNetConfig | None = None) -> None:
        super().__init__()
        config = config or NasNetConfig()
        filters = config.filters
        self.conv0 = nn.Conv2d(3, config.stem, 3, stride=2, bias=False)
        self.bn0 = _norm(config.stem)
        image = Image(config.stem, 0)
        stem_0 = ReductionCell(None, image, filters // 4)
        stem_1 = ReductionCell(image, stem_0.outputs, filters // 2)
        cells: list[NormalCell | ReductionCell] = [stem_0, stem_1]
        for scale in (1, 2, 4):
            if scale > 1:
                before, current = cells[-2].outputs, cells[-1].outputs
                cells.append(ReductionCell(before, current, scale * filters))
            for _ in range(config.repeats):
                before, current = cells[-2].outputs, cells[-1].outputs
                cells.append(NormalCell(before, current, scale * filters))
        self.cells = nn.ModuleList(cells)
        self.dropout = nn.Dropout(config.dropout)
        self.fc = nn.Linear(cells[-1].outputs.channels, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, 3, H, W) to logits (B, classes); published sizes are for 224x224."""
        before = current = self.bn0(self.conv0(images))
        for cell in self.cells:
            before, current = current, cell(before, current)
        x = torch.flatten(F.adaptive_avg_pool2d(F.relu(current), 1), 1)
        logits: Tensor = self.fc(self.dropout(x))
        return logits


def _fit(before: Image, current: Image, filters: int) -> nn.Module:
    """Return a layer that maps ``before`` to the image size of ``current`` and to ``filters``."""
    kind = Squeeze if before.halved == current.halved else FactorizedReduction
    return kind(before.channels, filters)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=0.001)


def _average(x: Tensor, stride: int = 1) -> Tensor:
    """Apply 3x3 average pooling that ignores pixels beyond the border."""
    return F.avg_pool2d(x, 3, stride, padding=1, count_include_pad=False)


def build() -> tuple[NasNet, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """Return the model without dropout, (images, labels) of a batch of two, and the loss."""
    torch.manual_seed(0)
    model = NasNet(NasNetConfig(dropout=0.0)).train()
    images = torch.randn(2, 3, 224, 224)
    return model, (images, torch.randint(1000, (2,))), F.cross_entropy
