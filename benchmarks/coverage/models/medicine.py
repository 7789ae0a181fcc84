"""Networks of monai, trained with its Dice loss."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.coverage.case import BATCH, CLASSES, Case, Cases, classes, images, numbers

PLANE: Final[dict[str, Any]] = {"spatial_dims": 2, "in_channels": 1, "out_channels": CLASSES}


def _made(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model: nn.Module = getattr(import_module("monai.networks.nets"), name)(**options)
        return model

    return make


def _dice(output: Any, target: Tensor) -> Tensor:
    losses = import_module("monai.losses")
    first = output[0] if isinstance(output, list | tuple) else output
    loss: Tensor = losses.DiceCELoss(softmax=True, to_onehot_y=True)(first, target)
    return loss


def _segments(name: str, size: int = 32, **options: Any) -> Case:
    return Case(
        _made(name, **{**PLANE, **options}),
        images(size, 1),
        _dice,
        lambda: torch.randint(CLASSES, (BATCH, 1, size, size)),
    )


CASES: Final[Cases] = {
    "UNet": _segments("UNet", channels=(4, 8, 16), strides=(2, 2), num_res_units=1),
    "BasicUNet": _segments("BasicUNet", features=(4, 4, 8, 8, 16, 4)),
    "AttentionUnet": _segments("AttentionUnet", channels=(4, 8, 16), strides=(2, 2)),
    "SegResNet": _segments("SegResNet", init_filters=8),
    "DynUNet": _segments(
        "DynUNet",
        kernel_size=[3, 3, 3],
        strides=[1, 2, 2],
        upsample_kernel_size=[2, 2],
        filters=[4, 8, 16],
    ),
    "HighResNet": _segments("HighResNet"),
    "UNETR": _segments(
        "UNETR",
        img_size=32,
        feature_size=4,
        hidden_size=32,
        mlp_dim=64,
        num_heads=4,
    ),
    "SwinUNETR": _segments("SwinUNETR", 64, feature_size=12, depths=(1, 1, 1, 1)),
    "VNet": Case(
        _made("VNet", spatial_dims=3, in_channels=1, out_channels=2),
        numbers((BATCH, 1, 16, 16, 16)),
    ),
    "DenseNet": Case(
        _made(
            "DenseNet",
            spatial_dims=2,
            in_channels=1,
            out_channels=CLASSES,
            init_features=8,
            growth_rate=4,
            block_config=(2, 2),
        ),
        images(32, 1),
        F.cross_entropy,
        classes,
    ),
    "EfficientNet": Case(
        _made(
            "EfficientNetBN",
            model_name="efficientnet-b0",
            pretrained=False,
            spatial_dims=2,
            in_channels=1,
            num_classes=CLASSES,
        ),
        images(64, 1),
        F.cross_entropy,
        classes,
    ),
    "ViT": Case(
        _made(
            "ViT",
            in_channels=1,
            img_size=(32, 32),
            patch_size=(8, 8),
            hidden_size=32,
            mlp_dim=64,
            num_layers=2,
            num_heads=4,
            classification=True,
            num_classes=CLASSES,
            spatial_dims=2,
        ),
        images(32, 1),
    ),
    "AutoEncoder": Case(
        _made(
            "AutoEncoder",
            spatial_dims=2,
            in_channels=1,
            out_channels=1,
            channels=(4, 8),
            strides=(2, 2),
        ),
        images(32, 1),
    ),
}
