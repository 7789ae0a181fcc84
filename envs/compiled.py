"""Compiled functions: numba's ``njit`` with types that checkers see through."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from numba.core.dispatcher import Dispatcher
from numba.cpython.unsafe import numbers

P = ParamSpec("P")
R = TypeVar("R")

lowest_set_bit = cast("Callable[[int], int]", numbers.trailing_zeros)
"""Number of the lowest bit that is set; one instruction, for compiled callers only."""


index = cast("Callable[[int], int]", np.uint32)
"""Makes a number an index that is never negative. In a hot loop it saves the question whether to
count from the end; that question was a sixth of the simulator's time."""


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function for plain numbers, arrays and named tuples of them, at its first call.

    Machine code is cached on disk, and running it releases the interpreter lock. Other argument
    types, even 0 for 0.0 or a read-only array for a writable one, compile again; so does a change
    of the function's file, or of a compiled function or number that its file imports.
    """
    return _njit(function)


def compiled_borrowing(function: Callable[P, R]) -> Callable[P, R]:
    """Like :func:`compiled`, for functions that make no arrays and only work on those they get.

    Arrays are not counted as in use while the function runs: its caller holds them anyway.
    Counting costs more than the work itself where small functions pass named tuples of many arrays.
    """
    return _njit(function, _nrt=False)


def compiled_inline(function: Callable[P, R]) -> Callable[P, R]:
    """Like :func:`compiled_borrowing`, and always merged into the compiled functions that call it.

    For the small parts of a hot loop: a call would hand over a named tuple array by array.
    """
    return _njit(function, _nrt=False, forceinline=True)


def _njit(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    try:
        dispatcher = numba.njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # no folder to write the cache to
        dispatcher = numba.njit(nogil=True, **options)(function)
    else:
        _watch_what_it_uses(dispatcher, function)
    return cast("Callable[P, R]", dispatcher)


def _watch_what_it_uses(dispatcher: Any, function: Callable[..., Any]) -> None:
    """Make cached code stale when a compiled function or a number that it imports has changed.

    By itself numba looks at the function's own file only, and would go on running the old code of
    all others. There is no public way to tell it; a test notices should this one close.
    """
    if not isinstance(dispatcher, Dispatcher):  # NUMBA_DISABLE_JIT
        return
    used = sorted(
        f"{name} = {_stamp(value)}"
        for name, value in function.__globals__.items()
        if isinstance(value, int | float | Dispatcher)
    )
    index = _cache_index(dispatcher)
    index._source_stamp = sha256(repr((index._source_stamp, used)).encode()).hexdigest()


def _stamp(value: object) -> object:
    if not isinstance(value, Dispatcher):
        return value
    index = _cache_index(value)
    return index and index._source_stamp


def _cache_index(dispatcher: Any) -> Any:
    """None where nothing is cached."""
    return getattr(dispatcher._cache, "_cache_file", None)
