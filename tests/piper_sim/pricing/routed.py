"""What the routing tests share: small jobs, and a `ExpertRouting` of any kind on them."""

from typing import Any

from cost_models import DeviceHardware, LinkFabric, load_hardware
from ir.job import Job
from ir.job.build import PreparedJob, prepare
from ir.job.load import job_from
from ir.job.routing import ExpertCounts, moe_layers
from ir.job.routing.described import made_up
from ir.plan.plan import Plan
from ir.workload.work import ConfigModelWork
from piper_sim.folding import DevicePlacement
from piper_sim.pricing.routing import ExpertRouting

HW: DeviceHardware = load_hardware("h800-sxm")


def job(config: str = "tiny-moe", file: str = "job", **sections: Any) -> Job:
    """Two stages, 8 devices each, experts over 4 of them; sections: further keys."""
    table: dict[str, Any] = {
        "model": {"config": config, "seq_len": 512},
        "cluster": {"gpu": "h800-sxm"},
        "parallel": {"pp": 2, "dp": 8, "ep": 4, "layers": "balanced"},
        "schedule": {"name": "1f1b", "microbatches": 4},
    }
    for section, keys in sections.items():
        table.setdefault(section, {}).update(keys)
    return job_from(table, file=file)


def made(wanted: Job) -> tuple[PreparedJob, Plan]:
    """A job's plan, whatever its routing."""
    prepared = prepare(wanted, HW.gpus_per_node)
    return prepared, prepared.plan()


def routing(
    prepared: PreparedJob, plan: Plan, counts: ExpertCounts | None = None, kind: str = "balanced", **keys: Any
) -> ExpertRouting:
    """A routing by given counts, or of a made-up kind (balanced too, which `routing_of` leaves to the cost model)."""
    source = prepared.base.source
    assert isinstance(source, ConfigModelWork)
    layers = moe_layers(plan.graph, source)
    per_node = prepared.job.cluster.gpus_per_node or HW.gpus_per_node
    ground = DevicePlacement(prepared.mesh, per_node)
    if counts is None:
        assert prepared.config.moe is not None
        sources = len(ground.positions)
        counts = made_up(kind, keys.get("strength", 1.0), keys.get("seed", 0), prepared.config.moe, layers, sources)
    return ExpertRouting(counts, layers, source, HW, ground, LinkFabric.of(HW, per_node), plan.graph.recompute)
