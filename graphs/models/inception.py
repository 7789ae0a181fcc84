"""Inception-V3 (Szegedy et al., arXiv 1512.00567, table 1), with the auxiliary classifier.

Modules are named after the layers of the published model: ``conv_1a_3x3``, ``mixed_5b.branch1x1``,
``mixed_6e``, ``aux_logits``, ``fc``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class InceptionConfig:
    """Sizes of the network; ``width`` scales every channel count but those of input and output."""

    classes: int = 1000
    width: float = 1.0
    dropout: float = 0.5
    auxiliary: bool = True

    def channels(self, count: int) -> int:
        """Return a published channel count, scaled by ``width``."""
        return max(1, round(count * self.width))


class ConvNormReLU(nn.Module):
    """Convolution without bias, batch norm, ReLU."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, outputs, H', W')."""
        return F.relu(self.bn(self.conv(x)))


class Mixed5(nn.Module):
    """The 35x35 block: 1x1, 5x5, two 3x3, and average pooling side by side."""

    def __init__(self, config: InceptionConfig, inputs: int, pool_features: int) -> None:
        super().__init__()
        c = config.channels
        self.branch1x1 = ConvNormReLU(inputs, c(64), 1)
        self.branch5x5_1 = ConvNormReLU(inputs, c(48), 1)
        self.branch5x5_2 = ConvNormReLU(c(48), c(64), 5, padding=2)
        self.branch3x3dbl_1 = ConvNormReLU(inputs, c(64), 1)
        self.branch3x3dbl_2 = ConvNormReLU(c(64), c(96), 3, padding=1)
        self.branch3x3dbl_3 = ConvNormReLU(c(96), c(96), 3, padding=1)
        self.branch_pool = ConvNormReLU(inputs, c(pool_features), 1)
        self.outputs = 2 * c(64) + c(96) + c(pool_features)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, outputs, H, W)."""
        pooled = F.avg_pool2d(x, 3, stride=1, padding=1)
        branches = [
            self.branch1x1(x),
            self.branch5x5_2(self.branch5x5_1(x)),
            self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x))),
            self.branch_pool(pooled),
        ]
        return torch.cat(branches, 1)


class Reduction6(nn.Module):
    """The reduction block from 35x35 to 17x17."""

    def __init__(self, config: InceptionConfig, inputs: int) -> None:
        super().__init__()
        c = config.channels
        self.branch3x3 = ConvNormReLU(inputs, c(384), 3, stride=2)
        self.branch3x3dbl_1 = ConvNormReLU(inputs, c(64), 1)
        self.branch3x3dbl_2 = ConvNormReLU(c(64), c(96), 3, padding=1)
        self.branch3x3dbl_3 = ConvNormReLU(c(96), c(96), 3, stride=2)
        self.outputs = c(384) + c(96) + inputs

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, outputs, H', W'), H' = (H - 3) // 2 + 1."""
        branches = [
            self.branch3x3(x),
            self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x))),
            F.max_pool2d(x, 3, stride=2),
        ]
        return torch.cat(branches, 1)


