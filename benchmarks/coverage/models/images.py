"""Models of transformers for images and videos."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.coverage.case import BATCH, CLASSES, Case, Cases, classes, mean_square
from benchmarks.coverage.models.language import automatic

PATCHES: Final[Mapping[str, Any]] = {"image_size": 32, "patch_size": 8}
FOUR_STAGES: Final[Mapping[str, Any]] = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
IMAGES: Final[Mapping[str, tuple[int, Mapping[str, Any]]]] = {
    "vit": (32, PATCHES),
    "deit": (32, {**PATCHES, "architectures": ["DeiTForImageClassification"]}),
    "beit": (32, PATCHES),
    "dinov2": (32, PATCHES),
    "dinov2_with_registers": (32, PATCHES),
    "vit_msn": (32, PATCHES),
    "ijepa": (32, PATCHES),
    "data2vec-vision": (32, PATCHES),
    "swin": (
        32,
        {
            "image_size": 32,
            "embed_dim": 16,
            "depths": [1, 2],
            "num_heads": [2, 4],
            "window_size": 2,
        },
    ),
    "swinv2": (
        32,
        {
            "image_size": 32,
            "embed_dim": 16,
            "depths": [1, 2],
            "num_heads": [2, 4],
            "window_size": 2,
        },
    ),
    "convnext": (32, FOUR_STAGES),
    "convnextv2": (32, FOUR_STAGES),
    "resnet": (32, {"embedding_size": 8, **FOUR_STAGES}),
    "regnet": (32, {"embedding_size": 8, "groups_width": 8, **FOUR_STAGES}),
    "bit": (
        32,
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 16, 32, 64],
            "depths": [1, 1, 1, 1],
            "num_groups": 1,
        },
    ),
    "mobilenet_v1": (32, {"depth_multiplier": 0.25, "image_size": 32}),
    "mobilenet_v2": (32, {"depth_multiplier": 0.25, "image_size": 32}),
    "mobilevit": (
        32,
        {
            "image_size": 32,
            "hidden_sizes": [12, 16, 20],
            "neck_hidden_sizes": [8, 8, 16, 16, 32, 32, 32],
        },
    ),
    "mobilevitv2": (64, {"image_size": 64, "width_multiplier": 0.25}),
    "poolformer": (64, FOUR_STAGES),
    "pvt": (
        64,
        {
            "image_size": 64,
            "hidden_sizes": [16, 32, 64, 128],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 4, 8],
        },
    ),
    "pvt_v2": (
        64,
        {
            "image_size": 64,
            "hidden_sizes": [16, 32, 64, 128],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 4, 8],
        },
    ),
    "levit": (
        64,
        {
            "image_size": 64,
            "hidden_sizes": [16, 32, 48],
            "num_attention_heads": [1, 2, 3],
            "depths": [1, 1, 1],
            "architectures": ["LevitForImageClassification"],
            "key_dim": [8, 8, 8],
        },
    ),
    "segformer": (
        64,
        {
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 3, 4],
        },
    ),
    "focalnet": (
        32,
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "hidden_sizes": [32, 64, 128],
            "depths": [1, 1, 1],
            "focal_levels": [2, 2, 2],
            "focal_windows": [3, 3, 3],
        },
    ),
    "hiera": (
        64,
        {"image_size": [64, 64], "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 8]},
    ),
}
"""Sizes of images, and of the models that classify them."""


def _pixels(size: int, training: bool) -> dict[str, Tensor]:
    pixels = {"pixel_values": torch.randn(BATCH, 3, size, size)}
    return pixels | {"labels": classes()} if training else pixels


def _classifier(kind: str, size: int, fields: Mapping[str, Any]) -> Case:
    labelled = {"num_labels": CLASSES, **fields}
    make = partial(automatic, "AutoModelForImageClassification", kind, labelled)
    return Case(make, partial(_pixels, size), loss=None)


def _depth(kind: str, fields: Mapping[str, Any]) -> Case:
    return Case(
        partial(automatic, "AutoModelForDepthEstimation", kind, fields),
        lambda training: {"pixel_values": torch.randn(BATCH, 3, 64, 64)},
        mean_square,
    )


def _segmented(training: bool) -> dict[str, Tensor]:
    found = {"pixel_values": torch.randn(BATCH, 3, 64, 64)}
    return found | {"labels": torch.randint(CLASSES, (BATCH, 64, 64))} if training else found


def _video(training: bool) -> dict[str, Tensor]:
    found = {"pixel_values": torch.randn(BATCH, 2, 3, 32, 32)}
    return found | {"labels": classes()} if training else found


CASES: Final[Cases] = {
    **{kind: _classifier(kind, size, fields) for kind, (size, fields) in IMAGES.items()},
    "dpt": _depth(
        "dpt",
        {
            "image_size": 64,
            "patch_size": 16,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 16, 16],
            "fusion_hidden_size": 16,
        },
    ),
    "glpn": _depth(
        "glpn",
        {
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 3, 4],
            "decoder_hidden_size": 16,
        },
    ),
    "segformer, segmentation": Case(
        partial(
            automatic,
            "AutoModelForSemanticSegmentation",
            "segformer",
            {**IMAGES["segformer"][1], "decoder_hidden_size": 16, "num_labels": CLASSES},
        ),
        _segmented,
        loss=None,
    ),
    "videomae": Case(
        partial(
            automatic,
            "AutoModelForVideoClassification",
            "videomae",
            {**PATCHES, "num_frames": 2, "num_labels": CLASSES},
        ),
        _video,
        loss=None,
    ),
}
