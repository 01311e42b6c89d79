"""From a job to its graph, strategy and plan. The same for the simulator and for the executor."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil, gcd

from ir.core.errors import ErrorKind, PiperError, job_error
from ir.core.files import named_path
from ir.core.filters import parse_filter
from ir.core.limits import check_nodes, check_passes, check_ranks
from ir.core.mesh import Mesh
from ir.core.work import DType
from ir.directives import Directive, ReplicateDirective, ShardDirective, apply
from ir.directives.load import DirectiveFile, load_strategy
from ir.graph.casts import with_casts
from ir.graph.graph import Graph
from ir.graph.matrices import MuonOptimizer
from ir.job.agree import agree, check_as_captured, check_replicated, with_split
from ir.job.cache import GRAPHS, PLANS, PlanStructure
from ir.job.model import read_model
from ir.job.recompute import recompute_options, recomputed_layers
from ir.job.schema import Job, JobPrecision, JobSchedule
from ir.lower import ExpertOverlap, MessageQueue, PassMerge, PlanPolicy, lower
from ir.plan.plan import Plan
from ir.schedules.custom import from_builder, from_csv
from ir.schedules.registry import build, default_chunks, flushed, legal_chunks
from ir.schedules.schedule import OpTimes, Schedule, ordering, placing
from ir.workload.captured import CapturedModel
from ir.workload.config.spec import ModelConfig
from ir.workload.layout import laid_out, layout_of, parse_layout
from ir.workload.part import Chunk, ModelWork
from ir.workload.partition import partition
from ir.workload.setting import FUSED_STYLE, KernelStyle, MicrobatchShape, ModelPrecision

DEFAULT_SCHEDULE = "1f1b"


@dataclass(frozen=True)
class PreparedJob:
    """A job resolved: sizes, config, the graph before directives, and the strategy that turns it into a plan."""

    job: Job
    config: ModelConfig
    mesh: Mesh
    schedule: str
    ranks: int
    mbs: int
    stages: int
    base: Graph
    strategy: tuple[Directive, ...]
    policy: PlanPolicy
    style: KernelStyle = FUSED_STYLE

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers of each stage, as `[parallel] layers` would list them."""
        count = Counter(s for s, _ in {(e.stage, e.chunk.name) for e in self.base.entries if "L" in e.chunk.tags})
        return tuple(count[stage] for stage in range(self.stages))

    @property
    def layout(self) -> tuple[str, ...]:
        """What stands on each stage, in the letters of `[schedule] layout`."""
        held = {(e.stage, e.chunk.name): e.chunk for e in self.base.entries}
        return layout_of([[c for (s, _), c in held.items() if s == stage] for stage in range(self.stages)])

    def graph(self) -> Graph:
        """The graph after all directives."""
        with blaming(self.job):
            graph = apply(self.base, self.strategy)
            check_replicated(graph)
            check_as_captured(graph)
            return with_casts(graph)

    @property
    def structure(self) -> PlanStructure:
        """What its plan is kept under. The model's config decides what is in a part of a given name."""
        base, mesh = self.base, self.mesh
        return PlanStructure(
            schedule=self.schedule,
            source=base.source,
            parts=tuple((e.stage, e.name) for e in base.entries),
            recompute=base.recompute,
            mesh=(frozenset(mesh.sizes.items()), frozenset(mesh.axes.items())),
            prefetch=base.prefetch,
            muon=base.muon,
            strategy=self.strategy,
            policy=self.policy,
        )

    def lowered(self) -> Plan:
        """The plan, built anew and not checked."""
        with blaming(self.job):
            return lower(self.graph(), self.policy, {"schedule": self.schedule})

    def plan(self) -> Plan:
        """The plan: one object for one structure. Whether it was checked, `PLANS.check` knows."""
        return PLANS.plan(self.structure, self.lowered)


@contextmanager
def blaming(job: Job) -> Iterator[None]:
    """Name the job's file in errors raised inside; what a flag would have to answer for, a key of the job does here.

    Raises PiperError of the same kind and message, with file and key filled in.
    """
    try:
        yield
    except PiperError as e:
        kind = ErrorKind.JOB if e.kind is ErrorKind.USAGE else e.kind
        file, key, allowed = e.file or job.file, e.key, e.allowed
        if kind in (ErrorKind.DIRECTIVE, ErrorKind.ILLEGAL_PLAN) and job.schedule.directives is not None:
            file, key = e.file or named_path(job.file, job.schedule.directives), key or "schedule.directives"
            allowed = allowed or "directives that place and order every pass of every microbatch once"
        elif kind is ErrorKind.MODEL and (key or "").startswith("model."):
            file = job.file  # set inline, or by --set
        raise PiperError(kind, e.message, file=file, key=key, allowed=allowed, suggestion=e.suggestion) from None


