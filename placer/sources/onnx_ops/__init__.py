"""Conversion of ONNX operators to torch: one module per kind of operator."""

from __future__ import annotations

from placer.sources.onnx_ops import (  # noqa: F401  # each one adds its rules
    elementwise,
    layers,
    recurrent,
    shapes,
)
from placer.sources.onnx_ops.rule import RULES, Node, UnsupportedError

__all__ = ["RULES", "Node", "UnsupportedError"]
