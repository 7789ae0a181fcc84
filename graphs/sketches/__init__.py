"""Well-known models as graphs of a training step, without torch: sizes in, ops and bytes out."""

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
