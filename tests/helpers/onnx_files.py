"""ONNX files, written by torch's own exporter."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn


def exported(model: nn.Module, inputs: tuple[Any, ...], path: Path, **options: Any) -> Path:
    """Export with the exporter that needs no other package; inputs are named x0, x1, ..."""
    names = [f"x{i}" for i in range(len(inputs))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, but the new exporter needs onnxscript
        torch.onnx.export(model.eval(), inputs, path, dynamo=False, input_names=names, **options)
    return path
