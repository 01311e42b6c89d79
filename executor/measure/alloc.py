"""What every unit allocates and frees, pass by pass: one microbatch, under fake tensors, which take no memory.

A unit runs by itself; its inputs and the gradients of its outputs are brought and let go of at once. So a list says
what the unit holds, and until when. Who else holds the same storage is for the plan to say, and for the simulator to
add up.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from executor.autograd.stage import Stage
from executor.measure.alloc_bench import Bench
from executor.measure.alloc_spread import Given, Like, Lists, by_row, sources
from executor.measure.alloc_update import sync_lists
from executor.modules.base import TORCH
from executor.modules.choose import model_of, recomputed
from executor.modules.moe.spread import local_experts
from executor.optim.gradients import Gradients
from executor.parallel.inline import Region
from executor.parallel.places import Places
from executor.parallel.router_guide import guide_of
from executor.parallel.shares import shares
from executor.runtime.batch import Batch, Waiting
from ir.core.alloc import AllocList
from ir.core.ops import Pass
from ir.graph.classes import node_classes
from ir.graph.expert_rows import spread_over
from ir.job.build import Prepared, precision_of
from ir.plan.plan import Plan


def take_lists(prepared: Prepared, plan: Plan) -> dict[str, AllocList]:
    """The alloc list of every node class of a plan, and those of its sync. Nothing is launched.

    The lists serve every plan of the same model, sizes and formats, whatever its schedule, stages and microbatches.

    Raises PiperError (model): a unit whose memory cannot be taken by itself.
    """
    classes = {(n.stage, n.part, n.kind): c for n, c in zip(plan.graph.nodes, node_classes(plan.graph), strict=True)}
    out = sync_lists(prepared)
    with _own_tables(), _without_values(prepared):
        batch = _batch(prepared)
        region = Region.of(plan, 0)  # with whom nothing is exchanged: what is allocated for messages depends on no peer
        likes = _Likes(prepared, batch, region)
        stages, wants, held = _stages(prepared, plan, batch, region)
        for number, stage in stages.items():
            for name in stage.units:
                wanted = {p: classes[number, name, p] for p in Pass if (number, name, p) in classes}
                if out.keys() >= set(wanted.values()) and likes.known(stage, name, wanted[Pass.F]):
                    continue
                given, asked = likes.of(number, stage.reads[name]), wants.get(name, ())
                take = partial(_taken, stage, name, wanted, batch, asked, held)
                if ranks := sources(stage, name):
                    found, outs = by_row(take, given, ranks, local_experts(stage.units[name]))
                else:
                    found, outs = take(given)
                likes.found(stage, name, wanted[Pass.F], outs)
                out |= {c: found[p] for p, c in wanted.items()}
    return out


def _taken(
    stage: Stage,
    name: str,
    passes: Collection[Pass],
    batch: Waiting,
    asked: tuple[str, ...],
    held: Sequence[Tensor],
    given: Given,
    more: tuple[object, ...] = (),
) -> tuple[Lists, tuple[Like, ...]]:
    """A unit's lists, and what it gives."""
    Bench(stage, name, given, batch, asked, held, more).run(passes)  # makes the tables that modules keep
    bench = Bench(stage, name, given, batch, asked, held, more)
    found = bench.run(passes)
    bench.check()
    return found, bench.outs


def _stages(
    prepared: Prepared, plan: Plan, batch: Waiting, region: Region
) -> tuple[dict[int, Stage], Mapping[str, tuple[str, ...]], list[Tensor]]:
    """Every stage, what its units read of the batch, and all that is there all the time."""
    places, graph = Places.of(plan), plan.graph
    guide = guide_of(prepared, graph, places, 0, batch.device, note=False)
    model = model_of(prepared, shares(graph, places.mesh.coordinates(0)), region, spread_over(graph), guide)
    entries, built = prepared.base.entries, model.build(model.chunks)
    grads = Gradients(built.params, TORCH[precision_of(prepared.job).grads])
    again, stages = recomputed(prepared), {}
    for number in range(prepared.stages):
        units = {e.name: built.units[e.name] for e in entries if e.stage == number}
        stages[number] = Stage(
            units,
            built.params,
            grads=grads,
            recompute=again,
            reads=built.reads,
            ports=built.ports,
            exchanges=built.exchanges,
        )
    return stages, built.extras, [*built.params.values(), *grads.sums.values()]


def _without_values(prepared: Prepared) -> AbstractContextManager[object]:
    """Fake tensors; a user's module is run for real, on zeros, as it may do what fake ones cannot."""
    return FakeTensorMode() if prepared.job.model.module is None else nullcontext()


class _Likes:
    """Shapes and formats of what units give, by unit and by class; what enters a stage is tokens or hidden states."""

    def __init__(self, prepared: Prepared, batch: Waiting, region: Region) -> None:
        ids = batch.batch.ids
        self.ids: tuple[Like, ...] = ((tuple(ids.shape), ids.dtype),)
        compute, (size, length) = TORCH[precision_of(prepared.job).compute], ids.shape
        self.hidden: tuple[Like, ...] = (((size, length // region.divides, prepared.config.hidden), compute),)
        self.made: dict[str, tuple[Like, ...]] = {}
        self.units: dict[str, tuple[Like, ...]] = {}

    def of(self, stage: int, reads: Sequence[str]) -> list[tuple[Like, ...]]:
        """What a unit is given, by the units it reads."""
        return [self.units[r] if r else self.hidden if stage else self.ids for r in reads]

    def known(self, stage: Stage, unit: str, name: str) -> bool:
        """Whether a unit's class was met before."""
        if name in self.made:
            self.found(stage, unit, name, self.made[name])
        return name in self.made

    def found(self, stage: Stage, unit: str, name: str, outs: tuple[Like, ...]) -> None:
        """A unit of a new class. What an exchange brings is like what it carries: as many rows."""
        self.made[name] = outs
        self.units |= {port: tuple(outs[k] for k in at) for port, at in stage.ported(unit, len(outs)).items()}
        self.units |= {n: self.units[x.reads] for n, x in stage.exchanges.items() if x.reads in self.units}


def _batch(prepared: Prepared) -> Waiting:
    shape = prepared.job.schedule.microbatch_size, prepared.job.model.seq_len
    ids, labels = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
    return Waiting(Batch(ids, labels, 1.0), torch.device("cpu"))


@contextmanager
def _own_tables() -> Iterator[None]:
    """Modules make rotary tables and masks once and keep them; here fake ones, which nobody may find later.

    Of their own accord they keep no fake table, which would then live and die with every microbatch.
    """
    modules = [vars(m) for name, m in sys.modules.items() if name.startswith("executor.modules.")]
    keepers = [m for m in modules if any(hasattr(f, "cache_clear") for f in m.values())]
    checks = [(m, m["is_fake"]) for m in keepers if "is_fake" in m]
    for m, _ in checks:
        m["is_fake"] = lambda _: False
    _clear(keepers)
    try:
        yield
    finally:
        _clear(keepers)
        for m, is_fake in checks:
            m["is_fake"] = is_fake


def _clear(modules: list[dict[str, Any]]) -> None:
    for f in [f for m in modules for f in m.values() if hasattr(f, "cache_clear")]:
        f.cache_clear()
