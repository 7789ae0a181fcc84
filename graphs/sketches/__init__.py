"""Graphs of well-known models, sketched without torch from their sizes."""

from graphs.sketches.inception import inception
from graphs.sketches.sequences import moe, nmt, transformer
from graphs.sketches.sharded import matrix_chain, sharded_feed_forward, sharded_layer

__all__ = [
    "inception",
    "matrix_chain",
    "moe",
    "nmt",
    "sharded_feed_forward",
    "sharded_layer",
    "transformer",
]
