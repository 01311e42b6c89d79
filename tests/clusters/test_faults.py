"""A hundred seeded faults under torchrun, on one agent and on two: who, at which op, how soon, and nobody is left."""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ir.plan.plan import OpKind, Plan
from tests.executor.launch.processes import agent, free_port, gone, objects, pids
from tests.executor.runs import job_file, judged

KINDS = ("kill", "stop", "raise", "hang", "cut", "full", "slow")
PLANS = (
    ("schedule.name=1f1b",),
    ("schedule.name=zb1p",),
    ("schedule.name=zbv",),
    ("parallel.pp=1", "parallel.dp=2", "parallel.zero=1", "schedule.microbatches=2"),
    ("parallel.pp=1", "parallel.dp=2", "parallel.zero=3", "schedule.microbatches=2"),
)
QUICK = (0, 2)  # one that says nothing, and where; one that both could report


@dataclass(frozen=True)
class Fault:
    """Rank `rank` comes to op `index` of the plan for the second time."""

    kind: str
    agents: int
    sets: tuple[str, ...]
    rank: int
    index: int
    text: str

    @classmethod
    def drawn(cls, seed: int, folder: Path) -> Fault:
        """Kinds and agents in turn; the rest by the seed."""
        draw = random.Random(seed)
        kind, agents, sets = KINDS[seed % len(KINDS)], 1 + seed // len(KINDS) % 2, draw.choice(PLANS)
        _, plan = judged(folder, *sets)
        rank = draw.randrange(2)
        index = draw.choice(_ops(plan, kind, rank))
        return cls(kind, agents, sets, rank, index, plan.text(index))


def _ops(plan: Plan, kind: str, rank: int) -> list[int]:
    """Where it may happen: a hang in what the others take part in."""
    program = rank if plan.programs == 2 else 0
    mine = np.flatnonzero(plan.program == program)
    if kind == "hang":
        mine = mine[plan.kind[mine] != OpKind.COMPUTE]
    return [int(i) for i in mine]


@dataclass(frozen=True)
class Outcome:
    """What was reported, and how many seconds after it happened all had ended. at: the op; "" where it never came."""

    fault: Fault
    found: dict[str, Any]
    at: str
    seconds: float
    left: int

    @property
    def right(self) -> bool:
        """The rank and the op; of a connection that ends, either end. Slow is no fault, one too soon is wrong."""
        if not self.at:
            return False
        if self.fault.kind == "slow":
            return "losses" in self.found
        error = self.found.get("error", {})
        if self.fault.kind == "cut":
            return error.get("rank") in (0, 1) and bool(error.get("op"))
        return (error.get("rank"), error.get("op")) == (self.fault.rank, self.at)


def suffered(seed: int, folder: Path) -> Outcome:
    """Run into the seed's fault."""
    fault, mark, out = Fault.drawn(seed, folder), folder / "mark", folder / "out"
    steps = ("--steps", "4" if fault.kind == "slow" else "10000")
    saving = ("--save", str(folder / "saved"), "--every", "3") if fault.kind == "full" else ()
    sets = (word for s in fault.sets for word in ("--set", s))
    args = str(job_file(folder)), *sets, *steps, *saving, "--out", str(out), "--watchdog", "3"
    env = {"FAULT": json.dumps({"kind": fault.kind, "rank": fault.rank, "index": fault.index, "mark": str(mark)})}
    port = free_port()
    agents = [
        agent(fault.agents, 2 // fault.agents, port, *args, module="tests.clusters.faulty", **env)
        for _ in range(fault.agents)
    ]
    said = [a.communicate(timeout=120) for a in agents]
    ended_s = time.monotonic()
    found = [o for text, _ in said for o in objects(text)]
    began_s, at = json.loads(mark.read_text()) if mark.exists() else (ended_s, "")
    left = sum(not gone(pid) for pid in pids(out))
    return Outcome(fault, found[0] if len(found) == 1 else {"all": found}, at, ended_s - began_s, left)


def score(outcomes: list[Outcome]) -> str:
    """A line a kind, and each that was wrong."""
    lines = []
    for kind in KINDS:
        of = [o for o in outcomes if o.fault.kind == kind]
        times = sorted(o.seconds for o in of if o.fault.kind != "slow") or [0.0]
        right = sum(o.right for o in of)
        lines.append(f"{kind:6} {right}/{len(of)} right, {times[len(times) // 2]:.1f} s, at most {times[-1]:.1f} s")
    return "\n".join(lines + [f"wrong: {o.fault} at {o.at}: {str(o.found)[:400]}" for o in outcomes if not o.right])


@pytest.mark.parametrize("seed", QUICK)
def test_it_is_said_once_who_and_where(seed: int, tmp_path: Path) -> None:
    outcome = suffered(seed, tmp_path)
    assert outcome.right and not outcome.left, outcome


@pytest.mark.slow
def test_a_hundred_faults(tmp_path: Path) -> None:
    outcomes = []
    for seed in range(100):
        (tmp_path / str(seed)).mkdir()
        outcomes.append(suffered(seed, tmp_path / str(seed)))
        print(outcomes[-1], file=sys.stderr, flush=True)
    print(score(outcomes))
    assert Counter(o.fault.agents for o in outcomes).keys() == {1, 2}
    assert sum(o.right for o in outcomes) >= 98, score(outcomes)
    assert not any(o.left for o in outcomes), score(outcomes)
