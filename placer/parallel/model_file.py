"""Write a trained model as a safetensors file that any torch program can read."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save
from torch import nn

from graphs.whole_file import write_whole


def write_model(path: Path, module: nn.Module) -> None:
    """Write the tensors of ``state_dict`` by name; the file is complete or absent.

    Tied weights are written once, under the first of their names, as
    ``safetensors.torch.load_model`` expects.

    Raises:
        OSError: it cannot be written.
    """
    name_of: dict[int, str] = {}  # by id of the tensor
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and name_of.setdefault(id(tensor), name) == name:
            tensors[name] = tensor.detach().cpu().contiguous().clone()
    write_whole(path, save(tensors, {"format": "pt"}))
