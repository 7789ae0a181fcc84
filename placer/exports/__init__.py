"""Exports of placements to other runtimes: one function per format, found by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final

from graphs.names import suggestion

if TYPE_CHECKING:
    from placer.exports.format import Format


@dataclass(frozen=True, slots=True)
class FormatEntry:
    """A format in the registry: its function, imported on first use, and a line of help."""

    function: str  # "module:function", the module in this package
    description: str


FORMATS: Final[Mapping[str, FormatEntry]] = {
    "device-map": FormatEntry(
        "device_map:device_map",
        "Hugging Face: {module: GPU}, for from_pretrained and accelerate's dispatch_model",
    ),
    "pipeline": FormatEntry(
        "pipelining:pipeline",
        "torch.distributed.pipelining: modules that stages begin with (split_spec)",
    ),
    "layer-counts": FormatEntry(
        "layer_counts:layer_counts",
        "layers per stage: VLLM_PP_LAYER_PARTITION, torchtitan's module_fqns_per_model_part",
    ),
    "override-regex": FormatEntry(
        "override_patterns:override_patterns",
        "llama.cpp: where the experts are, for --override-tensor",
    ),
}
"""{format name: its entry}; another format is a line here and a module."""


def format_named(name: str) -> Format:
    """Return the format with this name."""
    if name not in FORMATS:
        raise ValueError(
            f"there is no format {name!r}, there are {', '.join(FORMATS)}"
            f"{suggestion(name, FORMATS)}"
        )
    module, _, function = FORMATS[name].function.partition(":")
    write: Format = getattr(import_module(f"placer.exports.{module}"), function)
    return write
