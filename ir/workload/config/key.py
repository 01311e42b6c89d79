"""One key of a config: what it may hold, what it means to leave it out, whether any value but one is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class ModelKeyType(StrEnum):
    """What a key may hold; the text stands in error messages."""

    SIZE = "a positive integer"
    COUNT = "an integer, 0 or more"
    SIZE_OR_NULL = "a positive integer or null"
    RATIO = "a number above 0"
    WEIGHT = "a number, 0 or more"
    CHANCE = "a number from 0 to below 1"
    FLAG = "true or false"
    TEXT = "a string"
    TEXTS_OR_NULL = "a list of strings or null"
    COUNTS_OR_NULL = "a list of integers, 0 or more, or null"
    TABLE_OR_NULL = "an object or null"
    ANYTHING = "anything"


@dataclass(frozen=True, slots=True)
class ModelKey:
    """One key: what it may hold and what it means to leave it out. `default` is transformers'.

    only: the values that are built, () for all; why: the others are not, or, of a key that is never read, no value
    changes anything.
    """

    holds: ModelKeyType
    default: object = None
    required: bool = False
    only: tuple[object, ...] = ()
    why: str = ""


Table = Mapping[str, ModelKey]


def inert(reasons: Mapping[str, str]) -> dict[str, ModelKey]:
    """Keys that are accepted and never read, each with its reason."""
    return {n: ModelKey(ModelKeyType.ANYTHING, why=why) for n, why in reasons.items()}


def only(why: str, **values: object) -> dict[str, ModelKey]:
    """Keys that may hold nothing but these values, which is also what leaving them out means.

    >>> only("no window", sliding_window=None)["sliding_window"].only
    (None,)
    """
    return {n: ModelKey(ModelKeyType.ANYTHING, v, only=(v,), why=why) for n, v in values.items()}


def fits(holds: ModelKeyType, value: object) -> bool:
    """Whether a value is what a key may hold. `true` is no integer here.

    >>> fits(ModelKeyType.SIZE, 4), fits(ModelKeyType.SIZE, True), fits(ModelKeyType.SIZE, 4.0)
    (True, False, False)
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    whole = isinstance(value, int) and not isinstance(value, bool)
    match holds:
        case ModelKeyType.SIZE:
            return whole and _above(value, 1)
        case ModelKeyType.COUNT:
            return whole and _above(value, 0)
        case ModelKeyType.SIZE_OR_NULL:
            return value is None or (whole and _above(value, 1))
        case ModelKeyType.RATIO:
            return number and _above(value, 0.0) and value != 0
        case ModelKeyType.WEIGHT:
            return number and _above(value, 0.0)
        case ModelKeyType.CHANCE:
            return number and _above(value, 0.0) and not _above(value, 1.0)
        case ModelKeyType.FLAG:
            return isinstance(value, bool)
        case ModelKeyType.TEXT:
            return isinstance(value, str)
        case ModelKeyType.COUNTS_OR_NULL:
            return value is None or (
                isinstance(value, (list, tuple)) and all(fits(ModelKeyType.COUNT, v) for v in value)
            )
        case ModelKeyType.TABLE_OR_NULL:
            return value is None or isinstance(value, Mapping)
        case ModelKeyType.TEXTS_OR_NULL:
            return value is None or (isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value))
        case ModelKeyType.ANYTHING:
            return True


def _above(value: object, least: float) -> bool:
    # NaN and infinity fail: the first compares false, the second is not below the largest size we accept.
    return isinstance(value, (int, float)) and least <= value < 1e15
