"""Kinds of faults: each disturbs a job and checks what must hold afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final, Literal

from envs.costs.cache import FILE, CostCache, Session

from .case import ENDS, KILL, PAUSE, SLOW_DISK_S, STOPPED, Case
from .formats import HERE
from .jobs import Command, Job
from .lanes import forked
from .mutation import CANARY, changed_bytes, mutated
from .world import RANKS, STEPS

READ: Final = (
    *("graph", "cluster", "placement", "plan of replicas", "policy card", "policy"),
    *("checkpoint", "cost cache"),
)
"""Formats whose commands do not depend on the content of the file."""


def optimize_graph(case: Case) -> None:
    """End or stop a search on a graph file; a fifth of them start cold."""
    out = case.placement()
    signals = case.random.choice(ENDS)
    warm = case.random.random() < 0.8
    command = replace(case.world.graph_command(out), warm=warm)
    if warm and case.random.random() < 0.4:
        job = Job(replace(command, slow_disk_s=SLOW_DISK_S))
        codes = case.strike(job, signals, SLOW_DISK_S, after=job.is_writing)
    else:
        job = Job(command)
        usual_s = case.world.usual["graph"].took_s
        codes = case.strike(job, signals, usual_s if warm else usual_s + 4.0)
    ended = case.evaluator(job, codes)
    case.check_placement(out, ended)
    if ended.code == 0 and STOPPED not in ended.errors:
        case.expect_usual("graph")
    case.write_again(out)


def optimize_model(case: Case) -> None:
    """End or stop a search that measures, sometimes while it measures op costs."""
    out = case.placement()
    job = Job(_with_own_cache(case, case.world.model_command(out), 0.25))
    codes = case.strike(job, case.random.choice(ENDS), case.world.usual["model"].took_s)
    case.check_placement(out, case.evaluator(job, codes))
    _check_cache(case)
    case.write_again(out)


def one_worker(case: Case) -> None:
    """Kill or pause a worker of a search that measures: the search goes on."""
    out = case.placement()
    job = Job(_with_own_cache(case, case.world.model_command(out), 0.25))
    signals = case.random.choice((KILL, PAUSE))
    half_s = 0.5 * case.world.usual["model"].took_s
    codes = case.strike(job, signals, half_s, after=job.workers, victims=job.workers)
    case.check_placement(out, case.evaluator(job, codes))
    _check_cache(case)


def train(case: Case) -> None:
    """End a training up to three times; resumed, it gives the same files as without a fault."""
    command = case.world.train_command(case.folder / "p")
    if case.random.random() < 0.2:  # its processes are spawned, so it starts cold
        more = ["--workers", "2"]
        job = Job(replace(command, arguments=[*command.arguments, *more], warm=False))
        case.evaluator(job, case.strike(job, KILL, 1.5, after=job.workers, victims=job.workers))
    else:
        for _ in range(case.random.choice((1, 1, 2, 3))):
            job = Job(replace(command, slow_disk_s=case.random.choice((0.0, 0.02))))
            codes = case.strike(job, case.random.choice(ENDS), case.world.usual["train"].took_s)
            if case.evaluator(job, codes).code == 0:
                break
        else:
            case.run(command)
    case.expect_usual("train")
    case.expect_no_partial_file()


def run_ranks(case: Case) -> None:
    """End one of two ranks or their launcher; the resumed run gives the same files."""
    usual_s = case.world.usual["run"].took_s
    signals = case.random.choice((KILL, (signal.SIGSTOP, signal.SIGKILL), (signal.SIGTERM,)))
    if case.random.random() < 0.15:
        launcher = ["--nproc-per-node", str(RANKS), "--redirects", "3", "--log-dir", "log"]
        arguments = [*launcher, "-m", "placer.run", *case.world.run_arguments(case.folder)]
        module = "torch.distributed.run"
        job = Job(Command(arguments=arguments, module=module, folder=case.folder, warm=False))
        case.evaluator(job, case.strike(job, signals, usual_s + 12.0))
        for path in case.folder.rglob("stderr.log"):
            case.expect_no_traceback(path.read_text())
    else:
        jobs = [Job(command) for command in case.world.rank_commands(case.folder)]
        struck = case.random.randrange(RANKS)
        codes = case.strike(jobs[struck], signals, usual_s)
        for rank, job in enumerate(jobs):
            case.evaluator(job, codes if rank == struck else (0, 1))
    for job in [Job(command) for command in case.world.rank_commands(case.folder)]:
        case.evaluator(job, (0,))
    case.expect_usual("run")
    case.expect_no_partial_file()


def cache_writers(case: Case) -> None:
    """Kill processes that write to one cache: it has all entries that they reported as stored."""
    path = case.folder / FILE
    stored = case.folder / "stored"
    writers = range(case.random.choice((2, 4)))
    pids = [forked(partial(_write, path, stored, number)) for number in writers]
    time.sleep(case.random.uniform(0.02, 0.4))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    names = stored.read_text().split() if stored.exists() else []
    case.expect(set(CostCache(path).known(HERE, names)) == set(names), "lost", "times are lost")
    case.story.append(f"{len(names)} stored")
    _check_cache(case)


def _write(path: Path, stored: Path, number: int) -> None:
    """Store costs and log their names until killed."""
    out = os.open(stored, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for i in count():
        name = f"{number}-{i}"
        session = Session(cost_s={name: 1e-3}, runs=5, spread=0.0, measured="2026-01-31")
        CostCache(path).store(HERE, session)
        os.write(out, f"{name}\n".encode())


def one_cache(case: Case) -> None:
    """Run several searches that share a cache without op costs, and kill one of them."""
    outs = [case.placement(f"placement-{i}.json") for i in range(case.random.choice((2, 3)))]
    commands = [case.world.model_command(out, measure=False) for out in outs]
    jobs = [Job(_with_own_cache(case, command, 1.0)) for command in commands]
    codes = case.strike(jobs[0], KILL, case.world.usual["model"].took_s)
    for number, (job, out) in enumerate(zip(jobs, outs, strict=True)):
        case.check_placement(out, case.evaluator(job, (0,) if number else codes))
    _check_cache(case)


def damaged_cache(case: Case) -> None:
    """Damage files of the cache, or replace them by links or folders: searches go on."""
    out = case.placement()
    measures = case.random.random() < 0.3
    command = _with_own_cache(case, case.world.model_command(out, measure=False), 0.0)
    path = case.random.choice(sorted(case.folder.glob("cache/*")))
    damage = case.random.randrange(6)
    case.story.append(f"damage {damage} of {path.suffix}")
    content = path.read_bytes()
    path.unlink()
    match damage:
        case 0:
            path.mkdir()
        case 1:
            path.symlink_to("none")
        case 2:
            path.write_bytes(b"")
        case 3 if path.suffix == ".sqlite":
            path.write_bytes(content)
            value = case.random.choice(("'x'", "-1", "x'ff'", "1e300", "''"))
            column = case.random.choice(("spread", "measured", "runs", "kind"))
            with closing(sqlite3.connect(path)) as file, file:
                file.execute(f"UPDATE session SET {column} = {value}")
        case _:
            path.write_bytes(changed_bytes(case.random, content))
    if measures:
        case.check_placement(out, case.run(command))
    for option in ("--cache", "--clear-cache"):
        case.run(replace(command, arguments=["machine", option]), codes=(0, 1))


def full_disk(case: Case) -> None:
    """Leave no space for a result, the cache, temporary files or standard output."""
    room = case.random.choice((0, 4_096, 12_288))
    disk = case.folder / "disk"
    disk.mkdir()
    what = case.random.choice(("out", "report", "train", "cache", "temporary", "stdout", "limit"))
    case.story.append(f"{what} has {room} bytes")
    out = case.placement()
    command = case.world.graph_command(out)
    codes: tuple[int, ...] = (0, 1, 2)
    with _small_disk(disk):
        match what:
            case "stdout":
                command, codes = replace(command, stdout=Path("/dev/full")), (1,)
            case "limit":
                command, codes = replace(command, largest_file_bytes=2_048), (1,)
            case "out":
                out = case.placement("disk/placement.json")
                command = replace(case.world.graph_command(out), folder=case.folder)
            case "report":
                page = ["--report", str(disk / "report.html")]
                command = replace(command, arguments=[*command.arguments, *page])
            case "train":
                command = replace(case.world.train_command(disk / "p"), folder=case.folder)
            case "cache":
                cache = {"PLACER_CACHE": str(shutil.copytree(case.world.cache, disk / "cache"))}
                (disk / "cache" / FILE).unlink()
                command = case.world.model_command(out, measure=False)
                command, codes = replace(command, environment=cache), (0,)
            case _:
                command, codes = replace(command, environment={"TMPDIR": str(disk)}), (0,)
        _fill(disk, room)
        ended = case.run(command, codes)
        if what != "train":
            case.check_placement(out, ended)
        case.expect_no_partial_file()


def mutated_input(case: Case) -> None:
    """Run a command on a mutated file."""
    form = case.world.formats[case.random.choice(READ)]
    place = case.folder / "input"
    shutil.copytree(form.specimen.parent, place)
    path = place / form.specimen.name
    path.write_bytes(mutated(case.random, path.read_bytes(), form.syntax))
    arguments = case.random.choice(form.commands(path, None))
    case.story.append(f"{form.name}: placer {arguments[0]}")
    warm = case.random.random() < 0.9
    environment = {"PLACER_CACHE": str(place)}
    command = Command(arguments=arguments, folder=case.folder, warm=warm, environment=environment)
    case.run(command, codes=(0, 1, 2))
    case.expect(not (case.folder / CANARY).exists(), "others", "a text was run as code")


def damaged_checkpoint(case: Case) -> None:
    """Resume a run from a damaged checkpoint: it continues or says why it cannot."""
    single = Command(
        arguments=case.world.run_arguments(case.folder, 6), folder=case.folder, module="placer.run"
    )
    case.run(single)
    path = case.random.choice([p for p in case.folder.glob("run.json*") if p.is_file()])
    syntax: Literal["json", "safetensors"] = "json" if path.suffix == ".json" else "safetensors"
    path.write_bytes(mutated(case.random, path.read_bytes(), syntax))
    case.story.append(path.name)
    arguments = case.world.run_arguments(case.folder, STEPS)
    case.run(replace(single, arguments=arguments), codes=(0, 1, 2))


def _with_own_cache(case: Case, command: Command, without_costs: float) -> Command:
    """Return the command with a copy of the cache, without op costs with some probability."""
    cache = case.folder / "cache"
    if not cache.exists():
        shutil.copytree(case.world.cache, cache)
        if case.random.random() < without_costs:
            (cache / FILE).unlink()
    return replace(command, environment={**command.environment, "PLACER_CACHE": str(cache)})


def _check_cache(case: Case) -> None:
    """Check that every cache of the case is intact and none was set aside."""
    for path in case.folder.rglob(f"{FILE}*"):
        case.expect("aside" not in path.name, "lost", f"{path.name} was set aside")
        if path.name == FILE and path.stat().st_size:
            with closing(sqlite3.connect(path)) as file:
                (whole,) = file.execute("PRAGMA integrity_check").fetchone()
            case.expect(whole == "ok", "lost", f"the cache is damaged: {whole}")


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """Mount a file system of 128 kB at a folder."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)],
        check=True,
        capture_output=True,
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _fill(disk: Path, room: int) -> None:
    """Fill the disk up to ``room`` free bytes, in whole pages."""
    with (disk / "filling").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4_096))
        except OSError:
            file.truncate(max(file.tell() - room, 0))


KINDS: Final[dict[str, tuple[Callable[[Case], None], int]]] = {
    "optimize a graph": (optimize_graph, 34),
    "optimize a model": (optimize_model, 10),
    "a worker": (one_worker, 6),
    "train": (train, 7),
    "run": (run_ranks, 5),
    "writers of a cache": (cache_writers, 10),
    "searches on a cache": (one_cache, 2),
    "damaged cache": (damaged_cache, 7),
    "full disk": (full_disk, 6),
    "mutated input": (mutated_input, 10),
    "damaged checkpoint": (damaged_checkpoint, 3),
}
"""{name: (function, share in percent)}."""
