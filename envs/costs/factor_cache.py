"""Cache of the factors of op costs, in the file of the op times that they are for.

Factors are those of one step on one kind of device: factors of one model say little about another.
They are fitted to costs as they were, so a new profile of the step ends them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Final

from envs.costs.cache import FACTORS, Conditions, CostCache
from envs.costs.factors import CLASSES, LAUNCH, LOAD

TABLE: Final = f"""CREATE TABLE IF NOT EXISTS {FACTORS} (
    kind TEXT NOT NULL,
    hardware TEXT NOT NULL,
    torch TEXT NOT NULL,
    step TEXT NOT NULL,
    class TEXT NOT NULL,
    factor REAL NOT NULL CHECK (factor > 0),
    PRIMARY KEY (kind, hardware, torch, step, class)
) WITHOUT ROWID"""
WHERE: Final = "kind = ? AND hardware = ? AND torch = ? AND step = ?"


def step_id(signatures: Sequence[str], *, unplaced: bool = False) -> str:
    """Return the identity of a step: of its ops, and whether the unplaced model runs them."""
    lines = ["unplaced"] * unplaced + list(signatures)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


class FactorCache(CostCache):
    """The factors in a cache of op costs; files from before there were factors have none."""

    def factors(self, conditions: Conditions, step: str) -> dict[str, float]:
        """Return {class of ops: factor} of a step, without those that are 1."""
        rows = self._tried(lambda: self._read_factors(_key(conditions, step)))
        return {
            name: factor
            for name, factor in rows or ()
            if name in (*CLASSES, LOAD, LAUNCH)
            and isinstance(factor, float)
            and 0.0 < factor < math.inf
        }

    def scale_factors(
        self, conditions: Conditions, step: str, factors: Mapping[str, float], largest: float
    ) -> None:
        """Multiply the factors of a step; they stay within 1 / ``largest`` and ``largest``."""
        known = self.factors(conditions, step)
        scaled = dict(known) | {
            name: min(max(known.get(name, 1.0) * factor, 1.0 / largest), largest)
            for name, factor in factors.items()
        }
        self._stored(lambda: self._write_factors(_key(conditions, step), scaled))

    def forget_factors(self, conditions: Conditions, step: str) -> None:
        """Delete the factors of a step."""
        if self.factors(conditions, step):
            self._stored(lambda: self._write_factors(_key(conditions, step), {}))

    def _read_factors(self, key: Sequence[str]) -> list[tuple[str, float]]:
        if self._is_empty():
            return []
        with self._opened() as file:
            if not self._has_table(file, FACTORS):
                return []
            return file.execute(
                f"SELECT class, factor FROM {FACTORS} WHERE {WHERE}", key
            ).fetchall()

    def _write_factors(self, key: Sequence[str], factors: Mapping[str, float]) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._opened(write=True) as file:
            file.execute(TABLE)
            file.execute(f"DELETE FROM {FACTORS} WHERE {WHERE}", key)
            file.executemany(
                f"INSERT INTO {FACTORS} VALUES (?, ?, ?, ?, ?, ?)",
                ((*key, name, factor) for name, factor in factors.items()),
            )


def _key(conditions: Conditions, step: str) -> list[str]:
    return [conditions.kind, conditions.hardware, conditions.torch, step]
