"""Extraction of the graph of one step, and of the program that runs it, from a model.

Names are loaded on first use: a worker process needs only the program, and the modules that trace
models take longer to import than all the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from graphs.extract.extraction import Extraction, FallBack, extract
    from graphs.workload import ExtractionError, StepError, Workload

AUTO: Final = "auto"
"""The first extractor that accepts the step."""
HOMES: Final = {
    **dict.fromkeys(("Extraction", "FallBack", "extract"), "graphs.extract.extraction"),
    **dict.fromkeys(("ExtractionError", "StepError", "Workload"), "graphs.workload"),
}

__all__ = ["AUTO", "Extraction", "ExtractionError", "FallBack", "StepError", "Workload", "extract"]


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)
