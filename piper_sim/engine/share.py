"""Max-min sharing of links: progressive filling. docs/ENGINE.md, 8."""

from collections.abc import Mapping, Sequence

Loads = Mapping[int, float]


def fill(paces: Sequence[float], loads: Sequence[Loads]) -> list[float]:
    """Rates of meetings, given in the order of their least op. paces: their most; loads: link -> share at full speed.

    Two transfers on one link; the second could only ever take a quarter of it, or is slowed by something else:

    >>> fill([1.0, 1.0], [{0: 1.0}, {0: 1.0}])
    [0.5, 0.5]
    >>> fill([1.0, 1.0], [{0: 1.0}, {0: 0.25}])
    [0.75, 1.0]
    >>> fill([1.0, 0.25], [{0: 1.0}, {0: 1.0}])
    [0.75, 0.25]
    """
    rate: list[float | None] = [None] * len(paces)
    weight = [max(mine.values()) for mine in loads]
    most = [p * w for p, w in zip(paces, weight, strict=True)]
    users: dict[int, list[int]] = {}
    for f, mine in enumerate(loads):
        for r in mine:
            users.setdefault(r, []).append(f)
    while open_ := [f for f, x in enumerate(rate) if x is None]:
        wanted = dict.fromkeys(r for f in open_ for r in loads[f])
        level = {r: _level(r, users[r], rate, loads, weight) for r in wanted}
        t = min([*level.values(), *(most[f] for f in open_)])
        tight = {r for r, x in level.items() if x == t}
        for f in open_:
            if most[f] == t:
                rate[f] = paces[f]
            elif not tight.isdisjoint(loads[f]):
                rate[f] = min(paces[f], t / weight[f])
    return [x for x in rate if x is not None]


def _level(
    r: int, users: Sequence[int], rate: Sequence[float | None], loads: Sequence[Loads], weight: Sequence[float]
) -> float:
    """The bandwidth at which a link's unfrozen users fill what the frozen ones leave of it."""
    taken = wanted = 0.0
    for f in users:
        x = rate[f]
        if x is None:
            wanted += loads[f][r] / weight[f]
        else:
            taken += loads[f][r] * x
    return max(0.0, 1.0 - taken) / wanted
