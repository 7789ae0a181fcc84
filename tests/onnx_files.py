"""Files of ONNX as torch's own exporter writes them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn


def exported(model: nn.Module, inputs: tuple[Any, ...], path: Path, **options: Any) -> Path:
    """Export by the exporter that needs no further package; inputs are called x0, x1, ..."""
    names = [f"x{i}" for i in range(len(inputs))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, but the other one needs onnxscript
        torch.onnx.export(model.eval(), inputs, path, dynamo=False, input_names=names, **options)
    return path