def prepare(
    job: Job,
    gpus_per_node: int | None = None,
    times: OpTimes | None = None,
    chunk_cost: Callable[[ModelWork], Callable[[Chunk], float]] | None = None,
    most_layers: int | None = None,
    style: KernelStyle = FUSED_STYLE,
    given: DirectiveFile | None = None,
) -> PreparedJob:
    """Resolve a job. gpus_per_node: the hardware's, where the job names none. times: for searched schedules.

    chunk_cost: what `balanced` weighs a chunk by; its FLOPs where nothing better is known. most_layers: of a stage.
    style: the framework's: the same ops with other bytes and kernels. given: a strategy, for what `[schedule]` names.

    Raises PiperError: sizes that do not fit the cluster, the model or each other, each with the nearest that do.
    """
    with blaming(job):
        counted = job.cluster.nodes is not None  # the GPUs, which whatever a refusal names must divide
        job = resolve(job, gpus_per_node)
        model = read_model(job)
        config, chunks = model.config, model.chunks
        if not job.parallel.reshard:
            raise job_error("parallel.reshard", "false is not built yet", "leave it out")
        shape = MicrobatchShape(job.schedule.microbatch_size, job.model.seq_len, job.model.encoder_seq_len or 0)
        precision = precision_of(job)
        _check_attention(config, precision)
        made = given or _schedule(job, times or OpTimes())
        if isinstance(made, DirectiveFile):
            job, made = agree(job, made), with_split(made, job.schedule.microbatches)
        p = job.parallel
        sharing = p.tp * p.cp * (p.dp or 1) if counted else 0
        model.check(p.layout, shape, precision, recompute_options(job), sharing)
        mesh, source = p.mesh, model.source(shape, precision, style)
        mbs = (made.mbs or 1) if isinstance(made, DirectiveFile) else made.microbatches
        check_nodes(3 * sum(len(c.parts) for c in chunks), mbs)
        weigh = chunk_cost(source) if chunk_cost else lambda c: float(model.flops(c, shape, precision))
        # One direction's placement: in DualPipe each direction is a pipeline of its own, as fast as its dearest stage.
        ranks = (made.placements[0] if isinstance(made, Schedule) else made).rank_of_stage
        if job.schedule.layout is not None:
            stages = laid_out(chunks, _layout(job, made.stages))
        else:
            stages = partition(chunks, made.stages, p.layers, weigh, ranks, most_layers)
        again = replace(recomputed_layers(job, stages), early=style.stops_early)
        base = GRAPHS.graph(stages, source, again)
        base = replace(base, mesh=mesh, prefetch=p.ahead, muon=_muon(job, model.captured))
        if isinstance(made, DirectiveFile):
            strategy, name = made.directives, "directives"
        else:
            strategy, name = (*placing(made), *dividing(job, config), ordering(made)), made.name
        policy = _policy(job, name, style)
        return PreparedJob(job, config, mesh, name, mesh.ranks, mbs, made.stages, base, tuple(strategy), policy, style)


def _policy(job: Job, name: str, style: KernelStyle) -> PlanPolicy:
    """How the schedule of this name is lowered."""
    s, merge = job.schedule, PassMerge(job.schedule.merge)
    # DeepSeek's own order delays them; in Megatron's it is a choice.
    late = s.delay_wgrad or (merge is PassMerge.TEMPLATE and name.startswith("dualpipe"))
    experts = ExpertOverlap(s.expert_all_to_all or ("serial" if style.awaits_experts else "overlapped"))
    clipped, behind = job.optimizer.clip_norm > 0, not job.parallel.overlap_grad_reduce
    policy = PlanPolicy(merge, clip=clipped, delay_wgrad=late, reduce_behind=behind, experts=experts)
    if s.p2p == "blocking":
        return replace(policy, blocking=True, lookahead=0)
    return replace(policy, p2p=MessageQueue.SINGLE) if s.p2p == "ordered" else policy


