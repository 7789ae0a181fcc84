"""Tries models of public packages, each in a process of its own, and counts what became of them.

    python -m benchmarks coverage

Training and inference as given, with small configurations and random weights. A model is extracted,
placed op by op (or module by module) at random on two cores, and takes two steps on different
inputs, whose outputs, gradients and buffers are compared with the model's own. Models of packages
that are not installed are left out (``pip install 'device-placer[zoo]'``).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from benchmarks.coverage.attempt import Attempt, main
from benchmarks.coverage.models import NOT_EXPORTED, PACKAGES, SAMPLE, cases_of, is_installed
from benchmarks.record import Effort, Part
from benchmarks.tables import Table
from placer.sources.huggingface import WITHOUT_HUB

LIMIT_S: Final = 300.0
"""Time limit of a model, training and inference together."""
ENDING_S: Final = 10.0
"""Time that a process has to end once it has sent everything."""
PRELOADED: Final = (
    *("benchmarks.coverage.attempt", "graphs.extract.extraction", "transformers.modeling_utils"),
    *("torch._dynamo", "torch.export._trace"),
)
"""Modules that each process would otherwise import; those that are not installed do not matter."""
COLUMNS: Final = (
    "package, step",
    "tried",
    "export",
    "dispatch",
    "modules",
    "refused",
    "depends on data",
    "run on cores",
    "equal to eager",
)
STEPS: Final = {True: "training", False: "inference"}
Attempts = dict[str, list[Attempt]]
"""What became of the models, by package."""


def parts(effort: Effort) -> dict[str, Part]:
    """Return a part for each package, and two for all of them."""
    known: Attempts = {}
    every: Mapping[str, Sequence[str]] = dict.fromkeys(PACKAGES, ())
    chosen = effort.pick(quick=SAMPLE, normal=every, full=every)
    found: dict[str, Part] = {
        package: partial(tried, known, package, names) for package, names in chosen.items()
    }
    return found | {"all": partial(totals, known), "reasons": partial(reasons, known)}


def tried(known: Attempts, package: str, names: Sequence[str], found: dict[str, Any]) -> Table:
    """Try models of a package, by default all."""
    if not is_installed(package):
        found["skipped"] = "not installed"
        return _table([(f"{package}: not installed", *[""] * (len(COLUMNS) - 1))])
    known[package] = attempts(package, names or tuple(cases_of(package)))
    found["attempts"] = [asdict(each) for each in known[package]]
    return _table(
        [
            row(
                f"{package}, {step}", [each for each in known[package] if each.training == training]
            )
            for training, step in STEPS.items()
        ]
    )


def totals(known: Attempts, found: dict[str, Any]) -> Table | None:
    """Return the sums of all packages, with shares."""
    everything = [each for tries in known.values() for each in tries]
    rows = []
    for training, step in STEPS.items():
        own = [each for each in everything if each.training == training]
        if own:
            rows.append(row(f"all, {step}", own, shares=True))
            found[step] = dict(zip(COLUMNS[1:], rows[-1][1:], strict=True))
    return _table(rows) if rows else None


def reasons(known: Attempts, found: dict[str, Any]) -> Table | None:
    """Return why steps do not run on cores or are not compared.

    Raises:
        RuntimeError: results differ from eager, a model failed otherwise than by a refusal, or one
            of the sample is extracted otherwise than it was.
    """
    odd = [
        (f"{package}: {each.name}, {STEPS[each.training]}", each)
        for package, tries in known.items()
        for each in tries
        if not each.equal
    ]
    found["reasons"] = {name: each.reason for name, each in odd}
    wrong = [
        f"{name}: {each.reason}"
        for name, each in odd
        if each.failed or (each.ran and each.equal is False)
    ]
    if wrong := [*wrong, *extracted_otherwise(known)]:
        raise RuntimeError("; ".join(wrong))
    rows = tuple((name, each.reason[:200]) for name, each in odd)
    note = "the first 200 characters of the reason"
    return (
        Table("Not run on cores, or not compared", note, ("model", "reason"), rows) if odd else None
    )


def extracted_otherwise(known: Attempts) -> list[str]:
    """Return the steps of the sample whose extractor is not the expected one, and what it was."""
    return [
        f"{package}: {each.name}, {STEPS[each.training]}: extracted by {each.extractor or 'none'}, "
        f"not {expected}"
        for package, names in SAMPLE.items()
        for each in known.get(package, ())
        if each.name in names
        if each.extractor != (expected := NOT_EXPORTED.get((each.name, each.training), "export"))
    ]


def row(name: str, own: Sequence[Attempt], *, shares: bool = False) -> tuple[str, ...]:
    """Return the row of some attempts."""
    counts = (
        *(
            sum(each.extractor == by for each in own)
            for by in ("export", "dispatch", "modules", "")
        ),
        sum(each.depends_on_data for each in own),
        sum(each.ran for each in own),
        sum(each.equal is True for each in own),
    )
    cells = (f"{n} ({n / len(own):.0%})" if shares else f"{n}" for n in counts)
    return (name, str(len(own)), *cells)


def attempts(package: str, names: Sequence[str]) -> list[Attempt]:
    """Try models, as many at a time as there are cores."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        each = pool.map(partial(in_own_process, main, package), names)
        return [attempt for both in each for attempt in both]


def in_own_process(
    work: Callable[..., None], package: str, name: str, limit_s: float = LIMIT_S
) -> list[Attempt]:
    """Return both attempts of a model; one whose process dies or takes too long has failed.

    ``work`` is called in the process with package, name and a connection to send each attempt to.
    """
    os.environ |= WITHOUT_HUB
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(package, name, sender))
    process.start()
    sender.close()
    deadline = time.monotonic() + limit_s
    received: list[Attempt] = []
    reason = ""
    try:
        while len(received) < len(STEPS) and not reason:
            if receiver.poll(max(deadline - time.monotonic(), 0.0)):
                received.append(receiver.recv())
            else:
                reason = f"took more than {limit_s:g} s"
    except EOFError:
        process.join()
        reason = f"its process ended with status {process.exitcode}"
    else:
        if not reason:
            process.join(ENDING_S)
    finally:
        process.kill()
        process.join()
        receiver.close()
    missing = list(STEPS)[len(received) :]
    for each in (both := [*received, *(_failed(name, step, reason) for step in missing)]):
        _say(package, each)
    return both


def _failed(name: str, training: bool, reason: str) -> Attempt:
    return Attempt(name, training, failed=True, reason=reason)


def _say(package: str, each: Attempt) -> None:
    outcome = "equal" if each.equal else "differs" if each.ran and each.equal is False else ""
    line = (
        f"{package}: {each.name}, {STEPS[each.training]}: {each.extractor or 'refused'} {outcome}"
    )
    print(f"{line} {each.seconds:.1f} s {each.reason}".rstrip(), file=sys.stderr, flush=True)


def _table(rows: Iterable[tuple[str, ...]]) -> Table:
    note = "models of public packages, small and with random weights"
    return Table("Coverage", note, COLUMNS, tuple(rows))
