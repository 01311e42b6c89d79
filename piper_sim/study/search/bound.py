"""What no simulation of a job can undercut: seconds of a step, bytes of a rank. Nothing is planned for it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cost_models import DeviceHardware, state_bytes
from cost_models.allocator.bands import context_bytes
from ir.core.errors import job_error
from ir.core.grid import quantise
from ir.core.mesh import Mesh
from ir.core.ops import OpToken
from ir.core.order import FloatArray, IntArray
from ir.core.work import Message, MessageKind
from ir.job import Job
from ir.job.build import DEFAULT_SCHEDULE, blaming, precision_of, resolve
from ir.job.model import JobModel, read_model
from ir.job.recompute import recompute_options
from ir.schedules.registry import canonical, check_shape, default_chunks, legal_chunks, order_depends_on_times
from ir.workload.layout import laid_out, parse_layout
from ir.workload.part import Chunk
from ir.workload.partition import partition
from ir.workload.setting import MicrobatchShape
from piper_sim.pricing.costs import CostModel
from piper_sim.report.units import GIB
from piper_sim.study.planned import communicators
from piper_sim.study.search.chunks import ChunkCosts, alike
from piper_sim.study.search.walk import ScheduleCells, least_makespan, least_peaks, schedule_cells

_SYNC = (MessageKind.REDUCE_SCATTER, MessageKind.ALL_GATHER)


@dataclass(frozen=True)
class JobBound:
    """The least seconds of a step and device bytes of its fullest rank; excess: why it cannot fit, None if it might."""

    seconds: float
    device_bytes: float
    excess: str | None


@dataclass(frozen=True, eq=False)
class _Stages:
    """Of each stage: steps of its passes in max and plus, seconds of its kernels, bytes saved, parameters by pool.

    count: [stage, kind] chunks of each kind.
    """

    times: FloatArray
    busy: FloatArray
    saved: FloatArray
    numel: FloatArray
    count: IntArray
    most_layers: int


@dataclass(frozen=True, eq=False)
class _SizedJob:
    """A job resolved and found legal so far. key: what its chunks' costs depend on."""

    job: Job
    model: JobModel
    mesh: Mesh
    key: tuple[object, ...]
    costs: ChunkCosts
    name: str
    chunks: int
    mbs: int

    @property
    def searched(self) -> bool:
        """Whether its order is searched for its costs: it is not known yet."""
        return order_depends_on_times(self.name)

    @property
    def both_ways(self) -> bool:
        """Whether a stage is on two ranks: from each end of the pipeline a microbatch enters."""
        return self.name == "dualpipe" and self.mbs > self.job.schedule.flushes