def resolve(job: Job, gpus_per_node: int | None = None) -> Job:
    """Fill in what the job leaves open: GPUs per node, nodes, dp; microbatches where the global batch is given."""
    p, c = job.parallel, job.cluster
    per_node = c.gpus_per_node or gpus_per_node or 8
    inner = p.tp * p.cp * p.pp
    with blaming(job):
        check_ranks(inner * (p.dp or 1), "parallel.dp" if p.dp else "parallel.pp")
        if c.nodes is None:
            dp = p.dp or 1
            nodes = ceil(inner * dp / per_node)
        else:
            nodes, total = c.nodes, c.nodes * per_node
            check_ranks(total, "cluster.nodes")
            if p.dp is None and total % inner:
                fix = f"cluster.nodes = {ceil(inner / gcd(inner, per_node))}, or a tp·cp·pp that divides {total}"
                raise job_error("parallel.pp", f"tp·cp·pp = {inner} does not divide the {total} GPUs", fix)
            dp = p.dp or total // inner
            if inner * dp != total:
                fix = (
                    f"dp = {total // inner}" if total % inner == 0 else f"cluster.nodes = {ceil(inner * dp / per_node)}"
                )
                raise job_error("parallel.dp", f"tp·cp·pp·dp = {inner * dp}, but the cluster has {total} GPUs", fix)
        cluster = replace(c, nodes=nodes, gpus_per_node=per_node)
        for rank in c.speed:
            if int(rank) >= inner * dp:
                raise job_error("cluster.speed", f"rank {rank} of {inner * dp} ranks", f"ranks 0..{inner * dp - 1}")
        schedule = _batched(job.schedule, dp)
    return replace(job, parallel=replace(p, dp=dp), cluster=cluster, schedule=schedule)


