"""Custom operators of a program: what registered them is found here and loaded in every worker.

Operators of PyTorch itself are known wherever torch is imported. Others exist once the module that
registers them (``torch.library``) was imported, or their library was loaded.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final

import torch
from torch._library.custom_ops import OPDEFS

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


def registrations(program: StepProgram) -> Registrations:
    """Return what registered the custom operators of a program in this process.

    Raises:
        ExtractionError: it was the script that runs, or no module.
    """
    targets = {call.target for call in program.calls}
    custom = sorted(t for t in targets if t.partition(".")[0] not in OF_TORCH)
    if not custom:
        return Registrations()
    found: dict[str, str] = {}
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
