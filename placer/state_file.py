"""Nested state of tensors, numbers and strings in one safetensors file; nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from graphs.strict_json import brief, parse_json
from graphs.whole_file import checksum, write_whole

_KEY: Final = "placer"
_CHECKSUM: Final = "sha256"
_TENSOR: Final = "tensor"


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write dicts, lists, tuples, tensors, numbers, strings, None; the file is complete or absent.

    A new file is readable by its owner only.

    Raises:
        TypeError: the state contains something else.
        OSError: it cannot be written.
    """
    tensors: dict[str, torch.Tensor] = {}
    skeleton = json.dumps(_plain(state, tensors))
    metadata = {_KEY: skeleton, _CHECKSUM: _checksum(skeleton, tensors)}
    write_whole(path, save(tensors, metadata), private=True)


def read_state(path: Path) -> dict[str, Any]:
    """Return what :func:`write_state` wrote, tensors on the CPU.

    Raises:
        ValueError: it is not such a file, or is damaged.
        OSError: it cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no dict
        skeleton = metadata[_KEY]
        if metadata.get(_CHECKSUM) != _checksum(skeleton, tensors):
            raise ValueError("it is damaged; without --resume the run begins anew")
        content = parse_json(skeleton, lambda content: content, printable=False)
        state = _restored(content, tensors)
    except (KeyError, TypeError, SafetensorError, ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{path}: not the state of a rank: {brief(why)}") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path}: not the state of a rank")
    return state


def _checksum(skeleton: str, tensors: Mapping[str, torch.Tensor]) -> str:
    parts = {
        f"{name} {tensor.dtype} {tuple(tensor.shape)}": tensor.reshape(-1).view(torch.uint8).numpy()
        for name, tensor in tensors.items()
    }
    return checksum(skeleton, {name: part.data for name, part in parts.items()})


def _plain(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    # JSON form of a value: containers and tensors become lists that begin with their type.
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()
        return [_TENSOR, name]
    if isinstance(value, Mapping):
        return ["dict", [[_plain(k, tensors), _plain(v, tensors)] for k, v in value.items()]]
    if isinstance(value, list | tuple):
        return [type(value).__name__, [_plain(item, tensors) for item in value]]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"state holds a {type(value).__name__}, which no file of states can hold")


def _restored(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    match kind:
        case "tensor":
            return tensors[content]
        case "dict":
            return {_restored(k, tensors): _restored(v, tensors) for k, v in content}
        case "list":
            return [_restored(item, tensors) for item in content]
        case "tuple":
            return tuple(_restored(item, tensors) for item in content)
    raise ValueError(f"there is no {kind!r} in such a file")
