"""A job planned: all that is known of it before anything runs, memory with it, which does not depend on costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

from cost_models import DeviceHardware, OptimizerMemory
from cost_models.allocator.bands import context_bytes
from ir.core.mesh import Mesh
from ir.core.order import IntArray
from ir.job.build import PreparedJob
from ir.plan.plan import Plan
from ir.workload.config.spec import ModelConfig
from piper_sim.folding import RankClasses
from piper_sim.memory.reserved import ReservedMemory, reserved
from piper_sim.memory.sent import given_up
from piper_sim.memory.timeline import Memory, gradients_made, memory, state
from piper_sim.pricing.costs import CostModel
from piper_sim.pricing.routing import ExpertRouting, routing_of
from piper_sim.pricing.routing.uneven import worst
from piper_sim.pricing.scenario import classes_of
from piper_sim.pricing.sources import CostSources, sources
from piper_sim.report.units import GIB
from piper_sim.study.sure import SlowStepChances


@dataclass(frozen=True, eq=False)
class PlannedJob:
    """What is known of a job before anything runs: memory does not depend on costs.

    sized, workspace: the plan with the bytes of each program's worst replica, and its workspaces where routing sets
    them. slow: what may come of `[cluster] slow_nodes`; the job names the ones of its median step.
    """

    prepared: PreparedJob
    hardware: DeviceHardware
    plan: Plan
    model: CostModel
    routing: ExpertRouting | None
    classes: RankClasses
    sized: Plan
    workspace: IntArray | None
    memory: Memory
    slow: SlowStepChances | None = None

    @classmethod
    def of(cls, prepared: PreparedJob, hardware: DeviceHardware) -> PlannedJob:
        """Build the plan, find which replicas are equal, and walk memory."""
        plan, model = prepared.plan(), CostModel(prepared, hardware)
        routing = routing_of(prepared, plan.graph, hardware)
        classes = classes_of(model, plan, routing)
        sized, workspace = worst(plan, routing, classes)
        sized = given_up(sized) if hardware.software.sent_freed else sized
        grouped = prepared.config.moe is not None and prepared.job.costs.grouped_gemm
        library = hardware.library_bytes(grouped, model.tp_overlap and prepared.mesh.sizes["tp"] > 1)
        held, made = state(plan, model.recipe), gradients_made(plan, model.recipe)
        walked = workspace is None and made is None
        found = _walked(sized, held, library) if walked else memory(sized, held, workspace, library, made)
        return cls(prepared, hardware, plan, model, routing, classes, sized, workspace, found)

    @cached_property
    def sources(self) -> CostSources:
        """Where its seconds come from."""
        return sources(self.plan, self.model)

    @cached_property
    def reserved(self) -> tuple[ReservedMemory, ...]:
        """What each rank's allocator takes of what capacity, margin and context leave it."""
        return _replayed(self.sized, self.memory, self.hardware, self.room_bytes)

    @property
    def room_bytes(self) -> int:
        """What the driver has for an allocator: capacity less margin and context."""
        margin = int(self.prepared.job.cluster.memory_margin_GiB * GIB)
        return self.hardware.hbm_bytes - margin - self.context_bytes

    @property
    def context_bytes(self) -> int:
        """Bytes outside the allocator."""
        return context_bytes(self.hardware, communicators(self.prepared.mesh, self.prepared.config))


# What was found last of a plan, and of its memory: jobs that differ in costs alone ask for the same.
_Held = tuple[OptimizerMemory, ...]
_Replays = tuple[ReservedMemory, ...]
_WALKED: WeakKeyDictionary[Plan, tuple[tuple[_Held, int], Memory]] = WeakKeyDictionary()
_REPLAYED: WeakKeyDictionary[Memory, tuple[tuple[object, int], _Replays]] = WeakKeyDictionary()


def _walked(plan: Plan, held: _Held, library: int) -> Memory:
    kept = _WALKED.get(plan)
    if kept is None or kept[0] != (held, library):
        kept = _WALKED[plan] = (held, library), memory(plan, held, None, library)
    return kept[1]


def _replayed(plan: Plan, found: Memory, hardware: DeviceHardware, room: int) -> _Replays:
    kept, key = _REPLAYED.get(found), (hardware.reserved_over_allocated, room)  # all that an allocator knows of it
    if kept is None or kept[0] != key:
        kept = _REPLAYED[found] = key, reserved(plan, found, hardware, room)
    return kept[1]


def fits(p: PlannedJob) -> bool:
    """Whether every rank's allocator finds room for every request within the device less margin and context."""
    if int(p.memory.peak.max()) > p.room_bytes:  # no need to ask an allocator
        return False
    return all(r.fits for r in p.reserved)


def communicators(mesh: Mesh, config: ModelConfig) -> int:
    """Process groups of more than one rank that a rank is a member of."""
    wanted = ["tp", "cp", "pp", *(("ep", "edp") if config.moe is not None else ())]
    meet = [("cp", "dp"), *((a,) for a in wanted)]
    return sum(mesh.size(part) > 1 for axes in meet for part in mesh.divided(axes))
