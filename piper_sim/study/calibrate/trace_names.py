"""Which nodes of a job an annotated range of a training stands for: `2F0`, `2B0/l7.attn`, `l7.attn`, `UPDATE`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ir.core.ops import Pass
from ir.graph.graph import Graph, PerStepOp

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
