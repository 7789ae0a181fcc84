"""Loads targets of the command line: a function that returns a model, ``hf:name``, or a file."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import networkx as nx

from graphs.files import file_error_message, missing_file
from graphs.graph_file import load_graph
from graphs.optimizer import Optimizer
from graphs.precision import FULL
from graphs.text import suggestion
from placer.sources.names import (
    TargetError,
    file_named,
    is_exported,
    is_graph_file,
    is_huggingface,
    is_onnx,
)

if TYPE_CHECKING:
    from graphs.extract import Workload


MODULE: Final = "placer_target_"
"""Begins the names of the modules of targets, which no other process can import."""
INSTALLED_AS: Final = {
    "cv2": "opencv-python",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "yaml": "pyyaml",
    "torch_geometric": "torch-geometric",
}
"""{package: its name at PyPI}, where it differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The name of a model or graph, and the step to take of a model."""

    name: str
    training: bool = True
    optimizer: Optimizer | None = None
    dtype: str = FULL

    @property
    def is_graph(self) -> bool:
        """Return whether it names a graph file."""
        return is_graph_file(self.name)

    def load(self, *, weights: bool = True) -> Workload:
        """Load the step; see :func:`load_step`."""
        step = load_step(self.name, training=self.training, weights=weights)
        return replace(step, optimizer=self.optimizer, dtype=self.dtype)


def load_step(target: str, *, training: bool, weights: bool = True) -> Workload:
    """Load the step that a target names.

    * ``hf:name``: a transformers model, see :mod:`placer.sources.huggingface`;
    * ``model.pt2``: an exported program, see :mod:`placer.sources.exported`;
    * ``model.onnx``: an ONNX file, see :mod:`placer.sources.onnx`;
    * otherwise a function without arguments that returns ``(model, inputs)``,
      ``(model, inputs, loss)`` or ``(model, inputs, loss, target)``, the arguments of
      :meth:`graphs.extract.Workload.of`.

    Without ``weights`` only the graph is needed: a model of transformers is then created on the
    meta device, without memory; a function creates its model as always.
    """
    if is_huggingface(target):
        from placer.sources import huggingface

        return huggingface.load(
            huggingface.Request.parse(target), training=training, weights=weights
        )
    if training and (is_onnx(target) or is_exported(target)):
        raise TargetError(
            f"{target.partition('?')[0]} holds the inference of a model and can be placed for that "
            "only. To place training, give the function that makes the model: "
            "path/to/model.py:function",
            remedy="inference",
        )
    if is_onnx(target):
        from placer.sources import onnx

        return onnx.load(target)
    if is_exported(target):
        from placer.sources import exported

        return exported.load(Path(target))
    path, name = _function_named(target)
    function = _function(_module(path), name, str(path))
    try:
        made = function()
    except SystemExit as leaving:
        raise TargetError(f"{target} {_left(leaving)} instead of returning a model") from leaving
    except Exception as error:
        missing = _missing_package(target, error)
        message = f"{target} failed: {type(error).__name__}: {error}"
        raise TargetError(missing or message) from error
    return _step(made, target, training)


def check_target(target: str) -> None:
    """Raise TargetError if the form of a target is unknown, or its file does not exist."""
    if is_huggingface(target):
        return
    path = file_named(target) or _function_named(target)[0]
    if not path.exists():
        raise TargetError(missing_file(path))


def load_function(reference: str) -> Callable[..., object]:
    """Load the function that ``path/to/file.py:function`` names, from the target's module if it is.

    Its classes are then those of the target.
    """
    path, _, name = reference.rpartition(":")
    if not path or not name:
        raise TargetError(f"{reference!r} is no function: write path/to/file.py:function")
    return _function(_loaded(Path(path)) or _module(Path(path)), name, path)


def target_modules() -> list[ModuleType]:
    """Return the modules of the files of targets that were loaded."""
    return [module for name, module in sys.modules.items() if name.startswith(MODULE)]


def load_graph_target(target: str) -> nx.DiGraph[str]:
    """Read the graph file that a target names."""
    try:
        return load_graph(Path(target))
    except OSError as error:
        raise TargetError(file_error_message(error)) from error
    except ValueError as error:
        raise TargetError(str(error)) from error


def _function_named(target: str) -> tuple[Path, str]:
    path, colon, name = target.rpartition(":")
    if target.removesuffix(":").endswith(".py"):
        raise TargetError(_without_function(Path(target.removesuffix(":"))))
    if not colon or not path or not name:
        raise TargetError(
            f"target {target!r} is neither path/to/model.py:function, nor hf:name of a model of "
            "transformers, nor an exported program (.pt2, .onnx), nor a graph file (.json)"
        )
    return Path(path), name


def _loaded(path: Path) -> ModuleType | None:
    """Return the module of a target's file, None if it was not loaded."""
    return next((module for module in target_modules() if _is_of(module, path)), None)


