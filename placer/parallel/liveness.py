"""Says which rank is gone when a collective fails: a backend only knows that some peer is."""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from placer.cli.failures import JOB_FAILED, fail
from placer.parallel.groups import rank_list
from placer.parallel.run_store import RunStore

INTERVAL_S: Final = 0.5
MISSED: Final = 4
"""Who gives no sign of life for so many intervals is gone."""


class PeerError(RuntimeError):
    """Other ranks are gone or hang; the message names them."""


class StoppedError(BaseException):
    """The launcher ends this rank; it does so when another one has failed.

    It may come up anywhere, and who tries what may fail, an extractor for one, must let it pass.
    """


def leave(told: str) -> None:
    """End this process, whatever its other threads wait for."""
    fail(JOB_FAILED, told)
    sys.stderr.flush()
    os._exit(JOB_FAILED)


class Liveness:
    """Gives a sign of life of this rank, with the step it is in, and listens for those of others.

    Signs come from a thread beside the training. One that hangs in a collective still gives them.
    Where collectives do not fail but wait (NCCL), the thread ends the process: it watches the next
    rank, and what others say that is lost.
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
        """Give a first sign; `start` gives the others.

        Args:
            store: known to all ranks; used by nobody else, since a wait would hold signs up.
            rank: this one.
            ranks: how many there are.
            interval_s: seconds between signs.
            silence_s: a rank that gives no sign for so long is lost, and nothing can go on; None
                where collectives fail by themselves.
            end: what is done then, with what there is to tell.
            clock: tells seconds.
            sleep: waits for so many of them.
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
        self._heard = ("", clock())  # the last sign of the next rank, and when it came
        self._told_s = math.inf  # when others were heard to say who is lost
        self._lost_ranks = ""  # as the first to notice told it
        self._is_failing = False
        self._ended = threading.Event()
        store.set(f"name/{rank}", f"pid {os.getpid()} on {socket.gethostname()}")
        self._give_sign()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Give signs from a thread."""
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        self._thread.start()

    def at(self, step: int) -> None:
        """This rank has come to a step."""
        self._step = step

    def beat(self) -> bool:
        """Give a sign and look at those of others; return whether there is more to watch."""
        try:
            self._give_sign()
            self._told_by_others()  # while the store is there: its rank may leave, too
            lost = "" if self._silence_s is None else self._lost(self._silence_s)
        except RuntimeError:  # who keeps the store is gone; the collectives will fail, too
            return False
        if not lost or self._is_failing:
            return True
        self._end(f"rank {self._rank}: {lost} (rank {self._rank} is in step {self._step})")
        return False

    def close(self) -> None:
        """Give no more signs."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def error(self, failure: RuntimeError | StoppedError) -> RuntimeError | StoppedError:
        """What a failure means: who is gone or lets others wait; or else the failure as it is.

        Takes a few intervals, since only who stays silent for so long is gone; a launcher that
        stops the ranks meanwhile is not heard.
        """
        self._is_failing = True
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        why = str(failure).strip().partition("\n")[0]
        try:
            told = self._told_by_others() or self._gone()
            if not told and "timed out" in why.lower():
                told = self._behind()
            if told and self._rank == 0:  # may keep the store: let others read it before
                self._sleep(MISSED * self._interval_s)
        except RuntimeError:
            told = self._lost_ranks or "the rank or the launcher that keeps the store is gone"
        if not told:
            return failure
        return PeerError(f"{told} (step {self._step} of rank {self._rank} failed: {why})")

    def _told_by_others(self) -> str:
        """What a rank found that may be gone itself by now."""
        self._lost_ranks = self._lost_ranks or self._store.get("lost") or ""
        return self._lost_ranks

    def _gone(self) -> str:
        before = self._signs()
        self._sleep(MISSED * self._interval_s)
        after = self._signs()
        if told := self._told_by_others():
            return told
        gone = [rank for rank in range(self._ranks) if before[rank] == after[rank]]
        return self._tell_lost(gone) if gone else ""

    def _tell_lost(self, gone: list[int]) -> str:
        names = "; ".join(self._store.get(f"name/{rank}") or "never heard of" for rank in gone)
        told = f"{rank_list(gone)} died or hang{'s'[: len(gone) == 1]}: {names}"
        self._store.set("lost", told)
        return told

    def _lost(self, silence_s: float) -> str:
        """Who is lost without that this rank noticed otherwise, "" for nobody."""
        now_s, watched = self._clock(), (self._rank + 1) % self._ranks
        if told := self._told_by_others():
            self._told_s = min(self._told_s, now_s)
            return told if now_s - self._told_s > 2 * MISSED * self._interval_s else ""
        if watched == self._rank or (sign := self._store.get(f"alive/{watched}")) is None:
            return ""
        if sign != self._heard[0]:
            self._heard = sign, now_s
        return self._tell_lost([watched]) if now_s - self._heard[1] > silence_s else ""

    def _behind(self) -> str:
        steps = {rank: int(sign.split()[1]) for rank, sign in self._signs().items()}
        behind = [rank for rank, step in steps.items() if step == min(steps.values())]
        return f"all ranks live, but {rank_list(behind)} came to step {min(steps.values())} only"

    def _signs(self) -> dict[int, str]:
        return {rank: self._store.get(f"alive/{rank}") or "0 0" for rank in range(self._ranks)}

    def _give_sign(self) -> None:
        self._beat += 1
        self._store.set(f"alive/{self._rank}", f"{self._beat} {self._step}")

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s) and self.beat():
            pass
