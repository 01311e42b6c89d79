"""Peak bytes of every rank of a run before it runs: the very code of a rank, one rank after the other, without peers.

What a rank takes and lets go of depends on its program alone, so the peak is what a run of the plan measures, to the
byte. Where a step is quick it is computed; where its arithmetic would take longer than telling what it would need,
tensors are fake. Either way a rank costs about as much as two of its steps.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from executor.device.device import HostDevice
from executor.device.memory import OpWatch, PeakMemory
from executor.device.progress import RankProgress, create
from executor.parallel.inline import RankRegion
from executor.parallel.router_guide import planned_routes
from executor.runtime.batch import Microbatch, PendingMicrobatch
from executor.runtime.interpreter import PlanInterpreter
from executor.runtime.program import RankPlan
from executor.runtime.rank import crossing
from executor.runtime.rank_model import RankModel
from executor.transport.base import JoinedTransport, TransportHandle
from ir.graph.expert_rows import spread_chunks
from ir.job.build import PreparedJob
from ir.plan.places import RankPlacement
from ir.plan.plan import Plan

QUICK_FLOPS = 2**28  # of one node: some 10 ms on a core, about what its kernels take as fake ones
DONE = JoinedTransport(())  # what is over as soon as it is posted


class TransportWithoutPeers:
    """A transport that moves nothing; what would arrive is zeros."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def send(self, *_: object, **more: object) -> TransportHandle:
        return DONE

    def recv(self, source: object, into: Tensor, *_: object) -> TransportHandle:
        with torch.no_grad():
            into.zero_()
        return DONE

    all_reduce = send
    reduce_scatter = all_gather = all_to_all = recv

    def barrier(self) -> None:
        """Nobody to wait for, and nothing to take down."""

    close = barrier


class DeviceWithoutValues(OpWatch):
    """Above fake tensors: whatever number the host reads of one is 0."""

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.0 if args[0].is_floating_point() else 0
        return func(*args, **kwargs)


@contextmanager
def values(real: bool) -> Iterator[None]:
    """Whether tensors made here have values, or are fake: they take no memory, and nothing is computed."""
    if real:
        yield
    else:
        with FakeTensorMode(), DeviceWithoutValues():
            yield


class FakeRank:
    """A rank of a run: its stages, parameters and optimizer, as the run builds them. Only within one `values`."""

    def __init__(self, prepared: PreparedJob, plan: Plan, rank: int) -> None:
        job = prepared.job
        prepared = replace(prepared, job=replace(job, model=replace(job.model, weights=None)))  # bytes, not values
        self.prepared, self.plan = prepared, plan
        self.device, self.transport = HostDevice(), TransportWithoutPeers(rank)
        self.program, self.region = RankPlan.of(plan, rank), RankRegion.of(plan, rank, self.transport)
        routes = planned_routes(prepared, plan.graph, self.program.places, rank) if spread_chunks(plan.graph) else None
        self.local = RankModel.of(prepared, plan, rank, self.device, self.region, routes=routes)

    def peak(self) -> int:
        """The most bytes at one time in the second step, as in a run: the first makes what modules keep."""
        batches = self._batches()
        with tempfile.TemporaryDirectory(prefix="piper-progress-") as name:
            file, rank = Path(name) / "progress", self.program.rank
            create(file, rank + 1)
            progress, empty = RankProgress(file, rank), crossing(self.prepared, self.device, self.region)
            run = PlanInterpreter(self.program, self.local.kernels(), self.transport, progress, self.device, empty)
            run.step(0, batches)
            with PeakMemory(self.local.tensors()) as memory:
                run.step(1, batches)
            run.close()
            progress.close()
        return int(memory.peak)

    def alike(self) -> object:
        """All in which ranks may differ that need as many bytes: equal ranks have equal peaks."""
        sync = self.local.sync
        flat = [(f.counts, *((n, len(x)) for n, (_, x) in f.pieces(f.reduced).items())) for f in sync.flat.values()]
        routed = self.program.rank if self.prepared.config.moe is not None else None
        return self.program.number, sync.elsewhere, tuple(flat), tuple(t.nbytes for t in self.local.tensors()), routed

    def _batches(self) -> dict[int, PendingMicrobatch]:
        job = self.prepared.job
        shape, where = (job.schedule.microbatch_size, job.model.seq_len), self.device.torch
        ids, labels = (torch.zeros(shape, dtype=torch.int64, device=where) for _ in "il")
        numbers = {mb: self.program.number_of(mb) for mb in self.program.batches()}
        return {mb: PendingMicrobatch(Microbatch(ids, labels, 1.0, n), self.device.torch) for mb, n in numbers.items()}


def peak_bytes(prepared: PreparedJob, plan: Plan) -> tuple[int, ...] | None:
    """Peak allocated bytes of each rank over one step of the executor, as `piper-sim run` finds them.

    None where nobody knows before: ranks exchange rows of tokens, and routers choose how many.
    """
    if spread_chunks(plan.graph) and not prepared.job.routing.forced:
        return None
    return peaks(prepared, plan, real=prepared.job.model.module is not None or quick(plan))


def quick(plan: Plan) -> bool:
    """Whether arithmetic is the cheaper way."""
    return max(sum(k.flops * k.count for k in n.work) for n in plan.graph.nodes if not n.once) <= QUICK_FLOPS


def peaks(prepared: PreparedJob, plan: Plan, *, real: bool) -> tuple[int, ...]:
    """The same, by rank. real: with values. A user's own module needs them: it may do what fake tensors cannot."""
    known: dict[object, int] = {}
    out = []
    for number in range(RankPlacement.of(plan).ranks):
        with values(real):
            rank = FakeRank(prepared, plan, number)
            if (alike := rank.alike()) not in known:
                known[alike] = rank.peak()
        out.append(known[alike])
    return tuple(out)
