"""Networks of segmentation-models-pytorch, on a small backbone."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Final

import torch
from torch import Tensor, nn

from benchmarks.coverage.case import BATCH, CLASSES, Case, Cases, images

SIZE: Final = 64


def _made(name: str) -> nn.Module:
    package = import_module("segmentation_models_pytorch")
    model: nn.Module = getattr(package, name)("resnet18", encoder_weights=None, classes=CLASSES)
    return model


def _dice(output: Tensor, target: Tensor) -> Tensor:
    losses = import_module("segmentation_models_pytorch.losses")
    loss: Tensor = losses.DiceLoss("multiclass")(output, target)
    return loss


CASES: Final[Cases] = {
    name: Case(
        partial(_made, name),
        images(SIZE),
        _dice,
        lambda: torch.randint(CLASSES, (BATCH, SIZE, SIZE)),
    )
    for name in (
        "Unet",
        "UnetPlusPlus",
        "MAnet",
        "Linknet",
        "FPN",
        "PSPNet",
        "DeepLabV3",
        "DeepLabV3Plus",
        "UPerNet",
        "Segformer",
    )
}
