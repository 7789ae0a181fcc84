"""Custom operators of a program: what registered them is found here and loaded in every worker.

Operators of PyTorch itself are known wherever torch is imported. Others exist once the module that
registers them (``torch.library``) was imported, or their library was loaded.
"""

from __future__ import annotations

import operator
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final

import torch
from torch._library.custom_ops import OPDEFS

from graphs.extract.export.forward import ForwardProgram
from graphs.extract.export.functions import OwnFunction
from graphs.extract.program import StepProgram
from graphs.workload import ExtractionError

OF_TORCH: Final = ("aten", "prims")
"""Namespaces of torch, which every worker knows."""
OF_WORKERS: Final = frozenset({"OMP_NUM_THREADS"})
"""Variables that workers keep: libraries must not start threads there."""
REGISTERED_AT: Final = re.compile(r"registered at (.+\.py):\d+")
"""Matches where a kernel or a schema was registered from Python, in texts of the dispatcher."""
TORCH: Final = Path(torch.__file__).parent


@dataclass(frozen=True, slots=True)
class Registrations:
    """Modules as (name, file) and libraries that register operators.

    They are imported with the path and the environment of the process that asks for it.
    """

    modules: tuple[tuple[str, str], ...] = ()
    libraries: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def load(self) -> None:
        """Register the operators in this process."""
        os.environ.update(self.environment)
        sys.path += [folder for folder in self.path if folder not in sys.path]
        for library in self.libraries:
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        for name, file in self.modules:
            spec = _spec(name)
            if spec is not None and spec.origin == file:
                import_module(name)
            else:  # it was loaded from its file, under a name of its own
                _load(name, file)


def registrations(program: StepProgram, forward: ForwardProgram | None = None) -> Registrations:
    """Return what registered the custom operators of a program in this process.

    For workers that run a ``forward`` program these are also the modules of its functions.

    Raises:
        ExtractionError: it was the script that runs, or no module.
    """
    targets = {call.target for call in program.calls}
    custom = sorted(t for t in targets if t.partition(".")[0] not in OF_TORCH)
    calls = () if forward is None else forward.calls
    functions = {call.target for call in calls if isinstance(call.target, OwnFunction)}
    if not custom and not functions:
        return Registrations()
    found = {own.function.__module__: _file_of(own) for own in functions}
    for target in custom:
        for name in _modules(target):
            file = getattr(sys.modules.get(name), "__file__", None)
            if name == "__main__" or file is None:
                raise ExtractionError(
                    f"workers cannot register the operator {target}, which {name} registered: "
                    "define it in a module of its own, and import that"
                )
            found[name] = file
    libraries = tuple(sorted(torch.ops.loaded_libraries))
    environment = {name: text for name, text in os.environ.items() if name not in OF_WORKERS}
    return Registrations(
        tuple(found.items()), libraries, tuple(sys.path), tuple(environment.items())
    )


def _file_of(own: OwnFunction) -> str:
    """Return the file of the module in which workers find a function by its name."""
    cls, name = own.function, own.function.__module__
    module = None if name == "__main__" else sys.modules.get(name)
    file = getattr(module, "__file__", None)
    with suppress(AttributeError):
        if file is not None and operator.attrgetter(cls.__qualname__)(module) is cls:
            return str(file)
    raise ExtractionError(
        f"workers cannot import the function {own.qualified_name}, which has a backward of its "
        "own: define it at the top of a module of its own, and import that"
    )


def _modules(target: str) -> Iterator[str]:
    """Yield the modules that registered an operator, except those of torch."""
    namespace, name, overload = target.split(".")
    qualified = f"{namespace}::{name}"
    if (definition := OPDEFS.get(qualified)) is not None:
        yield definition._init_fn.__module__
    full = qualified if overload == "default" else f"{qualified}.{overload}"
    text = torch._C._dispatch_dump(full)
    files = {file for file in REGISTERED_AT.findall(text) if TORCH not in Path(file).parents}
    by_file = {getattr(module, "__file__", None): name for name, module in [*sys.modules.items()]}
    for file in sorted(files):
        yield by_file.get(file, file)


def _spec(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    except (ImportError, ValueError):
        return None


def _load(name: str, file: str) -> ModuleType:
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
