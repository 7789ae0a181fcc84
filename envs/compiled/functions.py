"""Compilation by numba's ``njit``, with types that static checkers understand."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, event, types
from numba.core.caching import FunctionCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.dispatcher import Dispatcher
from numba.core.typed_passes import NativeLowering
from numba.cpython.unsafe import numbers
from numba.extending import intrinsic
from numpy.typing import NDArray

from envs.compiled import tables

P = ParamSpec("P")
R = TypeVar("R")

lowest_set_bit = cast("Callable[[int], int]", numbers.trailing_zeros)
"""Index of the lowest set bit; one instruction, for compiled callers only."""


index = cast("Callable[[int], int]", np.uint32)
"""Convert a number to an unsigned index. This spares hot loops the check for negative indices,
which took a sixth of the simulator's time."""

int64 = cast("Callable[[int], int]", np.int64)
"""Convert a number to 64 bits: functions are compiled again for constants, and for each size of
number, that they are called with."""


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _prefetch(_: Any, array: Any, item: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = context.make_array(array)(context, builder, arguments[0])
        at = context.cast(builder, arguments[1], item, types.intp)
        pointer = builder.bitcast(builder.gep(view.data, [at]), cgutils.voidptr_t)
        kinds = [cgutils.voidptr_t, *3 * [cgutils.int32_t]]
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", kinds[:1], ir.FunctionType(ir.VoidType(), kinds)
        )
        flags = [cgutils.int32_t(flag) for flag in (0, 3, 1)]  # to read, keep, data
        builder.call(function, [pointer, *flags])
        return context.get_dummy_value()

    return types.void(array, item), generate


