"""Cache of ops that did not fit on a device, in the file of the op times.

With as little free memory as then they need not be tried again; with more they might fit.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from envs.costs.cache import OVERSIZE, Conditions, CostCache

TABLE: Final = f"""CREATE TABLE IF NOT EXISTS {OVERSIZE} (
    kind TEXT NOT NULL,
    hardware TEXT NOT NULL,
    torch TEXT NOT NULL,
    signature TEXT NOT NULL,
    free_bytes INTEGER NOT NULL,
    PRIMARY KEY (kind, hardware, torch, signature)
) WITHOUT ROWID"""
OF_DEVICE: Final = "kind = ? AND hardware = ? AND torch = ?"
SAME_ROOM: Final = 1.02
"""Ratio of free memory up to which there is as little as before: contexts vary in size."""


class OversizeCache(CostCache):
    """The ops without room in a cache of op costs; files from before these were kept have none."""

    def oversize(
        self, conditions: Conditions, signatures: Collection[str], free_bytes: int
    ) -> set[str]:
        """Return which of these ops did not fit in at least this much memory."""
        rows = self._tried(lambda: self._read_oversize(conditions, free_bytes)) or []
        return set(signatures).intersection(signature for (signature,) in rows)

    def store_oversize(
        self,
        conditions: Conditions,
        oversize: Collection[str],
        fitting: Collection[str],
        free_bytes: int,
    ) -> None:
        """Store the ops of a profile that did not fit; those that did are no longer kept here."""
        if oversize or self.oversize(conditions, fitting, 0):
            self._stored(lambda: self._write_oversize(conditions, oversize, fitting, free_bytes))

    def _read_oversize(self, conditions: Conditions, free_bytes: int) -> list[tuple[str]]:
        if self._is_empty():
            return []
        with self._opened() as file:
            if not self._has_table(file, OVERSIZE):
                return []
            return file.execute(
                f"SELECT signature FROM {OVERSIZE} "
                f"WHERE {OF_DEVICE} AND free_bytes * {SAME_ROOM} >= ?",
                [conditions.kind, conditions.hardware, conditions.torch, free_bytes],
            ).fetchall()

    def _write_oversize(
        self,
        conditions: Conditions,
        oversize: Collection[str],
        fitting: Collection[str],
        free_bytes: int,
    ) -> None:
        where = (conditions.kind, conditions.hardware, conditions.torch)
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._opened(write=True) as file:
            file.execute(TABLE)
            file.executemany(
                f"DELETE FROM {OVERSIZE} WHERE {OF_DEVICE} AND signature = ?",
                ((*where, signature) for signature in fitting),
            )
            file.executemany(
                f"INSERT INTO {OVERSIZE} VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE "
                "SET free_bytes = max(free_bytes, excluded.free_bytes)",
                ((*where, signature, free_bytes) for signature in oversize),
            )
