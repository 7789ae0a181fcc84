"""Says which rank is gone when a collective fails: a backend only knows that some peer is."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Any, Final, TypeAlias

from placer.parallel.groups import rank_list

Store: TypeAlias = Any
"""``torch.distributed.Store``, which type checkers do not know."""
INTERVAL_S: Final = 0.5
MISSED: Final = 4
"""Who gives no sign of life for so many intervals is gone."""


class PeerError(RuntimeError):
    """Other ranks are gone or hang; the message names them."""


class StoppedError(RuntimeError):
    """The launcher ends this rank; it does so when another one has failed."""


class Liveness:
    """Gives a sign of life of this rank, with the step it is in, and listens for those of others.

    Signs come from a thread beside the training. One that hangs in a collective still gives them.
    """

    def __init__(self, store: Store, rank: int, ranks: int, interval_s: float = INTERVAL_S) -> None:
        """Begin to give signs.

        Args:
            store: known to all ranks; used by nobody else, since a wait would hold signs up.
            rank: this one.
            ranks: how many there are.
            interval_s: seconds between signs.
        """
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._interval_s = interval_s
        self._step = 0
        self._beat = 0
        self._ended = threading.Event()
        store.set(f"name/{rank}", f"pid {os.getpid()} on {socket.gethostname()}")
        self._give_sign()
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        self._thread.start()

    def at(self, step: int) -> None:
        """This rank has come to a step."""
        self._step = step

    def close(self) -> None:
        """Give no more signs."""
        self._ended.set()
        self._thread.join()

    def error(self, failure: RuntimeError) -> RuntimeError:
        """What a failure means: who is gone or lets others wait; or else the failure as it is.

        Takes a few intervals, since only who stays silent for so long is gone; a launcher that
        stops the ranks meanwhile is not heard.
        """
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        why = str(failure).strip().partition("\n")[0]
        try:
            told = self._told_by_others() or self._gone()
            if not told and "timed out" in why.lower():
                told = self._behind()
        except RuntimeError:
            told = "the rank or the launcher that keeps the store is gone"
        if not told:
            return failure
        return PeerError(f"{told} (step {self._step} of rank {self._rank} failed: {why})")

    def _told_by_others(self) -> str:
        """What a rank found that may be gone itself by now."""
        if not self._store.check(["lost"]):
            return ""
        found: str = self._store.get("lost").decode()
        return found

    def _gone(self) -> str:
        before = self._signs()
        time.sleep(MISSED * self._interval_s)
        after = self._signs()
        if told := self._told_by_others():
            return told
        gone = [rank for rank in range(self._ranks) if before[rank] == after[rank]]
        if not gone:
            return ""
        names = "; ".join(self._store.get(f"name/{rank}").decode() for rank in gone)
        told = f"{rank_list(gone)} died or hang{'s'[: len(gone) == 1]}: {names}"
        self._store.set("lost", told)
        return told

    def _behind(self) -> str:
        steps = {rank: int(sign.split()[1]) for rank, sign in self._signs().items()}
        behind = [rank for rank, step in steps.items() if step == min(steps.values())]
        return f"all ranks live, but {rank_list(behind)} came to step {min(steps.values())} only"

    def _signs(self) -> dict[int, str]:
        return {rank: self._store.get(f"alive/{rank}").decode() for rank in range(self._ranks)}

    def _give_sign(self) -> None:
        self._beat += 1
        self._store.set(f"alive/{self._rank}", f"{self._beat} {self._step}")

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                self._give_sign()
            except RuntimeError:  # who keeps the store is gone; the collectives will fail, too
                return
