"""Runs a function in several processes that are the ranks of one process group."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_any
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRELOADED = ["torch._dynamo", "torch.distributed.tensor", "torch.testing", "pytest", "hypothesis"]
"""What ranks would else import one by one; optimizers and DDP do the first on first use."""


class RankError(AssertionError):
    """A rank failed; the message has its traceback."""


def on_ranks(
    count: int, work: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0
) -> list[Any]:
    """What ``work(*arguments)`` returns on each of ``count`` ranks of a gloo group, by rank.

    Ranks are forked from a server that has torch loaded. Each hands its result over, waits for the
    others and leaves at once: threads of gloo may abort a process that says farewell.

    Raises:
        RankError: a rank raised, died, or took longer than ``timeout_s``.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        pipes: list[Connection] = []
        processes = []
        for rank in range(count):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(rank, count, store, theirs, timeout_s, work, arguments)
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _results(pipes, timeout_s)
        finally:
            for process in processes:
                process.join(0.0 if sys.exc_info()[0] else 10.0)
                process.kill()
                process.join()


def _results(pipes: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    end_s = time.monotonic() + timeout_s
    while len(results) + len(failures) < len(pipes):
        left = {pipe: r for r, pipe in enumerate(pipes) if r not in results and r not in failures}
        ready = wait_any(list(left), max(end_s - time.monotonic(), 0.0))
        if not ready:
            failures |= dict.fromkeys(left.values(), f"no result after {timeout_s} s")
        for pipe in ready:
            rank = left[pipe]  # type: ignore[index]  # of the pipes that were given
            try:
                ok, payload = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                ok, payload = False, "it died without a word"
            (results if ok else failures)[rank] = payload
        if failures:
            end_s = min(end_s, time.monotonic() + 2.0)  # others that hang for its sake
    if failures:
        raise RankError("\n".join(f"rank {r}: {why}" for r, why in sorted(failures.items())))
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    rank: int,
    count: int,
    store: str,
    pipe: Connection,
    timeout_s: float,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=timeout_s / 2),  # so that ranks tell themselves
        )
        result = work(*arguments)
        pipe.send_bytes(pickle.dumps((True, result)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - whatever it was, the test shall show it
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    sys.stderr.flush()
    os._exit(0)
