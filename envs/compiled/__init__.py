"""Compilation by numba: functions cached on disk, and tables of arrays passed by pointer."""

from envs.compiled.functions import (
    FRACTION_BITS,
    bits_of,
    compiled,
    compiled_borrowing,
    compiled_inline,
    compiled_rows,
    fraction_bits,
    from_bits,
    index,
    int64,
    is_cached,
    loading_stage,
    lowest_set_bit,
    prefetch,
    reporting_compilation,
)
from envs.compiled.tables import by_pointer

__all__ = [
    "FRACTION_BITS",
    "bits_of",
    "by_pointer",
    "compiled",
    "compiled_borrowing",
    "compiled_inline",
    "compiled_rows",
    "fraction_bits",
    "from_bits",
    "index",
    "int64",
    "is_cached",
    "loading_stage",
    "lowest_set_bit",
    "prefetch",
    "reporting_compilation",
]
