"""A job made ready for its plan with what only costs can say: balanced layers, op times of searched schedules."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

from msgspec import structs

from cost_models import DeviceHardware, LinkFabric, load_hardware, message_seconds, work_seconds
from cost_models.hardware import presets
from cost_models.hardware.schema import check_consistent
from cost_models.software import GENERIC, frameworks, load_software
from cost_models.software.dispatcher import dispatchers
from ir.core.errors import PiperError, job_error
from ir.core.files import named_path
from ir.core.mesh import RankGroup
from ir.core.ops import Pass
from ir.graph.graph import Graph
from ir.job import Job
from ir.job.build import PreparedJob, prepare, resolve
from ir.job.routing.described import check_routing
from ir.job.table import keys_of
from ir.lower import PassMerge
from ir.plan.plan import OpKind
from ir.schedules.registry import default_chunks, order_depends_on_times
from ir.schedules.schedule import OpTimes
from ir.workload.config.spec import ModelConfig
from ir.workload.part import Chunk, ModelWork, PlacedPart
from ir.workload.setting import KernelStyle
from piper_sim.pricing.costs import CostModel
from piper_sim.pricing.measured import profile_of
from piper_sim.pricing.stage_times import given_times
from piper_sim.pricing.structure import CostShare


def hardware_of(job: Job) -> DeviceHardware:
    """The hardware file of `[cluster]` with its inline overrides; `[costs]`' software, dispatcher, deterministic."""
    gpu = job.cluster.gpu
    software = job.costs.software and named_path(job.file, job.costs.software, (*frameworks(), GENERIC))
    try:
        hardware = load_hardware(named_path(job.file, gpu, presets()), job.cluster.overrides, keys_of("cluster"))
        written, costs = load_software(software), job.costs
        if costs.portable_attention is not None:
            written = structs.replace(written, portable_attention=costs.portable_attention)
        if "host_launch_us" in job.cluster.overrides:  # the job's own host goes before the framework's
            written = structs.replace(written, launch_us=None)
        said = {"deterministic": costs.deterministic, "blocking": costs.blocking_launches}
        said |= {"fused_experts": costs.fused_experts}
        hardware = structs.replace(hardware.in_training(), software=written, **said)
        if hardware.software.fp8_recipe and "fp8_recipe" not in job.cluster.overrides:
            hardware = structs.replace(hardware, fp8_recipe=hardware.software.fp8_recipe)
        if (name := job.costs.dispatcher) is not None:
            found = dispatchers()[name]
            given = job.cluster.overrides.get("comm_sms")
            own = isinstance(given, Mapping) and "all_to_all" in given
            sms = hardware.comm_sms if own else hardware.comm_sms | {"all_to_all": float(found.sms)}
            hardware = check_consistent(structs.replace(hardware, dispatcher=found, comm_sms=sms), "costs.dispatcher: ")
        return hardware
    except PiperError as e:
        raise e.at(file=job.file) from None


def style_of(job: Job, hardware: DeviceHardware) -> KernelStyle:
    """How the job's framework writes its kernels, as far as the job does not say otherwise."""
    style, divided = hardware.software.style, job.costs.loss_parallel
    whole = style.whole_logits if divided is None else not divided
    # A framework's autograd makes all gradients of an expert before it sends any.
    awaits = job.costs.software not in (None, GENERIC)
    fused = job.costs.fused_experts
    return replace(
        style, grouped=job.costs.grouped_gemm, whole_logits=whole, awaits_experts=awaits, fused_experts=fused
    )


def _check_fused(job: Job, hardware: DeviceHardware, config: ModelConfig) -> None:
    """Raises PiperError (job): experts' products fused with their activation where no kernel is known to be."""
    if not job.costs.fused_experts:
        return
    m, costs = job.model, job.costs
    able = {
        f"products in {job.precision.compute}": job.precision.compute == "fp8",
        f"the fp8 recipe {hardware.fp8_recipe}": hardware.fp8_recipe == "mxfp8",
        f"{hardware.name}": hardware.gemm.experts_fused is not None,
        "experts one after the other (costs.grouped_gemm = false)": costs.grouped_gemm,
        "a module of one's own": not (m.graph or m.module),
        "a model without experts": config.moe is not None,
    }
    if (no := next((what for what, does in able.items() if not does), None)) is not None:
        message, fix = f"no such kernels are known of {no}", "leave costs.fused_experts out"
        raise job_error("costs.fused_experts", message, fix, "true on Blackwell, of experts in MXFP8", file=job.file)


