"""`Prediction`: what is known of one simulated job, as tables, as `simulate`'s object, as a picture."""

from __future__ import annotations

from base64 import b64encode
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from ir.core.order import IntArray
from ir.job.build import PreparedJob
from ir.plan.plan import Plan
from ir.trace.trace import Trace
from piper_sim.engine import EngineRun
from piper_sim.engine.traces import trace_of
from piper_sim.folding import replica
from piper_sim.memory.timeline import samples
from piper_sim.pricing.costs import OpCosts
from piper_sim.pricing.structure import KERNELS
from piper_sim.study.breakdown import StepBreakdown
from piper_sim.study.planned import PlannedJob, fits
from piper_sim.study.simulate import Object, simulate_object

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, eq=False)
class Prediction:
    """One job, simulated. `iteration_s`, `fits`; `memory`, `breakdown`, `trace` as pandas DataFrames; `to_dict()`.

    planned: the job resolved, its plan, its memory. costs, run: of the plan unfolded to the classes of replicas that
    differ. times: where each pipeline rank's step went. steps: simulated until it repeated.
    """

    planned: PlannedJob
    costs: OpCosts
    run: EngineRun
    times: StepBreakdown
    steps: int

    def __repr__(self) -> str:
        """In a line; the fields are a plan's arrays."""
        return f"Prediction({self.title}: {self.iteration_s:.4g} s a step, {'fits' if self.fits else 'does not fit'})"

    @property
    def prepared(self) -> PreparedJob:
        """The job resolved."""
        return self.planned.prepared

    @property
    def plan(self) -> Plan:
        """The plan, folded: what `piper-sim plan` prints and `piper-sim run` executes."""
        return self.planned.plan

    @property
    def iteration_s(self) -> float:
        """Seconds of the step that repeats, optimizer and exposed communication with it."""
        return self.times.iteration_s

    @property
    def fits(self) -> bool:
        """Whether every rank's allocator finds room within the device, less margin and context."""
        return fits(self.planned)

    @property
    def title(self) -> str:
        """Model, schedule and GPUs, in a few words."""
        return f"{self.prepared.job.model.name}, {self.prepared.schedule}, {self.prepared.ranks} GPUs"

    @property
    def breakdown(self) -> DataFrame:
        """Seconds of one step: a row for each pipeline rank, a column for each cause; a row sums to `iteration_s`."""
        from pandas import DataFrame, RangeIndex

        return DataFrame(list(self.times.seconds), index=RangeIndex(len(self.times.seconds), name="rank"))

    @property
    def memory(self) -> DataFrame:
        """Bytes at the peak: a row for each pipeline rank, its worst replica's.

        Columns: parameters, gradients, optimizer, activations, buffers, workspace, context, cache (what the allocator
        holds beyond what is asked for), which sum to device_peak; then low and high, the band that device_peak lies
        in, room (capacity less margin) and peak_op, the op that makes the peak.
        """
        from pandas import DataFrame, RangeIndex

        m = self._found["memory"]
        room = m["capacity_bytes"] - m["margin_bytes"]
        rows = []
        for r, parts in m["breakdown_bytes"].items():
            low, high = (b + parts["context"] for b in m["reserved_band_bytes"][r])
            head = {**parts, "cache": m["cache_bytes"][r], "device_peak": m["device_peak_bytes"][r]}
            rows.append({**head, "low": low, "high": high, "room": room, "peak_op": m["peak_op"][r]})
        return DataFrame(rows, index=RangeIndex(len(rows), name="rank"))

    @property
    def trace(self) -> DataFrame:
        """The last simulated step of one replica, the slowest: a row for each op.

        Columns: step, rank (pipeline rank), stream, op, post_s, start_s, end_s (seconds from the step's start).
        """
        from pandas import DataFrame

        t = self.last_step
        columns = {"step": t.step, "rank": t.rank, "stream": t.stream, "op": t.op}
        return DataFrame({**columns, "post_s": t.post_s, "start_s": t.start_s, "end_s": t.end_s})

    @cached_property
    def shown(self) -> int:
        """The class of replicas that `last_step` is of."""
        kernels = self.costs.shares[:, KERNELS].reshape(self.planned.classes.count, -1).sum(axis=1)
        return int(np.argmax(kernels))

    @cached_property
    def trace_order(self) -> IntArray:
        """[row of `last_step`] its op of the plan."""
        start = replica(self.run, self.shown, self.planned.classes.count).start[-1]
        names = [name for _, name in self.plan.streams]
        code = {name: i for i, name in enumerate(sorted(set(names)))}
        streams = np.array([code[name] for name in names])[self.plan.stream]
        return np.lexsort((streams, start, self.plan.program)).astype(np.int64)

    @cached_property
    def last_step(self) -> Trace:
        """The last simulated step of one replica, the one that computes longest, with memory samples."""
        classes, k = self.planned.classes, self.shown
        run = replica(self.run, k, classes.count)
        start, end = run.start[-1], run.end[-1]
        zero = float(start.min())
        found = samples(self.planned.sized, self.planned.memory, start - zero, end - zero)
        source = self.planned.sources.word
        header = {"schedule": self.prepared.schedule, "iteration_s": self.iteration_s, "cost_source": source}
        if classes.count > 1:
            header["replica"] = f"{int(classes.first[k])} of {len(classes.of)}"
        return trace_of(self.plan, run, header, memory=found)

    def to_dict(self) -> Object:
        """The object that `piper-sim simulate --json` prints, but for what `[history]` adds to it."""
        return deepcopy(self._found)

    @cached_property
    def _found(self) -> Object:
        return simulate_object(self.planned, self.costs, self.times, self.steps)

    def _repr_png_(self) -> bytes:
        """The step as a timeline, for a notebook."""
        from piper_sim.report.picture import timeline_png

        out = BytesIO()
        timeline_png(self.last_step, out, f"{self.title} (modelled)")
        return out.getvalue()

    def _repr_html_(self) -> str:
        """The same below a line of figures."""
        f = self._found
        text = f"{self.title}: {self.iteration_s:.4g} s a step, MFU {f['mfu']:.1%}, bubble {f['bubble_fraction']:.1%}"
        verdict = "fits" if self.fits else f"does not fit: {f['reason']}"
        picture = b64encode(self._repr_png_()).decode("ascii")
        return f'<p>{escape(f"{text}; {verdict}")}</p><img alt="timeline" src="data:image/png;base64,{picture}">'
