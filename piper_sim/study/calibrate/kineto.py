"""A profile from traces of a user's own training, one or several ranks': annotated ranges to op classes, NCCL to links.

A range that covers several nodes (`2F0`) is divided over them as they are modelled, ranges inside it left out.
"""

from collections import defaultdict
from collections.abc import Sequence

from cost_models import DeviceHardware
from cost_models.profile.machine import ProfileMachine
from cost_models.profile.profile import OpEntry, Profile
from cost_models.profile.shapes import op_shapes
from ir.core.errors import ErrorKind, PiperError
from ir.graph.classes import node_classes
from ir.graph.graph import Graph
from ir.job.build import PreparedJob
from piper_sim.folding.ground import RankPositions
from piper_sim.pricing.costs import KERNELS, CostModel
from piper_sim.study.calibrate.assemble import total
from piper_sim.study.calibrate.trace_events import FLAG, TraceFile, TraceRange, read_trace_file
from piper_sim.study.calibrate.trace_links import link_times
from piper_sim.study.calibrate.trace_names import FORMS, TraceName, TraceNames
from piper_sim.study.validate.samples import measured

Pieces = dict[str, dict[str, list[float]]]  # by class, by piece: seconds; a class takes the sum of its pieces


def read_kineto(paths: Sequence[str], prepared: PreparedJob, hardware: DeviceHardware) -> Profile:
    """The profile that some traces of a job give. Raises PiperError: a broken trace, or one of another job."""
    graph = prepared.plan().graph
    names = TraceNames(graph)
    traces = [read_trace_file(path, names.read) for path in paths]
    weights = _weights(graph, prepared, hardware)
    classes, shapes = node_classes(graph), op_shapes(graph)
    pieces: Pieces = defaultdict(lambda: defaultdict(list))
    for t in traces:
        for (name, piece), seconds in _samples(t, names, prepared, weights, classes).items():
            pieces[name][piece] += seconds
    times = {name: total([(measured(x), 1) for x in by.values()]) for name, by in pieces.items()}
    known = dict(zip(classes, shapes, strict=True))
    ops = {name: OpEntry(time, shape=known[name], alone=True) for name, time in times.items()}
    per_node = prepared.job.cluster.gpus_per_node or hardware.gpus_per_node
    links, unknown = link_times(traces, per_node)
    if not ops and not links:
        raise _foreign(traces)
    return Profile.of(_machine(traces), ops, links, origins=_origins(traces, len(ops), len(links), unknown))


def _samples(
    t: TraceFile, names: TraceNames, prepared: PreparedJob, weights: Sequence[float], classes: Sequence[str]
) -> dict[tuple[str, str], list[float]]:
    """Seconds by class and piece of every range of one trace."""
    read = {r.name: names.read(r.name) for r in t.ranges}
    program = _program(t, names, [n for n in read.values() if n is not None], prepared)
    out: dict[tuple[str, str], list[float]] = defaultdict(list)
    for r in t.ranges:
        named = read[r.name]
        seconds = r.seconds(kernels=t.kernels)
        if named is None or seconds <= 0:
            continue
        nodes = names.nodes(named, program)
        taken = {i for inner in _inside(r) if (n := read[inner.name]) is not None for i in names.nodes(n, program)}
        left = [i for i in nodes if i not in taken]
        total = sum(weights[i] for i in left)
        for i in left:
            share = weights[i] / total if total > 0 else 1 / len(left)
            out[classes[i], named.piece].append(seconds * share)
    return out


def _inside(r: TraceRange) -> list[TraceRange]:
    return [x for inner in r.inner for x in (inner, *_inside(inner))]


def _weights(graph: Graph, prepared: PreparedJob, hardware: DeviceHardware) -> list[float]:
    """Modelled seconds of every node's kernels."""
    model = CostModel(prepared, hardware)
    return [0.0 if n.message is not None else sum(model.node_shares(n)[s] for s in KERNELS) for n in graph.nodes]


def _program(t: TraceFile, names: TraceNames, found: list[TraceName], prepared: PreparedJob) -> int:
    """Which program a trace is of: by its rank, else by the stages that it has ranges of."""
    if t.rank is not None and t.world == prepared.ranks:
        return RankPositions(prepared.mesh).seat(t.rank).program
    stages = names.stages(found)
    groups = {g for n in names.graph.nodes if not n.once and n.stage in stages for g in n.groups}
    return min(groups, default=0)


def _machine(traces: Sequence[TraceFile]) -> ProfileMachine:
    gpus = sorted({t.gpu for t in traces if t.gpu})
    return ProfileMachine.elsewhere(", ".join(gpus), max(t.world for t in traces) if gpus else 0)


def _origins(traces: Sequence[TraceFile], ops: int, links: int, unknown: int) -> tuple[str, ...]:
    by = "by kernels" if any(t.kernels for t in traces) else "by the host's clock"
    many = f"{len(traces)} Kineto traces" if len(traces) > 1 else "a Kineto trace"
    out = [f"{many}: {ops} op classes {by}, {links} messages"]
    if unknown:
        out.append(f"{unknown} NCCL kernels of the trace are left out: it does not say their bytes")
    return tuple(out)


def _foreign(traces: Sequence[TraceFile]) -> PiperError:
    message = "no range in it is named after an op of this job, and no NCCL kernel says its bytes"
    fix = 'with torch.profiler.record_function("2F0"): ...'
    return PiperError(ErrorKind.JOB, message, file=traces[0].file, key=FLAG, allowed=FORMS, suggestion=fix)