class Mixed6(nn.Module):
    """The 17x17 block: 7x7 convolutions factorised into 1x7 and 7x1."""

    def __init__(self, config: InceptionConfig, inputs: int, inner: int) -> None:
        super().__init__()
        c = config.channels
        wide, tall = (1, 7), (7, 1)
        across, along = (0, 3), (3, 0)
        self.branch1x1 = ConvNormReLU(inputs, c(192), 1)
        self.branch7x7_1 = ConvNormReLU(inputs, c(inner), 1)
        self.branch7x7_2 = ConvNormReLU(c(inner), c(inner), wide, padding=across)
        self.branch7x7_3 = ConvNormReLU(c(inner), c(192), tall, padding=along)
        self.branch7x7dbl_1 = ConvNormReLU(inputs, c(inner), 1)
        self.branch7x7dbl_2 = ConvNormReLU(c(inner), c(inner), tall, padding=along)
        self.branch7x7dbl_3 = ConvNormReLU(c(inner), c(inner), wide, padding=across)
        self.branch7x7dbl_4 = ConvNormReLU(c(inner), c(inner), tall, padding=along)
        self.branch7x7dbl_5 = ConvNormReLU(c(inner), c(192), wide, padding=across)
        self.branch_pool = ConvNormReLU(inputs, c(192), 1)
        self.outputs = 4 * c(192)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, outputs, H, W)."""
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        pooled = F.avg_pool2d(x, 3, stride=1, padding=1)
        branches = [
            self.branch1x1(x),
            self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x))),
            self.branch7x7dbl_5(self.branch7x7dbl_4(double)),
            self.branch_pool(pooled),
        ]
        return torch.cat(branches, 1)


class Reduction7(nn.Module):
    """The reduction block from 17x17 to 8x8."""

    def __init__(self, config: InceptionConfig, inputs: int) -> None:
        super().__init__()
        c = config.channels
        self.branch3x3_1 = ConvNormReLU(inputs, c(192), 1)
        self.branch3x3_2 = ConvNormReLU(c(192), c(320), 3, stride=2)
        self.branch7x7x3_1 = ConvNormReLU(inputs, c(192), 1)
        self.branch7x7x3_2 = ConvNormReLU(c(192), c(192), (1, 7), padding=(0, 3))
        self.branch7x7x3_3 = ConvNormReLU(c(192), c(192), (7, 1), padding=(3, 0))
        self.branch7x7x3_4 = ConvNormReLU(c(192), c(192), 3, stride=2)
        self.outputs = c(320) + c(192) + inputs

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, outputs, H', W'), H' = (H - 3) // 2 + 1."""
        factorised = self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x)))
        branches = [
            self.branch3x3_2(self.branch3x3_1(x)),
            self.branch7x7x3_4(factorised),
            F.max_pool2d(x, 3, stride=2),
        ]
        return torch.cat(branches, 1)


class Mixed7(nn.Module):
    """The 8x8 block: 3x3 convolutions that fan out into 1x3 and 3x1."""

    def __init__(self, config: InceptionConfig, inputs: int) -> None:
        super().__init__()
        c = config.channels
        wide, tall = (1, 3), (3, 1)
        across, along = (0, 1), (1, 0)
        self.branch1x1 = ConvNormReLU(inputs, c(320), 1)
        self.branch3x3_1 = ConvNormReLU(inputs, c(384), 1)
        self.branch3x3_2a = ConvNormReLU(c(384), c(384), wide, padding=across)
        self.branch3x3_2b = ConvNormReLU(c(384), c(384), tall, padding=along)
        self.branch3x3dbl_1 = ConvNormReLU(inputs, c(448), 1)
        self.branch3x3dbl_2 = ConvNormReLU(c(448), c(384), 3, padding=1)
        self.branch3x3dbl_3a = ConvNormReLU(c(384), c(384), wide, padding=across)
        self.branch3x3dbl_3b = ConvNormReLU(c(384), c(384), tall, padding=along)
        self.branch_pool = ConvNormReLU(inputs, c(192), 1)
        self.outputs = c(320) + 4 * c(384) + c(192)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, outputs, H, W)."""
        single = self.branch3x3_1(x)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        pooled = F.avg_pool2d(x, 3, stride=1, padding=1)
        branches = [
            self.branch1x1(x),
            self.branch3x3_2a(single),
            self.branch3x3_2b(single),
            self.branch3x3dbl_3a(double),
            self.branch3x3dbl_3b(double),
            self.branch_pool(pooled),
        ]
        return torch.cat(branches, 1)


class Auxiliary(nn.Module):
    """The classifier on the 17x17 grid, used in training only."""

    def __init__(self, config: InceptionConfig, inputs: int) -> None:
        super().__init__()
        c = config.channels
        self.conv0 = ConvNormReLU(inputs, c(128), 1)
        self.conv1 = ConvNormReLU(c(128), c(768), 5)
        self.fc = nn.Linear(c(768), config.classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, 17, 17) to logits (B, classes)."""
        x = self.conv1(self.conv0(F.avg_pool2d(x, 5, stride=3)))
        logits: Tensor = self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
        return logits


