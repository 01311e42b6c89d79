"""Predict one job: plan, classes of replicas, costs, scenario, engine, memory, metrics."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cost_models import Hardware
from cost_models.allocator.bands import context_bytes
from cost_models.compute.host import HostCosts
from ir.core.errors import ErrorKind, PiperError
from ir.core.order import IntArray
from ir.job import Job
from ir.job.build import Prepared
from ir.job.cache import PLANS
from ir.plan.plan import Plan
from ir.trace.trace import Trace
from piper_sim.compiled import choose
from piper_sim.engine import Run, Scenario, steady
from piper_sim.engine.traces import trace_of
from piper_sim.folding import Classes, carry, replica, unfold
from piper_sim.memory.timeline import Memory, Reserved, memory, reserved, samples, state
from piper_sim.pricing.costs import KERNELS, CostModel, OpCosts
from piper_sim.pricing.hosts import ahead, inline
from piper_sim.pricing.interference import pairwise
from piper_sim.pricing.prepare import hardware_of, prepare_priced
from piper_sim.pricing.routing import Routing, price_uneven, routing_of
from piper_sim.pricing.routing.worst import worst
from piper_sim.pricing.sharing import leaves, links
from piper_sim.pricing.sources import Sources, sources
from piper_sim.study.breakdown import Breakdown, breakdown

GIB = 2**30
MOST_OPS = 12_000_000  # unfolded, about 650 bytes each


@dataclass(frozen=True, eq=False)
class Planned:
    """What is known of a job before anything runs: memory does not depend on costs.

    sized, workspace: the plan with the bytes of each program's worst replica, and its workspaces where routing sets
    them.
    """

    prepared: Prepared
    hardware: Hardware
    plan: Plan
    model: CostModel
    routing: Routing | None
    classes: Classes
    sized: Plan
    workspace: IntArray | None
    memory: Memory

    @classmethod
    def of(cls, prepared: Prepared, hardware: Hardware) -> Planned:
        """Build the plan, find which replicas are equal, and walk memory."""
        plan, model = prepared.plan(), CostModel(prepared, hardware)
        routing = routing_of(prepared, plan.graph, hardware)
        more = [] if routing is None else [routing.colours()[None]]
        if prepared.job.costs.interference == "maxmin":
            more.append(leaves(model.ground, hardware.leaf_nodes))
        classes = model.classes(plan, np.concatenate(more) if more else None)
        persistent = state(plan, model.recipe)
        sized, workspace = (plan, None) if routing is None else worst(plan, routing, classes)
        found = memory(sized, persistent, workspace)
        return cls(prepared, hardware, plan, model, routing, classes, sized, workspace, found)

    @cached_property
    def sources(self) -> Sources:
        """Where its seconds come from."""
        return sources(self.plan, self.model)

    @cached_property
    def reserved(self) -> tuple[Reserved, ...]:
        """What each rank's allocator takes of what capacity, margin and context leave it."""
        return reserved(self.sized, self.memory, self.hardware, self.room_bytes, self.workspace)

    @property
    def room_bytes(self) -> int:
        """What the driver has for an allocator: capacity less margin and context."""
        margin = int(self.prepared.job.cluster.memory_margin_GiB * GIB)
        return self.hardware.hbm_bytes - margin - self.context_bytes

    @property
    def context_bytes(self) -> int:
        """Bytes outside the allocator."""
        return context_bytes(self.hardware, communicators(self))


