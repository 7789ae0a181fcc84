"""``model.pt2``: a program written by ``torch.export.save``, with its example inputs.

Loading such a file, torch evaluates size expressions in it, writes its names into Python code that
it runs, looks operators up by any dotted name, imports modules named in container descriptions, and
unpickles what the file marks as pickled. Therefore the file is read once, and everything of this
kind that ``torch.export.save`` does not write for a program of PyTorch's own operators is refused.
"""

from __future__ import annotations

import inspect
import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.export.pt2_archive import _package
from torch.utils._pytree import tree_structure

from envs.hardware.discover import available_memory_bytes
from graphs.extract import Workload
from graphs.extract.errors import quiet
from graphs.files import file_error_message, missing_file, read_limited
from graphs.strict_json import brief
from graphs.text import check_printable
from placer.sources.names import TargetError
from placer.sources.size_expressions import check_expression

Archive = Any
"""``torch._C.PyTorchFileReader``, with which torch reads the file, too; it has no types."""

PROGRAM: Final = "models/model.json"
INPUTS: Final = "data/sample_inputs/model.pt"
PAYLOADS: Final = (
    "data/weights/model_weights_config.json",
    "data/constants/model_constants_config.json",
)
MEMBER: Final = re.compile(
    r"models/model\.json"
    r"|data/weights/(weight_\d+|model_weights_config\.json)"
    r"|data/constants/(tensor_\d+|model_constants_config\.json)"
    r"|data/sample_inputs/model\.pt"
    r"|extra/.+|archive_format|archive_version|byteorder|\.data/(version|serialization_id)",
    re.ASCII,
)
PAYLOAD: Final = re.compile(r"(weight|tensor)_\d+", re.ASCII)
NAME: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
"""Names of values, arguments and keywords, which torch writes into code unchanged."""
OPERATOR: Final = re.compile(
    r"torch\.ops\.(aten|prims|quantized_decomposed|torchvision)\.(\w+)\.(\w+)", re.ASCII
)
FUNCTION: Final = re.compile(
    r"_operator\.(eq|ne|le|ge|lt|gt|neg|pos|abs|add|sub|mul|truediv|floordiv|mod|pow|and_|or_|xor"
    r"|not_|lshift|rshift|getitem)"
    r"|math\.(trunc|floor|ceil|sqrt)"
    r"|torch\._?sym_[a-z0-9_]+"
    r"|torch\.ops\.higher_order\.(cond|while_loop|while_loop_stack_output|map_impl|scan"
    r"|associative_scan|strict_mode|out_dtype|wrap|wrap_with_autocast|wrap_with_set_grad_enabled"
    r"|tag_activation_checkpoint|flex_attention|flex_attention_backward|auto_functionalized"
    r"|auto_functionalized_v2|with_effects|invoke_subgraph)"
    r"|torch\._functorch\.predispatch\.(lazy_load_decompositions|_(add_batch_dim|remove_batch_dim|vmap_increment_nesting"
    r"|vmap_decrement_nesting|make_dual|unpack_dual|enter_dual_level|exit_dual_level"
    r"|jvp_increment_nesting|jvp_decrement_nesting|unwrap_for_grad))",
    re.ASCII,
)
REACHING_OUT: Final = frozenset({"from_file", "_print"})
"""Operators whose kernels open files or write to the terminal."""
FACTORIES: Final = frozenset({"list", "dict", "set", "tuple", "int", "float", "bool", "str"})


def load(path: Path) -> Workload:
    """Return the inference step of an exported program on its saved example inputs."""
    content = _checked(path)
    try:
        with quiet():
            # Like torch.export.load without tracebacks and formats before 2.8, which hold pickles.
            program = _package.load_pt2(io.BytesIO(content)).exported_programs["model"]
            model = program.module(check_guards=False)
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # torch's own text holds the node and a traceback
            cause = cause.__cause__
        reason = f"{type(cause).__name__}: {cause}" if cause is not error else str(error)
        raise TargetError(brief(f"torch cannot load {path}: {reason}")) from error
    if program.example_inputs is None:
        raise TargetError(f"{path} was saved without example inputs, so there is no step to place")
    inputs, keywords = program.example_inputs
    try:
        inspect.signature(model.forward).bind(*inputs, **keywords)
        is_taken = tree_structure((tuple(inputs), dict(keywords))) == program.call_spec.in_spec
    except (TypeError, ValueError):
        is_taken = False
    if not is_taken:
        raise TargetError(f"{path} does not take the example inputs it was saved with")
    for module in model.modules():
        module.training = False  # train() and eval() refuse: the mode is part of the program
    return Workload(model, tuple(inputs), dict(keywords), training=False)


