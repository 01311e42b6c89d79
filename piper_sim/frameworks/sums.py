"""Arithmetic of a shell script: what `$((…))` comes to, and what `((…))` and `let` set."""

import re
from collections.abc import Iterator, Mapping

from piper_sim.frameworks.statements import NAME

UNSET = "\u2e2e"  # stands where a variable's value is not in the file
ANSWER = UNSET + UNSET  # the same, of what a command says: there is a value
MAYBE_SET = "\u2e2f"  # behind each word of a value that a branch gave which may not be taken
_SET = re.compile(rf"\s*({NAME})\s*(?:([-+*/%]?)=(?!=)\s*(.+)|([-+])\4)\s*", re.DOTALL)
_FIRST = re.compile(rf"\s*([-+])\1\s*({NAME})\s*")  # ++N
_CHANGED = re.compile(rf"({NAME})\s*(?:(?:[-+*/%&^|]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)\s*({NAME})")
_WHOLE = r"(?:0|[1-9]\d{0,8})"  # 010 is 8 there


def changed(text: str) -> list[str]:
    """The names that a sum sets.

    >>> changed("N <<= 2"), changed("(++N) + M"), changed("N <= 2 || N == M")
    (['N'], ['N'], [])
    """
    return [m[1] or m[2] for m in _CHANGED.finditer(text)]


def settings(text: str) -> Iterator[str]:
    """What `((…))`, or a word of `let`, sets, as assignments; where it is not plain to what, a name has no value.

    >>> list(settings("N*=2, ++M")), [x.replace(ANSWER, "?") for x in settings("N<<=1")]
    (['N=$((N*(2)))', 'M=$((M+(1)))'], ['N=?'])
    """
    for one in text.split(","):
        part = _FIRST.sub(r"\2\1\1", one)
        m, names = _SET.fullmatch(part), changed(part)
        if m is not None and len(names) == 1:
            yield f"{m[1]}=$(({m[1] + op if (op := m[2] or m[4]) else ''}({m[3] or 1})))"
        else:
            yield from (f"{name}={ANSWER}" for name in names)


def number(variables: Mapping[str, str], text: str) -> str:
    """A sum of whole numbers, as `$((…))` has it: products, sums and parentheses alone.

    >>> number({"T": "2"}, "8*T*3/4/(1+T)+1")
    '5'
    """
    text = re.sub(NAME, lambda m: _plain(variables.get(m[0], UNSET)), text).replace(" ", "")
    if MAYBE_SET in text:
        return number(variables, text.replace(MAYBE_SET, "")) + MAYBE_SET
    while (m := re.search(r"\(([^()]*)\)", text)) and UNSET not in text:
        text = f"{text[: m.start()]}{number(variables, m[1])}{text[m.end() :]}"
    if not re.fullmatch(rf"{_WHOLE}([-+*/%]{_WHOLE}){{0,9}}", text):
        return UNSET
    total, sign = 0, 1
    for plus, product in re.findall(r"([-+]?)([^-+]+)", text):
        first, *rest = re.split(r"([*/%])", product)
        value, sign = int(first), -1 if plus == "-" else 1
        for op, word in zip(rest[::2], rest[1::2], strict=True):
            if op != "*" and not int(word):
                return UNSET
            value = value * int(word) if op == "*" else value // int(word) if op == "/" else value % int(word)
        total += sign * value
    return str(total)


def _plain(value: str) -> str:
    """A variable's value, if it is a number and no sum of its own."""
    return value if re.fullmatch(rf"-?\d+{MAYBE_SET}?", value) else UNSET
