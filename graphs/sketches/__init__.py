"""Well-known models as graphs of a training step, without torch: sizes in, ops and bytes out."""

from graphs.sketches.inception import inception
from graphs.sketches.sequences import moe, nmt, transformer

__all__ = ["inception", "moe", "nmt", "transformer"]
