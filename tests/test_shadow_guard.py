"""The built wheel, in an environment of its own, beside folders that carry our packages' names."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from placer.report.html.page import SCRIPTS

ROOT = Path(__file__).resolve().parents[1]


def shipped_files() -> set[str]:
    """Policies, their configurations and the suites, without what trainings leave beside them."""
    folder = ROOT / "trained_policies"
    return {p.name for p in folder.iterdir() if p.suffix in (".json", ".safetensors", ".toml")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel with what is installed (hatchling), without the network."""
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
    return next(out.glob("device_placer-*.whl"))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, as pip would install it."""
    site = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def run(site: Path, folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a folder, with the wheel instead of the checkout on the path.

    -S leaves out this environment's site-packages, and with them the editable checkout; -c puts the
    current folder first, as a user's ``python -c`` and notebooks do.
    """
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=folder,
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", ["envs", "graphs"])
def test_a_folder_of_the_same_name_is_reported_with_what_to_do(
    site: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    done = run(site, tmp_path, "import placer")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: placer needs its own package")
    assert name in last
    assert "comes first on the import path" in last
    assert "Rename" in last


def test_without_such_a_folder_the_wheel_imports(site: Path, tmp_path: Path) -> None:
    done = run(site, tmp_path, "import placer, envs, graphs; print(placer.__version__)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0.1.0"


def test_a_package_loaded_before_placer_is_reported_too(site: Path, tmp_path: Path) -> None:
    (tmp_path / "mine" / "graphs").mkdir(parents=True)
    (tmp_path / "mine" / "graphs" / "__init__.py").touch()
    code = "import sys; sys.path.insert(0, 'mine'); import graphs; sys.path.pop(0); import placer"
    done = run(site, tmp_path, code)
    assert "placer needs its own package 'graphs'" in done.stderr


def test_the_wheel_holds_the_three_packages_trained_policies_and_scripts_of_the_report(
    wheel: Path,
) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"placer", "envs", "graphs"}
    policies = {name for name in names if name.startswith("placer/trained_policies/")}
    assert {Path(name).name for name in policies} == shipped_files()
    assets = {Path(name).name for name in names if name.startswith("placer/report/assets/")}
    assert assets == {"report.css", *SCRIPTS}


def test_the_wheel_forgets_no_policy_and_takes_no_log_of_a_training() -> None:
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    listed = hatch["targets"]["wheel"]["force-include"]
    assert listed == {
        f"trained_policies/{name}": f"placer/trained_policies/{name}" for name in shipped_files()
    }
