"""``import placer``: from a wheel next to folders of our names, light, and with Gymnasium."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from placer.startup import VERSION


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


def output(code: str) -> str:
    """Return what code prints in a new interpreter of this environment."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.slow
def test_a_package_of_the_same_name_is_reported(site: Path, tmp_path: Path) -> None:
    done = run(site, tmp_path, "import placer, envs, graphs; print(placer.__version__)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == VERSION
    loaded = "import sys; sys.path.insert(0, 'mine'); import graphs; sys.path.pop(0); import placer"
    for name, folder, code in (
        ("graphs", tmp_path / "mine" / "graphs", loaded),
        ("envs", tmp_path / "envs", "import placer"),
    ):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        done = run(site, tmp_path, code)
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith(f"ImportError: placer needs its own package {name!r}")


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("imports", "found"),
    [
        ("import placer, gymnasium", "gymnasium.spec(name)"),
        ("import gymnasium, placer", "gymnasium.spec(name)"),
        ("import gymnasium", "gymnasium.make(f'placer:{name}').spec"),
    ],
)
def test_environments_are_registered_whatever_is_imported_first(imports: str, found: str) -> None:
    ids = ["placer/Placement-v0", "placer/Scheduler-v0"]
    assert output(f"{imports}; print([{found}.id for name in {ids}])") == str(ids)


def test_importing_placer_lists_its_names_and_loads_nothing_heavy() -> None:
    heavy = ("gymnasium", "networkx", "numba", "numpy", "stable_baselines3", "torch")
    loaded = f"[name for name in {heavy} if name in sys.modules]"
    code = f"import sys, placer; print(dir(placer) == sorted(placer.__all__), {loaded})"
    assert output(code) == "True []"
