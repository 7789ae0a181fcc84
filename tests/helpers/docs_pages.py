"""Parser of README and docs: fenced blocks, command lines, links and headings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.folders import ROOT

DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
NAMES_A_FILE = re.compile(r"# ([\w./-]+\.(?:py|toml))(?:[ :].*)?")
FENCE = re.compile(r"```(\w*)")
SLOW = ("hf:", "examples/", "graphs/models/", "policies/")  # large models, results of training
MARK = re.compile(r"<!-- (slow|gpu) -->")
LINK = re.compile(r"(?<!\\)\[[^\]]*\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"|srcset=\"([^\"]+)\"")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block; ``mark`` is the preceding comment, "slow" or "gpu"."""

    page: Path
    line: int  # number of the first line, from 1
    language: str
    text: str
    mark: str = ""

    @property
    def file(self) -> str:
        """Return the file that the first line names, as in ``# model.py``, or ""."""
        found = NAMES_A_FILE.fullmatch(self.text.partition("\n")[0])
        return found[1] if found else ""

    @property
    def where(self) -> str:
        """Return page and line."""
        return f"{self.page.name}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command:
    where: str
    words: tuple[str, ...]

    @property
    def needs_gpu(self) -> bool:
        """Return whether it runs on CUDA; device names that are only exported do not count."""
        pairs = zip(("", *self.words), self.words, strict=False)
        return any("cuda:" in word for before, word in pairs if before != "--as")

    @property
    def is_setup(self) -> bool:
        """Return whether it installs something or runs a make target; tests do not run these."""
        return self.words[0] in ("pip", "make")

    @property
    def is_quick(self) -> bool:
        """Return whether it neither measures a step nor starts processes."""
        text = " ".join(self.words)
        if self.words[0] != "placer" or any(it in text for it in SLOW):
            return False
        name, *rest = self.words[1:]
        match name:
            case "machine":
                return "--cache" in rest or "--clear-cache" in rest or "--completion" in rest
            case "export":
                return "--predict" not in rest
            case "extract":
                return True
            case "show":
                return "--html" not in rest or any(word.endswith(".json") for word in rest[3:])
            case "optimize" | "evaluate":
                return rest[0].endswith(".json")  # the target is a graph
        return False


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page in order."""
    inside: list[str] | None = None
    mark, language, first = "", "", 0
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if inside is None:
            if found := FENCE.fullmatch(line):
                inside, language, first = [], found[1], number + 1
            elif line.strip():
                mark = found[1] if (found := MARK.fullmatch(line)) else ""
        elif line == "```":
            yield Block(page, first, language, "\n".join(inside) + "\n", mark)
            inside, mark = None, ""
        else:
            inside.append(line)
    assert inside is None, f"{page.name}: the block of line {first} has no end"


def commands(block: Block) -> list[Command]:
    """Return the command lines of a shell block; a backslash joins two lines."""
    if block.language != "sh":
        return []
    found, before, first = [], "", block.line
    for number, line in enumerate(block.text.splitlines(), block.line):
        first = first if before else number
        before += line.removesuffix("\\")
        if line.endswith("\\"):
            continue
        if words := shlex.split(before, comments=True):
            found.append(Command(f"{block.page.name}:{first}", tuple(words)))
        before = ""
    return found


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    text, inside = [], False
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            text.append(line)
    return "\n".join(text)


def links(page: Path) -> list[str]:
    """Return the targets of the links and pictures of a page, without other sites."""
    text = re.sub(r"`[^`]*`", "", prose(page))
    found = ["".join(match.groups("")) for match in LINK.finditer(text)]
    return [link for link in found if not link.startswith(("http://", "https://"))]


def anchors(page: Path) -> set[str]:
    """Return the heading anchors of a page, as GitHub makes them."""
    headings = re.findall(r"^#{1,6} +(.+?) *$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
