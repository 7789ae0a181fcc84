"""Inception-V3 (Szegedy et al., arXiv 1512.00567, table 1), with the auxiliary classifier.

Modules are named after the layers of the published model: ``conv_1a_3x3``, ``mixed_5b.branch1x1``,
``mixed_6e``, ``aux_logits``, ``fc``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

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
    """Convolution without bias, batch norm, ReLU; ``padded`` keeps the size of the image."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: tuple[int, int],
        *,
        stride: int = 1,
        padded: bool = False,
    ) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2) if padded else 0
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, outputs, H', W')."""
        return F.relu(self.bn(self.conv(x)))


ONE, THREE, FIVE = (1, 1), (3, 3), (5, 5)
WIDE_3, TALL_3, WIDE_7, TALL_7 = (1, 3), (3, 1), (1, 7), (7, 1)
POOL = ("pool", "", 0, THREE)
Layer: TypeAlias = tuple[str, str, int, tuple[int, int]]
"""Name, name of the layer it reads ("" for the block's input), channels and kernel."""


class Mixed(nn.Module):
    """Layers in the order in which they run; the outputs of those in ``joined`` are concatenated.

    Where some of the layers are ``halving`` the image, with stride 2, ``POOL`` is a max pool that
    does so too; elsewhere it is an average pool that keeps the size.
    """

    def __init__(
        self,
        config: InceptionConfig,
        inputs: int,
        layers: Sequence[Layer],
        joined: Sequence[str],
        halving: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.joined = joined
        self.halves = bool(halving)
        self.source = {name: source for name, source, *_ in layers}
        channels = {"": inputs, "pool": inputs}
        for name, source, count, kernel in layers:
            if name != "pool":
                channels[name] = config.channels(count)
                stride = 2 if name in halving else 1
                layer = ConvNormReLU(
                    channels[source], channels[name], kernel, stride=stride, padded=stride == 1
                )
                self.add_module(name, layer)
        self.outputs = sum(channels[name] for name in joined)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, outputs, H', W'), H' = H or (H - 3) // 2 + 1."""
        values = {"": x}
        for name, source in self.source.items():
            if name != "pool":
                values[name] = self.get_submodule(name)(values[source])
            elif self.halves:
                values[name] = F.max_pool2d(x, 3, stride=2)
            else:
                values[name] = F.avg_pool2d(x, 3, stride=1, padding=1)
        return torch.cat([values[name] for name in self.joined], 1)


def mixed_5(config: InceptionConfig, inputs: int, pool_features: int) -> Mixed:
    """Return a 35x35 block: 1x1, 5x5, two 3x3, and average pooling side by side."""
    layers = (
        POOL,
        ("branch1x1", "", 64, ONE),
        ("branch5x5_1", "", 48, ONE),
        ("branch5x5_2", "branch5x5_1", 64, FIVE),
        ("branch3x3dbl_1", "", 64, ONE),
        ("branch3x3dbl_2", "branch3x3dbl_1", 96, THREE),
        ("branch3x3dbl_3", "branch3x3dbl_2", 96, THREE),
        ("branch_pool", "pool", pool_features, ONE),
    )
    joined = ("branch1x1", "branch5x5_2", "branch3x3dbl_3", "branch_pool")
    return Mixed(config, inputs, layers, joined)


def reduction_6(config: InceptionConfig, inputs: int) -> Mixed:
    """Return the reduction from 35x35 to 17x17."""
    layers = (
        ("branch3x3", "", 384, THREE),
        ("branch3x3dbl_1", "", 64, ONE),
        ("branch3x3dbl_2", "branch3x3dbl_1", 96, THREE),
        ("branch3x3dbl_3", "branch3x3dbl_2", 96, THREE),
        POOL,
    )
    halving = ("branch3x3", "branch3x3dbl_3")
    return Mixed(config, inputs, layers, (*halving, "pool"), halving)


def mixed_6(config: InceptionConfig, inputs: int, inner: int) -> Mixed:
    """Return a 17x17 block: 7x7 convolutions factorised into 1x7 and 7x1."""
    layers = (
        ("branch7x7dbl_1", "", inner, ONE),
        ("branch7x7dbl_2", "branch7x7dbl_1", inner, TALL_7),
        ("branch7x7dbl_3", "branch7x7dbl_2", inner, WIDE_7),
        POOL,
        ("branch1x1", "", 192, ONE),
        ("branch7x7_1", "", inner, ONE),
        ("branch7x7_2", "branch7x7_1", inner, WIDE_7),
        ("branch7x7_3", "branch7x7_2", 192, TALL_7),
        ("branch7x7dbl_4", "branch7x7dbl_3", inner, TALL_7),
        ("branch7x7dbl_5", "branch7x7dbl_4", 192, WIDE_7),
        ("branch_pool", "pool", 192, ONE),
    )
    joined = ("branch1x1", "branch7x7_3", "branch7x7dbl_5", "branch_pool")
    return Mixed(config, inputs, layers, joined)


def reduction_7(config: InceptionConfig, inputs: int) -> Mixed:
    """Return the reduction from 17x17 to 8x8."""
    layers = (
        ("branch7x7x3_1", "", 192, ONE),
        ("branch7x7x3_2", "branch7x7x3_1", 192, WIDE_7),
        ("branch7x7x3_3", "branch7x7x3_2", 192, TALL_7),
        ("branch3x3_1", "", 192, ONE),
        ("branch3x3_2", "branch3x3_1", 320, THREE),
        ("branch7x7x3_4", "branch7x7x3_3", 192, THREE),
        POOL,
    )
    halving = ("branch3x3_2", "branch7x7x3_4")
    return Mixed(config, inputs, layers, (*halving, "pool"), halving)


def mixed_7(config: InceptionConfig, inputs: int) -> Mixed:
    """Return an 8x8 block: 3x3 convolutions that fan out into 1x3 and 3x1."""
    layers = (
        ("branch3x3_1", "", 384, ONE),
        ("branch3x3dbl_1", "", 448, ONE),
        ("branch3x3dbl_2", "branch3x3dbl_1", 384, THREE),
        POOL,
        ("branch1x1", "", 320, ONE),
        ("branch3x3_2a", "branch3x3_1", 384, WIDE_3),
        ("branch3x3_2b", "branch3x3_1", 384, TALL_3),
        ("branch3x3dbl_3a", "branch3x3dbl_2", 384, WIDE_3),
        ("branch3x3dbl_3b", "branch3x3dbl_2", 384, TALL_3),
        ("branch_pool", "pool", 192, ONE),
    )
    fans = ("branch3x3_2a", "branch3x3_2b", "branch3x3dbl_3a", "branch3x3dbl_3b")
    return Mixed(config, inputs, layers, ("branch1x1", *fans, "branch_pool"))


class Auxiliary(nn.Module):
    """The classifier on the 17x17 grid, used in training only."""

    def __init__(self, config: InceptionConfig, inputs: int) -> None:
        super().__init__()
        c = config.channels
        self.conv0 = ConvNormReLU(inputs, c(128), ONE)
        self.conv1 = ConvNormReLU(c(128), c(768), FIVE)
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
        self.conv_1a_3x3 = ConvNormReLU(3, c(32), THREE, stride=2)
        self.conv_2a_3x3 = ConvNormReLU(c(32), c(32), THREE)
        self.conv_2b_3x3 = ConvNormReLU(c(32), c(64), THREE, padded=True)
        self.conv_3b_1x1 = ConvNormReLU(c(64), c(80), ONE)
        self.conv_4a_3x3 = ConvNormReLU(c(80), c(192), THREE)
        self.mixed_5b = mixed_5(config, c(192), 32)
        self.mixed_5c = mixed_5(config, self.mixed_5b.outputs, 64)
        self.mixed_5d = mixed_5(config, self.mixed_5c.outputs, 64)
        self.mixed_6a = reduction_6(config, self.mixed_5d.outputs)
        self.mixed_6b = mixed_6(config, self.mixed_6a.outputs, 128)
        self.mixed_6c = mixed_6(config, self.mixed_6b.outputs, 160)
        self.mixed_6d = mixed_6(config, self.mixed_6c.outputs, 160)
        self.mixed_6e = mixed_6(config, self.mixed_6d.outputs, 192)
        self.aux_logits = Auxiliary(config, self.mixed_6e.outputs) if config.auxiliary else None
        self.mixed_7a = reduction_7(config, self.mixed_6e.outputs)
        self.mixed_7b = mixed_7(config, self.mixed_7a.outputs)
        self.mixed_7c = mixed_7(config, self.mixed_7b.outputs)
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