def _is_of(module: ModuleType, path: Path) -> bool:
    return Path(module.__file__ or "").resolve() == path.resolve()


def _module(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(missing_file(path))
    name = f"{MODULE}{path.stem}"
    while name in sys.modules and not _is_of(sys.modules[name], path):
        name += "_"  # two files of one name
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Appended, so that files beside the target do not shadow installed packages.
    sys.path.append(str(path.resolve().parent))
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except SystemExit as leaving:
        raise TargetError(
            f"{path} {_left(leaving)} while it was imported; put what runs it as a script under "
            'if __name__ == "__main__"'
        ) from leaving
    except MemoryError:
        raise
    except Exception as error:
        if "failed to map segment" in str(error):
            raise MemoryError(str(error)) from error
        missing = _missing_package(str(path), error)
        message = f"{path} cannot be imported: {type(error).__name__}: {error}"
        raise TargetError(missing or message) from error
    return module


def _missing_package(what: str, error: Exception) -> str:
    """Return the message about a package that is not installed, "" for any other error."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not package.isidentifier() or package in sys.modules or find_spec(package) is not None:
        return ""
    return (
        f"{what} needs {package}, which is not installed: "
        f"pip install {INSTALLED_AS.get(package, package)}, or put {package}.py beside the file "
        "if it is your own"
    )


def _left(leaving: SystemExit) -> str:
    return f"called sys.exit({'' if leaving.code is None else repr(leaving.code)})"


def _function(module: ModuleType, name: str, path: str) -> Callable[[], object]:
    functions: dict[str, Callable[[], object]] = {
        key: value
        for key, value in vars(module).items()
        if callable(value) and not key.startswith("_")
    }
    if name in functions:
        return functions[name]
    defined = [k for k, v in functions.items() if getattr(v, "__module__", "") == module.__name__]
    raise TargetError(
        f"{path} has no function {name!r}; it defines {', '.join(defined) or 'none'}"
        + suggestion(name, defined)
    )


def _without_function(path: Path) -> str:
    """Return a message for a target that lacks the name of a function; the file is not run."""
    if not path.is_file():
        return missing_file(path)
    makers = [f"{path}:{name}" for name in _makers(path)]
    advice = f"did you mean {' or '.join(makers)}?" if makers else f"write {path}:NAME"
    return f"target {path} names no function that makes the model; {advice}"


def _makers(path: Path) -> list[str]:
    """Return the public functions of a file that need no arguments and return something."""
    try:
        statements = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):
        return []
    return [
        node.name
        for node in statements
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and len(node.args.posonlyargs + node.args.args) == len(node.args.defaults)
        and None not in node.args.kw_defaults
        and any(isinstance(part, ast.Return) and part.value for part in ast.walk(node))
    ]


def _step(made: object, name: str, training: bool) -> Workload:
    from torch import nn

    from graphs.extract import Workload

    parts: tuple[Any, ...] = made if isinstance(made, tuple) else (made,)
    if len(parts) not in (2, 3, 4) or not isinstance(parts[0], nn.Module):
        shown = ", ".join(type(part).__name__ for part in parts)
        raise TargetError(
            f"{name} must return (model, inputs), (model, inputs, loss) or (model, inputs, loss, "
            f"target) with a torch.nn.Module first; it returned ({shown})"
        )
    loss, target = (*parts[2:], None, None)[:2]
    if loss is not None and not callable(loss):
        raise TargetError(f"{name}: the loss, third of what it returns, cannot be called")
    return Workload.of(parts[0], parts[1], loss, target=target, training=training)
