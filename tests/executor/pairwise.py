"""Few cases in which every two values of two factors meet, drawn from many."""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any, TypeVar

Pairs = frozenset[tuple[str, Any, str, Any]]
C = TypeVar("C")


def pairs(case: object, names: Sequence[str]) -> Pairs:
    """The pairs of values that meet in a case, of these of its attributes.

    >>> sorted(pairs(1 + 2j, ("real", "imag")))
    [('real', 1.0, 'imag', 2.0)]
    """
    values = {name: getattr(case, name) for name in names}
    return frozenset((a, values[a], b, values[b]) for a, b in combinations(names, 2))


def met(cases: Iterable[Any], names: Sequence[str]) -> set[tuple[str, Any, str, Any]]:
    """The pairs of values that meet in some case."""
    return {pair for case in cases for pair in pairs(case, names)}


def cover(
    cases: Iterable[C],
    names: Sequence[str],
    wanted: Iterable[tuple[str, Any, str, Any]] | None = None,
    value: Callable[[int, C], Any] = lambda new, case: new,
) -> list[C]:
    """Cases in which all wanted pairs meet that can, those that add most first.

    value: what a case is worth that adds so many. wanted: every pair that meets in any case, unless given.
    """
    bits: dict[Any, int] = {}  # of a pair that is wanted
    chosen = None if wanted is None else set(wanted)
    rest = {case: 0 for case in cases}
    for case in rest:
        for pair in pairs(case, names):
            if chosen is None or pair in chosen:
                rest[case] |= bits.setdefault(pair, 1 << len(bits))
    left, out = (1 << len(bits)) - 1, list[C]()
    while left:
        best = max(rest, key=lambda case: value((left & rest[case]).bit_count(), case))
        left &= ~rest.pop(best)
        out.append(best)
    return out
