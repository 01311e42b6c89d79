"""Plans for tests: bare stages of any schedule, and a small invented mixture-of-experts model with the same orders."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from hypothesis import settings

from ir.core.filters import parse_filter
from ir.core.mesh import Mesh
from ir.core.ops import Pass
from ir.core.work import DType, Kernel, KernelKind, Message, MessageKind
from ir.directives import Directive, ReplicateDirective, ShardDirective, apply
from ir.graph.build import model_graph, stage_graph
from ir.graph.graph import Graph
from ir.graph.recompute import RecomputedLayers
from ir.lower import PassMerge, PlanPolicy, lower
from ir.plan.plan import OpLists, Plan
from ir.schedules.registry import build
from ir.schedules.schedule import Schedule, ordering, placing
from ir.workload.part import Chunk, ExpertMessages, KeptBuffer, Param, Part, PartWork, PlacedPart, SavedBuffer

OVERLAPPED = ("1f1b-overlap", "interleaved-1f1b-overlap")
FIXED = (*OVERLAPPED, "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb1p", "zbv", "dualpipe", "dualpipev")
# Layer-level plans take longer to make: a quarter of the examples.
fewer = settings(max_examples=max(20, settings.default.max_examples // 4))  # type: ignore[union-attr]
WHOLE = PlanPolicy(merge=PassMerge.FUSED, whole_backward=True, clip=False)


@dataclass(frozen=True)
class InventedSource:
    """Numbers that mean nothing but are all different, so that a wrong buffer has a wrong size."""

    def work(self, entry: PlacedPart) -> PartWork:
        layer = entry.chunk.tags.get("L", 90)
        size = 1000 * (1 + layer) + 10 * len(entry.part.name)
        gemm = (Kernel(KernelKind.GEMM, 2 * size, size, DType.BF16, (8, 8, 8)),)
        saved = (
            SavedBuffer("x", size + 1, Pass.W, "norm", gemm),
            SavedBuffer("p", size + 2, Pass.I),
            SavedBuffer("y", size + 3),
        )
        has_weights = bool(entry.part.params)
        return PartWork(
            forward=gemm,
            input_grad=gemm,
            weight_grad=gemm if has_weights else (),
            out_bytes=size + 4,
            saved=saved,
            stash_bytes=size + 5 if has_weights else 0,
            input_grad_workspace=7,
        )

    def messages(self, experts: PlacedPart) -> ExpertMessages:
        counts = Message(MessageKind.ALL_TO_ALL, 32, ("ep",))
        dispatch, combine = (Message(MessageKind.ALL_TO_ALL, n, ("ep",), 2) for n in (640, 320))
        return ExpertMessages(counts, dispatch, combine, 641, 642)

    def sync_bytes(self, whole: bool = False) -> tuple[int, int]:
        return 4, 2

    def weight_formats(self, gathered: bool = False) -> tuple[DType, DType]:
        return DType.BF16, DType.BF16


def moe_chunks(layers: int, tied: bool = False) -> list[Chunk]:
    """Embedding, layers of attention and experts, head."""
    table = Param("embed.weight", (50, 4))
    out = [Chunk("embed", (Part("embed", (), (), (table,)),))]
    for n in range(layers):
        attn = Part("attn", ("",), (KeptBuffer(""),), (Param(f"l{n}.attn", (30 + n, 4)),))
        router = Part("router", ("attn",), (KeptBuffer("attn"),), (Param(f"l{n}.router", (5, 4)),))
        experts = Part("experts", ("router",), (), (Param(f"l{n}.experts", (4, 10 + n, 4), ("ep",), True, (0,)),))
        add = Part("add", ("attn", "experts"), (KeptBuffer("experts", Pass.I),))
        out.append(Chunk(f"l{n}", (attn, router, experts, add), {"L": n, "MOE": n}))
    head = table if tied else Param("head.weight", (50, 4))
    out.append(Chunk("head", (Part("head", ("",), (KeptBuffer(""),), (head,)),)))
    return out


def cut(chunks: Sequence[Chunk], stages: int) -> list[list[Chunk]]:
    """Even stretches, one per stage."""
    edges = [round(k * len(chunks) / stages) for k in range(stages + 1)]
    return [list(chunks[a:b]) for a, b in pairwise(edges)]


@lru_cache(maxsize=4096)
def schedule_of(name: str, ranks: int, mbs: int, chunks: int | None = None) -> Schedule:
    """A schedule, made once: the searched ones take their time."""
    return build(name, ranks, mbs, chunks)


@lru_cache(maxsize=128)
def stage_plan(name: str, ranks: int, mbs: int, chunks: int | None = None, policy: PlanPolicy = WHOLE) -> Plan:
    """A schedule on bare stages."""
    schedule = schedule_of(name, ranks, mbs, chunks)
    graph = apply(stage_graph(schedule.stages), [*placing(schedule), ordering(schedule)])
    return lower(graph, policy, {"schedule": schedule.name})


@lru_cache(maxsize=128)
def moe_graph(
    name: str,
    ranks: int,
    mbs: int,
    *,
    zero: int = 1,
    dp: int = 4,
    ep: int = 2,
    layers: int | None = None,
    recompute: tuple[str, ...] = (),
    tied: bool = False,
    prefetch: int = 1,
    bucket_MiB: float | None = None,
    dp_replicate: int = 1,
    reduce_stream: str = "dp",
    then: tuple[Directive, ...] = (),
) -> Graph:
    """The model under a schedule, placed, sharded, replicated, then what more is said, and ordered."""
    schedule = schedule_of(name, ranks, mbs)
    chunks = moe_chunks(max(schedule.stages - 2, 1) if layers is None else layers, tied)
    stages = cut(chunks, schedule.stages)
    mesh = Mesh.of(tp=1, cp=1, dp=dp, pp=ranks, ep=ep, dp_replicate=dp_replicate)
    base = replace(
        model_graph(stages, InventedSource(), RecomputedLayers(frozenset(recompute))), mesh=mesh, prefetch=prefetch
    )
    everything = parse_filter({})
    copies = dp_replicate if zero else 1
    divide: list[Directive] = [ReplicateDirective(everything, zero, bucket_MiB, reduce_stream, reduce_stream, copies)]
    if ep > 1 and any("MOE" in c.tags for c in chunks):
        divide.insert(0, ShardDirective(parse_filter({"EP": "*"}), "ep"))
    return apply(base, [*placing(schedule), *divide, *then, ordering(schedule)])


def moe_plan(name: str, ranks: int, mbs: int, policy: PlanPolicy = PlanPolicy(), **kwargs: object) -> Plan:
    """Its plan."""
    return lower(moe_graph(name, ranks, mbs, **kwargs), policy, {"schedule": name})  # type: ignore[arg-type]


def with_waits(plan: Plan, row: int, on: int) -> Plan:
    """A plan in which an op waits for one more."""
    waits = OpLists.of(len(plan), np.append(plan.waits.rows(), row), np.append(plan.waits.items, on))
    return replace(plan, waits=waits)
