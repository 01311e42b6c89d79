"""What lives on one rank of a run: its stages, its parameters, its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from executor.autograd.compiled import CompiledParts, compile_parts
from executor.autograd.stage import Stage
from executor.device.device import Device, HostDevice, make_default, on_host
from executor.device.placed import place
from executor.modules.base import TORCH, BuiltChunks
from executor.modules.choose import gathered_format, model_of, recomputed, remade_values, without_backward
from executor.modules.user.model import UserModel
from executor.optim.muon import MatrixShardGroup
from executor.optim.optimizer import ParamGradients
from executor.optim.sync import BucketSync, BucketSyncConfig
from executor.parallel.expert_all_to_all import ExpertGroup, ExpertRoute
from executor.parallel.inline import RankRegion
from executor.parallel.router_guide import ExpertRouterGuide, guide_of
from executor.parallel.shares import ParamShard, shares
from executor.runtime.kernels import RealKernels
from ir.graph.expert_rows import spread_chunks
from ir.graph.graph import Graph
from ir.graph.sync import buckets, repeated
from ir.job.build import PreparedJob, precision_of
from ir.plan.places import RankPlacement
from ir.plan.plan import Plan


@dataclass(frozen=True)
class RankModel:
    """What lives on one rank: stages, every parameter once (two uses are one tensor, one gradient), optimizer.

    frozen: parameters that nobody trains. drawn: checksums of what the user's own build() made.
    default: where a step's tensors are made that say nothing. Ours all say it, code of a user's own may not.
    """

    stages: dict[int, Stage]
    extras: dict[str, tuple[str, ...]]
    params: dict[str, torch.Tensor]
    frozen: Mapping[str, torch.Tensor]
    grads: ParamGradients
    sync: BucketSync
    shares: dict[str, ParamShard]
    guide: ExpertRouterGuide
    compiled: CompiledParts
    default: torch.device
    drawn: Mapping[str, int]

    @classmethod
    def of(
        cls,
        prepared: PreparedJob,
        plan: Plan,
        rank: int,
        device: Device,
        region: RankRegion | None = None,
        *,
        note: bool = False,
        routes: Callable[[str, int], ExpertRoute] | None = None,
        compiling: Callable[[str], None] | None = None,
    ) -> RankModel:
        """Build this rank's part of the model, with the values every rank would give it.

        region: whom it meets inside compute ops; nobody without it. note: its routers' choices. routes: see `Stage`.
        compiling: is told before each graph that is compiled, where the job says so; without it none is.
        """
        job, precision = prepared.job, precision_of(prepared.job)
        entries, places = prepared.base.entries, RankPlacement.of(plan)
        held, region = shares(plan.graph, places.mesh.coordinates(rank)), region or RankRegion.of(plan, rank)
        guide = guide_of(prepared, plan.graph, places, rank, device, note=note)
        mine = sorted({n.stage for n in plan.graph.nodes if not n.once and places.program(rank) in n.groups})
        chunks = list(dict.fromkeys(e.chunk.name for e in entries if e.stage in mine))
        with on_host():
            spread = dict.fromkeys(spread_chunks(plan.graph), ExpertGroup.of(places, rank))
            model = model_of(prepared, held, region, spread, guide, device.torch)
            built = model.build(chunks)
            if isinstance(model, UserModel):
                model.keep(chunks)
        _move(built, device)
        device.bind()
        default = device.torch if isinstance(model, UserModel) and model.live else HostDevice.torch
        make_default(default)
        units = [e.name for e in entries if e.stage in mine and job.run.compile and compiling is not None]
        compiled = compile_parts(prepared, built, units, device.torch, region, compiling)
        params = dict[str, torch.Tensor](built.params)
        grads, again, stages = ParamGradients(params, TORCH[precision.grads]), recomputed(prepared), dict[int, Stage]()
        for s in mine:
            stages[s] = Stage(
                {e.name: built.units[e.name] for e in entries if e.stage == s},
                params,
                grads=grads,
                recompute=again,
                reads=built.reads,
                ports=built.ports,
                exchanges=built.exchanges,
                routes=routes,
            )
            stages[s].compiled, stages[s].remade = compiled.parts, remade_values(prepared)
            stages[s].still, stages[s].edge = without_backward(entries)
        elsewhere = repeated(plan.graph) if region.tp.index else frozenset[str]()
        config = _sync_config(prepared, elsewhere, _cuts(plan.graph, held, region), device)
        sync = BucketSync(rank, places, buckets(plan.graph), params, grads, list(model.shapes), config)
        drawn = model.drawn if isinstance(model, UserModel) else {}
        return cls(stages, dict(built.extras), params, built.frozen, grads, sync, held, guide, compiled, default, drawn)

    def kernels(self) -> RealKernels:
        return RealKernels(self.stages, self.extras, self.sync)

    def state_bytes(self) -> dict[str, int]:
        """What persists, by kind."""
        held = self.sync.state_bytes()
        return held | {"parameters": held["parameters"] + sum(t.nbytes for t in self.frozen.values())}

    def tensors(self) -> list[torch.Tensor]:
        return [*self.params.values(), *self.frozen.values(), *self.grads.sums.values(), *self.sync.tensors()]


def _move(built: BuiltChunks, device: Device) -> None:
    """To the device, parameters as buckets have them."""
    for unit in built.units.values():
        if any(t.device != device.torch for t in (*unit.parameters(), *unit.buffers())):
            unit.to(device.torch)  # moves the parameters themselves, so that ties stay ties
        if device.torch != HostDevice.torch:
            place(unit, device.torch)
    for p in built.params.values():
        p.data = p.data.contiguous()


def _cuts(graph: Graph, held: Mapping[str, ParamShard], region: RankRegion) -> dict[str, MatrixShardGroup]:
    """How ranks share the matrices that Muon updates: along rows or columns, not experts."""
    out = {}
    for b in buckets(graph):
        for name, m in zip(b.params, b.matrices, strict=False):
            if m.cut is not None:
                share = held[name]
                (own,) = (replace(c, dim=m.cut) for c in share.cuts if c.dim - (len(share.shape) - 2) == m.cut)
                out[name] = MatrixShardGroup(getattr(region, m.axis), own)
    return out


def _sync_config(
    prepared: PreparedJob, elsewhere: frozenset[str], cuts: Mapping[str, MatrixShardGroup], device: Device
) -> BucketSyncConfig:
    p = precision_of(prepared.job)
    reduce, moments, gather = (TORCH[d] for d in (p.reduce, p.optimizer, gathered_format(prepared)))
    return BucketSyncConfig(prepared.job.optimizer, reduce, moments, gather, elsewhere, cuts, device)
