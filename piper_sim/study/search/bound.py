"""What no simulation of a job can undercut: seconds of a step, bytes of a rank. Nothing is planned for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cost_models import DeviceHardware, state_bytes
from cost_models.allocator.bands import context_bytes
from ir.core.errors import ErrorKind, PiperError
from ir.core.mesh import Mesh
from ir.core.ops import OpToken
from ir.core.order import FloatArray
from ir.job import Job
from ir.job.build import DEFAULT_SCHEDULE, blaming, precision_of, recompute_options, resolve
from ir.job.model import JobModel, read_model
from ir.schedules.registry import canonical, check_shape, default_chunks, legal_chunks, order_depends_on_times
from ir.workload.layout import laid_out, parse_layout
from ir.workload.part import Chunk, PartLayout
from ir.workload.partition import partition
from ir.workload.setting import MicrobatchShape
from piper_sim.report.units import GIB
from piper_sim.study.planned import communicators
from piper_sim.study.search.chunks import ChunkCosts
from piper_sim.study.search.walk import ScheduleCells, compose, least_makespan, least_peaks, schedule_cells


@dataclass(frozen=True)
class JobBound:
    """The least seconds of a step and device bytes of its fullest rank; excess: why it cannot fit, None if it might."""

    seconds: float
    device_bytes: float
    excess: str | None


@dataclass(frozen=True, eq=False)
class _Stages:
    """Of each stage: steps of its passes in max and plus, seconds of its kernels, bytes saved, parameters by pool."""

    times: FloatArray
    busy: FloatArray
    saved: FloatArray
    numel: FloatArray
    most_layers: int


class JobBounds:
    """Bounds of jobs that differ in parallelism, schedule and attention alone; what they share is worked out once."""

    def __init__(self, hardware: DeviceHardware) -> None:
        self.hardware = hardware
        self._models: dict[str, JobModel] = {}
        self._costs: dict[tuple[object, ...], ChunkCosts] = {}
        self._stages: dict[tuple[object, ...], _Stages] = {}

    def of(self, job: Job) -> JobBound:
        """Of one job. Raises PiperError (job, model, usage): it is illegal."""
        with blaming(job):
            return self._of(replace(resolve(job, self.hardware.gpus_per_node), cluster=job.cluster))

    def _of(self, job: Job) -> JobBound:
        p, s = job.parallel, job.schedule
        model, mesh = self._checked(job)
        name = canonical(s.name or DEFAULT_SCHEDULE)
        asked = 0 if s.layout is None else len(parse_layout(s.layout)) // p.pp
        chunks = s.stages_per_rank or (asked if legal_chunks(name, asked) else default_chunks(name))
        mbs = s.microbatches or 2 * p.pp
        check_shape(name, p.pp, mbs, chunks)
        searched = order_depends_on_times(name)
        cells = schedule_cells("zbv" if searched and chunks == 2 else "1f1b" if searched else name, p.pp, mbs, chunks)
        key, costs = self._chunk_costs(job, model, mesh)
        layouts = [self._layout(key, costs, model, job, cells, None)]
        even = -(-sum("L" in c.tags for c in model.chunks) // len(cells.home))
        if p.layers == "balanced" and layouts[0].most_layers > even:
            layouts.append(self._layout(key, costs, model, job, cells, even))
        context = context_bytes(self.hardware, communicators(mesh, model.config))
        found = [self._bound(job, costs, cells, x, context, searched) for x in layouts]
        return min(found, key=lambda b: (b.excess is not None, b.seconds)) if len(found) > 1 else found[0]

    def _checked(self, job: Job) -> tuple[JobModel, Mesh]:
        p = job.parallel
        if job.model.attention not in self._models:
            self._models[job.model.attention] = read_model(job)
        model = self._models[job.model.attention]
        shape = MicrobatchShape(job.schedule.microbatch_size, job.model.seq_len)
        layout = PartLayout(p.tp, p.cp, p.ep, p.etp, p.sequence_parallel)
        model.check(layout, shape, precision_of(job), recompute_options(job))
        sizes = dict(tp=p.tp, cp=p.cp, dp=p.dp or 1, pp=p.pp, ep=p.ep, etp=p.etp)
        return model, Mesh.of(**sizes, order=p.order.split())

    def _chunk_costs(self, job: Job, model: JobModel, mesh: Mesh) -> tuple[tuple[object, ...], ChunkCosts]:
        p = job.parallel
        inner = p.order.split()[-2:] == ["dp", "pp"]  # then no group inside of a chunk depends on dp and pp
        same = replace(p, zero=0, layers="", bucket_MiB=None, dp=None if inner else p.dp, pp=1 if inner else p.pp)
        key = (job.model.attention, job.schedule.microbatch_size, job.schedule.recompute, same)
        if key not in self._costs:
            self._costs[key] = ChunkCosts.of(job, model, mesh, self.hardware)
        return key, self._costs[key]

    def _layout(
        self,
        key: tuple[object, ...],
        costs: ChunkCosts,
        model: JobModel,
        job: Job,
        cells: ScheduleCells,
        most: int | None,
    ) -> _Stages:
        ranks, layers = tuple(cells.home[:, 0].tolist()), job.parallel.layers
        whole = (key, ranks, layers, job.schedule.layout, most)
        if whole not in self._stages:
            if job.schedule.layout is not None:
                stages = laid_out(model.chunks, parse_layout(job.schedule.layout))
                if len(stages) != len(ranks):
                    message = f"the layout has {len(stages)} stages, the schedule {len(ranks)}"
                    raise PiperError(ErrorKind.JOB, message, key="schedule.layout")
            else:
                stages = partition(model.chunks, len(ranks), layers, costs.weights, ranks, most)
            self._stages[whole] = _stages(stages, model.chunks, costs)
        return self._stages[whole]

    def _bound(
        self, job: Job, costs: ChunkCosts, cells: ScheduleCells, stages: _Stages, context: int, searched: bool
    ) -> JobBound:
        ranks = len(cells.at) - 1
        numel = np.array([stages.numel[_held(cells, r)].sum(axis=0) for r in range(ranks)])
        copies = (2 if cells.both_ways else 1) * (2 if costs.tied else 1)
        state, updated = _state(numel, costs, job.parallel.zero, copies)
        if searched:  # its order is not known yet: one microbatch of each stage is alive at some time
            saved = np.array([stages.saved[_held(cells, r)].sum(axis=1).max() for r in range(ranks)])
        else:
            saved = least_peaks(cells, stages.saved)
        device = state + saved + context
        worst = int(device.argmax())
        update = np.array([costs.update_s(int(n)) for n in updated])
        busy = np.array([stages.busy[cells.stage[a:b], cells.token[a:b]].sum() for a, b in _rows(cells)])
        ends = busy + update
        if job.optimizer.clip_norm > 0 and not searched:  # all ranks meet in the norm: a step is a whole walk
            ends = np.maximum(ends, least_makespan(cells, stages.times, stages.busy, update, costs.p2p_s))
        room = self.hardware.hbm_bytes - int(job.cluster.memory_margin_GiB * GIB)
        excess = _excess(worst, state, saved, context, room) if device[worst] > room else None
        return JobBound(float(ends.max()) * (1 - 1e-9), float(device[worst]), excess)


def _rows(cells: ScheduleCells) -> list[tuple[int, int]]:
    return list(zip(cells.at[:-1].tolist(), cells.at[1:].tolist(), strict=True))


def _held(cells: ScheduleCells, rank: int) -> list[int]:
    """The stages on a rank."""
    return np.flatnonzero((cells.home == rank).any(axis=1)).tolist()


def _stages(stages: Sequence[Sequence[Chunk]], chunks: Sequence[Chunk], costs: ChunkCosts) -> _Stages:
    kind = {c.name: costs.kinds[i] for i, c in enumerate(chunks)}
    rows = [[kind[c.name] for c in stage if c.name in kind] for stage in stages]  # a skipped stage has no chunk
    back = {OpToken.I, OpToken.B}
    times = [[compose([costs.times[k, t] for k in (r[::-1] if t in back else r)]) for t in OpToken] for r in rows]
    return _Stages(
        np.array(times),
        np.array([costs.busy[r].sum(axis=0) for r in rows]),
        np.array([costs.saved[r].sum(axis=0) for r in rows]),
        np.array([costs.numel[r].sum(axis=0) for r in rows]),
        max(sum("L" in c.tags for c in stage) for stage in stages),
    )


def _state(numel: FloatArray, costs: ChunkCosts, zero: int, copies: int) -> tuple[FloatArray, list[float]]:
    """([rank] bytes that persist, [rank] elements it updates): at least."""
    ranks = [n * (copies if zero < 2 else 1) for n in costs.ranks]
    state = np.zeros(len(numel))
    for r, row in enumerate(numel):
        for n, own, held in zip(row, costs.ranks, ranks, strict=True):
            shards = [held if zero >= level else 1 for level in (3, 2, 1)]
            state[r] += state_bytes(int(n), costs.model.recipe, *shards, alone=own == 1).total
    shared = np.array(ranks if zero else [1] * len(ranks))
    return state, (numel // shared).sum(axis=1).tolist()


def _excess(rank: int, state: FloatArray, saved: FloatArray, context: int, room: int) -> str:
    least = state[rank] + saved[rank] + context
    parts = f"{state[rank] / GIB:.1f} of parameters, gradients and optimizer, {saved[rank] / GIB:.1f} of activations"
    return f"rank {rank} needs {least / GIB:.1f} GiB or more ({parts}), and there are {room / GIB:.1f}"
