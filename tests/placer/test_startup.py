"""``import placer``: from a wheel next to folders of our names, light, and with Gymnasium."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from placer.startup import VERSION
from tests.helpers.in_turn import in_turn

IDS = ("placer/Placement-v0", "placer/Scheduler-v0")


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the wheel as pip would install it."""
    site = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def run(site: Path, folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a folder, with the wheel instead of the checkout on the path.

    -S excludes this environment's site-packages and so the editable checkout; -c puts the current
    folder first, as a user's ``python -c`` and notebooks do.
    """
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=folder,
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_folder_of_the_same_name_is_reported(site: Path, tmp_path: Path) -> None:
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "__init__.py").touch()
    done = run(site, tmp_path, "import placer")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: placer needs its own package 'envs'")


def test_without_such_a_folder_the_wheel_imports(site: Path, tmp_path: Path) -> None:
    done = run(site, tmp_path, "import placer, envs, graphs; print(placer.__version__)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == VERSION


def test_a_package_loaded_before_placer_is_reported_too(site: Path, tmp_path: Path) -> None:
    (tmp_path / "mine" / "graphs").mkdir(parents=True)
    (tmp_path / "mine" / "graphs" / "__init__.py").touch()
    code = "import sys; sys.path.insert(0, 'mine'); import graphs; sys.path.pop(0); import placer"
    done = run(site, tmp_path, code)
    assert "placer needs its own package 'graphs'" in done.stderr


@pytest.mark.parametrize("name", in_turn(IDS, slow=IDS[1:]))
@pytest.mark.parametrize("imports", ["import placer, gymnasium", "import gymnasium, placer"])
def test_environments_are_registered_whatever_is_imported_first(imports: str, name: str) -> None:
    code = f"{imports}; print(gymnasium.make('{name}').reset(seed=0)[0].shape)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("(")


def test_gymnasium_finds_the_environments_by_module_and_name() -> None:
    code = f"import gymnasium; print(gymnasium.make('placer:{IDS[0]}').spec.id)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == IDS[0]


def test_importing_placer_loads_nothing_heavy() -> None:
    heavy = ("gymnasium", "networkx", "numba", "numpy", "stable_baselines3", "torch")
    code = f"import sys, placer; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
