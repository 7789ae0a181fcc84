"""Name the ranks that are gone when a collective fails: a backend only knows that some peer is.

Ranks exchange authenticated messages through the store of the run, which is writable by anyone.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist

from graphs.strict_json import brief
from graphs.text import escaped, first_line
from placer.parallel.processes import StoppedError, Store, rank_list, wire_device

SECRET_BYTES: Final = 32
RUN_FAILED: Final = 1
"""Exit status of a rank that fails."""
INTERVAL_S: Final = 0.5
MISSED: Final = 4
"""A rank without a heartbeat for this many intervals is gone."""
MOST_WAITS: Final = 10
"""The most such waits of a rank whose own heartbeats are late, too."""


class PeerError(RuntimeError):
    """Other ranks are gone or hang; the message names them."""


def leave(message: str) -> None:
    """End this process, whatever its other threads wait for."""
    print(f"placer: {brief(message)}", file=sys.stderr, flush=True)
    os._exit(RUN_FAILED)


class Liveness:
    """Sends heartbeats of this rank, with its current step, and watches those of other ranks.

    Heartbeats come from a background thread, so a rank that hangs in a collective still sends them.
    If collectives wait instead of failing (NCCL), the thread ends the process: it watches the next
    rank, and reports of lost ranks from others.
    """

    def __init__(
        self,
        store: RunStore,
        rank: int,
        ranks: int,
        interval_s: float = INTERVAL_S,
        *,
        silence_s: float | None = None,
        end: Callable[[str], None] = leave,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Send the first heartbeat; :meth:`start` sends the others.

        Nothing else may use the connection of ``store``, since a wait would delay heartbeats. A
        rank without a heartbeat for ``silence_s`` is lost, and ``end`` is called with a message;
        None if collectives fail by themselves.
        """
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._interval_s = interval_s
        self._step = 0
        self._beat = 0
        self._silence_s = silence_s
        self._end = end
        self._clock = clock
        self._sleep = sleep
        self._last_sign = ("", clock())  # last heartbeat of the next rank, and its time
        self._reported_s = math.inf  # when another rank first reported a lost one
        self._report = ""  # message of the first rank that noticed a lost one
        self._is_failing = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        store.set(f"name/{rank}", f"pid {os.getpid()} on {socket.gethostname()}")
        self._send_heartbeat()

    def start(self) -> None:
        """Start the heartbeat thread."""
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        self._thread.start()

    def at(self, step: int) -> None:
        """Record the step that this rank has reached."""
        self._step = step

    def beat(self) -> bool:
        """Send a heartbeat and check the other ranks; return whether to continue."""
        try:
            self._send_heartbeat()
            self._reported()  # read early: the store ends with its rank
            lost = "" if self._silence_s is None else self._lost(self._silence_s)
        except RuntimeError:  # the rank that hosts the store is gone; collectives will fail, too
            return False
        if not lost or self._is_failing:
            return True
        self._end(f"rank {self._rank}: {lost} (rank {self._rank} is in step {self._step})")
        return False

    def close(self) -> None:
        """Stop the heartbeats."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def error(self, failure: RuntimeError | StoppedError) -> RuntimeError | StoppedError:
        """Return an error that names the ranks that are gone or behind, or else what failed here.

        Its text is one line. Takes a few intervals, since a rank counts as gone only after so long
        without a heartbeat; SIGTERM from the launcher is ignored from then on.
        """
        self._is_failing = True
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        reason = first_line(failure)
        try:
            cause = self._reported() or self._gone()
            if not cause and "timed out" in reason.lower():
                cause = self._behind()
            if cause and self._rank == 0:  # may host the store: let others read it first
                self._sleep(MISSED * self._interval_s)
        except RuntimeError:
            cause = self._report or "the rank or the launcher that keeps the store is gone"
        if not cause:
            return failure if str(failure) == reason else RuntimeError(reason)
        return PeerError(f"{cause} (step {self._step} of rank {self._rank} failed: {reason})")

    def _reported(self) -> str:
        # The rank that reported it may itself be gone by now.
        self._report = self._report or self._store.get("lost") or ""
        return self._report

    def _gone(self) -> str:
        before, begun = self._heartbeats(), self._beat
        for _ in range(MOST_WAITS):
            self._sleep(MISSED * self._interval_s)
            if self._beat - begun >= MISSED // 2:  # else this machine is too busy to tell
                break
        after = self._heartbeats()
        if report := self._reported():
            return report
        others = set(range(self._ranks)) - {self._rank}
        gone = [rank for rank in sorted(others) if before[rank] == after[rank]]
        return self._report_lost(gone) if gone else ""

    def _report_lost(self, gone: list[int]) -> str:
        names = "; ".join(self._store.get(f"name/{rank}") or "never started" for rank in gone)
        report = f"{rank_list(gone)} died or hang{'s'[: len(gone) == 1]}: {names}"
        self._store.set("lost", report)
        return report

    def _lost(self, silence_s: float) -> str:
        # Names the ranks that are lost without any failed collective on this rank, "" if none is.
        now_s, watched = self._clock(), (self._rank + 1) % self._ranks
        if report := self._reported():
            self._reported_s = min(self._reported_s, now_s)
            return report if now_s - self._reported_s > 2 * MISSED * self._interval_s else ""
        if watched == self._rank or (sign := self._store.get(f"alive/{watched}")) is None:
            return ""
        if sign != self._last_sign[0]:
            self._last_sign = sign, now_s
        return self._report_lost([watched]) if now_s - self._last_sign[1] > silence_s else ""

    def _behind(self) -> str:
        steps = {rank: int(sign.split()[1]) for rank, sign in self._heartbeats().items()}
        first = min(steps.values())
        behind = [rank for rank, step in steps.items() if step == first]
        return f"all ranks are alive, but {rank_list(behind)} only reached step {first}"

    def _heartbeats(self) -> dict[int, str]:
        return {rank: self._store.get(f"alive/{rank}") or "0 0" for rank in range(self._ranks)}

    def _send_heartbeat(self) -> None:
        self._beat += 1
        self._store.set(f"alive/{self._rank}", f"{self._beat} {self._step}")

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s) and self.beat():
            pass


class RunStore:
    """Texts of the ranks in a store; entries not written by a rank count as absent.

    The store lists its keys to anyone who connects, so secret keys would not help: texts carry an
    authentication code instead.
    """

    def __init__(self, store: Store, secret: bytes) -> None:
        """Wrap a store shared by the ranks with the same secret."""
        self._store = store
        self._secret = secret

    def set(self, key: str, text: str) -> None:
        """Write a text."""
        content = text.encode()
        self._store.set(key, self._code(key, content) + content)

    def get(self, key: str) -> str | None:
        """Return a text, escaped for printing; None if no rank has written it yet."""
        if not self._store.check([key]):  # get would wait for the key
            return None
        entry: bytes = self._store.get(key)
        code, content = entry[:SECRET_BYTES], entry[SECRET_BYTES:]
        if not hmac.compare_digest(code, self._code(key, content)):
            return None
        return escaped(content.decode())

    def _code(self, key: str, content: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + content, hashlib.sha256)


def shared_secret() -> bytes:
    """Draw a secret on the first rank and broadcast it via the process group, not the store."""
    drawn = torch.frombuffer(bytearray(os.urandom(SECRET_BYTES)), dtype=torch.uint8)
    drawn = drawn.to(wire_device(None))
    dist.broadcast(drawn, 0)
    return bytes(drawn.tolist())
