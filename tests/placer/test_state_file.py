"""State files: written and read back."""

from __future__ import annotations

import stat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from placer.state_file import read_state, write_state

FORMAT = "test/1"
SCALARS = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | st.text()
TENSORS = st.lists(st.integers(-9, 9), max_size=4).map(torch.tensor)
ARRAYS = st.lists(st.integers(0, 9), max_size=4).map(lambda row: np.array(row, np.uint32))
KEYS = st.text() | st.integers(-9, 9)
NESTED = st.recursive(
    SCALARS | TENSORS | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or one != one)  # noqa: PLR0124 - NaN


@settings(max_examples=50)
@given(state=st.dictionaries(KEYS, NESTED, max_size=4))
def test_what_is_read_is_what_was_written(state: dict[Any, Any]) -> None:
    with TemporaryDirectory() as folder:
        write_state(Path(folder, "state"), state, FORMAT)
        found = read_state(Path(folder, "state"), FORMAT)
    assert same(state, found)
    assert type(state) is type(found)


def test_a_state_is_for_its_user_alone(tmp_path: Path) -> None:
    write_state(tmp_path / "state", {}, FORMAT)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o600


@pytest.mark.parametrize("part", [b"0.25", b"\x00\x00\x80\x3f", b'"shape":[2,3]'])
def test_a_damaged_state_is_refused(part: bytes, tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_state(path, {"weight": torch.ones(2, 3), "rate": 0.25, "none": torch.ones(0)}, FORMAT)
    assert same(read_state(path, FORMAT)["weight"], torch.ones(2, 3))
    content = path.read_bytes()
    assert part in content
    other = part.replace(b"2,3", b"3,2") if b"shape" in part else part[:-1] + b"6"
    path.write_bytes(content.replace(part, other, 1))
    with pytest.raises(ValueError, match="state: it is damaged"):
        read_state(path, FORMAT)


def test_other_values_files_and_formats_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with pytest.raises(TypeError, match="holds a set"):
        write_state(path, {"a": {1}}, FORMAT)
    path.write_text("no safetensors")
    with pytest.raises(ValueError, match="state: it is no state file"):
        read_state(path, FORMAT)
    write_state(path, {}, "test/2")
    with pytest.raises(ValueError, match="state: the format is 'test/2', this version reads 'te"):
        read_state(path, FORMAT)
