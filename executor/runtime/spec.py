"""A run as the launcher tells every rank, and the plan each builds from it again. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from executor.checkpoint.saving import Saving
from executor.parallel.places import Places
from ir.core.errors import ErrorKind, PiperError
from ir.core.order import FloatArray
from ir.job import load_job
from ir.job.build import Prepared, prepare
from ir.plan.plan import Plan
from ir.plan.text import plan_digest
from ir.trace.durations import emulated_seconds, replayed_seconds
from ir.trace.text import read_trace
from ir.trace.trace import Trace
from ir.workload.setting import Loss, Style

_ONE_BY_ONE = Lock()  # ranks that are threads of one process share the plan


@dataclass(frozen=True)
class Spec:
    """A run as the launcher hands it to every rank: the job, the strategy that was judged, the digest it must have.

    digest: "" where no plan is run, only its parts are looked at. style: the fields of `Prepared.style`.
    dump: a folder for each rank's gradients and parameters, of the first step and of the last. emulate: seconds of a
    layer's pass, instead of arithmetic; replay: a trace file whose ops' seconds are taken instead. emulate_comm:
    seconds by which the end of each transfer is put off. parts: a folder for what each node of every compute op took.
    steps: done at the end, those before `saving.first` by the runs that this one continues. note: which experts tokens
    went to in the first of them.
    """

    job: str
    sets: tuple[str, ...]
    strategy: str
    schedule: str
    digest: str
    steps: int
    dump: str | None = None
    backend: str = "gloo"
    emulate: float | None = None
    emulate_comm: float = 0.0
    replay: str | None = None
    parts: str | None = None
    saving: Saving = field(default_factory=Saving)
    note: bool = False
    style: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Spec:
        """From the JSON that the launcher wrote."""
        saving = Saving(**fields.get("saving", {}))
        style = tuple((k, v) for k, v in fields.get("style", ()))
        return cls(**{**fields, "sets": tuple(fields["sets"]), "saving": saving, "style": style})

    @property
    def real(self) -> bool:
        """Whether ops compute something."""
        return self.emulate is None and self.replay is None

    def seconds(self, plan: Plan, places: Places, rank: int) -> FloatArray:
        """[step, op] how long each compute op is to take, where it computes nothing."""
        if self.replay is not None:
            return taken(read_trace(Path(self.replay)), plan, places, rank)
        return emulated_seconds(plan, self.emulate or 0.0)[None]


def taken(trace: Trace, plan: Plan, places: Places, rank: int) -> FloatArray:
    """[step, op] seconds that compute ops took in a trace, at the rank's position.

    A trace has rows of all ranks of the mesh, or of one for each program. Raises PiperError: it lacks an op.
    """
    return replayed_seconds(plan, _of_position(trace, places, places.position(rank)))


def _of_position(trace: Trace, places: Places, position: int) -> Trace:
    """The rows of the ranks at one position, by program."""
    if int(trace.rank.max(initial=0)) < len(places.table):
        return trace
    program = {ranks[position]: p for p, ranks in enumerate(places.table)}
    rows = [k for k, rank in enumerate(trace.rank.tolist()) if rank in program]
    columns = (getattr(trace, name)[rows] for name in ("post_s", "start_s", "end_s"))
    rank = np.array([program[int(trace.rank[k])] for k in rows], dtype=trace.rank.dtype)
    op, stream = ([column[k] for k in rows] for column in (trace.op, trace.stream))
    return Trace(trace.header, trace.step[rows], rank, stream, op, *columns)


def style_of(fields: Sequence[tuple[str, Any]]) -> Style:
    """A framework's style from its fields, enums as their text.

    >>> style_of([("loss", "plain"), ("eager", True)]).loss
    <Loss.PLAIN: 'plain'>
    """
    given = dict(fields)
    return Style(**{**given, "loss": Loss(given["loss"])} if "loss" in given else given)


def rebuild(spec: Spec) -> tuple[Prepared, Plan]:
    """The plan that was judged and checked, built again from job and strategy. Raises PiperError: another digest."""
    with _ONE_BY_ONE:
        return _rebuild(spec)


@lru_cache(maxsize=1)
def _rebuild(spec: Spec) -> tuple[Prepared, Plan]:
    job = load_job(spec.job, spec.sets)
    schedule = replace(job.schedule, name=None, directives=spec.strategy, builder=None, csv=None)
    prepared = replace(prepare(replace(job, schedule=schedule), style=style_of(spec.style)), schedule=spec.schedule)
    plan = prepared.plan()
    if (found := plan_digest(plan)) != spec.digest and spec.digest:
        raise PiperError(ErrorKind.ILLEGAL_PLAN, f"the plan's digest is {found}, {spec.digest} was to be run")
    return prepared, plan
