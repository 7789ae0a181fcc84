"""Models of timm."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any, Final

from torch import nn

from benchmarks.coverage.case import CLASSES, Cases, classifier

TRANSFORMER: Final[Mapping[str, Any]] = {"img_size": 32, "depth": 2}
MODELS: Final[Mapping[str, tuple[int, Mapping[str, Any]]]] = {
    "resnet10t": (64, {}),
    "efficientnet_lite0": (64, {}),
    "mobilenetv3_small_050": (64, {}),
    "lcnet_050": (64, {}),
    "tinynet_e": (64, {}),
    "ghostnet_050": (64, {}),
    "regnetx_002": (64, {}),
    "repvgg_a0": (64, {}),
    "dla46_c": (64, {}),
    "convnext_atto": (64, {}),
    "edgenext_xx_small": (64, {}),
    "mobilevit_xxs": (64, {}),
    "fastvit_t8": (64, {}),
    "poolformer_s12": (64, {}),
    "semnasnet_075": (64, {}),
    "rexnet_100": (64, {}),
    "nf_resnet26": (64, {}),
    "vit_tiny_patch16_224": (32, TRANSFORMER),
    "deit_tiny_distilled_patch16_224": (32, TRANSFORMER),
    "cait_xxs24_224": (32, TRANSFORMER),
    "xcit_nano_12_p16_224": (32, TRANSFORMER),
    "levit_128s": (224, {}),
    "pit_ti_224": (224, {}),
}
"""Sizes of images and options of the models."""


def _made(name: str, options: Mapping[str, Any]) -> nn.Module:
    timm = import_module("timm")
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    return model


CASES: Final[Cases] = {
    name: classifier(partial(_made, name, options), size)
    for name, (size, options) in MODELS.items()
}