def _checked(path: Path) -> bytes:
    """Return the content of a file that is safe to load."""
    if not path.is_file():
        raise TargetError(missing_file(path))
    try:
        content = read_limited(path, available_memory_bytes())
    except OSError as error:
        raise TargetError(file_error_message(error)) from error
    except ValueError as error:
        raise TargetError(f"{path}: {error}") from error
    try:
        check_archive(content)
    except ValueError as error:
        raise TargetError(f"{path} {brief(str(error))}") from error
    return content


def check_archive(content: bytes) -> None:
    """Check that loading an archive runs nothing but operators on tensors.

    Else a ValueError is raised, whose message continues after the name of the file.
    """
    try:
        archive: Archive = torch._C.PyTorchFileReader(io.BytesIO(content))
        members: list[str] = archive.get_all_records()
    except RuntimeError:
        raise ValueError("is not a program that torch.export.save wrote") from None
    if len(set(members)) < len(members):
        raise ValueError("has several members of the same name")
    for member in members:
        if not MEMBER.fullmatch(member):
            raise ValueError(
                f"holds {member!a}, which is neither a tensor nor part of the graph; placer "
                "does not unpickle objects. Save it anew with torch.export.save, without custom "
                "objects"
            )
    _check(_content(archive, PROGRAM), "")
    for member in PAYLOADS:
        _check_payloads(_content(archive, member), frozenset(members), member.rpartition("/")[0])
    if INPUTS in members:
        _check_inputs(_record(archive, INPUTS))


def _record(archive: Archive, member: str) -> bytes:
    try:
        content: bytes = archive.get_record(member)
    except RuntimeError:
        raise ValueError(f"lacks {member}, or it is damaged") from None
    return content


def _content(archive: Archive, member: str) -> dict[str, Any]:
    try:
        content = json.loads(_record(archive, member))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"has no JSON in {member}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"has no JSON object in {member}")
    return content


def _check_payloads(content: dict[str, Any], members: frozenset[str], folder: str) -> None:
    _check(content, "")
    tensors = content.get("config")
    if not isinstance(tensors, dict):
        raise ValueError(f"has no list of the tensors in {folder}")
    for name, payload in tensors.items():
        _check_path(name, folder)
        if not isinstance(payload, dict) or payload.get("use_pickle") is not False:
            raise ValueError(f"has pickled objects: {folder} {name!a}")
        file = payload.get("path_name")
        if (
            not isinstance(file, str)
            or not PAYLOAD.fullmatch(file)
            or f"{folder}/{file}" not in members
        ):
            raise ValueError(f"has no tensor {file!a} in {folder}")


def _check_inputs(content: bytes) -> None:
    """Check that the example inputs are tensors, numbers and strings.

    torch first tries to load them as such, and otherwise unpickles them.
    """
    if not content:
        return
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception:  # noqa: BLE001  # damaged files make torch raise anything
        raise ValueError(
            "has example inputs other than tensors, numbers, texts, lists, tuples and dicts; "
            "placer does not unpickle objects"
        ) from None


def _check(value: object, key: str) -> None:
    """Check everything in a JSON value, each string and number by its key.

    A dict or list where torch expects a string makes torch fail. So it is harmless that names
    defined by the file may be keys, too.
    """
    if isinstance(value, list):
        for item in value:
            _check(item, key)
    elif isinstance(value, dict):
        for name, item in value.items():
            check_printable(name, key)
            if key == "range_constraints":
                check_expression(name)
            if name == "expr_str" and not isinstance(item, str):
                raise ValueError("has an expression of sizes that is no text")
            _check(item, name)
    else:
        RULES.get(key, check_printable)(value, key)


def _check_number(value: object, key: str) -> None:
    if value is not None and not isinstance(value, int):
        raise ValueError(f"has {value!a} as {key}, which is not a whole number")


def _check_size(value: object, key: str) -> None:
    check_expression(_text(value, key))


