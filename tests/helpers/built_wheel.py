"""A wheel of this repository, built without network access."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.helpers.folders import ROOT


def build_wheel(out: Path) -> Path:
    build = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--wheel-dir", str(out)]
    offline = ["--no-build-isolation", "--no-index"]
    subprocess.run([*build, *offline], check=True, capture_output=True)
    [wheel] = out.glob("*.whl")
    return wheel
