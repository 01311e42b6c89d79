"""Every op class of one rank, timed on the rank's own modules: one microbatch through each of its stages, again and
again, then the update. Nothing is sent, and no plan is run: a stage is given a made-up input and output gradient.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from executor.autograd.stage import Stage
from executor.device import clock
from executor.device.device import CudaDevice, Device
from executor.modules.base import TORCH
from executor.optim.flat import FlatBucket
from executor.runtime.batch import Microbatch
from executor.runtime.rank_model import RankModel
from ir.core.ops import Pass
from ir.graph.classes import node_classes
from ir.graph.graph import PerStepOp
from ir.job.build import PreparedJob, precision_of
from ir.plan.places import RankPlacement
from ir.plan.plan import Plan

WARM_UP = 3  # repetitions that are not counted
HOLD_S = 0.001  # for which the GPU is kept busy at first, so that the host has launched all before the work begins
MOST_HOLD_S = 0.01  # work that waits for the GPU itself would ask for ever more
CYCLES_PER_S = 2e9  # of the spinning kernel; a clock that is slower holds longer
FLUSH = 2  # times the second-level cache


DeviceTimer = Callable[[Callable[[], object]], float]  # seconds that work takes where it is done


def host_seconds(work: Callable[[], object]) -> float:
    """Of a host that does everything itself.

    >>> host_seconds(lambda: None) < 1.0
    True
    """
    began_s = clock.now()
    work()
    return clock.now() - began_s


class CudaDeviceTimer:
    """Of a GPU. Before the first event its second-level cache is overwritten, so that nothing is found there which a
    training step would have pushed out; then a kernel spins for as long as the host needs to launch the work, so that
    no gap between launches is counted.
    """

    def __init__(self, device: torch.device) -> None:
        size = int(torch.cuda.get_device_properties(device).L2_cache_size)
        self._flush = torch.empty(max(FLUSH * size, 2**20), dtype=torch.uint8, device=device)
        self._hold_s = HOLD_S
        self._device = device

    def __call__(self, work: Callable[[], object]) -> float:
        """Between two events of the current stream, which is waited for."""
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize(self._device)
        self._flush.zero_()
        torch.cuda._sleep(int(self._hold_s * CYCLES_PER_S))
        began_s = clock.now()
        start.record()
        work()
        end.record()
        launching_s = clock.now() - began_s
        end.synchronize()
        if launching_s > self._hold_s:  # the next repetition is held for longer
            self._hold_s = min(MOST_HOLD_S, 2 * launching_s)
        return float(start.elapsed_time(end)) / 1e3


def watch_of(device: Device) -> DeviceTimer:
    """The one for a device."""
    return CudaDeviceTimer(device.torch) if isinstance(device, CudaDevice) else host_seconds


Samples = dict[str, list[float]]
Note = Callable[[str], None]  # tells that work goes on
Names = Mapping[tuple[int, str, str], str]  # (stage, pass, part) → class, of nodes that compute
_MB = 0


def names_of(plan: Plan) -> Names:
    """The class of every node of a plan that computes."""
    named = zip(plan.graph.nodes, node_classes(plan.graph), strict=True)
    return {(n.stage, str(n.kind), n.part): c for n, c in named if n.message is None}


def op_samples(
    prepared: PreparedJob,
    plan: Plan,
    names: Names,
    rank: int,
    device: Device,
    watch: DeviceTimer,
    repeats: int,
    note: Note,
) -> Samples:
    """Seconds by class of node, of everything that a rank computes; the repetitions to warm up are left out.

    names: as the caller's graph has them, which may know of a framework that the ranks know nothing of.
    """
    local = RankModel.of(prepared, plan, rank, device)
    program = RankPlacement.of(plan).program(rank)
    mine = {(n.stage, str(n.kind), n.part) for n in plan.graph.nodes if program in n.groups}
    names = {key: name for key, name in names.items() if key in mine}
    bench = _Bench(prepared, local, names, device, watch, plan.graph.stages - 1)
    out: Samples = defaultdict(list)
    for k in range(WARM_UP + repeats):
        note(f"microbatch {k} of program {program}")
        for name, seconds in bench.microbatch():
            if k >= WARM_UP:
                out[name].append(seconds)
    return dict(out)


class _Bench:
    """One rank's stages and optimizer."""

    def __init__(
        self,
        prepared: PreparedJob,
        local: RankModel,
        names: Names,
        device: Device,
        watch: DeviceTimer,
        last: int,
    ) -> None:
        job, self.config = prepared.job, prepared.config
        self.local, self.names, self.watch, self.last = local, names, watch, last
        self.shape = (job.schedule.microbatch_size, job.model.seq_len)
        self.dtype, self.device = TORCH[precision_of(job).stream], device.torch
        ids = torch.randint(self.config.vocab, self.shape, device=self.device)
        self.batch = Microbatch(ids, ids.roll(-1, 1), 1.0 / ids.numel())
        self.update = next((c for (_, kind, _), c in names.items() if kind == PerStepOp.UPDATE), None)

    def microbatch(self) -> list[tuple[str, float]]:
        sync, out = self.local.sync, []
        zeroing = self.watch(sync.begin)
        for flat in sync.flat.values():
            _open(flat)
        for number, stage in self.local.stages.items():
            out += self._stage(number, stage)
        for flat in sync.flat.values():
            _close(flat)
        if self.update is not None:
            out.append((self.update, zeroing + self.watch(sync.update)))
        return out

    def _stage(self, number: int, stage: Stage) -> list[tuple[str, float]]:
        out: list[tuple[str, float]] = []

        def run(pass_: Pass, unit: str) -> None:
            seconds = self.watch(lambda: stage.run(pass_, _MB, [unit]))
            if (name := self.names.get((number, str(pass_), unit))) is not None:
                out.append((name, seconds))

        first = number == 0
        stage.feed(_MB, self.batch.ids if first else self._made((*self.shape, self.config.hidden), self.dtype))
        for unit in stage.units:
            if (wants := self.local.extras.get(unit)) is not None:
                stage.feed_extra(_MB, unit, *self.batch.extras(wants))
            run(Pass.F, unit)
        given = stage.take_output(_MB)
        if number != self.last and not stage.still.issuperset(stage.units):
            stage.feed_grad(_MB, *(self._made(tuple(t.shape), t.dtype) for t in given))
        for unit in stage.units:
            if (number, str(Pass.R), unit) in self.names:
                run(Pass.R, unit)
        for unit in reversed(stage.units):
            if unit not in stage.still:
                run(Pass.I, unit)
                run(Pass.W, unit)
        stage.take_input_grad(_MB)
        assert not stage.in_flight, "a microbatch is left over"
        return out

    def _made(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=self.device)


def _passing(flat: FlatBucket) -> bool:
    """Whether gradients are reduced by the microbatch."""
    return not any(name in flat.grads.sums for name in flat.places)


def _open(flat: FlatBucket) -> None:
    """What the plan's gathers and openings would do: weights are there, and room for a microbatch's gradients."""
    if flat.gathers:
        flat.fetch()
        flat.whole.normal_(0.0, 0.02)
    if _passing(flat):
        flat.open(_MB)


def _close(flat: FlatBucket) -> None:
    """What its reductions and frees would do, on this rank alone."""
    if _passing(flat):
        flat.land(_MB)
        flat.close(_MB)
    elif flat.travels is not flat.sums:
        flat.filled()
    if flat.gathers:
        flat.drop()
