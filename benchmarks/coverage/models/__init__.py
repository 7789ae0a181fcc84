"""Small models of public packages, by package; none of them needs the network."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Final, NamedTuple

from benchmarks.coverage.case import Cases


class Package(NamedTuple):
    """A package, and the module here that has a function ``cases`` for it."""

    imported: str
    module: str


PACKAGES: Final[Mapping[str, Package]] = {
    "torch": Package("torch", "plain"),
    "placer": Package("graphs.models", "reference"),
    "transformers: text": Package("transformers", "language"),
    "transformers: images": Package("transformers", "images"),
    "transformers: other": Package("transformers", "senses"),
    "torchvision": Package("torchvision", "vision"),
    "timm": Package("timm", "timm_models"),
    "vit-pytorch": Package("vit_pytorch", "lucidrains"),
    "x-transformers": Package("x_transformers", "x_models"),
    "torch_geometric": Package("torch_geometric", "graph_networks"),
    "diffusers": Package("diffusers", "diffusion"),
    "segmentation-models-pytorch": Package("segmentation_models_pytorch", "segmentation"),
    "monai": Package("monai", "medicine"),
}
SAMPLE: Final[Mapping[str, tuple[str, ...]]] = {
    "torch": (
        "mlp with batch norm",
        "lstm",
        "packed gru",
        "transformer",
        "convolutional autoencoder",
        "spectral norm",
        "checkpointing",
        "dict of inputs",
    ),
    "placer": ("resnet", "rnnlm", "moe", "dlrm"),
    "transformers: text": ("llama", "mixtral", "gpt2", "bert", "t5"),
    "transformers: images": ("vit",),
    "transformers: other": ("clip", "wav2vec2"),
}
"""20 models of packages that the development environment has."""
NOT_EXPORTED: Final[Mapping[tuple[str, bool], str]] = {
    ("packed gru", True): "modules",
    ("packed gru", False): "modules",
    ("checkpointing", True): "dispatch",
    ("wav2vec2", True): "modules",
}
"""{(model of the sample, training): its extractor} where it is not that by export."""


def is_installed(package: str) -> bool:
    """Return whether a package can be imported; it is not imported."""
    return find_spec(PACKAGES[package].imported) is not None


def cases_of(package: str) -> Cases:
    """Return the models of a package that is installed."""
    module = import_module(f"benchmarks.coverage.models.{PACKAGES[package].module}")
    cases: Cases = module.CASES
    return cases
