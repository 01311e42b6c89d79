"""JSON, TOML and CSV, strictly: no key twice, no NaN, no number or nesting beyond reason; errors name key or line."""

import csv
import json
import math
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ir.core.files.read import FileErrors, cut, read_text

DEPTH = 64
DIGITS = 40  # of a whole number as it is written; more cost time, and thousands a ValueError
_PLACE = re.compile(r"(.*) \(at (line \d+, column \d+|end of document)\)", re.DOTALL)
_NESTED = f"tables and lists {DEPTH} deep"


class _Doubtful(Exception):
    """Something stands in a text that `_first_wrong` will find and name."""


class _Pairs(list[tuple[str, Any]]):
    """An object's keys and values, those given twice among them."""


def read_json(path: str | Path, form: FileErrors) -> Any:
    """What a JSON file holds. Raises PiperError (io, the format's kind): unreadable, or not strictly JSON."""
    return parse_json(read_text(path, form), form, str(path))


def read_toml(path: str | Path, form: FileErrors) -> dict[str, Any]:
    """What a TOML file holds. Raises PiperError (io, the format's kind): unreadable, or not TOML within reason."""
    return parse_toml(read_text(path, form), form, str(path))


def parse_json(text: str, form: FileErrors, file: str | None = None) -> Any:
    """A JSON text's value.

    >>> from ir.core.errors import ErrorKind
    >>> parse_json('{"a": {"b": 1, "b": 2}}', FileErrors("a profile", ErrorKind.JOB, "costs.profile"))
    Traceback (most recent call last):
    ...
    ir.core.errors.PiperError: a.b: given twice
    allowed: each key once
    fix: keep one of them
    """

    try:
        return _value(text, form, file)
    except json.JSONDecodeError as e:
        raise form.wrong(f"not JSON: {e.msg}", file, f"line {e.lineno}, column {e.colno}", "JSON") from None
    except RecursionError:
        raise form.wrong("not JSON: nested too deep", file, None, _NESTED) from None


def _value(text: str, form: FileErrors, file: str | None) -> Any:
    def number(word: str) -> float:
        if (found := float(word)) and not form.smallest <= abs(found) <= form.largest:
            raise _Doubtful
        return found

    def whole(word: str) -> int:
        if len(word) > DIGITS or abs(found := int(word)) > form.largest:
            raise _Doubtful
        return found

    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_constant, parse_float=number, parse_int=whole
        )
        if not _too_deep(value) and "\\u" not in text:
            return value
    except _Doubtful:
        pass
    # Rare, so it may take its time: read again with keys given twice kept, to say what is wrong and where.
    check_plain(json.loads(text, object_pairs_hook=_Pairs, parse_int=_long), form, file)
    return json.loads(text)


def parse_toml(text: str, form: FileErrors, file: str | None = None) -> dict[str, Any]:
    """A TOML text's table."""
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise form.wrong("not TOML: nested too deep", file, None, _NESTED) from None
    except ValueError as e:  # not TOML, or a number of too many digits
        m = _PLACE.fullmatch(str(e))
        said, at = (m[1], m[2]) if m else (str(e), None)
        raise form.wrong(f"not TOML: {cut(said, 200)[1:-1]}", file, at, "TOML") from None
    check_plain(table, form, file)
    return table


def parse_csv(text: str, form: FileErrors, file: str | None = None) -> list[tuple[int, list[str]]]:
    """(line, cells) of a CSV text's rows; what is blank, and lines that begin with #, are none."""
    kept = ("\n" if line.lstrip().startswith("#") else line for line in text.splitlines(keepends=True))
    reader = csv.reader(kept, strict=True, skipinitialspace=True)
    try:
        return [(reader.line_num, [c.strip() for c in cells]) for cells in reader if cells]
    except csv.Error as e:
        raise form.wrong(f"not CSV: {e}", file, f"line {reader.line_num}", "commas, quotes closed") from None


def check_plain(value: object, form: FileErrors, file: str | None = None) -> None:
    """Refuse values that JSON does not have, keys given twice, and numbers, texts and nesting beyond reason.

    Raises PiperError, of the format's kind.
    """
    stack: list[tuple[str, object, int]] = [("", value, 0)]
    while stack:
        key, x, depth = stack.pop()
        if depth > DEPTH:
            raise form.wrong("nested too deep", file, key, _NESTED)
        if isinstance(x, Mapping | _Pairs):
            seen: set[object] = set()
            inner = []
            for k, v in x.items() if isinstance(x, Mapping) else x:
                here = f"{key}.{k}" if key else str(k)
                if k in seen:
                    raise form.wrong("given twice", file, here, "each key once", "keep one of them")
                seen.add(k)
                _check_leaf(k, form, file, key)
                inner.append((here, v, depth + 1))
            stack += reversed(inner)
        elif isinstance(x, list | tuple):
            stack += reversed([(f"{key}[{i}]", v, depth + 1) for i, v in enumerate(x)])
        else:
            _check_leaf(x, form, file, key)


def _check_leaf(x: object, form: FileErrors, file: str | None, key: str) -> None:
    if isinstance(x, str):
        if "\0" in x or any("\ud800" <= c <= "\udfff" for c in x):
            raise form.wrong(f"{cut(x)} is no text", file, key, "letters, no NUL and no half of a pair")
    elif isinstance(x, float) and not math.isfinite(x):
        if form.finite:
            raise form.wrong(f"{json.dumps(x)} is no number", file, key, "finite numbers")
    elif isinstance(x, int | float) and not isinstance(x, bool):
        if abs(x) > form.largest or 0 < abs(x) < form.smallest:
            large = abs(x) > 1
            allowed = f"numbers {'up to' if large else 'from'} {form.largest if large else form.smallest:g}"
            raise form.wrong(f"the number is too {'large' if large else 'small'}", file, key, allowed)
    elif x is not None and not isinstance(x, bool):
        raise form.wrong(f"{cut(str(x))} is a {type(x).__name__}", file, key, "numbers, text, true/false")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Doubtful
    return found


def _constant(_: str) -> NoReturn:
    raise _Doubtful


def _long(word: str) -> float:
    """A whole number, as a finite float where it has too many digits for one: it is refused for its size."""
    return int(word) if len(word) <= DIGITS else math.copysign(min(abs(float(word)), sys.float_info.max), float(word))


def _too_deep(value: object) -> bool:
    level = [value]
    for _ in range(DEPTH + 1):
        level = [v for x in level if isinstance(x, dict | list) for v in _inner(x)]
        if not level:
            return False
    return True


def _inner(x: dict[str, Any] | list[Any]) -> Iterator[Any]:
    return (v for v in (x.values() if isinstance(x, dict) else x) if isinstance(v, dict | list))
