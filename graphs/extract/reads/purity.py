"""Side effects of expressions and statements of a model, found by their syntax.

An expression is pure if it changes nothing and keeps no value that it is given. A statement is
inert if all that it does is raise, warn or log. Names are looked up in the frame that runs them.
"""

from __future__ import annotations

import ast
import builtins
import logging
import math
import types
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any, Final

import torch
from torch import nn

BUILTINS: Final = (
    *(abs, all, any, bool, complex, dict, divmod, enumerate, float, format, frozenset, getattr),
    *(hasattr, int, isinstance, issubclass, len, list, max, min, range, repr, reversed, round, set),
    *(sorted, str, sum, tuple, type, zip),
)
LEVELS: Final = ("critical", "debug", "error", "exception", "fatal", "info", "log", "warn")
"""Methods of loggers; others that begin alike, as "warning_once", are of packages."""
CHECKS: Final = ("_check", "_assert")
"""Prefixes of torch's functions that raise or do nothing."""
LIBRARY_CHECKS: Final = {("transformers.utils.import_utils", "torch_compilable_check")}
"""Such functions of other packages: their module and name."""
OWNERS: Final = (types.ModuleType, nn.Module, logging.Logger, type)
"""Objects whose attributes can be looked up without running code of the model."""
MISSING: Final = object()
BINDS: Final = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LATER: Final = (ast.BoolOp, ast.IfExp, ast.Lambda, *COMPREHENSIONS)
"""Parts of these are evaluated only if others have some value."""
RANDOM: Final = ("bernoulli", "dropout", "multinomial", "normal", "poisson", "rand")
EFFECTS: Final = ("add", "backward", "register_hook", "retain_grad", "sort")
"""Methods named like these change something, besides those that end with an underscore."""


def resolved(expression: ast.expr, frame: FrameType) -> Any:
    """Return the object that a dotted name has in a frame, MISSING if it is unknown."""
    if isinstance(expression, ast.Name):
        for names in (frame.f_locals, frame.f_globals, vars(builtins)):
            if expression.id in names:
                return names[expression.id]
    elif isinstance(expression, ast.Attribute):
        owner = resolved(expression.value, frame)
        computed = isinstance(getattr(type(owner), expression.attr, None), property)
        if isinstance(owner, OWNERS) and not computed:
            return getattr(owner, expression.attr, MISSING)
    return MISSING


def is_check(call: ast.expr, frame: FrameType) -> bool:
    """Return whether a call raises or does nothing: torch._check, torch._assert and their kin."""
    function = resolved(call.func, frame) if isinstance(call, ast.Call) else MISSING
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", "")
    return (module == "torch" and name.startswith(CHECKS)) or (module, name) in LIBRARY_CHECKS


def is_log(call: ast.expr, frame: FrameType) -> bool:
    """Return whether a call warns, logs or prints."""
    if not isinstance(call, ast.Call):
        return False
    function = resolved(call.func, frame)
    if function is print or function is warnings.warn:
        return True
    if not isinstance(call.func, ast.Attribute) or function is MISSING:
        return False
    logs = resolved(call.func.value, frame)
    return call.func.attr.startswith(LEVELS) and (
        logs is logging or isinstance(logs, logging.Logger)
    )


def is_pure_call(call: ast.Call, frame: FrameType) -> bool:
    """Return whether a call changes nothing and keeps nothing of what it is given.

    Such are functions of torch and math, the builtin ones, and methods of tensors and texts; not
    those in place.
    """
    if any(keyword.arg in ("key", "out") for keyword in call.keywords):
        return False
    function = resolved(call.func, frame)
    if function is not MISSING:
        return any(function is builtin for builtin in BUILTINS) or _is_operator(function)
    if not isinstance(call.func, ast.Attribute):
        return False
    name = call.func.attr
    if name.endswith("_") or name.startswith(EFFECTS):
        return False
    known = hasattr(torch.Tensor, name) or hasattr(str, name)
    return known and not isinstance(resolved(call.func.value, frame), OWNERS)


def _is_operator(function: Any) -> bool:
    """Return whether a function is of math, or one of torch's operators that change nothing."""
    name = getattr(function, "__name__", "_")
    if name.endswith("_") or name.startswith(RANDOM):
        return False
    if getattr(torch, name, None) is function:
        return hasattr(torch._C._VariableFunctions, name) or hasattr(torch.functional, name)
    return getattr(math, name, None) is function


def is_pure(node: ast.AST, frame: FrameType) -> bool:
    """Return whether all that an expression calls is pure, and it binds no name."""
    return all(
        is_pure_call(part, frame) if isinstance(part, ast.Call) else not isinstance(part, BINDS)
        for part in ast.walk(node)
    )


def is_steady(test: ast.expr, path: Sequence[ast.AST], frame: FrameType, *, called: bool) -> bool:
    """Return whether a test does the same whatever a read in it returns, apart from its value.

    ``path`` leads from the test to the read, which happens within a call at its end if it is
    ``called``. The value goes into pure calls only, and calls that may change something are made in
    any case.
    """
    reads = set(map(id, path))

    def steady(node: ast.AST, conditional: bool) -> bool:
        if isinstance(node, BINDS):
            return False
        if isinstance(node, ast.Call) and not is_pure_call(node, frame):
            inside = (called and node is path[-1]) or any(
                id(part) in reads for part in (*node.args, *node.keywords, node.func)
            )
            if conditional or inside:
                return False
        chained = isinstance(node, ast.Compare) and len(node.ops) > 1
        later = conditional or chained or isinstance(node, LATER)
        return all(steady(child, later) for child in ast.iter_child_nodes(node))

    return steady(test, False)


def is_inert(branch: ast.If, function: ast.AST, frame: FrameType) -> bool:
    """Return whether an ``if`` of a function has no else, and does nothing but raise, warn and log.

    It may make texts for it, under names that nothing else in the function uses.
    """

    def inert(statement: ast.stmt) -> bool:
        match statement:
            case ast.Raise() | ast.Pass() | ast.Expr(value=ast.Constant()):
                return True
            case ast.Assert(test=test):
                return is_pure(test, frame)
            case ast.Expr(value=ast.Call() as call):
                parts = (*call.args, *call.keywords)
                known = is_log(call, frame) or is_check(call, frame)
                return known and all(is_pure(part, frame) for part in parts)
            case ast.Assign(targets=targets, value=value):
                return all(isinstance(name, ast.Name) for name in targets) and is_pure(value, frame)
            case ast.AugAssign(
                target=ast.Name(), value=ast.JoinedStr() | ast.Constant(value=str())
            ):
                return is_pure(statement.value, frame)
            case ast.If(test=test):
                inner = (*statement.body, *statement.orelse)
                return is_pure(test, frame) and all(map(inert, inner))
        return False

    return (
        not branch.orelse and all(map(inert, branch.body)) and not _leaks(branch, function, frame)
    )


def _leaks(statement: ast.stmt, function: ast.AST, frame: FrameType) -> bool:
    """Return whether a statement binds names that code outside of it may use."""
    targets = [
        target
        for node in ast.walk(statement)
        if isinstance(node, ast.Assign | ast.AugAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    bound = {getattr(target, "id", "") for target in targets}
    if not bound <= set(frame.f_code.co_varnames):  # some are global, or cells
        return bool(bound)
    inside, everywhere = (
        sum(getattr(node, "id", getattr(node, "arg", None)) in bound for node in ast.walk(root))
        for root in (statement, function)
    )
    return everywhere != inside
