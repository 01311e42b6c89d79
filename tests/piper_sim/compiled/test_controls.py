"""A defect planted in either engine is seen by the comparison of both."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ir.plan.plan import OpLists
from piper_sim.compiled import CompiledEngine, events, net
from piper_sim.engine import EngineScenario, HostModel, MessageMode, contention, loop
from tests.piper_sim.compiled.scenario_cases import HOSTS, SCALES
from tests.piper_sim.compiled.test_twin import agree

NAMES = ("1f1b", "zbv", "dualpipe", "zb1p", "interleaved-1f1b", "dualpipev", "gpipe", "1f1b")
CONTROLS = [
    ((name, 4, 6, "cut"), seed, SCALES[seed % len(SCALES)], MessageMode.RENDEZVOUS, HOSTS[seed % 3], seed % 2 == 0, 2)
    for seed, name in enumerate(NAMES * 2)
]
# Here the order in which rates are summed shows in the last bit of a time.
CONTROLS.append((("zbv", 8, 12, "cut"), 4, "minutes", MessageMode.RENDEZVOUS, "none", True, 1))
Change = Callable[[Any], Any]


def given_other(change: Callable[[EngineScenario], EngineScenario]) -> Change:
    """SimPy is given another scenario."""

    def planted(old: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, scenario: EngineScenario, *rest: Any) -> None:
            old(self, change(scenario), *rest)

        return init

    return planted


def built_from(change: Callable[[EngineScenario], EngineScenario]) -> Change:
    """The twin's structure is another scenario's."""
    return lambda old: lambda scenario: old(change(scenario))


def no_carry(s: EngineScenario) -> EngineScenario:
    return replace(s, late=s.late[:0], before=s.before[:0])


def fewer_waits(s: EngineScenario) -> EngineScenario:
    """Without the first wait of the last op that has some."""
    row, item = s.plan.waits.rows(), s.plan.waits.items
    keep = np.arange(len(item)) != np.flatnonzero(row == row[-1])[0]
    return replace(s, plan=replace(s.plan, waits=OpLists.of(len(s.plan), row[keep], item[keep])))


def with_host(change: Callable[[HostModel], HostModel]) -> Callable[[EngineScenario], EngineScenario]:
    return lambda s: replace(s, host=s.host and change(s.host))


def free(host: HostModel) -> HostModel:
    none = np.zeros(0, dtype=np.int64)
    return HostModel(host.launch, OpLists.of(len(host.launch), none, none))


def quick(host: HostModel) -> HostModel:
    return HostModel(host.launch * 0, host.hold)


def off_by_one(host: HostModel) -> HostModel:
    """What held a host for one op holds it for the next."""
    row = host.hold.rows() + 1
    keep = row < len(host.launch)
    return HostModel(host.launch, OpLists.of(len(host.launch), row[keep], host.hold.items[keep]))


def no_moving(old: Callable[..., float]) -> Callable[..., float]:
    def pace_of(self: Any, i: int) -> float:
        were, self.n_moving = self.n_moving, [[0] * len(x) for x in self.n_moving]
        try:
            return old(self, i)
        finally:
            self.n_moving = were

    return pace_of


def frozen_share_kept(old: Callable[..., float]) -> Callable[..., float]:
    """What frozen users take of a link is forgotten."""

    def level(r: int, users: Sequence[int], rate: Sequence[float | None], *rest: Any) -> float:
        return old(r, [f for f in users if rate[f] is None], rate, *rest)

    return level


def other_order(old: Callable[..., float]) -> Callable[..., float]:
    return lambda r, users, *rest: old(r, users[::-1], *rest)


def nothing_near(old: Callable[..., Any]) -> Callable[..., Any]:
    """Only what was touched is shared anew, not what shares links with it."""
    return lambda self, found: {w.op: w for w in found} if old(self, found) else {}


def other_tables(**factors: float) -> Change:
    """The twin's tables are off by a factor each; launches are the last of `duration`."""

    def planted(old: Callable[..., None]) -> Callable[..., None]:
        def run(n: net.OpNet, rates: Any, table: Any, duration: Any, *rest: Any) -> None:
            launched = np.arange(len(duration)) >= n.ops
            old(
                n,
                rates._replace(wire=rates.wire * factors.get("wire", 1.0)),
                table._replace(load=table.load * factors.get("load", 1.0)),
                np.where(launched, duration * factors.get("launch", 1.0), duration),
                *rest,
            )

        return run

    return planted


DEFECTS: dict[str, tuple[Any, str, Change]] = {
    "SimPy forgets moving kernels": (contention.SharedEngine, "_pace_of", no_moving),
    "SimPy rounds to another grid": (contention, "GRID", lambda grid: grid / 2),
    "SimPy settles before it is due": (contention, "SETTLE", lambda late: late - 2),
    "SimPy carries nothing over": (loop.EngineState, "__init__", given_other(no_carry)),
    "SimPy's host forgets its hold": (loop.EngineState, "__init__", given_other(with_host(free))),
    "SimPy's launches are not added": (loop.EngineState, "__init__", given_other(with_host(quick))),
    "SimPy's window is one op off": (loop.EngineState, "__init__", given_other(with_host(off_by_one))),
    "SimPy forgets what frozen users take": (contention, "_level", frozen_share_kept),
    "SimPy sums users in another order": (contention, "_level", other_order),
    "SimPy shares anew too little": (contention.SharedEngine, "_component", nothing_near),
    "the twin carries nothing over": (net, "build", built_from(no_carry)),
    "the twin misses one wait": (net, "build", built_from(fewer_waits)),
    "the twin's host forgets its hold": (net, "build", built_from(with_host(free))),
    "the twin's window is one op off": (net, "build", built_from(with_host(off_by_one))),
    "the twin's launches are not added": (events, "run", other_tables(launch=0.0)),
    "the twin's slowdowns are off by 1e-10": (events, "run", other_tables(wire=1 + 1e-10)),
    "the twin's loads are off by 1e-10": (events, "run", other_tables(load=1 + 1e-10)),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledEngine, "_built", weakref.WeakKeyDictionary())
    assert all(agree(*c) for c in CONTROLS)
    monkeypatch.setattr(CompiledEngine, "_built", weakref.WeakKeyDictionary())
    where, what, change = DEFECTS[name]
    monkeypatch.setattr(where, what, change(getattr(where, what)))
    assert not all(agree(*c) for c in CONTROLS)
