"""Small mistakes in a Python file: a mutant puts one expression or statement in the place of another."""

import ast
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any

# Asserts are for us, what f-strings say for people.
_LEFT_ALONE = (ast.Import, ast.ImportFrom, ast.Assert, ast.JoinedStr)
_FIELDS = {"annotation", "returns", "decorator_list"}
_PAIRS = [
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn),
    (ast.Add, ast.Sub), (ast.Mult, ast.Add), (ast.Div, ast.Mult), (ast.FloorDiv, ast.Mult), (ast.Mod, ast.FloorDiv),
    (ast.BitAnd, ast.BitOr), (ast.LShift, ast.RShift), (ast.And, ast.Or),
]  # fmt: skip
_SWAPS: dict[type, type] = {b: a for a, b in _PAIRS} | dict(_PAIRS)
_NAMES = {"min": "max", "any": "all", "minimum": "maximum"}
_NAMES |= {b: a for a, b in _NAMES.items()}


@dataclass(frozen=True)
class Mutant:
    """path: from the root. line: the text of the line it begins in. change: what was there → what is. at: its bytes."""

    path: str
    line: str
    change: str
    at: tuple[int, int]
    text: str

    def applied(self, source: bytes) -> bytes:
        """The file with the mistake in it."""
        return source[: self.at[0]] + self.text.encode() + source[self.at[1] :]


def mutants(path: str, source: bytes) -> list[Mutant]:
    """All of a file, in its order.

    >>> [m.change for m in mutants("x", b"def f(a: int):\\n    return min(a + 1, len(a) < 2)")]  # doctest: +ELLIPSIS
    ['min(a + 1, len(a) < 2) → max(a + 1, len(a) < 2)', 'a + 1 → a - 1', '1 → 2', '1 → 0', 'len(a) < 2 → ...', '2 → 3']
    >>> mutants("x", b"if a + b:\\n    go()")[0].applied(b"if a + b:\\n    go()")
    b'if False:\\n    go()'
    """
    lines = source.splitlines(keepends=True)
    starts = [sum(map(len, lines[:i])) for i in range(len(lines))]
    out = []
    for node in _places(ast.parse(source)):
        for old, new in _changed(node):
            at = starts[old.lineno - 1] + old.col_offset, starts[old.end_lineno - 1] + old.end_col_offset
            was, text = ast.unparse(old), ast.unparse(new)
            bare = isinstance(new, ast.stmt | ast.Constant) and not isinstance(old, ast.Expr)
            line = lines[old.lineno - 1].decode().strip()
            out.append(Mutant(path, line, _said(was, text), at, text if bare or text == "pass" else f"({text})"))
    return out


def _said(was: str, text: str) -> str:
    """The change, cut to where it is."""
    if len(was) + len(text) > 100:
        before = max(0, next(i for i, (a, b) in enumerate(zip(was + "\0", text + "\1", strict=False)) if a != b) - 20)
        was, text = ("…" * bool(before) + t[before : before + 60] for t in (was, text))
    return f"{was} → {text}"


def _places(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all below it, but for types, decorators, imports, and what only tools and commands run."""
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, _LEFT_ALONE) or name in _FIELDS:
                continue
            if getattr(child, "arg", "") == "strict":  # zip's: an assert by another name
                continue
            if not (isinstance(child, ast.If) and ast.unparse(child.test)[:8] in ("TYPE_CHE", "__name__")):
                yield from _places(child)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    new = copy(node)
    vars(new).update(fields)
    return new


def _changed(n: Any) -> Iterator[tuple[Any, ast.AST]]:
    """(node, what stands there instead): every small mistake at one place."""
    match n:
        case ast.Compare():
            for i, op in enumerate(n.ops):
                yield n, _with(n, ops=[*n.ops[:i], _SWAPS[type(op)](), *n.ops[i + 1 :]])
        case ast.BoolOp() | ast.BinOp() if type(n.op) in _SWAPS and not _is_text(n):
            yield n, _with(n, op=_SWAPS[type(n.op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield n, n.operand
        case ast.Constant(value=bool()):
            yield n, ast.Constant(not n.value)
        case ast.Constant(value=int() | float()):
            yield n, ast.Constant(n.value + 1)
            if n.value == 1:
                yield n, ast.Constant(0)
        case ast.Call():
            for k in n.keywords:
                if k.arg and k.arg != "strict":
                    yield n, _with(n, keywords=[x for x in n.keywords if x is not k])
            name = getattr(n.func, "attr", getattr(n.func, "id", ""))
            if name in _NAMES:
                key = "attr" if isinstance(n.func, ast.Attribute) else "id"
                yield n, _with(n, func=_with(n.func, **{key: _NAMES[name]}))
        case ast.If() | ast.IfExp():
            yield n.test, ast.Constant(False)
            if n.orelse:
                yield n.test, ast.Constant(True)
        case ast.comprehension():
            yield from ((test, ast.Constant(True)) for test in n.ifs)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break():
            yield n, ast.Pass()
        case ast.Assign() if not any(isinstance(x, ast.Name | ast.Tuple) for x in n.targets):
            yield n, ast.Pass()


def _is_text(n: Any) -> bool:
    """Whether an operand is text, where a changed operator is nothing but a TypeError."""
    sides = (n.left, n.right) if isinstance(n, ast.BinOp) else ()
    return any(isinstance(s, ast.JoinedStr) or isinstance(getattr(s, "value", 0), str) for s in sides)
