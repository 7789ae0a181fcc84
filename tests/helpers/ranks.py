"""Run a function in several processes that are the ranks of one process group."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_any
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRELOADED = [
    *("torch._dynamo", "torch.distributed.tensor", "torch.export", "torch.testing"),
    *("torch.export._trace", "torch.distributed.algorithms.ddp_comm_hooks"),
    *("pytest", "hypothesis", "placer.api", "placer.parallel.run", "tests.helpers.runs"),
    "tests.helpers.frozen",  # the last
]
"""Modules that ranks would otherwise import one by one, some of them on first use."""

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""What ``placer.run`` joins its ranks with, by type of device."""


PORTS_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")


class RankError(AssertionError):
    """A rank failed; the message contains its traceback."""


def on_ranks(
    count: int,
    work: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 600.0,
    joined: bool = True,
    device_type: str = "cpu",
) -> list[Any]:
    """Run ``work(*arguments)`` on ``count`` ranks of a group and return the results by rank.

    With ``joined`` False the ranks have no group yet, only the environment that torchrun sets. The
    group uses gloo; with the device type "cuda" also NCCL, and each rank a GPU of its own.

    Ranks are forked from a server that has torch loaded. Each returns its result, waits for the
    others and exits at once, because gloo's threads may abort a process that shuts down normally.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store")) if joined else ""
        port = free_port()
        pipes: list[Connection] = []
        processes = []
        for rank in range(count):
            ours, theirs = context.Pipe(duplex=False)
            place = Place(rank, count, port, store, timeout_s, device_type)
            process = context.Process(target=_rank, args=(place, theirs, work, arguments))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _results(pipes, timeout_s)
        finally:
            for process in processes:
                process.join(0.0 if sys.exc_info()[0] else 60.0)
                process.kill()
                process.join()


def each(cases: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the results of several cases {name: (work, *arguments)}, in turn on the same ranks.

    To start ranks takes longer than most of what tests do on them.
    """
    return {name: work(*arguments) for name, (work, *arguments) in cases.items()}


def refusal(work: Callable[[], Any]) -> str:
    """Return the message of the error that the work raises, "" for none."""
    try:
        work()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


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
            end_s = min(end_s, time.monotonic() + 60.0)  # others may hang because of it
    if failures:
        raise RankError("\n".join(f"rank {r}: {why}" for r, why in sorted(failures.items())))
    return [results[rank] for rank in range(len(pipes))]


@dataclass(frozen=True)
class Place:
    """Environment of one rank."""

    rank: int
    count: int
    port: int
    store: str  # file of the group's store, "" for no group
    timeout_s: float
    device_type: str = "cpu"

    def enter(self) -> None:
        torch.set_num_threads(1)
        os.environ |= {
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.count),
            "LOCAL_RANK": str(self.rank),
            "LOCAL_WORLD_SIZE": str(self.count),
        }
        if self.device_type == "cuda":
            torch.cuda.set_device(self.rank)
        if self.store:
            dist.init_process_group(
                BACKENDS[self.device_type],
                init_method=f"file://{self.store}",
                rank=self.rank,
                world_size=self.count,
                timeout=timedelta(seconds=self.timeout_s / 2),  # so that ranks report it themselves
            )


def _rank(
    place: Place, pipe: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    try:
        place.enter()
        pipe.send_bytes(pickle.dumps((True, work(*arguments))))
        if place.store:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - whatever it was, the test shall show it
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    sys.stderr.flush()
    os._exit(0)


def free_port() -> int:
    """Return a port that nobody listens on, and that no other test gets while this process lives.

    It is none of those that the kernel gives to connections: one of them might take it meanwhile.
    """
    lowest_given = int(PORTS_GIVEN.read_text().split()[0])
    if lowest_given < 10_000:  # the kernel gives away nearly all
        lowest_given = 1 << 16
    first = lowest_given - 8000
    for number in range(lowest_given - first):
        port = first + (97 * os.getpid() + number) % (lowest_given - first)
        if _is_reserved_here(port):
            return port
    raise RuntimeError(f"all ports from {first} to {lowest_given - 1} are in use")


def _is_reserved_here(port: int) -> bool:
    """Reserve a port for this process and return True, or return False if it is in use."""
    mark = socket.socket(socket.AF_UNIX)  # its name is gone with its last process
    with socket.socket() as probe:
        try:
            mark.bind(f"\0port {port} of a test")
            probe.bind(("", port))
        except OSError:
            mark.close()
            return False
    mark.detach()
    return True
