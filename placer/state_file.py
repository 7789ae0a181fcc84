"""State files: nested dicts, lists, tensors, numbers and strings in one safetensors file.

The metadata of the file holds a format, the state as JSON with references to its tensors, and a
checksum of both. Nothing is pickled: reading a file never runs code from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from graphs.files import write_whole
from graphs.strict_json import brief, parse_json

_FORMAT: Final = "format"
_STATE: Final = "placer"
_CHECKSUM: Final = "sha256"


class StateFileError(ValueError):
    """A file does not hold the expected state; the message says why."""


def write_state(path: Path, state: Mapping[str, Any], file_format: str) -> None:
    """Write dicts, lists, tuples, tensors, arrays, numbers, strings, None; all of it or nothing.

    A new file is readable by its owner only. ``file_format`` is the name and version of the kind of
    state, such as "placer-checkpoint/6".
    """
    tensors: dict[str, torch.Tensor] = {}
    content = json.dumps(_encoded(state, tensors))
    metadata = {
        _FORMAT: file_format,
        _STATE: content,
        _CHECKSUM: _checksum(content, tensors),
    }
    write_whole(path, save(tensors, metadata), private=True)


def read_state(path: Path, file_format: str) -> dict[str, Any]:
    """Return what :func:`write_state` wrote in this format, tensors on the CPU."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no dict
        if (found := metadata.get(_FORMAT)) != file_format:
            raise ValueError(f"the format is {found!r}, this version reads {file_format!r}")
        content = metadata[_STATE]
        if metadata.get(_CHECKSUM) != _checksum(content, tensors):
            raise ValueError("it is damaged")
        state = _decoded(parse_json(content, lambda parsed: parsed, printable=False), tensors)
        if not isinstance(state, dict):
            raise ValueError("it holds no dict")
    except (KeyError, TypeError, SafetensorError, ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, ValueError) else f"it is no state file: {error!r}"
        raise StateFileError(f"{path}: {brief(why)}") from error
    return state


def _checksum(content: str, tensors: Mapping[str, torch.Tensor]) -> str:
    # Detects damage, not deliberate changes.
    digest = hashlib.sha256(content.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\0{name} {tensor.dtype} {tuple(tensor.shape)}\0{tensor.nbytes}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _encoded(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    # JSON form of a value: containers and tensors become lists that begin with their type.
    if isinstance(value, torch.Tensor | np.ndarray):
        is_tensor, name = isinstance(value, torch.Tensor), str(len(tensors))
        tensor = torch.as_tensor(value).detach().cpu()
        tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
        return ["tensor" if is_tensor else "array", name]
    if isinstance(value, Mapping):
        return ["dict", [[_encoded(k, tensors), _encoded(v, tensors)] for k, v in value.items()]]
    if isinstance(value, list | tuple):
        return [type(value).__name__, [_encoded(item, tensors) for item in value]]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"state holds a {type(value).__name__}, which no state file can hold")


def _decoded(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    match kind:
        case "tensor":
            return tensors[content]
        case "array":
            return tensors[content].numpy()
        case "dict":
            return {_decoded(k, tensors): _decoded(v, tensors) for k, v in content}
        case "list":
            return [_decoded(item, tensors) for item in content]
        case "tuple":
            return tuple(_decoded(item, tensors) for item in content)
    raise ValueError(f"there is no {kind!r} in such a file")
