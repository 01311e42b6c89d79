"""Numbers as people read them."""

import math

GIB = 2**30
MISSING = "–"
_STEPS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def seconds(value: float | None, digits: int = 3) -> str:
    """A duration with its unit, to so many significant digits.

    >>> seconds(0.01234), seconds(92.5), seconds(0), seconds(None), seconds(4000)
    ('12.3 ms', '92.5 s', '0 s', '–', '4000 s')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0 s"
    scale, unit = next(((s, u) for s, u in _STEPS if abs(value) >= s * (1 - 0.5 * 10**-digits)), _STEPS[-1])
    return f"{significant(value / scale, digits)} {unit}"


def duration(value: float, unit: object = "s", digits: int = 3) -> str:
    """A time in the trace's unit: seconds with their prefix, or a bare number where the user's times had no unit.

    >>> duration(0.5), duration(26, "")
    ('500 ms', '26')
    """
    return seconds(value, digits) if unit == "s" else f"{value:.{digits}g}"


def significant(value: float, digits: int = 3) -> str:
    """A plain decimal number, never cut before its point.

    >>> significant(0.012345), significant(1234.5), significant(2.0)
    ('0.0123', '1234', '2')
    """
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else MISSING
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{min(places, 15)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def gib(value: float | None) -> str:
    """Bytes in GiB; the unit stands in the column's title.

    >>> gib(80 * 2**30), gib(2**29), gib(1000), gib(None)
    ('80.0', '0.50', '< 0.01', '–')
    """
    if value is None:
        return MISSING
    size = value / GIB
    if 0 < abs(size) < 0.005:
        return "< 0.01"
    return f"{size:.2f}" if 0 < abs(size) < 0.95 else f"{size:.1f}"


def size(value: float | None) -> str:
    """Bytes with the unit that suits them.

    >>> size(80 * 2**30), size(1536), size(0), size(None)
    ('80.0 GiB', '1.5 KiB', '0 B', '–')
    """
    if value is None:
        return MISSING
    for scale, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value) >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value:.0f} B"


def percent(share: float | None) -> str:
    """A share of one in percent; the sign stands in the column's title.

    >>> percent(0.1234), percent(None)
    ('12.3', '–')
    """
    return MISSING if share is None or not math.isfinite(share) else f"{100 * share:.1f}"


def short(value: float) -> str:
    """A large number in millions (M) or billions (B).

    >>> short(671_026_419_200), short(1_234_567)
    ('671.0 B', '1.2 M')
    """
    return f"{value / 1e9:.1f} B" if value >= 1e9 else f"{value / 1e6:.1f} M"


def count(value: float | None) -> str:
    """A large number, its digits in groups of three.

    >>> count(1234567.8), count(None), count(3.25)
    ('1 234 568', '–', '3.25')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:,.0f}".replace(",", " ") if abs(value) >= 100 else significant(value)
