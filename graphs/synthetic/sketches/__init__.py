"""Graphs of well-known models, sketched without torch from their sizes."""

from graphs.synthetic.sketches.inception import inception
from graphs.synthetic.sketches.sequences import moe, nmt, transformer
from graphs.synthetic.sketches.sharded import matrix_chain, sharded_feed_forward, sharded_layer

__all__ = [
    "inception",
    "matrix_chain",
    "moe",
    "nmt",
    "sharded_feed_forward",
    "sharded_layer",
    "transformer",
]
