"""Constraints between knobs: small arithmetic expressions such as `cpu * replicas <= 2`, never executed as Python.

The text is parsed with `ast`, and only the following is translated: numbers, strings, knobs, `+ - * / // %`,
comparisons (chained ones included), `in` a list, `and`, `or`, `not`, and the functions `min`, `max` and `abs`.
A constraint that names an inactive knob does not apply. Names of knobs may have hyphens and dots, as in
`max-num-seqs * 2 <= 64`, or be words of Python (`lambda`): where a knob has that name it is meant.
"""

from __future__ import annotations

import ast
import keyword
import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

from plait_autoconfig.errors import SpaceError, hint
from plait_autoconfig.values import Config

KNOB_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*", re.ASCII)
"""What a knob may be called."""

_WORDS = {*keyword.kwlist} - {"and", "or", "not", "in", "is", "True", "False", "None"}
"""What Python's parser takes for something else, and a constraint for the name of a knob."""

_LONGEST = 500  # characters; also keeps the parser from nesting deeply

_Term = Callable[[Config], Any]

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "abs": abs}


@dataclass(frozen=True, slots=True)
class Constraint:
    """A condition on a configuration, and the knobs that it names."""

    text: str
    names: frozenset[str]
    _holds: _Term

    @classmethod
    def parse(cls, text: str, knobs: Collection[str]) -> Self:
        """Parse a constraint over these knobs. Raises `SpaceError`, which quotes the text and names the problem."""
        tree, reader = _read(text, knobs, f"constraint `{text}`")
        if not _is_condition(tree):
            raise SpaceError(f"constraint `{text}` is no condition: it compares nothing")
        term = reader.term(tree)
        if not reader.names:
            raise SpaceError(f"constraint `{text}` names no knob; they are {', '.join(knobs)}")
        return cls(text, frozenset(reader.names), term)

    def holds(self, config: Config) -> bool:
        """Return whether the configuration satisfies the constraint; True if any knob that it names is inactive."""
        if not all(name in config for name in self.names):
            return True
        try:
            return bool(self._holds(config))
        except (TypeError, ArithmeticError) as error:
            values = ", ".join(f"{name} = {config[name]!r}" for name in sorted(self.names))
            raise SpaceError(f"constraint `{self.text}` cannot be computed for {values}: {error}") from error


@dataclass(frozen=True, slots=True)
class Formula:
    """A number that follows from a configuration: `replicas * threads`, or `2`."""

    text: str
    _term: _Term

    @classmethod
    def parse(cls, text: str, knobs: Collection[str]) -> Self:
        """Parse a formula over these knobs. Raises `SpaceError`, which quotes the text and names the problem."""
        tree, reader = _read(text, knobs, f"formula `{text}`")
        return cls(text, reader.term(tree))

    def value(self, config: Config) -> float:
        """Return the number. Raises `SpaceError` for what is none, is negative, or follows from an inactive knob."""
        try:
            found = self._term(config)
            if isinstance(found, bool) or not isinstance(found, int | float) or not 0.0 <= found < float("inf"):
                raise TypeError(f"it is {found!r}")
        except KeyError as error:
            msg = f"formula `{self.text}` names {error.args[0]}, which has no value in every configuration"
            raise SpaceError(msg) from error
        except (TypeError, ArithmeticError) as error:
            values = ", ".join(f"{name} = {value!r}" for name, value in config.items())
            raise SpaceError(f"formula `{self.text}` gives no number from 0 up for {values}: {error}") from error
        return float(found)


