"""Reads of values that only check or report: their statement raises, warns, logs or does nothing.

    if not torch.isfinite(x).all():        assert (x >= 0).all()        torch._check(n.item() > 0)
        raise ValueError("not finite")

A step without such a statement computes the same. All else that reads values may steer the model.
What is read is found by the position of the running instruction in the source of the model.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, TypeAlias

import torch

from graphs.extract.errors import is_skipped, is_start, line_of
from graphs.extract.reads.known_values import COMPARISONS, Range, number_range
from graphs.extract.reads.purity import (
    is_check,
    is_inert,
    is_log,
    is_pure,
    is_steady,
    resolved,
)

Span: TypeAlias = tuple[int, int, int, int]
"""First line, its column, last line, its column, in bytes."""
FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
OF_TORCH: Final = {"fn", "__builtins__"}
"""Globals of a lambda that torch makes by eval, to call what it traces."""
DISTRIBUTIONS: Final = str(Path(torch.distributions.__file__).parent / "_")[:-1]
"""Folder of the functions of torch that check values which a model gives."""
KINDS: Final = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
NAMES: Final[dict[type[ast.cmpop], str]] = dict(zip(KINDS, COMPARISONS, strict=True))
LEAVES: Final = (ast.Return, ast.Break, ast.Continue)


@dataclass(frozen=True, slots=True)
class Check:
    """A read of values that steers nothing: its line, and the place of what reads.

    ``holds`` if the read is that of torch's own check, which raises unless it is true.
    """

    line: str
    place: tuple[CodeType, Span | None]
    holds: bool


def running_check() -> Check | None:
    """Return the check whose read of values is running, None if it may steer the model."""
    frames = _running_frames()
    if not frames:
        return None
    reading = frames[0]
    path = _path(reading)
    holds = _is_own_check(path, reading)
    if not (holds or _only_checks(path, reading)) or any(map(_may_catch, frames)):
        return None
    shown = next((one for one in frames if not _is_helper(one)), reading)
    statement = [node for node in _path(shown) if isinstance(node, ast.stmt)][-1]
    place = reading.f_code, _running_span(reading.f_code, reading.f_lasti)
    return Check(line_of(shown, statement.lineno), place, holds)


def is_decided(numbers: Range) -> bool:
    """Return whether the running read of one of some numbers is only compared, and how is known.

    The read is a side of the comparison, and the other side a number: ``drop.item() < self.p``.
    """
    frames = _running_frames()
    match _path(frames[0]) if frames else []:
        case [*_, ast.Compare(left=left, ops=[kind], comparators=[right]), ast.Call() as read]:
            name = NAMES.get(type(kind))
            other = _number(right if read is left else left, frames[0])
            if name is None or other is None or not _keeps_the_number(read, frames[0]):
                return False
            sides = (numbers, other) if read is left else (other, numbers)
            return sides[0].compared(name, sides[1]) is not None
    return False


def _keeps_the_number(read: ast.Call, frame: FrameType) -> bool:
    is_item = isinstance(read.func, ast.Attribute) and read.func.attr == "item"
    return is_item or resolved(read.func, frame) is float


def _number(expression: ast.expr, frame: FrameType) -> Range | None:
    if isinstance(expression, ast.Constant):
        return number_range(expression.value)
    return number_range(resolved(expression, frame))


def _running_frames() -> list[FrameType]:
    """Return the frames of the model that are running, the innermost first; empty if unknown."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_start(frame):
        is_known = not is_skipped(frame) or frame.f_code.co_filename.startswith(DISTRIBUTIONS)
        if is_known and not frame.f_globals.keys() <= OF_TORCH:
            frames.append(frame)
        frame = frame.f_back
    return frames if frame is not None else []


