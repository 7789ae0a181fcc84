"""Exempts all objects so far from garbage collection; imported last where ranks are forked.

A collection in a rank would write to every one of them, and so copy the memory they lie in.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
