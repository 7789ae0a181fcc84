"""``model.onnx``: a file written by an ONNX exporter, as a model for inference.

After a question mark follow the sizes that the file leaves open, by their names in the file:
``model.onnx?batch=2&sequence=64``. Nothing in such a file is run as code or unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl

import torch
from torch import Tensor

from envs.hardware.discover import available_memory_bytes
from graphs.extract import Workload
from graphs.extract.errors import quiet
from graphs.files import file_error_message, missing_file
from graphs.text import check_printable
from placer.sources.names import TargetError

LARGEST_FILE_BYTES: Final = 2**31
"""Limit of protocol buffers; larger models have their weights in separate files."""
NOTES: Final = ("doc_string", "metadata_props")
"""Descriptive fields, which may have line breaks and are not shown."""
SEED: Final = 0


def load(target: str) -> Workload:
    """Return the inference step of an ONNX file on random inputs; integer inputs are 0 or 1."""
    name, _, query = target.partition("?")
    path = Path(name)
    onnx = _onnx(path)
    # Importing this module creates all rules, so it is imported only when needed.
    from placer.sources.onnx_model import build

    model = _checked(onnx, path)
    inputs = _inputs(model.graph, path, _sizes(target, query))
    opsets = [one.version for one in model.opset_import if one.domain in ("", "ai.onnx")]
    if not opsets:
        raise TargetError(f"{path} does not say which version of ONNX its operators are of")
    try:
        with quiet():
            module = build(model.graph, opsets[0], inputs)
    except ValueError as error:
        raise TargetError(f"{path}: {error}") from error
    return Workload(module, tuple(inputs.values()), training=False)


def _onnx(path: Path) -> Any:
    try:
        return import_module("onnx")
    except ModuleNotFoundError as error:
        raise TargetError(
            f"{path} needs {error.name}, which is not installed: pip install 'device-placer[onnx]'"
        ) from error


def _checked(onnx: Any, path: Path) -> Any:
    """Return the parsed file with its external data, with model-local functions inlined."""
    from placer.sources.onnx_ops.node import bytes_of

    if not path.is_file():
        raise TargetError(missing_file(path))
    if (size := path.stat().st_size) > LARGEST_FILE_BYTES:
        raise TargetError(
            f"{path} has {size / 1e9:.1f} GB, but an ONNX file holds 2.1 GB at most; save its "
            "weights as external data"
        )
    try:
        model = onnx.load(str(path), load_external_data=False)
    except OSError as error:
        raise TargetError(file_error_message(error)) from error
    except Exception as error:
        raise TargetError(f"{path} is no ONNX file, or not a whole one") from error
    if not model.graph.node:
        raise TargetError(f"{path} is no ONNX file, or one without any operator")
    try:
        for text in _texts(model):
            check_printable(text, f"{path}: a name")
    except ValueError as error:
        raise TargetError(str(error)) from error
    try:
        _check_room(sum(map(bytes_of, model.graph.initializer)), "weights", path)
        onnx.external_data_helper.load_external_data_for_model(model, str(path.parent))
        return onnx.inliner.inline_local_functions(model) if model.functions else model
    except TargetError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise TargetError(f"{path} cannot be read: {reason or type(error).__name__}") from error


def _texts(message: Any) -> Iterator[str]:
    """Yield the strings in a protocol buffers message and its nested messages."""
    for field, value in message.ListFields():
        if field.name not in NOTES and field.type in (field.TYPE_MESSAGE, field.TYPE_STRING):
            for item in value if field.is_repeated else [value]:
                if field.type == field.TYPE_STRING:
                    yield item
                else:
                    yield from _texts(item)


def _sizes(target: str, query: str) -> dict[str, int]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        sizes = {name: int(text) for name, text in pairs}
    except ValueError as error:
        raise TargetError(f"target {target!r}: {error}; write ?name=size&name=size") from error
    for name, size in sizes.items():
        if size < 1:
            raise TargetError(f"target {target!r}: {name} is {size}, not a number above 0")
    return sizes


def _inputs(graph: Any, path: Path, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Return random inputs by name, without initializers, which old files list as inputs."""
    from placer.sources.onnx_ops.node import dtype_of

    constants = {one.name for one in graph.initializer}
    wanted = [one for one in graph.input if one.name not in constants]
    for one in wanted:
        if not one.type.HasField("tensor_type") or not one.type.tensor_type.HasField("shape"):
            raise TargetError(f"{path}: input {one.name!r} is no tensor of known rank")
    shapes = {
        one.name: [
            dim.dim_value or dim.dim_param or f"{one.name}.{axis}"
            for axis, dim in enumerate(one.type.tensor_type.shape.dim)
        ]
        for one in wanted
    }
    names = list(dict.fromkeys(d for dims in shapes.values() for d in dims if isinstance(d, str)))
    if unknown := [name for name in sizes if name not in names]:
        has = f"the open sizes {', '.join(names)}" if names else "no open sizes"
        raise TargetError(f"{path} has {has}, not {', '.join(unknown)}")
    if missing := [name for name in names if name not in sizes]:
        example = "&".join(f"{name}={sizes.get(name, 1)}" for name in names)
        raise TargetError(
            f"{path} leaves the size of {', '.join(missing)} open: give it, such as in "
            f"'{path}?{example}'"
        )
    dims = {
        name: [d if isinstance(d, int) else sizes[d] for d in shape]
        for name, shape in shapes.items()
    }
    for name, shape in dims.items():
        if min(shape, default=0) < 0:
            raise TargetError(f"{path}: input {name!r} has the shape {shape}")
    # drawn in no more than 8 bytes each
    _check_room(8 * sum(map(math.prod, dims.values())), "inputs", path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return {
            one.name: _random(dims[one.name], dtype_of(one.type.tensor_type.elem_type))
            for one in wanted
        }


def _check_room(needed_bytes: int, what: str, path: Path) -> None:
    if needed_bytes > (free := available_memory_bytes()):
        raise TargetError(
            f"{path} needs {needed_bytes / 1e9:.1f} GB for its {what}, but {free / 1e9:.1f} GB are "
            "free here"
        )


def _random(shape: list[int], dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=torch.float32).to(dtype)
    return torch.randint(2, shape).to(dtype)