FRACTION_BITS: Final = (1 << 23) - 1
"""Mask of the bits of a number of single precision after its leading one."""


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _bits_of(_: Any, number: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], cgutils.int32_t)

    return types.int32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _from_bits(_: Any, bits: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _fraction_bits(_: Any, number: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[0], cgutils.int32_t)
        return builder.and_(bits, cgutils.int32_t(FRACTION_BITS))

    return types.int32(types.float32), generate


bits_of = cast("Callable[[np.float32], int]", _bits_of)
"""Return the 32 bits of a number of single precision; for compiled callers only. Of numbers that
are not negative, the order is theirs: loops over integers can keep the least of several items at
once, those over floating-point numbers not."""

fraction_bits = cast("Callable[[np.float32], int]", _fraction_bits)
"""Return the last 23 of :func:`bits_of`, those after the leading one of a number's binary form. The
operator & would widen them to 64 bits, and halve the items that a loop takes together."""

from_bits = cast("Callable[[int], np.float32]", _from_bits)
"""Return the number of single precision that has 32 bits; for compiled callers only."""


prefetch = cast("Callable[[NDArray[Any], int], None]", _prefetch)
"""Start to load an item of a contiguous array, counted over all its dimensions, into the cache; for
compiled callers only."""


_uncached: Final[set[str]] = set()
"""Functions whose machine code cannot be cached in any folder."""


def loading_stage(*, is_cached: bool) -> str:
    """Return the name of the stage that loads compiled code, or compiles it, with the reason."""
    if _uncached:
        return (
            "Compiling code (10 s, in every run: neither the installation nor ~/.cache can be "
            "written; set NUMBA_CACHE_DIR to a folder that can)"
        )
    return "Loading compiled code" if is_cached else "Compiling code (once, 10 s)"


@contextmanager
def reporting_compilation(report: Callable[[int, int], None]) -> Iterator[None]:
    """Call ``report`` whenever this process has compiled a function in the block.

    It gets the number of functions that were compiled so far, and of all that there are: some of
    them may not be needed, or be compiled by another process.
    """
    done: set[Dispatcher] = set()

    class Compiled(event.Listener):  # type: ignore[misc]  # numba has no types
        def on_start(self, _: Any) -> None:
            pass

        def on_end(self, ended: Any) -> None:
            if (dispatcher := ended.data["dispatcher"]) in _STAMPS:
                done.add(dispatcher)
                report(len(done), len(_STAMPS))

    with event.install_listener("numba:compile", Compiled()):
        yield


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function of plain numbers, arrays and tables of them, at its first call.

    Tables are named tuples, see :mod:`envs.compiled.tables`. Machine code is cached on disk, and
    running it releases the interpreter lock; of several processes that need it, one compiles and
    the others wait. Other argument types, even 0 for 0.0 or a read-only array for a writable one,
    cause another compilation; so does a change of the function's file, or of a compiled function or
    number that its file imports.
    """
    return _compiled(function)


def compiled_borrowing(function: Callable[P, R]) -> Callable[P, R]:
    """Compile as :func:`compiled` does, for functions that only use the arrays they are given.

    They must not create arrays. Arrays are not reference-counted while the function runs: its
    caller holds them anyway.
    """
    return _compiled(function, _nrt=False)


def compiled_inline(function: Callable[P, R]) -> Callable[P, R]:
    """Compile as :func:`compiled_borrowing` does, always inlined into the compiled callers.

    Only compiled functions can call it, and it has no machine code of its own.
    """
    return _compiled_inline(function, _PartCompiler)


def compiled_rows(function: Callable[P, R]) -> Callable[P, R]:
    """Compile as :func:`compiled_inline` does, for arrays that overlap with nothing else.

    The arrays among the arguments, if written to, must share no memory with each other or with what
    else the function uses. So a loop over their items handles several at once, without comparing
    addresses before.
    """
    return _compiled_inline(function, _RowsCompiler)


def _compiled_inline(function: Callable[P, R], compiler: type[CompilerBase]) -> Callable[P, R]:
    dispatcher = numba.njit(
        nogil=True,
        error_model="numpy",
        _nrt=False,
        forceinline=True,
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
        pipeline_class=compiler,
    )(function)
    if isinstance(dispatcher, Dispatcher):  # not with NUMBA_DISABLE_JIT
        _STAMPS[dispatcher] = _stamp(function)
        _keep_from_python(dispatcher)
    return cast("Callable[P, R]", dispatcher)


def is_cached(function: object) -> bool:
    """Return whether machine code of a function is on disk, or cannot be cached at all."""
    cache = getattr(function, "_cache", None)
    return not isinstance(cache, _SharedCache) or cache.has_code()


def _keep_from_python(dispatcher: Any) -> None:
    """Make calls from Python raise an error: there is no code at the address to be called."""

    def add_overload(result: Any) -> None:
        dispatcher.overloads[tuple(result.signature.args)] = result

    def refuse(*_: object, **__: object) -> None:
        raise TypeError(f"{dispatcher.py_func.__name__} can only be called by compiled functions")

    dispatcher.add_overload, dispatcher._compile_for_args = add_overload, refuse


def _compiled(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    dispatcher = numba.njit(nogil=True, no_cfunc_wrapper=True, error_model="numpy", **options)(
        function
    )
    if isinstance(dispatcher, Dispatcher):  # not with NUMBA_DISABLE_JIT
        _STAMPS[dispatcher] = _stamp(function)
        try:
            dispatcher._cache = _SharedCache(function, _STAMPS[dispatcher])
        except RuntimeError:  # no folder to write the cache to
            _uncached.add(function.__qualname__)
    return cast("Callable[P, R]", dispatcher)


_COMPILER_FILES: Final = (__file__, tables.__file__)
_STAMPS: Final[dict[Dispatcher, str]] = {}
"""Cache key of each function's code: it changes with the function and with what it uses."""


def _stamp(function: Callable[..., Any]) -> str:
    used = sorted(
        f"{name} = {_STAMPS.get(value, value)}"
        for name, value in function.__globals__.items()
        if isinstance(value, int | float | np.number | Dispatcher)
    )
    content = _content(function.__code__.co_filename)
    return sha256(repr((content, *map(_content, _COMPILER_FILES), used)).encode()).hexdigest()


@cache
def _content(path: str) -> str:
    try:
        return sha256(Path(path).read_bytes()).hexdigest()
    except OSError:  # it was typed in interactively
        return ""


class _SharedCache(FunctionCache):  # type: ignore[misc]  # numba has no types
    """Machine code on disk that several processes share, so that only one of them compiles it.

    A process that finds no code locks the function until it has compiled it. A function waits only
    for those that it calls, so processes never deadlock.
    """

    def __init__(self, function: Callable[..., Any], stamp: str) -> None:
        super().__init__(function)
        # No public API sets what code depends on; a test notices if this stops working.
        self._cache_file._source_stamp = stamp
        self._load_current = self._cache_file._load_index
        self._cache_file._load_index = self._load_index
        self._lock: int | None = None

    def _load_index(self) -> dict[Any, str]:
        """Return the cached code by signature: none if its types were renamed since."""
        try:
            return cast("dict[Any, str]", self._load_current())
        except (ImportError, AttributeError):
            return {}

    def has_code(self) -> bool:
        """Return whether there is code for any argument types."""
        return bool(self._cache_file._load_index())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code for a signature; None locks the function, which is to be compiled."""
        code = super().load_overload(sig, target_context)
        if code is None and self._locked():
            code = super().load_overload(sig, target_context)  # another process was faster
            if code is not None:
                self._unlock()
        return code

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        finally:
            self._unlock()

    def _locked(self) -> bool:
        """Lock the function; return False where files cannot be locked."""
        if self._lock is None:
            try:
                self._impl.locator.ensure_cache_path()
                path = f"{self._cache_file._index_path}.lock"
                lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
            except OSError:
                return False
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:
                os.close(lock)
                return False
            except BaseException:
                os.close(lock)
                raise
            self._lock = lock
        return True

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class _PartCompiler(CompilerBase):  # type: ignore[misc]  # numba has no types
    """Numba's default passes, except that the last one leaves the code for callers to link.

    By default numba optimizes every function and makes machine code of it, again and again for one
    that others inline: that was a third of the compile time.
    """

    def define_pipelines(self) -> list[Any]:
        """Replace the lowering pass."""
        manager = DefaultPassBuilder.define_nopython_pipeline(self.state)
        manager.passes = [
            (_PartLowering if step is NativeLowering else step, name)
            for step, name in manager.passes
        ]
        manager._finalized = False
        manager.finalize()
        return [manager]


class _RowsCompiler(_PartCompiler):
    """Compiles as its base does, and tells LLVM that arrays among the arguments do not overlap."""

    def define_pipelines(self) -> list[Any]:
        """Set the flag, which numba offers to its own targets only."""
        self.state.flags.noalias = True
        return super().define_pipelines()


@register_pass(mutates_CFG=True, analysis_only=False)
class _PartLowering(NativeLowering):  # type: ignore[misc]  # numba has no types
    _name = "part_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = _Part(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return bool(super().run_pass(state))


class _Part(JITCodeLibrary):  # type: ignore[misc]  # numba has no types
    """Code of a function that is linked into its callers and has no address."""

    @property
    def codegen(self) -> Any:
        return _WithoutEnvironments(self._codegen)

    def get_pointer_to_function(self, _: str) -> int:
        self._ensure_finalized()
        return 0

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


class _WithoutEnvironments:
    """A code generator for functions that have no address at which to store an environment."""

    def __init__(self, codegen: Any) -> None:
        self._codegen = codegen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codegen, name)

    def set_env(self, *_: object) -> None:
        """Do nothing."""
