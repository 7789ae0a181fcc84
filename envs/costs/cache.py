"""Cache of measured op times: one SQLite file that several processes may share.

A *session* is one profile of one step on one kind of device. It gives every op signature of the
step one time: the median over the runs and over the ops with that signature. The last five sessions
of a signature are kept; which of them count is decided when they are read:

- A session is *calm* if the interquartile range of its summed op times is at most 10 % of their
  median; one whose noise is unknown counts as noisy. Where there are calm sessions only they count:
  noisy hours cannot outvote a quiet one.
- Without any, three noisy sessions count together, so that a machine that is never quiet does not
  measure forever. With fewer the time is not known.
- The result is the median of those that count, for an even number the lower of the middle two.
  Other load adds to times and seldom reduces them, so of two the smaller is nearer to the truth;
  with three or more a single outlier, slow or fast, has no effect. Sessions from before a change of
  the machine are gone after five new ones.

The file keeps SQLite's rollback journal: unlike its write-ahead log it works on network file
systems and can be read where nothing can be written. A missing cache is never an error: a file that
cannot be opened counts as empty and stores nothing. A damaged or foreign file is set aside. Storing
in a folder that cannot be written gives a warning.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import statistics
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar
from zlib import crc32

from envs.hardware.cache_folder import CacheWarning, cache_folder, warn_if_unwritable
from envs.hardware.cluster import LONGEST_S
from graphs.text import check_printable, escaped

APPLICATION: Final = 0x706C6163  # "plac", in SQLite's field for the application of a file
SESSIONS_KEPT: Final = 5
SESSIONS_IF_NOISY: Final = 3
CALM_SPREAD: Final = 0.1
UNKNOWN_SPREAD: Final = 1.0
"""Spread in the file of a session whose noise is unknown, above ``CALM_SPREAD``."""
WAIT_S: Final = 10.0  # for other writers
CHUNK: Final = 500  # signatures asked for at once
DAMAGED: Final = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
COMPANIONS: Final = ("-journal", "-wal", "-shm")
TABLES: Final = (
    """CREATE TABLE session (
        id INTEGER PRIMARY KEY,
        kind TEXT NOT NULL,
        hardware TEXT NOT NULL,
        torch TEXT NOT NULL,
        measured TEXT NOT NULL,
        runs INTEGER NOT NULL,
        spread REAL NOT NULL
    )""",
    """CREATE TABLE cost (
        signature TEXT NOT NULL,
        session INTEGER NOT NULL REFERENCES session,
        cost_s REAL NOT NULL CHECK (cost_s > 0),
        PRIMARY KEY (signature, session)
    ) WITHOUT ROWID""",
)
FACTORS: Final = "factor"  # table of :mod:`envs.costs.factor_cache`, made when it is needed
OVERSIZE: Final = "oversize"  # that of :mod:`envs.costs.oversize_cache`
MEANING: Final = 4  # version of what a time means
EVERY_FILE: Final = "op-costs-*.sqlite*"
Result = TypeVar("Result")


def file_name(tables: Sequence[str]) -> str:
    """Return the cache file name for these tables; other tables have other files."""
    return f"op-costs-{MEANING}-{crc32(''.join(tables).encode()):08x}.sqlite"


FILE: Final = file_name(TABLES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Conditions of a measurement: the kind of device, its hardware and the version of torch."""

    kind: str
    hardware: str
    torch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One profile: {signature: seconds}, its number of runs, and the spread of their sums.

    ``spread`` is (upper quartile - lower quartile) / median of the runs' summed op times, None if
    the noise is unknown.
    """

    cost_s: Mapping[str, float]
    runs: int
    spread: float | None
    measured: str  # the day, as in 2026-01-31


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCost:
    """Combined cost of the sessions of a signature that count, and the day of the last of them."""

    cost_s: float
    measured: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Content of a cache for one set of conditions."""

    conditions: Conditions
    signatures: int
    sessions: int
    first: str  # days of the first and the last session
    last: str


