"""Which links messages load: ports and NICs each way, uplinks of leaf switches; and what sharing them costs."""

from typing import Any

import numpy as np
import pytest

from cost_models import load_hardware, message_seconds
from cost_models.links.fabric import LinkFabric
from cost_models.links.loads import LinkBytes, link_bytes
from ir.core.work import Message, MessageKind
from ir.job.load import job_from
from ir.plan.plan import OpKind
from piper_sim.engine import EngineScenario, Links, play
from piper_sim.folding import classes as fold
from piper_sim.folding import unfold
from piper_sim.pricing.costs import CostModel
from piper_sim.pricing.prepare import hardware_of, prepare_priced
from piper_sim.pricing.scenario import NIC_IN, NIC_OUT, OWN, PORT_IN, PORT_OUT, leaves, links

FABRIC = LinkFabric.of(load_hardware("h100-sxm"))
SMALL: dict[str, Any] = {
    "model": {"config": "tiny-moe", "seq_len": 64},
    "parallel": {"pp": 2, "dp": 8, "ep": 4},
    "schedule": {"name": "1f1b", "microbatches": 4},
    "cluster": {"gpu": "h100-sxm", "gpus_per_node": 4, "nodes": 4},
}


def built(**cluster: object) -> tuple[Any, ...]:
    job = job_from({**SMALL, "cluster": {**SMALL["cluster"], **cluster}}, file="test")
    hw = hardware_of(job)
    prepared = prepare_priced(job, hw)
    folded = prepared.plan()
    model = CostModel(prepared, hw)
    classes = fold(folded, model.ground, leaves(model.ground, hw.leaf_nodes))
    costs = model.price(folded, classes)
    plan = unfold(folded, classes, prepared.mesh)
    return plan, folded, classes, model, costs, links(folded, classes, model, costs.duration)


def loads(found: Links, op: int) -> dict[int, float]:
    k = int(found.row[op])
    own = slice(found.at[k], found.at[k + 1])
    return dict(zip(found.resource[own].tolist(), found.load[own].tolist(), strict=True))


def test_a_transfer_leaves_at_one_end_and_arrives_at_the_other() -> None:
    plan, _, _, _, _, found = built()
    i = plan.texts.index("0SEND_F0")
    assert list(loads(found, i)) == [NIC_OUT] and list(loads(found, int(plan.partner[i]))) == [OWN + NIC_IN]


def test_an_expert_group_inside_a_node_loads_ports_both_ways() -> None:
    plan, _, _, _, _, found = built()
    i = next(i for i, t in enumerate(plan.texts) if t.endswith("dispatch"))
    assert list(loads(found, i)) == [PORT_OUT, PORT_IN]
    assert not (found.row[plan.kind == OpKind.COMPUTE] >= 0).any()


def test_reductions_across_nodes_load_both() -> None:
    plan, _, _, _, _, found = built()
    i = next(i for i, t in enumerate(plan.texts) if "RS" in t and "dense" in t)
    assert list(loads(found, i)) == [PORT_OUT, NIC_OUT, PORT_IN, NIC_IN]
    assert all(0 < x <= 1 for x in loads(found, i).values())


def test_an_uplink_is_loaded_by_all_ranks_under_it() -> None:
    plan, _, classes, model, costs, found = built(leaf_nodes=2, oversubscription=400.0)
    i = plan.texts.index("0SEND_F0")
    (up,) = [r for r in loads(found, i) if r >= OWN * plan.programs]
    nic = loads(found, i)[NIC_OUT]
    assert loads(found, i)[up] == pytest.approx(nic * 400.0), "8 ranks on 8 NICs' worth of uplinks, divided by 400"
    assert np.ptp(leaves(model.ground, 2)[0]) == 0 and classes.count == 1
    alone = play(EngineScenario.of(plan), costs.duration)
    shared = play(EngineScenario.of(plan, links=found), costs.duration)
    assert shared.end.max() > alone.end.max()


def test_a_stage_on_two_leaves_is_told_apart() -> None:
    _, _, classes, _, _, found = built(leaf_nodes=1)
    assert classes.count == 2 and classes.size.tolist() == [4, 4]
    assert found.count == 2 * 2 * OWN + 2 * 4


@pytest.mark.parametrize("kind", MessageKind)
@pytest.mark.parametrize(("ranks", "per_node"), [(8, 8), (16, 8), (4, 1), (2, 1), (2, 2)])
def test_a_message_alone_never_takes_more_than_its_links(kind: MessageKind, ranks: int, per_node: int) -> None:
    """The model's seconds are never less than the bytes over the links' rates: else a load would be over 1."""
    message = Message(kind, 64 << 20, ("dp",))
    seconds = message_seconds(message, ranks, per_node, FABRIC)
    moved = link_bytes(message, ranks, per_node)
    exact = LinkBytes(moved.node, moved.nic)
    assert exact.node / FABRIC.node <= seconds * (1 + 1e-9) or kind is MessageKind.ALL_REDUCE
    assert exact.nic / FABRIC.nic <= seconds * (1 + 1e-9)