@dataclass(frozen=True, eq=False)
class Prediction:
    """Everything known about one simulated job. costs, run: of the plan unfolded to the classes of replicas."""

    planned: Planned
    costs: OpCosts
    run: Run
    breakdown: Breakdown
    steps: int

    @property
    def prepared(self) -> Prepared:
        """The job resolved."""
        return self.planned.prepared

    @property
    def plan(self) -> Plan:
        """The plan, folded."""
        return self.planned.plan

    @property
    def memory(self) -> Memory:
        """Memory by pipeline rank, each its worst replica's."""
        return self.planned.memory

    @property
    def iteration_s(self) -> float:
        """Seconds of the step that repeats."""
        return self.breakdown.iteration_s

    def trace(self) -> Trace:
        """The last simulated step of one replica, the one that computes longest, with memory samples."""
        classes = self.planned.classes
        kernels = self.costs.shares[:, KERNELS].reshape(classes.count, -1).sum(axis=1)
        k = int(np.argmax(kernels))
        run = replica(self.run, k, classes.count)
        start, end = run.start[-1], run.end[-1]
        zero = float(start.min())
        found = samples(self.planned.sized, self.memory, start - zero, end - zero)
        source = self.planned.sources.word
        header = {"schedule": self.prepared.schedule, "iteration_s": self.iteration_s, "cost_source": source}
        if classes.count > 1:
            header["replica"] = f"{int(classes.first[k])} of {len(classes.of)}"
        return trace_of(self.plan, run, header, memory=found)


def predict(job: Job) -> Prediction:
    """Build, check, price and run the plan of a job. Raises PiperError for what cannot be built.

    `layers = "balanced"` evens out modelled seconds. Where that does not fit in memory, no stage may hold more layers
    than an even split would give it, and the second try counts if it fits.
    """
    hardware = hardware_of(job)
    first = Planned.of(prepare_priced(job, hardware), hardware)
    even = -(-sum(first.prepared.layers) // first.prepared.stages)
    if job.parallel.layers != "balanced" or max(first.prepared.layers) <= even or fits(first):
        return simulated(first)
    second = Planned.of(prepare_priced(job, hardware, even), hardware)
    return simulated(second if fits(second) else first)


def simulated(p: Planned) -> Prediction:
    """Check, price and run a plan."""
    job = p.prepared.job
    PLANS.check(p.plan, inline=job.costs.host_model == "inline")
    _refuse_large(p)
    if p.routing is None:
        costs = p.model.price(p.plan, p.classes)
    else:
        costs = price_uneven(p.routing, p.plan, p.model, p.classes)
    scenario = scenario_of(p, costs)
    ran, steps = steady(scenario, costs.duration, p.prepared.policy.clip, choose.play)
    split = breakdown(scenario, ran, costs, p.classes)
    return Prediction(p, costs, ran, split, steps)


def scenario_of(p: Planned, costs: OpCosts) -> Scenario:
    """The unfolded plan with the host and the interference that the job asks for."""
    job = p.prepared.job
    plan = unfold(p.plan, p.classes, p.prepared.mesh)
    if job.costs.host_model == "inline":
        host = inline(plan, p.model.measured.host_s)
    else:
        host = ahead(plan, HostCosts.of(p.hardware))
    slow = None if job.costs.interference == "none" else pairwise(plan, p.hardware, p.model.measured.pairs)
    shared = job.costs.interference == "maxmin"
    found = links(p.plan, p.classes, p.model, costs.duration) if shared else None
    return Scenario(plan, *carry(p.plan, p.classes), host=host, slow=slow, links=found)


def fits(p: Planned) -> bool:
    """Whether every rank's allocator finds room for every request within the device less margin and context."""
    if int(p.memory.peak.max()) > p.room_bytes:  # no need to ask an allocator
        return False
    return all(r.refused is None for r in p.reserved)


def communicators(p: Planned) -> int:
    """Process groups of more than one rank that a rank is a member of."""
    sizes = p.prepared.mesh.sizes
    moe = p.prepared.config.moe is not None
    wanted = ["tp", "cp", "pp", *(("ep", "edp") if moe else ())]
    return sum(sizes[a] > 1 for a in wanted) + (sizes["cp"] * sizes["dp"] > 1)


def _refuse_large(p: Planned) -> None:
    ops = len(p.plan) * p.classes.count
    if ops > MOST_OPS:
        raise PiperError(
            ErrorKind.JOB,
            f"{p.classes.count} of {len(p.classes.of)} replicas differ, which makes {ops:,} ops",
            key="schedule.microbatches",
            allowed=f"{MOST_OPS:,} ops",
            suggestion=f"schedule.microbatches = {max(1, p.prepared.mbs * MOST_OPS // ops)}",
        )