class InceptionV3(nn.Module):
    """Inception-V3: 27,161,264 parameters at the published sizes.

    The auxiliary classifier ends in a batch norm over 1x1 pixels: training needs a batch of two.
    """

    def __init__(self, config: InceptionConfig | None = None) -> None:
        super().__init__()
        config = config or InceptionConfig()
        c = config.channels
        self.conv_1a_3x3 = ConvNormReLU(3, c(32), 3, stride=2)
        self.conv_2a_3x3 = ConvNormReLU(c(32), c(32), 3)
        self.conv_2b_3x3 = ConvNormReLU(c(32), c(64), 3, padding=1)
        self.conv_3b_1x1 = ConvNormReLU(c(64), c(80), 1)
        self.conv_4a_3x3 = ConvNormReLU(c(80), c(192), 3)
        self.mixed_5b = Mixed5(config, c(192), 32)
        self.mixed_5c = Mixed5(config, self.mixed_5b.outputs, 64)
        self.mixed_5d = Mixed5(config, self.mixed_5c.outputs, 64)
        self.mixed_6a = Reduction6(config, self.mixed_5d.outputs)
        self.mixed_6b = Mixed6(config, self.mixed_6a.outputs, 128)
        self.mixed_6c = Mixed6(config, self.mixed_6b.outputs, 160)
        self.mixed_6d = Mixed6(config, self.mixed_6c.outputs, 160)
        self.mixed_6e = Mixed6(config, self.mixed_6d.outputs, 192)
        self.aux_logits = Auxiliary(config, self.mixed_6e.outputs) if config.auxiliary else None
        self.mixed_7a = Reduction7(config, self.mixed_6e.outputs)
        self.mixed_7b = Mixed7(config, self.mixed_7a.outputs)
        self.mixed_7c = Mixed7(config, self.mixed_7b.outputs)
        self.dropout = nn.Dropout(config.dropout)
        self.fc = nn.Linear(self.mixed_7c.outputs, config.classes)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Map images (B, 3, 299, 299) to logits (B, classes).

        In training mode, with the auxiliary classifier: (logits, auxiliary logits).
        """
        x = self.conv_2b_3x3(self.conv_2a_3x3(self.conv_1a_3x3(images)))
        x = F.max_pool2d(x, 3, stride=2)
        x = self.conv_4a_3x3(self.conv_3b_1x1(x))
        x = F.max_pool2d(x, 3, stride=2)
        x = self.mixed_5d(self.mixed_5c(self.mixed_5b(x)))
        x = self.mixed_6c(self.mixed_6b(self.mixed_6a(x)))
        x = self.mixed_6e(self.mixed_6d(x))
        auxiliary = self.aux_logits(x) if self.training and self.aux_logits is not None else None
        x = self.mixed_7c(self.mixed_7b(self.mixed_7a(x)))
        x = self.dropout(F.adaptive_avg_pool2d(x, 1))
        logits = self.fc(torch.flatten(x, 1))
        return logits if auxiliary is None else (logits, auxiliary)


def build() -> tuple[InceptionV3, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """Return the model without dropout, (images, labels) of a batch of two, and the loss."""
    torch.manual_seed(0)
    model = InceptionV3(InceptionConfig(dropout=0.0)).train()
    images = torch.randn(2, 3, 299, 299)
    labels = torch.randint(1000, (2,))
    return model, (images, labels), _loss


def _loss(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Return the weighted cross-entropies of both classifiers, as in common training recipes."""
    logits, auxiliary = output
    return F.cross_entropy(logits, labels) + 0.4 * F.cross_entropy(auxiliary, labels)
