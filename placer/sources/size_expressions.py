"""Safety check of size expressions in a ``.pt2`` file, which sympy would evaluate as Python code.

The grammar has numbers, symbols such as ``s77``, arithmetic, comparisons, and calls of the classes
that torch writes: ``FloorDiv(Add(Symbol('s77', integer=True), Integer(1)), Integer(2))``.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from typing import Final

SYMBOL: Final = re.compile(r"(?:s|u|zf|zuf)\d{1,6}", re.ASCII)
"""Names that torch gives to symbols; loading counts up to the number of an unbacked one."""
LONGEST: Final = 4_000
MOST_BITS: Final = 4096
"""Maximum size of a number; larger ones would take sympy long to compute."""
MOST_EXPONENT_BITS: Final = 7
MOST_POWER_OF_SYMBOL: Final = 4
"""sympy expands powers of sums of symbols, which takes time exponential in the exponent."""
MOST_ARGUMENTS: Final = 16
"""Maximum per call; sympy compares all arguments of Max and Min with each other."""

FUNCTION: Final = re.compile(
    # torch.utils._sympy.functions
    r"FloorDiv|ModularIndexing|Where|PythonMod|Mod|CleanDiv|CeilDiv|CeilToInt|FloorToInt|LShift"
    r"|RShift|PowByNatural|FloatPow|FloatTrueDiv|IntTrueDiv|IsNonOverlappingAndDenseIndicator"
    r"|TruncToFloat|TruncToInt|RoundToInt|RoundDecimal|ToFloat|Identity"
    r"|OpaqueUnaryFn_(a?(sin|cos|tan)|(sin|cos|tan)h|asinh|sqrt|exp|log2?)"
    r"|BitwiseFn_bitwise_(and|or|xor)"
    # sympy, with both names of relations
    r"|Add|Mul|Pow|Max|Min|Abs|floor|ceiling|And|Or|Not|Eq|Ne|Lt|Le|Gt|Ge|Equality|Unequality"
    r"|(Strict)?(Less|Greater)Than"
)
POWER: Final = re.compile("Pow|PowByNatural|FloatPow|LShift")
CONSTANT: Final = re.compile("true|false|oo|int_oo")
ASSUMPTION: Final = re.compile(
    "integer|rational|real|finite|infinite|even|odd|zero|nonzero|commutative"
    "|(extended_)?(non)?(positive|negative)|extended_(real|nonzero)"
)
ARITHMETIC: Final = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
OPERATORS: Final = (*ARITHMETIC, ast.BitAnd, ast.BitOr)
SIGNS: Final = (ast.UAdd, ast.USub, ast.Invert)
RELATIONS: Final = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def check_expression(text: str) -> None:
    """Check that evaluating an expression does nothing but arithmetic.

    >>> check_expression("Add(Symbol('s0', integer=True), Integer(1))")
    >>> check_expression("__import__('os')")
    Traceback (most recent call last):
        ...
    ValueError: "__import__('os')" is no expression of sizes
    """
    shown = repr(text if len(text) <= 80 else f"{text[:77]}...")
    try:
        if len(text) > LONGEST or not (text.isascii() and text.isprintable()):
            raise ValueError
        bits = _bits(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{shown} is no expression of sizes") from None
    if bits > MOST_BITS:
        raise ValueError(f"{shown} has numbers of more than {MOST_BITS} bits")


def _bits(node: ast.expr) -> int:
    """Return a bound on the bits of numbers in the value of a part; ValueError if not allowed."""
    match node:
        case ast.Constant(value=bool()):
            return 1
        case ast.Constant(value=int() as number):
            return number.bit_length()
        case ast.Constant(value=float() as number) if math.isfinite(number):
            return max(math.frexp(number)[1], 1)
        case ast.Name(id=name) if CONSTANT.fullmatch(name) or SYMBOL.fullmatch(name):
            return 1
        case ast.UnaryOp(op=sign, operand=operand) if isinstance(sign, SIGNS):
            return _bits(operand)
        case ast.BinOp(left=left, op=operator, right=right) if isinstance(operator, OPERATORS):
            if isinstance(operator, ast.Pow):
                return _bits_of_power(left, right)
            return _bits(left) + _bits(right) + 1
        case ast.Compare(left=left, ops=relations, comparators=others) if all(
            isinstance(relation, RELATIONS) for relation in relations
        ):
            return _bits_of_all([left, *others])
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords):
            return _bits_of_call(name, arguments, keywords)
    raise ValueError


def _bits_of_call(name: str, arguments: Sequence[ast.expr], keywords: Sequence[ast.keyword]) -> int:
    match name, arguments:
        case "Symbol", [ast.Constant(value=str() as symbol)] if SYMBOL.fullmatch(symbol):
            if all(map(_is_assumption, keywords)):
                return 1
        case "Float", [ast.Constant(value=str() as digits)] if re.fullmatch(
            r"-?\d*\.?\d*(e[+-]?\d{1,3})?", digits, re.ASCII
        ):
            match keywords:
                case [] | [ast.keyword(arg="precision", value=ast.Constant(value=53))]:
                    return max(math.frexp(float(digits))[1], 1)
        case ("Integer", [_]) | ("Rational", [_, _]) if not keywords:
            return sum(_bits_of_integer(argument) for argument in arguments)
        case _, [base, exponent] if POWER.fullmatch(name) and not keywords:
            return _bits_of_power(base, exponent)
        case _ if FUNCTION.fullmatch(name) and not keywords and len(arguments) <= MOST_ARGUMENTS:
            return _bits_of_all(arguments)
    raise ValueError


def _bits_of_integer(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number.bit_length()
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _bits_of_integer(operand)
    raise ValueError


def _bits_of_power(base: ast.expr, exponent: ast.expr) -> int:
    exponent_bits = _bits(exponent)
    is_too_large = exponent_bits > MOST_EXPONENT_BITS
    if is_too_large or (_has_symbol(base) and not _is_small(exponent)):
        raise ValueError
    return min(_bits(base), MOST_BITS + 1) << exponent_bits


def _has_symbol(node: ast.expr) -> bool:
    return any(
        isinstance(part, ast.Name) and (part.id == "Symbol" or SYMBOL.fullmatch(part.id))
        for part in ast.walk(node)
    )


def _is_small(exponent: ast.expr) -> bool:
    match exponent:
        case ast.Call(func=ast.Name(id="Integer"), args=[number], keywords=[]):
            return _is_small(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _is_small(operand)
        case ast.Constant(value=int() as number):
            return number <= MOST_POWER_OF_SYMBOL
    return False


def _bits_of_all(parts: Sequence[ast.expr]) -> int:
    return sum(_bits(part) + 1 for part in parts)


def _is_assumption(keyword: ast.keyword) -> bool:
    is_truth = isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, bool)
    return is_truth and ASSUMPTION.fullmatch(keyword.arg or "") is not None