class CostCache:
    """The op cost cache in one file; every call opens its own connection."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = cache_folder() / FILE if path is None else path

    def known(self, conditions: Conditions, signatures: Iterable[str]) -> dict[str, KnownCost]:
        """Return {signature: cost} for the signatures with enough sessions."""
        asked = list(dict.fromkeys(signatures))
        rows = self._tried(lambda: self._read(conditions, asked))
        sessions: defaultdict[str, list[tuple[float, str, float]]] = defaultdict(list)
        for signature, cost_s, measured, spread in rows or ():
            if _is_cost(cost_s) and _is_session(measured, spread):
                sessions[signature].append((cost_s, measured, spread))
        combined = {signature: _combined(each) for signature, each in sessions.items()}
        return {signature: cost for signature, cost in combined.items() if cost is not None}

    def store(self, conditions: Conditions, session: Session) -> None:
        """Store a session, without times that are not above 0 or not below ``LONGEST_S``."""
        costs = {s: float(cost_s) for s, cost_s in session.cost_s.items() if _is_cost(cost_s)}
        spread = UNKNOWN_SPREAD if session.spread is None else session.spread
        if costs and math.isfinite(spread):
            self._stored(lambda: self._write(conditions, session, spread, costs))

    def holdings(self) -> list[Holding]:
        """Return what the cache holds, by conditions.

        Raises UnreadableCacheError for a damaged or foreign file, OSError if it cannot be read.
        """
        if self._is_empty():
            return []
        query = (
            "SELECT kind, hardware, torch, count(DISTINCT signature), count(DISTINCT id), "
            "min(measured), max(measured) FROM session JOIN cost ON session = id "
            "GROUP BY kind, hardware, torch ORDER BY kind, hardware, torch"
        )
        with self._errors(), self._opened() as file:
            rows = file.execute(query).fetchall()
            check_printable([list(row) for row in rows], "the cache of op costs")
            return [
                Holding(
                    conditions=Conditions(kind=str(kind), hardware=str(hardware), torch=str(torch)),
                    signatures=signatures,
                    sessions=sessions,
                    first=str(first),
                    last=str(last),
                )
                for kind, hardware, torch, signatures, sessions, first, last in rows
            ]

    def clear(self, kind: str) -> None:
        """Delete the times of one kind of device; raises as :meth:`holdings` does."""
        if self.path.exists():
            with self._errors(), self._opened(write=True) as file:
                of_kind = "SELECT id FROM session WHERE kind = ?"
                file.execute(f"DELETE FROM cost WHERE session IN ({of_kind})", [kind])
                file.execute("DELETE FROM session WHERE kind = ?", [kind])
                for table in (FACTORS, OVERSIZE):
                    if self._has_table(file, table):
                        file.execute(f"DELETE FROM {table} WHERE kind = ?", [kind])

    def files(self) -> list[Path]:
        """Return the cache's existing files, with those set aside and those of other versions."""
        parts = (self.path, _aside(self.path))
        names = [Path(f"{part}{suffix}") for part in parts for suffix in ("", *COMPANIONS)]
        names += sorted(set(self.path.parent.glob(EVERY_FILE)).difference(names))
        return [name for name in names if os.path.lexists(name)]

    def _is_empty(self) -> bool:
        """Return whether nothing was ever stored; a full disk may leave a file without tables."""
        return not self.path.exists() or self.path.stat().st_size == 0

    def _has_table(self, file: sqlite3.Connection, name: str) -> bool:
        query = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = ?"
        return bool(file.execute(query, [name]).fetchone()[0])

    def _read(
        self, conditions: Conditions, signatures: list[str]
    ) -> list[tuple[str, float, str, float]]:
        rows: list[tuple[str, float, str, float]] = []
        if self._is_empty():
            return rows
        with self._opened() as file:
            for at in range(0, len(signatures), CHUNK):
                chunk = signatures[at : at + CHUNK]
                rows += file.execute(
                    "SELECT signature, cost_s, measured, spread "
                    "FROM cost JOIN session ON session = id "
                    "WHERE kind = ? AND hardware = ? AND torch = ? "
                    f"AND signature IN ({', '.join('?' * len(chunk))})",
                    [conditions.kind, conditions.hardware, conditions.torch, *chunk],
                )
        return rows

    def _write(
        self, conditions: Conditions, session: Session, spread: float, costs: Mapping[str, float]
    ) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        where = [conditions.kind, conditions.hardware, conditions.torch]
        about = [session.measured, session.runs, spread]
        with self._opened(write=True) as file:
            row = file.execute(
                "INSERT INTO session (kind, hardware, torch, measured, runs, spread) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                [*where, *about],
            ).lastrowid
            file.executemany(
                "INSERT INTO cost VALUES (?, ?, ?)", ((s, row, costs[s]) for s in costs)
            )
            file.execute(
                "DELETE FROM cost WHERE (signature, session) IN (SELECT signature, session FROM "
                "(SELECT signature, session, row_number() OVER "
                "(PARTITION BY signature ORDER BY session DESC) AS age "
                "FROM cost JOIN session ON session = id "
                "WHERE kind = ? AND hardware = ? AND torch = ?) WHERE age > ?)",
                [*where, SESSIONS_KEPT],
            )
            file.execute("DELETE FROM session WHERE id NOT IN (SELECT session FROM cost)")

    @contextlib.contextmanager
    def _opened(self, *, write: bool = False) -> Iterator[sqlite3.Connection]:
        """Open a transaction on the file; ``write`` creates the file if it is missing."""
        address = f"{self.path.absolute().as_uri()}?mode={'rwc' if write else 'rw'}"
        file = sqlite3.connect(address, uri=True, timeout=WAIT_S, isolation_level=None)
        with contextlib.closing(file):
            file.execute("PRAGMA trusted_schema = OFF")  # the file may be another user's
            file.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            _check(file)
            yield file
            file.execute("COMMIT")

    def _tried(self, work: Callable[[], Result]) -> Result | None:
        """Run ``work``, again after setting a damaged file aside; None if it cannot be opened."""
        try:
            inode = self.path.stat().st_ino if self.path.exists() else None
            return work()
        except sqlite3.Error as error:
            if not _is_damage(error):
                return None
            self._set_aside(inode, error)
        except OSError:
            return None
        with contextlib.suppress(sqlite3.Error, OSError):
            return work()
        return None

    def _stored(self, write: Callable[[], object]) -> None:
        """Run ``write`` as :meth:`_tried` does; warn if nothing can be written at all."""
        if self._tried(lambda: write() is None) is None:
            warn_if_unwritable(self.path.parent)

    def _set_aside(self, inode: int | None, error: sqlite3.Error) -> None:
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino != inode:
                return  # another process has done it
            # Companions first: SQLite would apply them to the next file of that name.
            for suffix in (*COMPANIONS, ""):
                with contextlib.suppress(FileNotFoundError):
                    Path(f"{self.path}{suffix}").replace(f"{_aside(self.path)}{suffix}")
            warnings.warn(
                f"{self.path} is no readable cache of op costs ({escaped(str(error))}): it is now "
                f"{_aside(self.path).name} beside it, and costs are measured anew",
                CacheWarning,
                stacklevel=2,
            )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of SQLite into UnreadableCacheError or OSError."""
        try:
            yield
        except sqlite3.Error as error:
            if _is_damage(error):
                raise UnreadableCacheError(self.path, error) from error
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
                raise OSError(
                    f"{self.path} is locked by another process, for {WAIT_S:g} s already: try again"
                ) from error
            raise OSError(f"{self.path}: {error}") from error


class UnreadableCacheError(ValueError):
    """The file at ``path`` is damaged, or not a cache of op costs."""

    def __init__(self, path: Path, error: sqlite3.Error) -> None:
        super().__init__(f"{path} is no readable cache of op costs ({error})")
        self.path = path


class _ForeignError(sqlite3.DatabaseError):
    sqlite_errorcode = sqlite3.SQLITE_NOTADB


def _check(file: sqlite3.Connection) -> None:
    """Create the tables of an empty file; refuse a file of another application."""
    (application,) = file.execute("PRAGMA application_id").fetchone()
    if application == APPLICATION:
        return
    (tables,) = file.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application or tables:
        raise _ForeignError("it belongs to another application")
    for table in TABLES:
        file.execute(table)
    file.execute(f"PRAGMA application_id = {APPLICATION}")


def _is_damage(error: sqlite3.Error) -> bool:
    """Return whether an error is about the file's content, not about locks or access."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in DAMAGED


def _is_cost(cost_s: object) -> bool:
    return isinstance(cost_s, float) and 0.0 < cost_s < LONGEST_S


def _is_session(measured: object, spread: object) -> bool:
    return isinstance(measured, str) and isinstance(spread, float) and spread >= 0.0


def _combined(sessions: list[tuple[float, str, float]]) -> KnownCost | None:
    calm = [session for session in sessions if session[2] <= CALM_SPREAD]
    counting = calm or sessions
    if not calm and len(sessions) < SESSIONS_IF_NOISY:
        return None
    return KnownCost(
        cost_s=statistics.median_low([cost_s for cost_s, _, _ in counting]),
        measured=max(day for _, day, _ in counting),
    )


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.set-aside")
