"""Mutations of files: of their bytes, their text, and the values in them."""

from __future__ import annotations

import copy
import io
import json
import re
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, Final, Literal, TypeAlias

from tests.helpers.tiny_training import inline_toml

Syntax: TypeAlias = Literal["json", "toml", "safetensors", "zip", "bytes"]

LARGE: Final = (2**31, 2**53, 2**62, 2**63, 2**70, 10**400, 1e20, 1e300, 1.7e308, 1_000_000)
SMALL: Final = (0, -0.0, 1, -1, 0.5, 1e-9, 5e-324, -1e300, -(2**63), float("inf"), float("nan"))
CANARY: Final = "executed"
"""File that appears in the working folder if any code in a text is executed."""
CODE: Final = (
    f"__import__('os').system('touch {CANARY}')",
    f"open('{CANARY}', 'w').close()",
    f"(lambda: open('{CANARY}', 'w').close())()",
    f"[open('{CANARY}', 'w').close() for x in '1']",
    f"x): open('{CANARY}', 'w').close() #",
    f"x'); open('{CANARY}', 'w').close(); ('",
    f"x\n    open('{CANARY}', 'w').close()\n    x",
    *("().__class__", "lambda: 0", "10**10**10", "Pow(9, Pow(9, 99))", "LShift(1, 127)"),
    *("(" * 300 + "1" + ")" * 300, "(" * 50_000, "-" * 3_000 + "1", "1 if s77 else 0"),
    *("*".join(["(s77+1)**4"] * 150), "Max(" + "s77-1," * 15 + "s78)", "FloorDiv(1, 0)"),
    *(
        "Symbol('s77', real=False)",
        "u999999",
        "s77.name",
        "Float('1e999')",
        "Mod(s77, 0) < s78 < 1",
    ),
)
TEXTS: Final = (
    *CODE,
    *("", " ", "x", "x" * 70_000, "é€😀", "\ud800x", "\u202egnp", "\x00", "\x1b[31mred", "a\nb"),
    *("../../etc/passwd", "core:0", "cuda:99", "-1", "nan", "%s{0}$(x)", "__class__"),
)
OTHERS: Final[tuple[Any, ...]] = (None, True, False, [], {}, [[]], {"": {}}, [None] * 2_000)
NUMBER: Final = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
PAIR: Final = re.compile(r'(?<!\w)"?\w{1,40}"?\s{0,2}[:=]\s{0,2}[^,\n{}\[\]]{1,80}')
NUMBERS: Final = ("1e400", "-1", "NaN", "Infinity", "inf", "9" * 5_000, "0x10", "1_0", "1.", "")
INNER: Final = re.compile(r"[\[{]|\w+\(|s\d+$")
"""Beginning of a text that is itself JSON or an expression."""
JUNK: Final = ("\x00", "\ufeff", "\u2028", "\x1b[2J", "{", "]", '"', ",", "//", "#", "\\u12", "=")


LARGEST_TREE: Final = 30_000
"""Largest file size in bytes whose values are repeated; repeating larger ones might explode."""


def mutated(random: Random, content: bytes, syntax: Syntax) -> bytes:
    """Return the content with one to three changes, which usually keep its syntax."""
    change = _CHANGES[syntax]
    for _ in range(random.choice((1, 1, 2, 3))):
        content = (change if random.random() < 0.8 else changed_bytes)(random, content)
    return content


def changed_bytes(random: Random, content: bytes) -> bytes:
    """Return the content with bytes flipped, cut off, removed, repeated, inserted or replaced."""
    size = len(content)
    start = random.randrange(size + 1)
    end = min(start + random.choice((1, 1, 2, 8, 64, 1_000)), size)
    match random.randrange(6):
        case 0:
            return content[:start]
        case 1:
            return content[:start] + content[end:]
        case 2:
            return content[:end] + content[start:end] * random.choice((1, 3, 100)) + content[end:]
        case 3:
            return content[:start] + random.randbytes(random.randrange(1, 40)) + content[start:]
        case 4:
            return content[:start] + random.randbytes(end - start) + content[end:]
    flipped = bytearray(content)
    for _ in range(random.choice((1, 2, 16)) if size else 0):
        flipped[random.randrange(size)] ^= 1 << random.randrange(8)
    return bytes(flipped)


def changed_text(random: Random, content: bytes) -> bytes:
    """Return the content with changed numbers and lines, deep nesting or odd characters."""
    text = content.decode(errors="replace")
    at = random.randrange(len(text) + 1)
    match random.randrange(5):
        case 0 if numbers := list(NUMBER.finditer(text)):
            found = random.choice(numbers)
            text = text[: found.start()] + random.choice(NUMBERS) + text[found.end() :]
        case 1:
            lines = text.splitlines(keepends=True)
            line = random.choice(lines or [""])
            lines.insert(random.randrange(len(lines) + 1), line)
            text = "".join(lines)
        case 2:
            opening = random.choice(("[", '{"a":', "[[", "a."))
            text = text[:at] + opening * random.choice((100, 3_000, 100_000)) + text[at:]
        case 3:
            text = text[:at] + random.choice(JUNK) + text[at:]
        case _:
            pairs = PAIR.findall(text)
            text = text.replace(pair := random.choice(pairs or [""]), f"{pair}, {pair}", 1)
    return text.encode(errors="surrogatepass")


