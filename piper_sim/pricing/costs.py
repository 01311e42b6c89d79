"""Seconds of every op of a job's plan, and what they are made of: from the hardware file, or from a profile."""

import hashlib
from dataclasses import dataclass
from typing import cast

import numpy as np
from msgspec import structs

from cost_models import DeviceHardware, LinkFabric, OptimizerPrecision, kernel_seconds, message_seconds
from cost_models.compute import optimizer
from cost_models.compute.interference import comm_class
from cost_models.compute.roofline import dispatched
from cost_models.hardware.schema import COMM_KINDS
from cost_models.profile.profile import CostSource, Profile, ProfileCost
from ir.core.errors import job_error
from ir.core.grid import quantise, quantised
from ir.core.ops import Pass
from ir.core.order import FloatArray, IntArray
from ir.core.work import Kernel, Message
from ir.graph.graph import GraphNode, PerStepOp
from ir.job.build import PreparedJob
from ir.plan.plan import OpKind, Plan
from piper_sim.folding import DevicePlacement, RankClasses, RankSlot, RankSpread
from piper_sim.folding.uses import CollectiveUse, joined, shape_axes
from piper_sim.pricing.copies import copy_seconds
from piper_sim.pricing.cp_ring import around_ring, ring_messages
from piper_sim.pricing.measured import MODELLED, MeasuredCosts, scaled
from piper_sim.pricing.stage_times import given_numbers, scaled_to_stage_times
from piper_sim.pricing.structure import (
    KERNELS,
    CostShare,
    collectives,
    computed,
    different_messages,
    different_nodes,
    different_ops,
    different_seats,
    shape_kinds,
    transfers,
)
from piper_sim.pricing.tp_messages import beside_products, runs_beside, under_products

FIRST = RankSlot(0, 0)


