"""A model and example inputs -> the graph of one step and the program that runs it."""

from graphs.extract.extraction import Extraction, extract
from graphs.extract.step import ExtractionError, Step

__all__ = ["Extraction", "ExtractionError", "Step", "extract"]
