"""Exports of placements to other runtimes: one function per format, found by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Final

from graphs.text import suggestion

if TYPE_CHECKING:
    from placer.exports.format import Format


FORMATS: Final[Mapping[str, tuple[str, str]]] = {
    "device-map": (
        "device_map:device_map",
        "Hugging Face: {module: GPU}, for from_pretrained and accelerate's dispatch_model",
    ),
    "pipeline": (
        "pipelining:pipeline",
        "torch.distributed.pipelining: modules that stages begin with (split_spec)",
    ),
    "layer-counts": (
        "layer_counts:layer_counts",
        "layers per stage: VLLM_PP_LAYER_PARTITION, torchtitan's module_fqns_per_model_part",
    ),
    "override-regex": (
        "override_patterns:override_patterns",
        "llama.cpp: where the experts are, for --override-tensor",
    ),
}
"""{format name: ("module:function" in this package, line of help)}."""


def format_named(name: str) -> Format:
    """Return the format with this name."""
    if name not in FORMATS:
        raise ValueError(
            f"there is no format {name!r}, there are {', '.join(FORMATS)}"
            f"{suggestion(name, FORMATS)}"
        )
    module, _, function = FORMATS[name][0].partition(":")
    write: Format = getattr(import_module(f"placer.exports.{module}"), function)
    return write
