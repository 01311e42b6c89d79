"""A profile from traces of a user's own training, one or several ranks': annotated ranges to op classes, NCCL to links.

`TraceNames` reads the ranges: `2F0`, `2B0/l7.attn`, `l7.attn`, `UPDATE`. One that covers several nodes is divided over
them as they are modelled, ranges inside it left out; or as all ranges together say, where they tell nodes apart.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from cost_models import DeviceHardware
from cost_models.profile.profile import OpEntry, Profile
from ir.core.errors import PiperError, job_error
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
Timed = tuple[str, float, tuple[str, ...]]  # a range: its piece, its seconds, the classes of the nodes in it
ROUNDS, SAME = 2000, 1e-5  # of `agreed`: at most so many; at an end where no class changes by more

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
            own = text.startswith("Optimizer.")  # of several optimizers, each has its range in a step
            return TraceName(piece=text if own else m["piece"])
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
    _, classes, shapes = zip(*classes_of(graph, prepared.job), strict=True)
    timed = [x for t in traces for x in _timed(t, names, prepared, classes)]
    weights = agreed(timed, dict(zip(classes, _weights(graph, prepared, hardware), strict=True)))
    pieces: Pieces = defaultdict(lambda: defaultdict(list))
    for piece, seconds, over in timed:
        whole = sum(weights[c] for c in over)
        for c in over:
            pieces[c][piece].append(seconds * (weights[c] / whole if whole > 0 else 1 / len(over)))
    times = {name: total([(measured(x), 1) for x in by.values()]) for name, by in pieces.items()}
    known = dict(zip(classes, shapes, strict=True))
    ops = {name: OpEntry(time, shape=known[name], alone=True) for name, time in times.items()}
    per_node = prepared.job.cluster.gpus_per_node or hardware.gpus_per_node
    links, unknown = link_times(traces, per_node)
    if not ops and not links:
        raise _foreign(traces)
    machine = machine_of([(t.gpu, t.world) for t in traces], FLAG)
    return Profile.of(machine, ops, links, origins=_origins(traces, timed, len(ops), len(links), unknown))


def _timed(t: TraceFile, names: TraceNames, prepared: PreparedJob, classes: Sequence[str]) -> Iterator[Timed]:
    """The ranges of one trace. One of an update counts with all that is in it, which does not count again."""
    read = {r.name: names.read(r.name) for r in t.ranges}
    program = _program(t, names, [n for n in read.values() if n is not None], prepared)
    updates = [r for r in t.ranges if (n := read[r.name]) is not None and n.piece]
    within = {id(x) for r in updates for x in _inside(r)}
    for r in t.ranges:
        named = read[r.name]
        if named is None or id(r) in within:
            continue
        inner = _inside(r)
        seconds = r.seconds(inner if named.piece else (), kernels=t.kernels)
        taken = {i for x in inner if (n := read[x.name]) is not None for i in names.nodes(n, program)}
        left = [i for i in names.nodes(named, program) if named.piece or i not in taken]
        if seconds > 0 and left:
            yield named.piece, seconds, tuple(classes[i] for i in left)


def agreed(timed: Sequence[Timed], modelled: Mapping[str, float]) -> dict[str, float]:
    """By class: seconds in whose proportion a range is divided. As modelled, unless ranges of other nodes show more.

    Each range says by how much its classes together are off, and a class follows the ranges it is in, in proportion to
    its part of each (multiplicative updates of maximum likelihood): what no range tells apart stays as it is modelled.

    >>> found = agreed([("", 5.0, ("layer", "embed")), ("", 8.0, ("layer", "layer"))], {"layer": 2.0, "embed": 2.0})
    >>> {c: round(x, 2) for c, x in found.items()}
    {'layer': 4.0, 'embed': 1.0}
    """
    rows = defaultdict[tuple[str, ...], list[float]](list)
    for piece, seconds, over in timed:
        if not piece:
            rows[over].append(seconds)
    names = sorted({c for over in rows for c in over})
    at = {c: k for k, c in enumerate(names)}
    count = np.zeros((len(rows), len(names)))
    for row, over in zip(count, rows, strict=True):
        np.add.at(row, [at[c] for c in over], 1)
    took, found = np.array([median(x) for x in rows.values()]), np.array([modelled[c] for c in names])
    for _ in range(ROUNDS if len(rows) > 1 else 0):
        whole = count @ found
        off = np.divide(took, whole, out=np.ones_like(whole), where=whole > 0)
        step = (count.T @ off) / count.sum(axis=0)
        found *= step
        if np.abs(step - 1).max() < SAME:
            break
    return {**modelled, **dict(zip(names, found.tolist(), strict=True))}


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


def _origins(
    traces: Sequence[TraceFile], timed: Sequence[Timed], ops: int, links: int, unknown: int
) -> tuple[str, ...]:
    by = "by kernels" if any(t.kernels for t in traces) else "by the host's clock"
    many = f"{len(traces)} Kineto traces" if len(traces) > 1 else "a Kineto trace"
    out = [f"{many}: {ops} op classes {by}, {links} messages"]
    classes = [{*over} for _, _, over in timed]
    if together := len(set().union(*classes) - {c for over in classes if len(over) == 1 for c in over}):
        out.append(f"{together} op classes were never timed by themselves: their parts of ranges are modelled")
    if unknown:
        out.append(f"{unknown} NCCL kernels of the trace are left out: it does not say their bytes")
    return tuple(out)


def _foreign(traces: Sequence[TraceFile]) -> PiperError:
    message = "no range in it is named after an op of this job, and no NCCL kernel says its bytes"
    return job_error(FLAG, message, 'with torch.profiler.record_function("2F0"): ...', FORMS, file=traces[0].file)
