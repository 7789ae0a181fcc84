"""Models of vit-pytorch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any, Final

from torch import nn
from torch.nn import functional as F

from benchmarks.coverage.case import CLASSES, Case, Cases, classes, classifier, numbers

SQUARE: Final[Mapping[str, Any]] = {"image_size": 32, "patch_size": 8, "num_classes": CLASSES}
LAYERS: Final[Mapping[str, Any]] = {"dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64}
USUAL: Final[Mapping[str, Any]] = {**SQUARE, **LAYERS}
STAGES: Final[Mapping[str, Any]] = {
    f"s{stage}_{name}": value
    for stage in (1, 2, 3)
    for name, value in {"emb_dim": 16 * stage, "heads": stage, "depth": 1}.items()
}
MODELS: Final[Mapping[str, tuple[str, str, Mapping[str, Any]]]] = {
    "vit": ("vit", "ViT", USUAL),
    "simple vit": ("simple_vit", "SimpleViT", USUAL),
    "deepvit": ("deepvit", "DeepViT", USUAL),
    "cait": ("cait", "CaiT", {**USUAL, "cls_depth": 1}),
    "parallel vit": ("parallel_vit", "ViT", {**USUAL, "num_parallel_branches": 2}),
    "vit for small datasets": ("vit_for_small_dataset", "ViT", USUAL),
    "rvt": ("rvt", "RvT", USUAL),
    "pit": (
        "pit",
        "PiT",
        {**USUAL, "depth": (1, 1)},
    ),
    "levit": (
        "levit",
        "LeViT",
        {
            "image_size": 32,
            "num_classes": CLASSES,
            "stages": 2,
            "dim": (32, 48),
            "depth": 1,
            "heads": (2, 3),
            "mlp_mult": 2,
        },
    ),
    "cvt": ("cvt", "CvT", {"num_classes": CLASSES, **STAGES}),
    "twins": (
        "twins_svt",
        "TwinsSVT",
        {
            "num_classes": CLASSES,
            **{f"s{n}_emb_dim": 16 * n for n in (1, 2, 3, 4)},
            **{f"s{n}_local_patch_size": 2 for n in (1, 2, 3)},
            "s4_local_patch_size": 1,
            **{f"s{n}_global_k": 1 for n in (1, 2, 3, 4)},
            **{f"s{n}_depth": 1 for n in (1, 2, 3, 4)},
        },
    ),
    "max vit": (
        "max_vit",
        "MaxViT",
        {
            "num_classes": CLASSES,
            "dim_conv_stem": 8,
            "dim": 16,
            "dim_head": 8,
            "depth": (1, 1),
            "window_size": 4,
        },
    ),
    "nest": (
        "nest",
        "NesT",
        {
            "image_size": 32,
            "patch_size": 4,
            "dim": 16,
            "heads": 2,
            "num_hierarchies": 2,
            "block_repeats": (1, 1),
            "num_classes": CLASSES,
        },
    ),
    "mobilevit": (
        "mobile_vit",
        "MobileViT",
        {
            "image_size": (64, 64),
            "dims": [16, 24, 32],
            "channels": [8, 8, 8, 8, 16, 16, 16, 16, 16, 16, 32],
            "num_classes": CLASSES,
        },
    ),
    "t2t": (
        "t2t",
        "T2TViT",
        {
            "dim": 32,
            "image_size": 32,
            "depth": 1,
            "heads": 2,
            "mlp_dim": 64,
            "num_classes": CLASSES,
            "t2t_layers": ((7, 4), (3, 2)),
        },
    ),
}


LARGER: Final = ("cvt", "twins", "mobilevit")
"""Models that need images of 64 pixels."""


def _made(module: str, name: str, options: Mapping[str, Any]) -> nn.Module:
    model: nn.Module = getattr(import_module(f"vit_pytorch.{module}"), name)(**options)
    return model


CASES: Final[Cases] = {
    **{
        name: classifier(partial(_made, *made), 64 if name in LARGER else 32)
        for name, made in MODELS.items()
    },
    "vit in 3d": Case(
        partial(
            _made,
            "vit_3d",
            "ViT",
            {
                "image_size": 32,
                "image_patch_size": 8,
                "frames": 4,
                "frame_patch_size": 2,
                "num_classes": CLASSES,
                **LAYERS,
            },
        ),
        numbers((2, 3, 4, 32, 32)),
        F.cross_entropy,
        classes,
    ),
    "vit in 1d": Case(
        partial(
            _made,
            "vit_1d",
            "ViT",
            {"seq_len": 32, "patch_size": 8, "num_classes": CLASSES, **LAYERS},
        ),
        numbers((2, 3, 32)),
        F.cross_entropy,
        classes,
    ),
}
