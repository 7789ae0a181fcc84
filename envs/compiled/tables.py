"""Named tuples of arrays that compiled functions pass to each other as one pointer.

By default numba unpacks a named tuple: with thirty arrays, every function that takes it has two
hundred arguments. Compiling them took most of the compile time.
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any, Final, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    NativeValue,
    infer_getattr,
    lower_getattr_generic,
    models,
    register_model,
    typeof_impl,
    unbox,
)
from numba.np.arrayobj import populate_array
from numba.np.numpy_support import from_dtype
from numpy.typing import NDArray

T = TypeVar("T")
WORD: ir.IntType = ir.IntType(64)


def by_pointer(named_tuple: type[T]) -> type[T]:
    """Let compiled functions take such named tuples as one pointer; a class decorator.

    Fields are numbers, and arrays that are contiguous and writable. Compiled functions read the
    fields as usual; they cannot create such a tuple, and must not return its arrays.
    """
    members = {name: getattr(named_tuple, name) for name in ("__doc__", "__module__")}
    made = type(named_tuple.__name__, (_Table, named_tuple), members)
    made.__qualname__ = named_tuple.__qualname__
    typeof_impl.register(made)(lambda table, _: table._compiled_type)
    return cast("type[T]", made)


class _Table(tuple[Any, ...]):
    """A named tuple with what compiled code needs to know of it, computed at first use."""

    _fields: tuple[str, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave addresses out of copies."""
        return type(self), tuple(self)

    @cached_property
    def _compiled_type(self) -> TableType:
        kinds = tuple(_kind(name, value) for name, value in zip(self._fields, self, strict=True))
        return _table_type(type(self).__name__, self._fields, kinds)

    @cached_property
    def _words(self) -> NDArray[np.int64]:
        words: list[Any] = []
        for value in self:
            if isinstance(value, np.ndarray):
                words += [value.__array_interface__["data"][0], *value.shape]
            else:
                words.append(np.float64(value).view(np.int64) if type(value) is float else value)
        return np.array([int(word) for word in words], np.int64)

    @cached_property
    def _address(self) -> int:
        return self._words.ctypes.data


class TableType(types.Type):  # type: ignore[misc]  # numba has no types
    """The numba type of such a named tuple, given by the types of its fields."""

    def __init__(self, name: str, kinds: dict[str, Any]) -> None:
        self.kinds = kinds
        sizes = [1 + getattr(kind, "ndim", 0) for kind in kinds.values()]
        self.words = dict(zip(kinds, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
        super().__init__(f"{name}({', '.join(f'{field}: {kinds[field]}' for field in kinds)})")


register_model(TableType)(models.OpaqueModel)

NUMBERS: Final = {bool: types.boolean, int: types.int64, float: types.float64}


@cache
def _table_type(name: str, fields: tuple[str, ...], kinds: tuple[Any, ...]) -> TableType:
    """Return the type, made once: making it takes longer than most functions run."""
    types_of_fields = (
        types.Array(from_dtype(kind[0]), kind[1], "C") if isinstance(kind, tuple) else NUMBERS[kind]
        for kind in kinds
    )
    return TableType(name, dict(zip(fields, types_of_fields, strict=True)))


def _kind(name: str, value: object) -> Any:
    """Return what determines the type of a field: (dtype, dimensions), or the type of a number."""
    if isinstance(value, np.ndarray):
        if not value.flags.carray:
            raise TypeError(f"array {name} is not contiguous, aligned and writable")
        return value.dtype, value.ndim
    if type(value) not in NUMBERS:
        raise TypeError(f"field {name} is {type(value).__name__}, not an array or a number")
    return type(value)


@unbox(TableType)  # type: ignore[untyped-decorator]  # numba has no types
def _unboxed(_: TableType, table: Any, compiling: Any) -> Any:
    python = compiling.pyapi
    address = python.object_getattr_string(table, "_address")
    pointer = python.long_as_voidptr(address)
    python.decref(address)
    return NativeValue(pointer, is_error=python.c_api_error())


@infer_getattr
class _Attributes(AttributeTemplate):  # type: ignore[misc]  # numba has no types
    key = TableType

    def generic_resolve(self, table: TableType, name: str) -> Any:
        return table.kinds.get(name)


@lower_getattr_generic(TableType)  # type: ignore[untyped-decorator]  # numba has no types
def _field(context: Any, builder: Any, table: TableType, pointer: Any, name: str) -> Any:
    kind, word = table.kinds[name], table.words[name]
    if not isinstance(kind, types.Array):
        value = _read(builder, pointer, word, context.get_data_type(kind))
        return context.data_model_manager[kind].from_data(builder, value)
    array = context.make_array(kind)(context, builder)
    item = context.get_data_type(kind.dtype)
    shape = [_read(builder, pointer, word + 1 + k, cgutils.intp_t) for k in range(kind.ndim)]
    strides = [cgutils.intp_t(context.get_abi_sizeof(item))]
    for size in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], size))
    populate_array(
        array,
        data=_read(builder, pointer, word, item.as_pointer()),
        shape=shape,
        strides=strides,
        itemsize=strides[-1],
        meminfo=None,
    )
    return array._getvalue()


def _read(builder: Any, pointer: Any, word: int, kind: Any) -> Any:
    """Generate code that reads a word; words never change, so loops read them once."""
    words = builder.bitcast(pointer, WORD.as_pointer())
    place = builder.gep(words, [ir.IntType(32)(word)])
    value = builder.load(builder.bitcast(place, kind.as_pointer()))
    value.set_metadata("invariant.load", builder.module.add_metadata([]))
    return value
