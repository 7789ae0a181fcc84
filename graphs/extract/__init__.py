"""A model and example inputs -> the graph of one step and the program that runs it.

The names are loaded when they are first used: a worker process needs the program alone, and what
traces models takes longer to import than all of the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from graphs.extract.extraction import Extraction, FallBack, extract
    from graphs.extract.step import ExtractionError, Step, StepError

AUTO: Final = "auto"
"""The first extractor that takes the step."""

__all__ = ["AUTO", "Extraction", "ExtractionError", "FallBack", "Step", "StepError", "extract"]


def __getattr__(name: str) -> Any:
    """Load a public name, the first time it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "extraction" if name in ("Extraction", "FallBack", "extract") else "step"
    return getattr(import_module(f"{__name__}.{home}"), name)