def _check_operator(value: object, key: str) -> None:
    target = _text(value, key)
    if FUNCTION.fullmatch(target):
        return
    parts = OPERATOR.fullmatch(target)
    if parts is None or parts[2] in REACHING_OUT or not _is_registered(*parts.groups()):
        raise ValueError(f"calls {target!a}, which is no operator of PyTorch on tensors")


def _is_registered(namespace: str, name: str, overload: str) -> bool:
    """Return whether an operator has a kernel; TorchScript functions such as ``save`` have none."""
    suffix = "" if overload == "default" else f".{overload}"
    try:
        return torch._C._dispatch_has_kernel(f"{namespace}::{name}{suffix}")
    except RuntimeError:  # not a valid operator name
        return False


def _check_name(value: object, key: str) -> None:
    if value not in (None, "") and not NAME.fullmatch(_text(value, key)):
        raise ValueError(f"has {value!a} as {key}, which is not a name")


def _check_path(value: object, key: str) -> None:
    """Check the path of a parameter or module, whose parts torch writes into code, in quotes."""
    parts = _text(value, key).split(".")
    for part in parts:
        if not part.isprintable() or set(part) & set("\"'\\") or re.fullmatch("__.*__", part):
            raise ValueError(f"has {value!a} as {key}, which is not the path of a module")


def _check_device(value: object, key: str) -> None:
    if not re.fullmatch("[a-z]+", _text(value, key), re.ASCII):
        raise ValueError(f"has {value!a} as a device")


def _check_lines(value: object, key: str) -> None:
    """Check a multi-line string; it is not evaluated."""
    check_printable(_text(value, key).replace("\n", " ").replace("\t", " "), key)


def _refuse_objects(value: object, key: str) -> None:
    raise ValueError(f"has custom objects: {value!a}")


def _check_tree(value: object, key: str) -> None:
    """Check how inputs or outputs are nested in containers, stored as JSON in a string."""
    try:
        _, root = json.loads(_text(value, key))
        _check_container(root)
        if key == "in_spec" and root["type"] is not None:
            for part in root["children_spec"]:
                if part["type"] == "builtins.dict":  # the keywords
                    for name in json.loads(part["context"]):
                        _check_name(name, "keyword")
    except (LookupError, TypeError, RecursionError, json.JSONDecodeError):
        raise ValueError(f"has an {key} that torch does not write") from None


def _check_container(node: dict[str, Any]) -> None:
    context = node["context"]
    if node["type"] == "collections.defaultdict":
        if context["default_factory_module"] != "builtins" or (
            context["default_factory_name"] not in FACTORIES
        ):
            raise ValueError("has a defaultdict that calls a function of its own")
        context = context["dict_context"]
    elif isinstance(context, str):
        try:
            context = json.loads(context)
        except json.JSONDecodeError:  # the name of a named tuple
            context = str(context)
    _check_keys(context)
    for child in node["children_spec"]:
        _check_container(child)


def _check_keys(context: object) -> None:
    """Refuse dicts: torch imports the module of an enum that one describes."""
    if isinstance(context, dict):
        raise ValueError("has containers whose keys are neither texts nor numbers")
    if isinstance(context, list):
        for item in context:
            _check_keys(item)
    else:
        check_printable(context, "a key")


def _text(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"has {value!a} as {key}, which is not a text")
    return value


NAMES: Final = ("name", "as_name", "forward_arg_names")
PATHS: Final = ("parameter_name", "buffer_name", "tensor_constant_name", "user_input_name", "fqn")
NUMBERS: Final = (
    *("as_int", "as_ints", "as_int_lists", "as_scalar_type", "as_memory_format", "as_layout"),
    *("min_val", "max_val", "index", "dtype", "layout", "kind", "major", "minor"),
)
RULES: Final[Mapping[str, Callable[[object, str], None]]] = MappingProxyType(
    {
        "expr_str": _check_size,
        "target": _check_operator,
        "as_operator": _check_operator,
        "class_fqn": _refuse_objects,
        "type": _check_device,
        "in_spec": _check_tree,
        "out_spec": _check_tree,
        **dict.fromkeys(NAMES, _check_name),
        **dict.fromkeys(PATHS, _check_path),
        "stack_trace": _check_lines,
        **dict.fromkeys(NUMBERS, _check_number),
    }
)
"""{key in the JSON: check of its values}; all other values must be printable."""
