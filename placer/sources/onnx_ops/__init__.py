"""Conversion of ONNX operators to torch: one module per kind of operator."""

from __future__ import annotations

from typing import Final

from placer.sources.onnx_ops import elementwise, layers, shapes
from placer.sources.onnx_ops.node import Node, Rule, UnsupportedError

__all__ = ["RULES", "Node", "UnsupportedError"]

RULES: Final[dict[str, Rule]] = elementwise.RULES | layers.RULES | shapes.RULES
"""{ONNX operator: rule}."""
