"""Where every stream and host stands when none can move."""

from itertools import pairwise

import numpy as np

from ir.core.errors import ErrorKind, PiperError
from ir.core.order import BoolArray, FloatArray
from ir.plan.plan import Plan
from piper_sim.engine.scenario import EngineScenario

LINES = 40


def deadlock(
    scenario: EngineScenario, started: BoolArray, ended: BoolArray, post: FloatArray | None = None
) -> PiperError:
    """The error that says, stream by stream, what the op at its head waits for; then the same of hosts.

    started, ended: [step, op]. post: [step, op] when ops were dispatched, negative where they were not.
    """
    plan = scenario.plan
    lines = []
    for queue, (program, stream) in zip(plan.queues, plan.streams, strict=True):
        stuck = next(((s, i) for s in range(len(ended)) for i in queue if not ended[s, i]), None)
        if stuck is not None:
            lack = _lack(scenario, *stuck, started, ended)
            lines.append(f"  rank {program} {stream} stands at {plan.text(stuck[1])}, which waits for {lack}")
    if scenario.host is not None and post is not None:
        lines += _hosts(scenario, post, ended)
    more = [f"  and {len(lines) - LINES} more"] if len(lines) > LINES else []
    return PiperError(ErrorKind.DEADLOCK, "\n".join(["no stream can move:", *lines[:LINES], *more]))


def _lack(scenario: EngineScenario, step: int, i: int, started: BoolArray, ended: BoolArray) -> str:
    plan = scenario.plan
    lack = [plan.text(w) for w in plan.waits.row(i).tolist() if not ended[step, w]]
    if started[step, i]:
        lack = [f"{plan.text(j)} of rank {int(plan.program[j])}" for j in _mates(plan, i) if not started[step, j]]
    elif step:
        over = scenario.before[scenario.late == i].tolist()
        lack += [f"{plan.text(j)} of the step before" for j in over if not ended[step - 1, j]]
    return ", ".join(lack) or "its host"


def _mates(plan: Plan, i: int) -> list[int]:
    if plan.partner[i] >= 0:
        return [int(plan.partner[i])]
    return np.flatnonzero(plan.collective == plan.collective[i]).tolist() if plan.collective[i] >= 0 else []


def _hosts(scenario: EngineScenario, post: FloatArray, ended: BoolArray) -> list[str]:
    plan, host = scenario.plan, scenario.host
    assert host is not None
    lines = []
    for p, (a, b) in enumerate(pairwise(plan.bounds.tolist())):
        stuck = next(((s, i) for s in range(len(post)) for i in range(a, b) if post[s, i] < 0), None)
        if stuck is None:
            continue
        step, i = stuck
        now = [plan.text(j) for j in host.hold.row(i).tolist() if j < len(plan) and not ended[step, j]]
        held = [j - len(plan) for j in host.hold.row(i).tolist() if j >= len(plan)]
        now += [f"{plan.text(j)} of the step before" for j in held if step and not ended[step - 1, j]]
        lines.append(f"  rank {p} host stands at {plan.text(i)}, which waits for {', '.join(now)}")
    return lines