class JobBounds:
    """Bounds of jobs that differ in parallelism, schedule and attention alone; what they share is worked out once."""

    def __init__(self, hardware: DeviceHardware) -> None:
        self.hardware = hardware
        self._models: dict[str, JobModel] = {}
        self._meshes: dict[tuple[object, ...], Mesh] = {}
        self._costs: dict[tuple[object, ...], ChunkCosts] = {}
        self._stages: dict[tuple[object, ...], _Stages] = {}
        self._cuts: dict[tuple[object, ...], tuple[tuple[Chunk, ...], ...]] = {}
        self._priced: dict[int, CostModel] = {}
        self._messages: dict[tuple[object, ...], float] = {}

    def first(self, job: Job) -> JobBound:
        """A quick one: the mean of all ranks. Raises PiperError (job, model, usage): it is illegal."""
        with blaming(job):
            x = self._sized(job)
            p, costs = x.job.parallel, x.costs
            count = np.bincount(costs.kinds, minlength=len(costs.busy)).astype(np.float64)
            both = costs.busy[:, [OpToken.F, OpToken.I, OpToken.W]].sum(axis=1)
            seconds = float(count @ both) * x.mbs / p.pp
            copies = 2 if x.both_ways else 1
            state, _ = _state((count @ costs.numel)[None, :] / p.pp * copies, x, copies * (1 + costs.tied))
            device = float(state[0]) + self._context(x)
            room = self.room(x.job)
            said = f"the mean of all ranks is {device / GIB:.1f} GiB or more of parameters, gradients and optimizer"
            excess = f"{said}, and there are {room / GIB:.1f}" if device > room else None
            return JobBound(seconds * (1 - 1e-9), device * (1 - 1e-9), excess)

    def of(self, job: Job) -> JobBound:
        """Of one job, its schedule walked. Raises PiperError (job, model, usage): it is illegal."""
        with blaming(job):
            x = self._sized(job)
            name = ("zbv" if x.chunks == 2 else "1f1b") if x.searched else x.name
            cells = schedule_cells(name, x.job.parallel.pp, x.mbs, x.chunks, x.job.schedule.flushes)
            layouts = [self._layout(x, cells, None)]
            even = -(-sum("L" in c.tags for c in x.model.chunks) // len(cells.home))
            if x.job.parallel.layers == "balanced" and x.job.schedule.layout is None and layouts[0].most_layers > even:
                layouts.append(self._layout(x, cells, even))
            found = [self._bound(x, cells, stages) for stages in layouts]
            might = [b for b in found if b.excess is None] or found  # which of them it is, is known once it is planned
            seconds, device = min(b.seconds for b in might), min(b.device_bytes for b in might)
            return JobBound(seconds, device, might[0].excess)

    def _sized(self, job: Job) -> _SizedJob:
        job = replace(resolve(job, self.hardware.gpus_per_node), cluster=job.cluster)
        p, s = job.parallel, job.schedule
        if job.model.attention not in self._models:
            self._models[job.model.attention] = read_model(job)
        model = self._models[job.model.attention]
        shape = MicrobatchShape(s.microbatch_size, job.model.seq_len, job.model.encoder_seq_len or 0)
        layout = p.layout
        model.check(layout, shape, precision_of(job), recompute_options(job))
        sizes = (p.tp, p.cp, p.dp or 1, p.pp, p.ep, p.etp, p.dp_replicate, p.order)
        if sizes not in self._meshes:
            self._meshes[sizes] = p.mesh
        mesh = self._meshes[sizes]
        name = canonical(s.name or DEFAULT_SCHEDULE)
        asked = 0 if s.layout is None else len(parse_layout(s.layout)) // p.pp
        chunks = s.stages_per_rank or (asked if legal_chunks(name, asked) else default_chunks(name))
        mbs = s.microbatches or 2 * p.pp
        check_shape(name, p.pp, mbs, chunks)
        stages = p.pp * chunks
        if s.layout is None and (p.layers != "balanced" or sum("L" in c.tags for c in model.chunks) < stages):
            partition(model.chunks, stages, p.layers)  # refuses counts that do not fit
        inner = p.order.split()[-2:] == ["dp", "pp"]  # then no group inside of a chunk depends on dp and pp
        same = replace(p, zero=0, layers="", bucket_MiB=None, dp=None if inner else p.dp, pp=1 if inner else p.pp)
        same = replace(same, dp_replicate=1)
        key = (
            job.model.attention,
            job.optimizer.offload,
            s.microbatch_size,
            s.recompute,
            s.recompute_layers is None,
            same,
        )
        if key not in self._costs:
            self._costs[key] = ChunkCosts.of(job, model, mesh, self.hardware)
        return _SizedJob(job, model, mesh, key, self._costs[key], name, chunks, mbs)

    def _context(self, x: _SizedJob) -> int:
        return context_bytes(self.hardware, communicators(x.mesh, x.model.config))

    def room(self, job: Job) -> int:
        """Bytes of a device that a job may fill."""
        return self.hardware.hbm_bytes - int(job.cluster.memory_margin_GiB * GIB)

    def _layout(self, x: _SizedJob, cells: ScheduleCells, most: int | None) -> _Stages:
        ranks, layers, layout = tuple(cells.home[:, 0].tolist()), x.job.parallel.layers, x.job.schedule.layout
        whole = (x.key, ranks, layers, layout, most)
        if whole not in self._stages:
            cut = (x.costs.weights, ranks, layers, layout, most)
            if cut not in self._cuts:
                self._cuts[cut] = _cut(x, ranks, most)
            self._stages[whole] = _stages(self._cuts[cut], x.model.chunks, x.costs)
        return self._stages[whole]

    def _bound(self, x: _SizedJob, cells: ScheduleCells, stages: _Stages) -> JobBound:
        job, costs = x.job, x.costs
        held = (cells.passes > 0).astype(np.float64)  # [rank, stage] 1 where a rank holds it
        copies = (2 if cells.both_ways else 1) * (2 if costs.tied else 1)
        state, updated = _state(held @ stages.numel, x, copies)
        # A searched order is not known yet: one microbatch of each stage is alive at some time.
        alone = (held * stages.saved[:, :2].sum(axis=1)).max(axis=1)
        saved = alone if x.searched else least_peaks(cells, stages.saved)
        device = state + saved + self._context(x)
        worst = int(device.argmax())
        update = np.array([costs.update_s(int(n)) for n in updated])
        ends = update + np.bincount(cells.rank, stages.busy[cells.stage, cells.token], len(held))
        if job.optimizer.clip_norm > 0 and not x.searched:  # all ranks meet in the norm: a step is a whole walk
            ends = np.maximum(ends, least_makespan(cells, stages.times, stages.busy, update, costs.p2p_s))
        if job.parallel.zero >= 2:
            ends = np.maximum(ends, cells.passes @ self._synced(x, stages, cells.fused))
        room = self.room(job)
        excess = _excess(worst, state, saved, self._context(x), room) if device[worst] > room else None
        return JobBound(float(ends.max()) * (1 - 1e-9), float(device[worst]), excess)

    def _synced(self, x: _SizedJob, stages: _Stages, fused: bool) -> FloatArray:
        """[stage] least seconds of reductions and gathers for one microbatch, which queue on one stream.

        A pass finds `ahead + 1` buckets there at most and gathers the others; a fused pair's passes may share.
        """
        out, p, costs = np.zeros(len(stages.numel)), x.job.parallel, x.costs
        if p.bucket_MiB is not None or x.job.costs.stage_times is not None:
            return out
        kinds = costs.numel.tolist()
        kind = {m: [[self._message(x, m, pool, n) for pool, n in enumerate(row)] for row in kinds] for m in _SYNC}
        for s, count in enumerate(stages.count.tolist()):
            out[s] = sum(n * sum(row) for n, row in zip(count, kind[MessageKind.REDUCE_SCATTER], strict=True))
            if p.zero == 3 and not fused:
                each = [t for n, row in zip(count, kind[MessageKind.ALL_GATHER], strict=True) for t in n * row]
                out[s] += 2 * sum(sorted(each)[: max(0, len(each) - p.ahead - 1)])
        return out

    def _message(self, x: _SizedJob, kind: MessageKind, pool: int, numel: float) -> float:
        """Seconds of a bucket's reduction or gather; 0 where that differs from rank to rank."""
        axes, _ = x.mesh.divided(x.costs.pools[pool])
        ranks = x.mesh.size(axes)
        if not numel or ranks == 1:
            return 0.0
        key = (id(x.mesh), kind, axes, numel)
        if key not in self._messages:
            if id(x.mesh) not in self._priced:
                small = replace(x.costs.small, job=x.job, mesh=x.mesh, ranks=x.mesh.ranks)
                self._priced[id(x.mesh)] = CostModel(small, self.hardware)
            model, source = self._priced[id(x.mesh)], x.costs.small.base.source
            assert source is not None
            element = source.sync_bytes()[kind is MessageKind.ALL_GATHER]
            message = Message(kind, -(-int(numel) // ranks) * ranks * element, axes)
            self._messages[key] = quantise(model.message(message)) if alike(model, message) else 0.0
        return self._messages[key]


def _cut(x: _SizedJob, ranks: tuple[int, ...], most: int | None) -> tuple[tuple[Chunk, ...], ...]:
    layout = x.job.schedule.layout
    if layout is None:
        return partition(x.model.chunks, len(ranks), x.job.parallel.layers, x.costs.weights, ranks, most)
    stages = laid_out(x.model.chunks, parse_layout(layout))
    if len(stages) != len(ranks):
        raise job_error("schedule.layout", f"the layout has {len(stages)} stages, the schedule {len(ranks)}")
    return stages


def _stages(stages: Sequence[Sequence[Chunk]], chunks: Sequence[Chunk], costs: ChunkCosts) -> _Stages:
    kind = {c.name: costs.kinds[i] for i, c in enumerate(chunks)}
    rows = [tuple(kind[c.name] for c in stage if c.name in kind) for stage in stages]  # a skipped stage has no chunk
    count = np.array([np.bincount(r, minlength=len(costs.busy)) for r in rows])
    return _Stages(
        np.array([costs.steps(r) for r in rows]),
        count @ costs.busy,
        count @ costs.saved,
        count @ costs.numel,
        count,
        max(sum("L" in c.tags for c in stage) for stage in stages),
    )


def _state(numel: FloatArray, x: _SizedJob, copies: int) -> tuple[FloatArray, list[float]]:
    """([rank] bytes that persist, [rank] elements it updates): at least. copies: of a parameter among programs."""
    zero, own = x.job.parallel.zero, [x.mesh.size(axes) for axes in x.costs.pools]
    shared = [x.mesh.size(x.mesh.divided(axes)[0]) * (copies if zero < 2 else 1) for axes in x.costs.pools]
    state = np.zeros(len(numel))
    for r, row in enumerate(numel.tolist()):
        for n, ranks, all_ranks in zip(row, own, shared, strict=True):
            shards = [all_ranks if zero >= level else 1 for level in (3, 2, 1)]
            state[r] += state_bytes(int(n), x.costs.model.recipe, *shards, alone=ranks == 1).total
    return state, (numel // np.array(shared if zero else [1] * len(own))).sum(axis=1).tolist()


def _excess(rank: int, state: FloatArray, saved: FloatArray, context: int, room: int) -> str:
    least = state[rank] + saved[rank] + context
    parts = f"{state[rank] / GIB:.1f} of parameters, gradients and optimizer, {saved[rank] / GIB:.1f} of activations"
    return f"rank {rank} needs {least / GIB:.1f} GiB or more ({parts}), and there are {room / GIB:.1f}"
