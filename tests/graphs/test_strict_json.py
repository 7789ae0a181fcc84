"""Strict JSON reading: errors are reported in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphs.graph_file import load_graph
from graphs.strict_json import LONGEST_MESSAGE, brief, load_toml, of_format, parse_json, within


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON: Expecting"),
        (3000 * "[" + 3000 * "]", "nested too deeply"),
        ('[{"a": 1, "b": {"c": 1, "c": 2}}]', "'c' is given twice in one object"),
        (r'{"a": ["\ud800x"]}', r"a\[0\] is '\\ud800x', which cannot be printed"),
        (r'{"\uDFFF": 1}', r"a key of the file is '\\udfff', which cannot be printed"),
        (r'{"a": {"b": [1, "\u001b[2J"]}}', r"a\.b\[1\] is '\\x1b\[2J', which cannot be printed"),
        ('{"a": "\x7f"}', r"a is '\\x7f', which cannot be printed"),
        ('["\N{RIGHT-TO-LEFT OVERRIDE}"]', r"\[0\] is '\\u202e', which cannot be printed"),
        ("1" * 5000, "Exceeds the limit"),
    ],
)
def test_json_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text, lambda content: content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = ", "not TOML: Invalid value .at end of document."),
        (b"a = 1\n\xff", "not text in UTF-8 .byte 6."),
        (b"a = " + 3000 * b"[" + 3000 * b"]", "nested too deeply"),
        (b"a = " + 5000 * b"1", "a number has thousands of digits"),
        (b"a = 1\n" + b"b." * 100_000 + b"b = 1", "more than 64 names are joined by dots"),
        (b"#" * 1_000_001, "1.0 MB is more than such a file may have"),
        (b'a = "\\u009b2J"', r"a is '\\x9b2J', which cannot be printed"),
        (b"a = 1", "one and another"),
    ],
)
def test_toml_that_is_refused_is_told_with_its_file(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "some.toml"
    path.write_bytes(content)

    def parse(_: object) -> None:
        raise ValueError("one and\n  another")

    with pytest.raises(ValueError, match=message) as refusal:
        load_toml(path, parse)
    assert str(refusal.value).startswith(f"{path}: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["n" * 70_000, "n nn" * 9000])
def test_names_without_end_do_not_fill_a_message(tmp_path: Path, name: str) -> None:
    path = tmp_path / "graph.json"
    node = {"id": name, "cost_s": {"*": -1.0}}
    path.write_text(json.dumps({"format": "placer-graph/1", "nodes": [node, node]}))
    with pytest.raises(ValueError, match=r"nodes\[0\]: op 'n") as refusal:
        load_graph(path)
    told = str(refusal.value)
    assert len(told) < LONGEST_MESSAGE + 200
    assert "\n" not in told


def test_a_brief_message_keeps_its_begin_and_its_end() -> None:
    listed = ", ".join(f"device:{i}" for i in range(2000))
    told = brief(f"there is no device 'x': there are {listed}; did you mean device:7?")
    assert told.startswith("there is no device 'x'")
    assert told.endswith("device:7?")
    assert len(told) <= LONGEST_MESSAGE
    path = "/a" * 150
    assert brief(f"{path} cannot be read") == f"{path} cannot be read"


def test_a_number_outside_of_its_range_is_told_in_few_digits() -> None:
    with pytest.raises(ValueError, match=r"^size is 1000.*0000, not within 0 \.\. 5$") as refusal:
        within(10**3000, 0, 5, "size")
    assert len(str(refusal.value)) < 100


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"nodes": []}, "the file lacks format, which is 'placer-graph/1' in such a file"),
        ({"format": "placer-graph/2", "no": 1}, "is 'placer-graph/2', this version reads"),
        ({"format": "placer-placement/1", "devices": {}}, "this file has to be 'placer-graph/1'"),
        ({"format": 1}, "format is 1, but this file has to be"),
        ({"format": "placer-graph/1", "node": []}, "unknown key node; did you mean nodes"),
        ({"format": "placer-graph/1"}, "the file lacks nodes"),
    ],
)
def test_a_file_of_another_format_is_told_before_its_keys(content: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of_format(content, "placer-graph/1", frozenset({"format", "nodes"}), ("nodes",))