@dataclass(frozen=True, eq=False)
class OpCosts:
    """duration: seconds per op, multiples of 2**-40. shares: [op, Share], summing to the duration of compute ops."""

    duration: FloatArray
    shares: FloatArray

    @property
    def digest(self) -> str:
        """SHA-256 of all durations."""
        return hashlib.sha256(np.ascontiguousarray(self.duration).tobytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class _Table:
    """shares: [shape, Share] of compute ops. wire: [shape] of communication, transfers left at 0."""

    shares: FloatArray
    wire: FloatArray


class CostModel:
    """Prices nodes and messages of one job, rank by rank. Equal kernels, messages and ranks are priced once.

    profile: what was measured, which goes before what is modelled; by default `[costs] profile`.
    """

    def __init__(self, prepared: PreparedJob, hardware: DeviceHardware, profile: Profile | None = None) -> None:
        job = prepared.job
        self.job, self.mesh, self.hardware, self.free = job, prepared.mesh, hardware, frozenset(job.costs.free)
        self.per_node = job.cluster.gpus_per_node or hardware.gpus_per_node
        self.fabric = LinkFabric.of(hardware, self.per_node)
        slower = hardware.nic_efficiency * hardware.software.zero3_network
        self.sharded = LinkFabric.of(structs.replace(hardware, nic_efficiency=slower), self.per_node)
        self.ground = DevicePlacement.of(self.mesh, self.per_node, job.cluster.speed)
        p = prepared.base.source.precision if prepared.base.source is not None else None  # type: ignore[attr-defined]
        assert p is not None
        self.recipe = OptimizerPrecision(
            cast(optimizer.OptimizerName, job.optimizer.name),
            p.params,
            p.grads,
            p.optimizer,
            hardware.software.grad_copy_bytes,
            job.optimizer.offload,
            hardware.software.tied_apart,
            hardware.software.fresh_grads,
            hardware.software.grad_cast_apart,
        )
        if job.optimizer.offload and hardware.host_GBps is None:
            message = f"{hardware.name} does not say how fast its host updates"
            raise job_error("optimizer.offload", message, "cluster.host_GBps = 40", "0, or a host_GBps")
        said = job.costs.tp_overlap
        self.tp_overlap = hardware.software.tp_overlap if said is None else said
        self.measured = MeasuredCosts.of(prepared, profile) or MODELLED
        self.formats = p.compute, p.reduce
        self.copies = self.hardware.software.copies > 0 and self.measured is MODELLED and job.costs.stage_times is None
        self._kernels: dict[Kernel, float] = {}
        self._messages: dict[tuple[Message, RankSpread, bool], ProfileCost] = {}
        self._collectives: dict[tuple[Message, tuple[int, ...], RankSlot, bool], float] = {}

    def price(self, plan: Plan, classes: RankClasses | None = None) -> OpCosts:
        """Seconds of every op of the plan unfolded to `classes`: what each class's first rank of each program takes.

        No classes: one program stands for all its replicas, placed like the first and as fast as the slowest.

        A rank's speed divides its kernels' seconds, not its messages'. Ranks that exchange messages inside an op leave
        it together: what the slowest one's kernels take longer than a rank's own, it spends in those messages.
        """
        return OpCosts(*self.seconds(plan, classes))

    def seconds(self, plan: Plan, classes: RankClasses | None = None) -> tuple[FloatArray, FloatArray]:
        """`price` as arrays that nobody else holds: durations and shares."""
        first = np.zeros(1, dtype=np.int64) if classes is None else classes.first
        seats, which = different_seats(plan, self.ground, tuple(first.tolist()))  # one where all groups lie alike
        tables = [self._table(plan, seat) for seat in seats]
        program, shape, at = different_ops(plan)
        alone = np.stack([t.shares for t in tables])[which[:, program], shape]
        shares = self._slowed(plan, alone, program, shape, None if classes is None else first)
        duration = shares.sum(axis=2)
        wire = np.stack([t.wire for t in tables])[which[:, program], shape]
        kinds = shape_kinds(plan)[shape]
        comm = kinds != OpKind.COMPUTE
        duration[:, comm] = wire[:, comm]
        ops, peer, messages, carried = transfers(plan)
        if len(ops):
            seconds = np.array([self._transfer(m) for m in messages])[carried]
            near = self.ground.node[program[ops]] == self.ground.node[peer]
            duration[:, ops] = np.where(near[:, first].T, seconds[:, 0], seconds[:, 1])
        duration, shares = duration.take(at, axis=1), shares.take(at, axis=1)
        if self.copies:
            own = self._speed(self.ground.speed, program[at], None if classes is None else first)
            copying = quantised(copy_seconds(plan, self.hardware, *self.formats) / own)
            duration += copying
            shares[..., CostShare.COMPUTE] += copying
        return duration.ravel(), shares.reshape(-1, len(CostShare))

    def _table(self, plan: Plan, seat: RankSlot) -> _Table:
        """Seconds of every shape for ranks whose groups lie as this one's, at full speed."""
        nodes, which = different_nodes(plan, bool(self.measured.nodes))
        node = np.array([self.node_shares(n, seat) for n in nodes]).reshape(-1, len(CostShare))[which]
        nodes, which = different_messages(plan)
        message = np.array([self.node_message(n, seat) for n in nodes])[which]
        times = self.job.costs.stage_times
        if times is not None:
            node, message = scaled_to_stage_times(plan.graph, node, message, times)
        (shape, covered), kinds = computed(plan), len(CostShare)
        entry = (shape[:, None] * kinds + np.arange(kinds)).ravel()
        shares = np.asarray(np.bincount(entry, quantised(node)[covered].ravel(), len(plan.shapes) * kinds), np.float64)
        wire = np.zeros(len(plan.shapes))
        of_nodes, first, own, messages, carried = collectives(plan)
        wire[of_nodes] = message[first]
        wire[own] = np.array([self.message(m, (), seat, zero3=True) for m in messages], dtype=np.float64)[carried]
        return _Table(shares.reshape(-1, kinds), quantised(wire))

    def _slowed(
        self, plan: Plan, alone: FloatArray, program: IntArray, shape: IntArray, first: IntArray | None
    ) -> FloatArray:
        """Shares at the ranks' speeds."""
        if (self.ground.speed == 1).all():
            return alone
        out, kernels = alone.copy(), alone[..., KERNELS]
        own = self._speed(self.ground.speed, program, first)[..., None]
        out[..., KERNELS] = quantised(kernels / own)
        axes = [shape_axes(plan)[s] if first is not None else None for s in shape.tolist()]
        for together in dict.fromkeys(a for a in axes if a):
            column = np.array([a == together for a in axes])
            slowest = self._speed(self.ground.slowest(together), program, first)[:, column, None]
            rest = (quantised(kernels[:, column] / slowest) - out[:, column][..., KERNELS]).sum(axis=2)
            out[:, column, CostShare.CP if together == ("cp",) else CostShare.TP] += rest
        return out

    @staticmethod
    def _speed(speed: FloatArray, program: IntArray, first: IntArray | None) -> FloatArray:
        """[class, of the programs]."""
        return (speed.min(axis=1)[:, None] if first is None else speed[:, first])[program].T

    def _transfer(self, message: Message) -> tuple[float, float]:
        """Seconds of a transfer inside a node, and between two."""
        times = self.job.costs.stage_times
        if times is not None and "p2p" in times and "p2p" not in self.free:
            given = quantise(given_numbers("p2p", times["p2p"], 1)[0])
            return given, given
        near, far = (quantise(self.priced(message, RankSpread(2, k, 3 - k)).seconds) for k in (2, 1))
        return near, far

    def node_shares(self, n: GraphNode, seat: RankSlot = FIRST) -> list[float]:
        """Seconds of one instance of a node, by share."""
        out = [0.0] * len(CostShare)
        if n.kind is PerStepOp.UPDATE:
            kernels = (*self._update(n), *n.work)
            out[CostShare.OPTIMIZER] = sum(map(self.kernel, kernels)) + self._offloaded(n.numel)
            out[CostShare.TP] = sum(self.message(message, (), seat) for message in n.inline)
        elif n.message is None:
            own = CostShare.RECOMPUTE if n.kind is Pass.R else CostShare.COMPUTE
            out[own] = sum(map(self.kernel, n.work))
            if n.kind is Pass.W:
                out[own] += sum(self.kernel(k) for k in optimizer.accumulate(n.work, self.recipe))
            launched = self.hardware.software.async_tp and not self.tp_overlap
            beside, experts = 0.0, 0.0
            for message in n.inline:
                axis = CostShare.CP if "cp" in message.axes else CostShare.TP
                seconds = dispatched(self.message(message, (), seat), self.hardware)
                if launched and runs_beside(n.kind, message):
                    beside += seconds
                elif "etp" in message.axes:  # no user buffers of experts
                    experts += seconds
                else:
                    out[axis] += seconds
            if self.hardware.software.cp_ring and out[CostShare.CP] and ring_messages(n):
                slowed, out[CostShare.CP] = around_ring(n.work, out[CostShare.CP], self.mesh.sizes["cp"], self.hardware)
                out[own] += slowed
            if beside:
                slowed, exposed = beside_products(n.work, beside, self.hardware)
                out[own], out[CostShare.TP] = out[own] + slowed, out[CostShare.TP] + exposed
            if out[CostShare.TP] and self.tp_overlap:
                pieces = self.mesh.sizes["tp"]
                out[own], out[CostShare.TP] = under_products(n.work, out[own], out[CostShare.TP], pieces, self.kernel)
            out[CostShare.TP] += experts
        if (found := self.measured.node(n)) is None:
            return out
        over = KERNELS if found.alone else list(CostShare)  # alone: what messages inside it take comes on top
        for s, seconds in zip(over, scaled([out[s] for s in over], found.seconds), strict=True):
            out[s] = seconds
        return out

    def node_message(self, n: GraphNode, seat: RankSlot = FIRST) -> float:
        """Seconds of the message that one instance of a node is; 0 for compute."""
        return 0.0 if n.message is None else self.message(n.message, joined(n), seat)

    def _update(self, n: GraphNode) -> list[Kernel]:
        numel, matrices = n.numel, n.matrices
        kernels = [
            optimizer.zero_grads(numel + n.others, self.recipe),
            optimizer.update(numel - matrices, self.recipe.others),
        ]
        kernels += [optimizer.update(matrices, self.recipe)] if matrices else []
        if self.job.optimizer.clip_norm > 0:
            kernels += [optimizer.grad_norm(numel, self.recipe), optimizer.clip(numel, self.recipe)]
        return kernels

    def _offloaded(self, numel: int) -> float:
        hw = self.hardware
        return (
            0.0 if hw.host_GBps is None else optimizer.offloaded_seconds(numel, self.recipe, hw.host_GBps, hw.pcie_GBps)
        )

    def kernel(self, kernel: Kernel) -> float:
        """Seconds of a kernel's launches."""
        if (found := self._kernels.get(kernel)) is None:
            found = self._kernels[kernel] = kernel_seconds(kernel, self.hardware)
        return found

    def message(
        self, message: Message, programs: tuple[int, ...] = (), seat: RankSlot = FIRST, *, zero3: bool = False
    ) -> float:
        """Seconds of a collective in a rank's own group, joined over programs. zero3: of divided weights, gradients."""
        key = message, programs, seat, zero3
        if (found := self._collectives.get(key)) is None:
            use = CollectiveUse.of(message, self.ground.positions.programs, programs)
            found = self._collectives[key] = self.priced(message, self.ground.spread(use, seat), zero3=zero3).seconds
        return found

    def priced(self, message: Message, spread: RankSpread, *, zero3: bool = False) -> ProfileCost:
        """A message in a group that lies so."""
        if self.free and COMM_KINDS[comm_class(message.kind)] in self.free:
            return ProfileCost(0.0, 0.0, CostSource.MODELLED)
        if (found := self._messages.get((message, spread, zero3))) is None:
            fabric = self.sharded if zero3 else self.fabric

            def price(m: Message, s: RankSpread) -> float:
                return message_seconds(m, s.ranks, s.per_node, fabric, nodes=s.nodes)

            found = self.measured.dispatched(message, spread, price) if fabric.deduplicate else None
            found = found or self.measured.message(message, spread, lambda s: price(message, s))
            self._messages[message, spread, zero3] = found
        return found
