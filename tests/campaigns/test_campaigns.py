"""The checks of the campaigns detect faults."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from tests.campaigns import ROOT, jobs
from tests.campaigns.formats import Format
from tests.campaigns.jobs import Command, Job
from tests.campaigns.mutation import CODE, mutated
from tests.campaigns.reading import read
from tests.helpers.processes import all_end, becomes_true, is_alive

PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open("started", "w").close()
time.sleep(60)
"""


def job(folder: Path, code: str) -> Job:
    (folder / "script.py").write_text(code)
    return Job(Command(arguments=[], folder=folder, module="script", warm=False))


def test_what_a_killed_job_leaves_is_seen_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "FAREWELL_S", 0.0)
    started = job(tmp_path, PARENT)
    assert started.when((tmp_path / "started").exists)
    (started.temporary / "left").touch()
    [child] = started.workers()
    started.send(signal.SIGKILL)
    ended = started.finish()
    assert (ended.code, ended.hung) == (-signal.SIGKILL, False)
    assert [told.partition(" ")[0] for told in ended.orphans] == [str(child)]
    assert ended.left == [str(started.temporary / "left")]
    while started.family():
        time.sleep(0.01)


def test_a_job_that_fails_shows_its_code_and_its_traceback(tmp_path: Path) -> None:
    ended = job(tmp_path, "raise OSError('no')").finish()
    assert ended.code == 1
    assert "Traceback" in ended.errors
    assert not ended.orphans
    assert not ended.left


@pytest.mark.parametrize("syntax", ["json", "toml", "safetensors", "zip", "bytes"])
def test_mutations_follow_from_the_seed(syntax: str) -> None:
    content = json.dumps({"a": [1, {"b": 2.5}], "c": "text"}).encode()
    made = [mutated(Random(seed), content, syntax) for seed in range(40)]  # type: ignore[arg-type]
    assert made == [mutated(Random(seed), content, syntax) for seed in range(40)]  # type: ignore[arg-type]
    assert len({*made, content}) > 20


CAMPAIGN = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from tests.campaigns.jobs import Command, Job
from tests.campaigns.lanes import lanes

def work():
    job = Job(Command(arguments=[], folder=Path.cwd(), module="sleeping", warm=False))
    Path("new").write_text(f"{{os.getpid()}} {{job.pid}}")
    os.rename("new", "started")
    time.sleep(60)

lanes().submit(work)
time.sleep(60)
"""


def test_lanes_and_their_jobs_end_when_the_campaign_is_killed(tmp_path: Path) -> None:
    (tmp_path / "sleeping.py").write_text("import time; time.sleep(60)")
    code = CAMPAIGN.format(tests=str(ROOT))
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path) as campaign:
        assert becomes_true((tmp_path / "started").exists)
        processes = [int(pid) for pid in (tmp_path / "started").read_text().split()]
        assert all(map(is_alive, processes))
        campaign.kill()
    assert all_end(processes)


def test_code_of_a_file_that_is_run_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "specimen").mkdir()
    form = Format("text", "bytes", tmp_path / "specimen/text", lambda path: eval(path.read_text()))
    for text in CODE[:4]:
        assert [failure.rule for failure in read(form, text.encode(), tmp_path)] == ["executed"]
    assert read(form, b"1 + 1", tmp_path) == []
