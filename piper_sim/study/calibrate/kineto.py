"""A profile from traces of a user's own training, one or several ranks': annotated ranges to op classes, NCCL to links.

`TraceNames` reads the ranges: `2F0`, `2B0/l7.attn`, `l7.attn`, `UPDATE`. One that covers several nodes is divided over
them as they are modelled, ranges inside it left out.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from cost_models import DeviceHardware
from cost_models.profile.profile import OpEntry, Profile
from ir.core.errors import ErrorKind, PiperError
from ir.core.ops import Pass
from ir.graph.graph import Graph, PerStepOp
from ir.job.build import PreparedJob
from piper_sim.folding.ground import RankPositions
from piper_sim.pricing.costs import CostModel
from piper_sim.pricing.measured import classes_of
from piper_sim.pricing.structure import KERNELS
from piper_sim.study.calibrate.assemble import machine_of, total
from piper_sim.study.calibrate.trace_events import FLAG, TraceFile, TraceRange, read_trace_file
from piper_sim.study.calibrate.trace_links import link_times
from piper_sim.study.validate.samples import measured

Pieces = dict[str, dict[str, list[float]]]  # by class, by piece: seconds; a class takes the sum of its pieces

# Microbatches in a name are read over: all have one class. torch.optim annotates its own step and zero_grad.
_OP = re.compile(r"(?P<stage>\d+)?(?P<kind>[FBIWR])(?P<mb>\d+)?(?:/(?P<part>[\w.]+))?", re.ASCII)
_UPDATE = re.compile(r"(?P<piece>UPDATE|Optimizer\.(?:step|zero_grad))(?:[#/].*)?", re.ASCII)
_PASSES = {"F": (Pass.F,), "I": (Pass.I,), "W": (Pass.W,), "R": (Pass.R,), "B": (Pass.R, Pass.I, Pass.W)}
FORMS = "2F0, 2B0, 2F0/l7.attn, F/l7.attn, l7.attn (forward), UPDATE"


@dataclass(frozen=True, slots=True)
class TraceName:
    """What a name says. part: of a chunk, or a chunk; "" for all of a stage. piece: of an update, which is a sum."""

    passes: tuple[Pass, ...] = ()
    stage: int | None = None
    part: str = ""
    piece: str = ""


class TraceNames:
    """The names of one job's graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.parts = {n.part for n in graph.nodes if not n.once and n.message is None}
        self.chunks = {part.rpartition(".")[0] for part in self.parts} - {""}

    def read(self, text: str) -> TraceName | None:
        """What an annotation is about; None where it is no name of ours.

        >>> from ir.job.build import prepare
        >>> from ir.job.load import job_from
        >>> names = TraceNames(prepare(job_from({"model": {"config": "tiny-llama"}})).plan().graph)
        >>> names.read("0B3/l1.mlp").passes, names.read("l1.mlp").part, names.read("F"), names.read("ProfilerStep#2")
        ((<Pass.R: 'R'>, <Pass.I: 'I'>, <Pass.W: 'W'>), 'l1.mlp', None, None)
        """
        if text in self.parts or text in self.chunks:
            return TraceName(_PASSES["F"], part=text)
        if m := _UPDATE.fullmatch(text):
            return TraceName(piece=m["piece"])
        m = _OP.fullmatch(text)
        if m is None or (m["stage"] is None and m["part"] is None):
            return None
        part = m["part"] or ""
        if part and part not in self.parts and part not in self.chunks:
            return None
        return TraceName(_PASSES[m["kind"]], None if m["stage"] is None else int(m["stage"]), part)

    def nodes(self, named: TraceName, program: int) -> list[int]:
        """The nodes that a name covers; of an update, the one that this program has."""
        nodes = self.graph.nodes
        if named.piece:
            return [i for i, n in enumerate(nodes) if n.kind is PerStepOp.UPDATE and program in n.groups]
        return [
            i
            for i, n in enumerate(nodes)
            if n.message is None
            and n.kind in named.passes
            and named.stage in (None, n.stage)
            and named.part in ("", n.part, n.part.rpartition(".")[0])
        ]

    def stages(self, names: Sequence[TraceName]) -> set[int]:
        """The stages that some names are about."""
        return {self.graph.nodes[i].stage for named in names if not named.piece for i in self.nodes(named, 0)}


def read_kineto(paths: Sequence[str], prepared: PreparedJob, hardware: DeviceHardware) -> Profile:
    """The profile that some traces of a job give. Raises PiperError: a broken trace, or one of another job."""
    graph = prepared.plan().graph
    names = TraceNames(graph)
    traces = [read_trace_file(path, names.read) for path in paths]
    weights = _weights(graph, prepared, hardware)
    _, classes, shapes = zip(*classes_of(graph, prepared.job), strict=True)
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
    machine = machine_of([(t.gpu, t.world) for t in traces], FLAG)
    return Profile.of(machine, ops, links, origins=_origins(traces, len(ops), len(links), unknown))


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