def prepare_priced(job: Job, hardware: DeviceHardware, most_layers: int | None = None) -> PreparedJob:
    """Prepare a job; a searched schedule is given the mean op times of the model's stages."""
    name = job.schedule.name
    profile_of(job)  # whether or not this command asks it for anything: a bad one is said at once
    times = None
    if name is not None and order_depends_on_times(name):
        fixed = "zbv" if default_chunks(name) == 2 else "1f1b"  # with the same stages
        probe = prepare(replace(job, schedule=replace(job.schedule, name=fixed)), hardware.gpus_per_node)
        times = op_times(probe, hardware)
    made = prepare(job, hardware.gpus_per_node, times, weigh(job, hardware), most_layers, style_of(job, hardware))
    check_routing(job, made.config)
    _check_fused(job, hardware, made.config)
    if hardware.software.gather_on_demand:
        made = replace(made, policy=replace(made.policy, gather_on_demand=True))
    if made.policy.merge is PassMerge.PROFILE:
        made = replace(made, policy=replace(made.policy, seconds=node_seconds(made, hardware)))
    return made


def node_seconds(prepared: PreparedJob, hardware: DeviceHardware) -> tuple[tuple[str, float], ...]:
    """Seconds of each node of the job's graph by its text, on one rank at its usual speed, to the nanosecond."""
    model = CostModel(prepared, hardware)
    nodes = [n for n in prepared.graph().nodes if not n.once]
    found = {n.text(): model.message(n.message) if n.message else sum(model.node_shares(n)) for n in nodes}
    return tuple(sorted((text, round(seconds, 9)) for text, seconds in found.items()))


def weigh(job: Job, hardware: DeviceHardware) -> Callable[[ModelWork], Callable[[Chunk], float]]:
    """What `balanced` weighs a chunk by: the modelled seconds of its kernels and all-to-alls on one rank."""
    resolved = resolve(job, hardware.gpus_per_node)
    p = resolved.parallel
    layout = p.layout
    per_node = resolved.cluster.gpus_per_node or hardware.gpus_per_node
    fabric = LinkFabric.of(hardware, per_node)

    @cache  # only when a chunk is weighed: `prepare` has checked the sizes against the model by then
    def experts() -> RankGroup:
        return p.mesh.shape(("ep",), per_node)

    def part_seconds(source: ModelWork, entry: PlacedPart) -> tuple[float, float]:
        w = source.work(entry)
        kernels = sum(work_seconds(k, hardware) for k in (w.forward, w.input_grad, w.weight_grad))
        if entry.part.name != "experts":
            return kernels, 0.0
        m = source.messages(entry)
        shape = experts()
        messages = (m.counts, m.dispatch, m.combine, m.dispatch, m.combine)
        return kernels, sum(message_seconds(x, shape.ranks, shape.per_node, fabric) for x in messages)

    def weighing(source: ModelWork) -> Callable[[Chunk], float]:
        known: dict[str, tuple[float, float]] = {}  # a part's name says what it is, in every chunk

        def seconds(chunk: Chunk) -> float:
            total = 0.0
            for part in chunk.parts:
                if part.name not in known:
                    known[part.name] = part_seconds(source, PlacedPart(0, chunk, part, layout))
                kernels, messages = known[part.name]
                total += kernels
                total += messages
            return total

        return seconds

    return weighing


def op_times(probe: PreparedJob, hardware: DeviceHardware) -> OpTimes:
    """Mean seconds of a stage's passes and of a transfer, given or modelled; what weight gradients hold on to."""
    model = CostModel(probe, hardware)
    plan = probe.plan()
    costs = model.price(plan)
    totals = {"F": 0.0, "I": 0.0, "W": 0.0, "R": 0.0}
    graph = plan.graph
    for n in graph.nodes:
        if not n.once:
            seconds = model.message(n.message) if n.message else sum(model.node_shares(n)[: CostShare.OPTIMIZER])
            totals[str(n.kind)] += seconds
    stages = graph.stages
    given = given_times(probe.job.costs.stage_times or {}, stages)
    totals |= {k: sum(v) for k, v in given.items()} | ({"R": 0.0} if "I" in given else {})
    sends = costs.duration[plan.kind == OpKind.SEND]
    p2p = float(sends.mean()) if len(sends) else 0.0
    f, i, w = totals["F"], totals["I"] + totals["R"], totals["W"]
    return OpTimes(f / stages, i / stages, w / stages, p2p, held_for_weights(graph))


def held_for_weights(graph: Graph) -> float:
    """Bytes that live from I to W (activations, output gradients) over those that live from F to I; a stage's most."""
    readers: dict[tuple[int, int], set[object]] = defaultdict(set)
    for e in graph.edges:
        if graph.nodes[e.src].stage == graph.nodes[e.dst].stage:
            readers[e.src, e.slot].add(graph.nodes[e.dst].kind)
    saved, held = [0] * graph.stages, [0] * graph.stages
    for (src, slot), kinds in readers.items():
        made, size, stage = graph.nodes[src].kind, graph.nodes[src].writes[slot].bytes, graph.nodes[src].stage
        if made is Pass.F and kinds & {Pass.I, Pass.W}:
            saved[stage] += size
        if made in (Pass.F, Pass.I) and Pass.W in kinds:
            held[stage] += size
    return min(1.0, max((h / s for h, s in zip(held, saved, strict=True) if s), default=1.0))