def _only_checks(path: Sequence[ast.AST], frame: FrameType) -> bool:
    """Return whether all that depends on the read at the end of a path is a check or a report."""
    at = max((i for i, node in enumerate(path) if isinstance(node, ast.stmt)), default=-1)
    if at < 0 or at + 1 == len(path):
        return False
    statement, expressions = path[at], path[at + 1 :]
    called = "CALL" in dis.opname[frame.f_code.co_code[frame.f_lasti]]
    for around, inner in pairwise(path[: at + 1]):  # a text made for a warning
        if isinstance(around, ast.If) and inner in around.body and is_inert(around, path[0], frame):
            return True
    match statement:
        case ast.If(test=test) if expressions[0] is test:
            return is_steady(test, expressions, frame, called=called) and is_inert(
                statement, path[0], frame
            )
        case ast.Assert(test=test) if expressions[0] is test:
            return is_steady(test, expressions, frame, called=called)
        case ast.Expr(value=ast.Call() as call) if len(expressions) > 1:
            known = is_log(call, frame) or is_check(call, frame)
            return known and all(is_pure(part, frame) for part in (*call.args, *call.keywords))
    return False


def _is_own_check(path: Sequence[ast.AST], frame: FrameType) -> bool:
    """Return whether the running instruction calls a check of torch, which reads."""
    match path:
        case [*_, ast.Expr(value=call), ast.Call() as running] if running is call:
            return is_check(call, frame)
    return False


def _is_helper(frame: FrameType) -> bool:
    return frame.f_code.co_name == "torch_compilable_check" or is_skipped(frame)


def _may_catch(frame: FrameType) -> bool:
    """Return whether a frame may go on after an error in what it is running."""
    path = _path(frame)
    if not path:
        return True
    for outer, inner in pairwise(path):
        match outer:
            case ast.Try(body=body) | ast.TryStar(body=body) if inner in body:
                if not all(isinstance(handler.body[-1], ast.Raise) for handler in outer.handlers):
                    return True
                if any(isinstance(x, LEAVES) for end in outer.finalbody for x in ast.walk(end)):
                    return True
            case ast.With(items=items) if inner in outer.body:
                if not all(_lets_pass(item.context_expr, frame) for item in items):
                    return True
            case ast.AsyncWith():
                return True
    return False


def _lets_pass(manager: ast.expr, frame: FrameType) -> bool:
    """Return whether a context is known to let errors pass, as those of torch do."""
    kind: Any = resolved(manager.func, frame) if isinstance(manager, ast.Call) else None
    module = getattr(kind, "__module__", None) or ""
    return kind is nullcontext or module.partition(".")[0] in ("torch", "transformers")


def _path(frame: FrameType) -> list[ast.AST]:
    """Return the nodes from the function of a frame to what it is running; empty if unknown."""
    return _path_at(frame.f_code.co_filename, frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=4096)
def _path_at(file: str, code: CodeType, instruction: int) -> list[ast.AST]:
    source = _parsed(file, "".join(linecache.getlines(file)))
    if source is None or code not in source.codes:  # another version of the file, as well
        return []
    span = _running_span(code, instruction)
    path = list(_containing(source.tree, span)) if span is not None else []
    functions = [i for i, node in enumerate(path) if isinstance(node, FUNCTIONS)]
    path = path[functions[-1] :] if functions else []
    if path and isinstance(path[-1], ast.If | ast.Assert):  # Python 3.11 jumps for a statement
        path.append(path[-1].test)
    return path


def _running_span(code: CodeType, instruction: int) -> Span | None:
    """Return the span of an instruction; those of one call share it, however Python runs them."""
    start, end, column, end_column = list(code.co_positions())[instruction // 2]
    if start is None or end is None or column is None or end_column is None:
        return None
    return start, column, end, end_column


@dataclass(frozen=True, slots=True)
class _Source:
    tree: ast.Module
    codes: frozenset[CodeType]


@functools.lru_cache(maxsize=64)
def _parsed(file: str, text: str) -> _Source | None:
    try:
        tree = ast.parse(text)
        code = compile(text, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    return _Source(tree, frozenset(_codes(code)))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _containing(node: ast.AST, span: Span) -> Iterator[ast.AST]:
    """Yield the nodes that contain a span, from the outermost to the innermost."""
    for child in ast.iter_child_nodes(node):
        own = _span(child)
        if own is None:
            inner = list(_containing(child, span))  # as those of comprehensions, arguments
            if inner:
                yield child
                yield from inner
                return
        elif own[:2] <= span[:2] and span[2:] <= own[2:]:
            yield child
            yield from _containing(child, span)
            return


def _span(node: ast.AST) -> Span | None:
    if not isinstance(node, ast.stmt | ast.expr | ast.excepthandler | ast.keyword | ast.arg):
        return None
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