def _batched(s: JobSchedule, dp: int) -> JobSchedule:
    """With microbatches instead of a global batch."""
    if s.global_batch is None:
        return s
    each = dp * s.microbatch_size
    if s.global_batch % each:
        message = f"dp · microbatch_size = {each} does not divide {s.global_batch} sequences"
        fix = f"global_batch = {max(1, round(s.global_batch / each)) * each}"
        raise job_error("schedule.global_batch", message, fix)
    return replace(s, microbatches=s.global_batch // each, global_batch=None)


def precision_of(job: Job) -> ModelPrecision:
    """The number formats; those left out are the usual companions of `compute`. Parameters that are kept whole come
    back from an update as they are kept, and compiled code reads no others, unless `gather` says otherwise.
    """
    given = job.precision
    base = ModelPrecision.of(DType(given.compute), _residual(given))
    named = {k: getattr(given, k) for k in ("dispatch", "combine", "gather", "reduce", "params", "grads", "optimizer")}
    made = replace(base, **{k: DType(v) for k, v in named.items() if v is not None})
    made = replace(made, attention=_narrower(job, "attention"), head=_narrower(job, "head"))
    if given.optimizer is None and made.params.bytes > made.optimizer.bytes:
        made = replace(made, optimizer=made.params)
    if given.gather is not None or made.params is made.gather:
        return made
    return replace(made, gather=made.params) if job.run.compile else replace(made, updated=made.params)


def _residual(given: JobPrecision) -> DType | None:
    """The residual stream's format where it is not its readers' own. Raises PiperError (job): a narrower one."""
    own, wide = ModelPrecision.of(DType(given.compute)).activations, DType.FP32
    allowed = [own] if own.bytes >= wide.bytes else [own, wide]
    if given.residual is None or given.residual == own:
        return None
    if given.residual not in allowed:
        message = f"a residual stream in {given.residual} between parts that compute in {own}"
        raise job_error("precision.residual", message, f'precision.residual = "{allowed[-1]}"', ", ".join(allowed))
    return DType(given.residual)


def _narrower(job: Job, key: str) -> DType | None:
    """The format of attention's or the head's products where it is not the activations'. Raises PiperError (job):
    another than fp8 beside products in fp8, or where no kernel of a config's is known to do it.
    """
    given, own = getattr(job.precision, key), ModelPrecision.of(DType(job.precision.compute)).activations
    if given is None or given == own:
        return None
    known = not (job.model.graph or job.model.module) and (key == "head" or job.model.attention == "flash")
    compute = job.precision.compute
    allowed = [own, DType.FP8] if compute == DType.FP8 and known else [own]
    if given not in allowed:
        no_kernel = "where no fused kernel of a config does it" if key == "attention" else "of a module of one's own"
        message = f"{key} in {given} {f'beside products in {compute}' if known else no_kernel}"
        raise job_error(f"precision.{key}", message, f'precision.{key} = "{own}"', ", ".join(allowed))
    return DType(given)


def _check_attention(config: ModelConfig, precision: ModelPrecision) -> None:
    """Raises PiperError (job): attention in fp8 of a model whose keys are compressed or picked."""
    if precision.attention is not None and (config.indexer or config.compressed):
        message, fix = "no kernel is known that reads picked or compressed keys in fp8", "leave precision.attention out"
        raise job_error("precision.attention", message, fix, str(precision.activations))


def _muon(job: Job, captured: CapturedModel | None) -> MuonOptimizer | None:
    """How matrices are updated, where not as all else. Raises PiperError (job): what Muon is not said for."""
    o, zero = job.optimizer, job.parallel.zero
    if o.name != "muon":
        return None
    if zero > 1:
        message = f"Muon updates whole matrices, and zero = {zero} cuts them"
        raise job_error("parallel.zero", message, "zero = 1", "0, 1")
    if o.offload:
        raise job_error("optimizer.offload", "Muon's matrices are updated on the device", "offload = 0", "0")
    if captured is not None and captured.found.tables is None:
        message = f"{job.model.graph} does not say which matrices are embeddings: it is of a version before"
        raise job_error("optimizer.name", message, "capture it again", "adamw, sgd")
    if captured is not None and not {"embed", "head"} <= {c.name for c in captured.chunks}:
        message = "what is ahead of the first layer, or behind the last, is AdamW's, and is not told apart from it"
        raise job_error("optimizer.name", message, "tags of the layers alone: PP = model.layers.*", "adamw, sgd")
    return MuonOptimizer(o.ns_steps, o.tp_mode)


def dividing(job: Job, config: ModelConfig) -> list[Directive]:
    """The shard and replicate directives of `[parallel]`."""
    p, out = job.parallel, list[Directive]()
    everything = parse_filter({})
    if p.dp_replicate > 1 and p.zero == 0:
        message, fix = f"{p.dp_replicate} copies of shards, and zero = 0 makes none", "parallel.zero = 1"
        raise job_error("parallel.dp_replicate", message, fix, "1 where zero is 0")
    if p.tp > 1:
        out.append(ShardDirective(everything, "tp", sequence_parallel=p.sequence_parallel))
    if p.cp > 1:
        out.append(ShardDirective(everything, "cp", heads=p.layout.cp_heads))
    if config.moe is not None and p.ep * p.etp > 1:
        out.append(ShardDirective(parse_filter({"EP": "*"}), "ep"))
    out.append(ReplicateDirective(everything, p.zero, p.bucket_MiB, dp_replicate=p.dp_replicate))
    return out


def _schedule(job: Job, times: OpTimes) -> Schedule | DirectiveFile:
    s, pp = job.schedule, job.parallel.pp
    if s.flushes > 1 and (given := next((k for k in ("directives", "csv", "builder") if getattr(s, k)), None)):
        raise job_error(
            "schedule.flushes", f"the {given} says itself what runs when", "flushes = 1", "a schedule's name"
        )
    if s.directives is not None:
        return load_strategy(named_path(job.file, s.directives))
    if s.csv is not None:
        return _shaped(job, from_csv(named_path(job.file, s.csv)), "csv")
    mbs = s.microbatches if s.microbatches is not None else 2 * pp
    if s.builder is not None:
        check_passes(pp, mbs)
        return _shaped(job, from_builder(named_path(job.file, s.builder), pp, mbs), "builder")
    name, chunks = s.name or DEFAULT_SCHEDULE, s.stages_per_rank
    if s.layout is not None and chunks is None:  # a layout says how many stages there are
        many, over = divmod(len(parse_layout(s.layout)), pp)
        chunks = many if not over and legal_chunks(name, many) else None
    check_passes(pp * (chunks or default_chunks(name)), mbs)
    return flushed(lambda m: build(name, pp, m, chunks, times), mbs, s.flushes)


def _layout(job: Job, stages: int) -> tuple[str, ...]:
    found = parse_layout(job.schedule.layout or "")
    if len(found) != stages:
        pp, s = job.parallel.pp, job.schedule
        what = f"{s.name or 'the schedule'} on {pp} ranks has {stages}"
        fix = f"stages_per_rank = {len(found) // pp}" if len(found) % pp == 0 else f"{stages - 1} signs |"
        raise job_error("schedule.layout", f"the layout has {len(found)} stages, {what}", fix)
    return found


def _shaped(job: Job, made: Schedule, key: str) -> Schedule:
    s = job.schedule
    ranks, mbs = made.ranks, made.microbatches
    if ranks != job.parallel.pp:
        message = f"it has {ranks} ranks, pp is {job.parallel.pp}"
        raise job_error(f"schedule.{key}", message, f"pp = {ranks}", "as many ranks as pp")
    if s.microbatches not in (None, mbs):
        message, allowed = f"the {key} has {mbs}", f"{mbs}, or left out"
        raise job_error("schedule.microbatches", message, f"microbatches = {mbs}", allowed)
    if s.stages_per_rank not in (None, made.chunks):
        message, allowed = f"the {key} has {made.chunks}", f"{made.chunks}, or left out"
        raise job_error("schedule.stages_per_rank", message, f"stages_per_rank = {made.chunks}", allowed)
    return made


def directives_json(strategy: Sequence[Directive]) -> list[dict[str, object]]:
    """The strategy as a strategy file that loads again."""
    out: list[dict[str, object]] = []
    for d in strategy:
        made = d.json()
        out += made if isinstance(made, list) else [made]
    return out
