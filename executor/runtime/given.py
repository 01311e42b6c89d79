"""What ranks are given: the resolved job and the plan that was judged, as one text. Without torch.

Nobody lowers anything again: the plan is read from its text, which must have the digest that was judged, once for all
ranks of a machine, which are forked behind it. So what runs is the plan that was checked, wherever that came from.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from ir.core.errors import ErrorKind, PiperError
from ir.core.files import resolve_types
from ir.directives.load import parse_strategy
from ir.job.build import PreparedJob, directives_json, prepare
from ir.job.cache import PLANS
from ir.job.schema import Job
from ir.plan.plan import Plan
from ir.plan.text import parse_plan, plan_digest, plan_text
from ir.workload.setting import KernelStyle

Checksums = Mapping[str, int]  # of the first values of parameters and buffers, by name
NOTHING_DRAWN: Checksums = {}
Judged = tuple[PreparedJob, Plan, Checksums]  # what may run; and what a module's build() has drawn, where it has one


@dataclass(frozen=True)
class _Given:
    """job: resolved, with the layers of each stage, and no file. file: its path, which need not be text. schedule: its
    name in the plan. plan: the text; digest: its own. drawn: see `Judged`.
    """

    job: Job
    file: bytes
    strategy: list[dict[str, Any]]
    schedule: str
    style: KernelStyle
    digest: str
    plan: str
    drawn: Checksums


resolve_types(_Given)


def given_text(prepared: PreparedJob, plan: Plan, drawn: Checksums = NOTHING_DRAWN) -> str:
    """Job and plan as JSON, which `read_given` reads on any machine that has the files the job names.

    drawn: what ranks are to draw, too; what is not in it, nobody asks for.
    """
    job, file = prepared.job, os.fsencode(Path(prepared.job.file).resolve())
    parallel = replace(job.parallel, layers=prepared.layers)
    job = replace(job, parallel=parallel, cluster=replace(job.cluster, nodes=None), file="")  # as many as dp needs
    strategy = directives_json(prepared.strategy)
    given = _Given(job, file, strategy, prepared.schedule, prepared.style, plan_digest(plan), plan_text(plan), drawn)
    return msgspec.json.encode(given).decode()


def given_name(number: int) -> str:
    """The file, in a launch's folder, of the number-th that it gives."""
    return f"given-{number}.json"


@cache
def read_given(path: Path) -> Judged:
    """What a file says, read once in a process and in those forked from it.

    Raises PiperError (illegal_plan): the plan that was read has another digest than the one that was judged.
    """
    given = msgspec.json.decode(path.read_bytes(), type=_Given)
    made = prepare(
        replace(given.job, file=os.fsdecode(given.file)), style=given.style, given=parse_strategy(given.strategy)
    )
    prepared = replace(made, schedule=given.schedule)
    plan = parse_plan(given.plan, prepared.graph(), str(path))
    if (found := plan_digest(plan)) != given.digest:
        raise PiperError(ErrorKind.ILLEGAL_PLAN, f"the plan's digest is {found}, {given.digest} was to be run")
    return prepared, PLANS.plan(prepared.structure, lambda: plan), given.drawn


def forget() -> None:
    """Let go of all that was read, in a process that only forks those which use it."""
    read_given.cache_clear()
    PLANS.clear()
