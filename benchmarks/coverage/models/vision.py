"""Models of torchvision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Final

from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.coverage.case import CLASSES, Case, Cases, classes, classifier, images, numbers

SMALL: Final = (
    "resnet18",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "shufflenet_v2_x0_5",
    "mnasnet0_5",
    "regnet_y_400mf",
    "squeezenet1_1",
    "densenet121",
)


def _named(name: str, **options: Any) -> nn.Module:
    models = import_module("torchvision.models")
    model: nn.Module = models.get_model(name, weights=None, num_classes=CLASSES, **options)
    return model


def _of_class(name: str, **options: Any) -> nn.Module:
    model: nn.Module = getattr(import_module("torchvision.models"), name)(**options)
    return model


def _googlenet_loss(output: Any, target: Tensor) -> Tensor:
    losses = [F.cross_entropy(logits, target) for logits in output]
    return losses[0] + 0.3 * losses[1] + 0.3 * losses[2]


def _convnext() -> nn.Module:
    module = import_module("torchvision.models.convnext")
    stages = [module.CNBlockConfig(8, 16, 1), module.CNBlockConfig(16, None, 1)]
    model: nn.Module = module.ConvNeXt(stages, num_classes=CLASSES)
    return model


def _segmenter(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        models = import_module("torchvision.models")
        model: nn.Module = models.get_model(
            name, weights=None, weights_backbone=None, num_classes=CLASSES
        )
        return model

    return make


CASES: Final[Cases] = {
    **{name: classifier(partial(_named, name), 64) for name in SMALL},
    "googlenet": Case(
        partial(_named, "googlenet", aux_logits=True, init_weights=False),
        images(96),
        _googlenet_loss,
        classes,
    ),
    "vision transformer": classifier(
        partial(
            _of_class,
            "VisionTransformer",
            image_size=32,
            patch_size=8,
            num_layers=2,
            num_heads=2,
            hidden_dim=32,
            mlp_dim=64,
            num_classes=CLASSES,
        ),
        32,
    ),
    "swin": classifier(
        partial(
            _of_class,
            "SwinTransformer",
            patch_size=[4, 4],
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=[4, 4],
            num_classes=CLASSES,
        ),
        32,
    ),
    "convnext": classifier(_convnext, 32),
    "lraspp_mobilenet_v3_large": Case(_segmenter("lraspp_mobilenet_v3_large"), images(64)),
    "deeplabv3_mobilenet_v3_large": Case(_segmenter("deeplabv3_mobilenet_v3_large"), images(64)),
    "r3d_18": Case(partial(_named, "r3d_18"), numbers((2, 3, 4, 32, 32)), F.cross_entropy, classes),
}
