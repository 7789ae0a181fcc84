"""Expressions of sizes in exported programs: arithmetic is admitted, anything else is refused."""

from __future__ import annotations

import pytest
from torch.utils._sympy import functions

from placer.sources import exported
from placer.sources.size_expressions import check_expression


@pytest.mark.parametrize("name", functions.__all__)
def test_every_function_of_sizes_that_torch_has_is_in_the_grammar(name: str) -> None:
    check_expression(f"{name}(Symbol('s7', positive=True, integer=True), Integer(-2))")


@pytest.mark.parametrize(
    "text",
    [
        "s77",
        "2*s0 - 1",
        "(s0 + u1)//2 <= 64",
        "(s0 > 3) & ~(s1 < 2)",
        "Pow(Symbol('s7', integer=True), Integer(2))",
        "Add(Float('0.5', precision=53), Rational(1, 3))",
        "And(StrictLessThan(Symbol('s7', integer=True), Integer(9)), true)",
        "Max(1, s0, Min(s1, 4096))",
    ],
)
def test_expressions_of_sizes_are_admitted(text: str) -> None:
    check_expression(text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('id')",
        "Symbol('s7').__class__",
        "Symbol('x')",
        "Symbol('__import__')",
        "Symbol(s7)",
        "Symbol('s7', cls=Integer)",
        "Symbol('s7', integer=open('f', 'w'))",
        "Symbol(**{'name': 's7'})",
        "S('1+1')",
        "sympify('1+1')",
        "Integer('7')",
        "Float('exit()')",
        "lambda: 1",
        "[s0 for s0 in s1]",
        "s0 if s1 else s2",
        "(s0 := 1)",
        "s0.func",
        "s0[0]",
        "f'{s0}'",
        "Max(*s0)",
        "Function('f')(s0)",
        "eval",
        "u99999999999",
        "1j",
        "1e999",
        "s0\n",
        "ｓ0",
        "",
        "(" * 300,
        "-" * 20_000 + "1",
        "1+" * 60_000 + "1",
        "Pow(Integer(9), Integer(9999999))",
        "2**(64**64)",
        "((((2**64)**64)**64)**64)**64",
        "LShift(Integer(1), Integer(1000000000))",
        "PythonMod((s0+s1+s2+s3)**20, (s0+s1)**20)",
        "Max(" + ", ".join(f"s{i}" for i in range(17)) + ")",
    ],
)
def test_anything_else_is_no_expression_of_sizes(text: str) -> None:
    with pytest.raises(ValueError, match=r"expression of sizes|bits"):
        check_expression(text)


def test_an_expression_that_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="no text"):
        exported._check({"expr_str": {"name": "__import__('os')"}}, "")
