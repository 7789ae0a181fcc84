"""Custom operators of third parties run in workers, which import what registered them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placer
from envs.core_runtime.runtime import CoreRuntime
from envs.executors.cores.custom_ops import Registrations, registrations
from envs.hardware.discover import discover
from graphs.extract import Extraction, ExtractionError, Workload, extract
from tests.helpers.folders import ROOT
from tests.helpers.placed_steps import CORES, on_cores
from tests.helpers.tiny_models import Plain, assert_same, eager, squared

OPERATOR = """
import torch
from torch import Tensor

@torch.library.custom_op("{namespace}::scaled", mutates_args=())
def scaled(x: Tensor, by: float) -> Tensor:
    return x * by

@scaled.register_fake
def _(x, by):
    return torch.empty_like(x)

scaled.register_autograd(
    lambda ctx, grad: (torch.ops.{namespace}.scaled(grad, ctx.by), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]),
)
"""
LIBRARY = """
import torch

library = torch.library.Library("{namespace}", "DEF")
library.define("scaled(Tensor x, float by) -> Tensor")
library.impl("scaled", lambda x, by: x * by, "CompositeExplicitAutograd")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder that modules can be imported from; they are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def imported(folder: Path, source: str, namespace: str) -> ModuleType:
    package = folder / f"{namespace}_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "operators.py").write_text(source.format(namespace=namespace))
    return import_module(f"{package.name}.operators")


def from_file(folder: Path, source: str, namespace: str) -> ModuleType:
    """Load a module as targets of the command line are: under a name that cannot be imported."""
    file = folder / "model.py"
    file.write_text(source.format(namespace=namespace))
    spec = importlib.util.spec_from_file_location(f"{namespace}_target", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def scaled_step(namespace: str, *, training: bool) -> Extraction:
    def forward(m: Any, x: Tensor) -> Tensor:
        out: Tensor = getattr(torch.ops, namespace).scaled(m.linear(x), 3.0)
        return out

    model = Plain(forward, linear=nn.Linear(4, 4))
    return extract(
        Workload.of(model, (torch.randn(2, 4), torch.ones(2, 4)), squared, training=training)
    )


@pytest.mark.slow_repeats
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize(
    ("load", "source", "training"),
    [(imported, OPERATOR, True), (imported, LIBRARY, False), (from_file, OPERATOR, False)],
)
def test_operators_of_other_packages_run_placed(
    load: Any, source: str, training: bool, folder: Path
) -> None:
    namespace = f"placer_test_{load.__name__}_{training}".lower()
    module = load(folder, source, namespace)
    extraction = scaled_step(namespace, training=training)
    found = registrations(extraction.program)
    assert found.modules == ((module.__name__, module.__file__),)
    expected = eager(extraction.step).output.detach()
    with on_cores(extraction) as placed:
        assert_same(placed.step(*extraction.step.inputs), expected)


def test_steps_of_pytorchs_own_operators_import_nothing() -> None:
    step = Workload.of(nn.Linear(4, 4), torch.randn(2, 4), training=False)
    assert registrations(extract(step).program) == Registrations()


def test_operators_of_the_running_script_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    namespace = "placer_test_main"
    source = OPERATOR.format(namespace=namespace)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(source, names)
    message = rf"{namespace}.scaled.default, which __main__ registered"
    extraction = scaled_step(namespace, training=False)
    with pytest.raises(ExtractionError, match=message):
        registrations(extraction.program)
    monkeypatch.setattr(CoreRuntime, "costs", None)  # nothing is measured before
    with pytest.raises(ExtractionError, match=message):
        placer.optimize(extraction.step, discover(f"core:{CORES[0]}"))


@pytest.mark.slow
def test_a_process_without_the_operators_gets_them_from_their_files(folder: Path) -> None:
    module = imported(folder, OPERATOR, "placer_test_alone")
    assert module.__file__
    found = Registrations(((module.__name__, module.__file__),), (), (str(folder),))
    script = (
        "import torch; from envs.executors.cores.custom_ops import Registrations; "
        f"{found!r}.load(); print(torch.ops.placer_test_alone.scaled(torch.ones(()), 2.0).item())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "2.0"
