"""What every rank of a run is told beside its job and plan; and a trace's seconds as ops of a plan take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ir.core.files import resolve_types
from ir.core.order import FloatArray
from ir.job.run_options import CheckpointOptions, JobRunOptions
from ir.plan.places import RankPlacement
from ir.plan.plan import Plan
from ir.trace.durations import emulated_seconds, replayed_seconds
from ir.trace.text import read_trace
from ir.trace.trace import Trace


@dataclass(frozen=True)
class PlanRun:
    """A run as the launcher hands it to every rank.

    options: of which `steps` counts those done before, by the runs that this one continues: `saving.first`.
    note: which experts tokens went to in the first step.
    log: a folder that each rank notes its steps in.
    """

    options: JobRunOptions
    saving: CheckpointOptions = field(default_factory=CheckpointOptions)
    note: bool = False
    log: Path | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> PlanRun:
        """From what `told` has made.

        >>> from pathlib import Path
        >>> options = JobRunOptions(2, dump=Path("/d"), sets=("model.seed=1",))
        >>> spec = PlanRun(options, CheckpointOptions("/s", every=2))
        >>> PlanRun.of(spec.told()) == spec
        True
        """
        return msgspec.convert(dict(fields), cls, dec_hook=lambda kind, value: kind(value))

    def told(self) -> dict[str, Any]:
        """As JSON has it; ranks may work elsewhere, so paths are whole."""
        fields: dict[str, Any] = msgspec.to_builtins(self, enc_hook=lambda path: str(path.resolve()))
        return fields

    def seconds(self, plan: Plan, places: RankPlacement, rank: int) -> FloatArray:
        """[step, op] how long each compute op is to take, where it computes nothing."""
        if self.options.replay is not None:
            return taken(read_trace(self.options.replay), plan, places, rank)
        return emulated_seconds(plan, self.options.emulate or 0.0)[None]


resolve_types(PlanRun)


def taken(trace: Trace, plan: Plan, places: RankPlacement, rank: int) -> FloatArray:
    """[step, op] seconds that compute ops took in a trace, at the rank's position.

    A trace has rows of all ranks of the mesh, or of one for each program. Raises PiperError: it lacks an op.
    """
    return replayed_seconds(plan, _of_position(trace, places, places.position(rank)))


def _of_position(trace: Trace, places: RankPlacement, position: int) -> Trace:
    """The rows of the ranks at one position, by program."""
    if int(trace.rank.max(initial=0)) < len(places.table):
        return trace
    program = {ranks[position]: p for p, ranks in enumerate(places.table)}
    rows = [k for k, rank in enumerate(trace.rank.tolist()) if rank in program]
    columns = (getattr(trace, name)[rows] for name in ("post_s", "start_s", "end_s"))
    rank = np.array([program[int(trace.rank[k])] for k in rows], dtype=trace.rank.dtype)
    op, stream = ([column[k] for k in rows] for column in (trace.op, trace.stream))
    return Trace(trace.header, trace.step[rows], rank, stream, op, *columns)