def changed_tree(random: Random, tree: Any) -> Any:
    """Return nested lists and dicts with a value replaced, removed, renamed, repeated or moved."""
    tree = copy.deepcopy(tree)
    places = list(_places(tree))
    if not places:
        return changed_value(random, tree)
    inner = [(h, k) for h, k in places if _is_inner(k) or _is_inner(h[k])]
    holder, key = random.choice(inner if inner and random.random() < 0.3 else places)
    match random.randrange(8):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[random.choice((*TEXTS, *map(str, holder)))] = holder.pop(key)
        case 2 if isinstance(holder, list):
            holder.extend([copy.deepcopy(holder[key])] * random.choice((1, 2, 300)))
        case 3:
            other, place = random.choice(places)
            holder[key] = copy.deepcopy(other[place])
        case _:
            holder[key] = changed_value(random, holder[key])
    return tree


def _is_inner(value: object) -> bool:
    return isinstance(value, str) and INNER.match(value) is not None


def changed_value(random: Random, value: Any) -> Any:
    """Return another value, often of the same type."""
    if isinstance(value, int | float) and random.random() < 0.7:
        scaled = value * random.choice((-1, 2, 0.5, 1e3, 1e9)) if abs(value) < 1e250 else 0
        return random.choice((*LARGE, *SMALL, scaled))
    if isinstance(value, str) and random.random() < 0.7:
        return changed_string(random, value)
    if random.random() < 0.05:
        nested: Any = value
        for _ in range(random.choice((10, 300, 20_000))):
            nested = [nested]
        return nested
    return random.choice((*LARGE, *SMALL, *TEXTS, *OTHERS))


def changed_string(random: Random, value: str) -> str:
    """Return another text: a special one, changed in a word or slightly, or mutated as JSON."""
    words = list(re.finditer(r"\w+", value))
    match random.randrange(4):
        case 0:
            return random.choice(TEXTS)
        case 1 | 2 if words:
            word = random.choice(words)
            other = random.choice((*TEXTS, *NUMBERS, random.choice(words)[0]))
            return value[: word.start()] + other + value[word.end() :]
        case 3 if value.startswith(("[", "{")):
            return _json(random, value.encode()).decode(errors="replace")
    return random.choice((value + value, value[:-1], value.upper()))


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (list or dict, index or key) in a tree."""
    keys: Any = tree.keys() if isinstance(tree, dict) else range(len(tree))
    for key in keys if isinstance(tree, dict | list) else ():
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _places(tree[key])


def _json(random: Random, content: bytes) -> bytes:
    write = partial(json.dumps, ensure_ascii=random.random() < 0.7)
    return _tree(random, content, json.loads, write)


def _toml(random: Random, content: bytes) -> bytes:
    return _tree(random, content, tomllib.loads, inline_toml)


def _tree(
    random: Random, content: bytes, parse: Callable[[str], Any], write: Callable[[Any], str]
) -> bytes:
    if random.random() > 0.25 and len(content) <= LARGEST_TREE:
        with suppress(ValueError, RecursionError, AttributeError):
            return write(changed_tree(random, parse(content.decode()))).encode()
    return changed_text(random, content)


def _safetensors(random: Random, content: bytes) -> bytes:
    """Change the header as JSON, the numbers after it, or the length of the header."""
    size = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + size], content[8 + size :]
    match random.randrange(5):
        case 0:
            other = random.choice((0, 1, size // 2, size * 2, 2**40, 2**63)) % 2**64
            return other.to_bytes(8, "little") + header + data
        case 1 | 2 | 3:
            header = _json(random, header)
        case _:
            word = random.choice(
                (b"\x00\x00\xc0\x7f", b"\xff\xff\x7f\x7f", b"\x00" * 4, b"\x80" * 4)
            )
            at = random.randrange(max(len(data) // 4, 1)) * 4
            data = data[:at] + word * random.choice((1, 4, 64)) + data[at + 4 :]
            data = data[: len(content) - 8 - size]
    return len(header).to_bytes(8, "little") + header + data


def _zip(random: Random, content: bytes) -> bytes:
    """Change one member of an archive, usually a JSON one."""
    made = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(made, "w") as new:
            names = archive.namelist()
            sizes = [1 + n.endswith(".json") * archive.getinfo(n).file_size ** 0.5 for n in names]
            [chosen] = random.choices(names, sizes)
            for name in names:
                data = archive.read(name)
                change = _json if name.endswith(".json") else changed_bytes
                new.writestr(name, change(random, data) if name == chosen else data)
    except Exception:  # noqa: BLE001 - zipfile raises many kinds for what an earlier change broke
        return changed_bytes(random, content)
    return made.getvalue()


_CHANGES: Final[dict[Syntax, Callable[[Random, bytes], bytes]]] = {
    "json": _json,
    "toml": _toml,
    "safetensors": _safetensors,
    "zip": _zip,
    "bytes": changed_bytes,
}