def _read(text: str, knobs: Collection[str], what: str) -> tuple[ast.expr, _Reader]:
    """Return the tree of an expression, and what translates it. Raises `SpaceError`."""
    if len(text) > _LONGEST:
        raise SpaceError(f"{what.partition(' ')[0]}: it has {len(text)} characters, more than {_LONGEST}")
    stand_ins = _stand_ins(text, knobs)
    try:
        tree = ast.parse(_with_stand_ins(text.strip(), stand_ins), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SpaceError(f"{what} cannot be read: {error}") from error
    return tree, _Reader(what, knobs, {short: name for name, short in stand_ins.items()})


def _stand_ins(text: str, knobs: Collection[str]) -> dict[str, str]:
    """Return Python's kind of name for each knob whose own is none, and that the text does not contain."""
    named = [knob for knob in knobs if not knob.isidentifier() or knob in _WORDS]
    prefix = "knob_"
    while prefix in text:
        prefix += "_"
    return {knob: f"{prefix}{number}" for number, knob in enumerate(named)}


def _with_stand_ins(text: str, stand_ins: Mapping[str, str]) -> str:
    """Replace knobs by their stand-ins, the longest name first; not in strings, nor inside of other names."""
    if not stand_ins:
        return text
    names = "|".join(re.escape(name) for name in sorted(stand_ins, key=len, reverse=True))
    pattern = rf"('[^']*'|\"[^\"]*\")|(?<![\w.-])({names})(?![\w.-])"
    return re.sub(pattern, lambda found: found[1] or stand_ins[found[2]], text)


def _arithmetic(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Restrict the operator to numbers: on strings `*` would repeat and `%` would format, to any length."""

    def on_numbers(left: Any, right: Any) -> Any:
        if not isinstance(left, int | float) or not isinstance(right, int | float):
            raise TypeError("arithmetic needs numbers")
        return function(left, right)

    return on_numbers


def _is_condition(node: ast.expr) -> bool:
    if isinstance(node, ast.BoolOp):
        return all(map(_is_condition, node.values))
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    return isinstance(node, ast.Compare | ast.Name)


class _Reader:
    """Translates the nodes of one expression into functions of the configuration."""

    def __init__(self, what: str, knobs: Collection[str], own_names: Mapping[str, str]) -> None:
        self._what, self._knobs, self._own_names = what, knobs, own_names
        self.names: set[str] = set()

    def term(self, node: ast.expr) -> _Term:
        match node:
            case ast.Constant(value=bool() | int() | float() | str() as value):
                return lambda _: value
            case ast.Name(id=name):
                return self._knob(name)
            case ast.List() | ast.Tuple():
                return self._joined(node.elts, tuple)
            case ast.BoolOp(op=ast.And()):
                return self._joined(node.values, all)
            case ast.BoolOp():
                return self._joined(node.values, any)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self.term(operand)
                return lambda config: not inner(config)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self.term(operand)
                return lambda config: -inner(config)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return self._pair(_arithmetic(_OPERATORS[type(op)]), left, right)
            case ast.Compare():
                return self._compare(node)
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS and arguments:
                function = _FUNCTIONS[name]
                return self._joined(arguments, lambda values: function(*values))
        raise SpaceError(f"{self._what} has `{ast.unparse(node)}`, which is not allowed here")

    def _knob(self, name: str) -> _Term:
        name = self._own_names.get(name, name)
        if name not in self._knobs:
            raise SpaceError(f"{self._what} names {name}, which is no knob; {hint(name, self._knobs)}")
        self.names.add(name)
        return lambda config: config[name]

    def _joined(self, nodes: list[ast.expr], join: Callable[[Any], Any]) -> _Term:
        terms = [self.term(node) for node in nodes]
        return lambda config: join(term(config) for term in terms)

    def _pair(self, function: Callable[[Any, Any], Any], left: ast.expr, right: ast.expr) -> _Term:
        first, second = self.term(left), self.term(right)
        return lambda config: function(first(config), second(config))

    def _compare(self, node: ast.Compare) -> _Term:
        sides = [node.left, *node.comparators]
        parts = []
        for left, op, right in zip(sides, node.ops, sides[1:], strict=False):
            if type(op) not in _COMPARISONS:
                raise SpaceError(f"{self._what}: `is` is not allowed, use ==")
            parts.append(self._pair(_COMPARISONS[type(op)], left, right))
        return parts[0] if len(parts) == 1 else lambda config: all(part(config) for part in parts)
