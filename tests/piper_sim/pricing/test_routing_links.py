"""Bytes of an all-to-all's links: the balanced formula where counts are equal, by hand where they are not."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.links.fabric import LinkFabric, all_to_all_seconds, distinct, loaded_all_to_all_seconds
from ir.core.order import FloatArray, IntArray
from ir.core.work import Message, MessageKind
from piper_sim.pricing.routing.traffic import LinkLoads, LinkRoads, fullest, loads, reach
from tests.piper_sim.pricing.routed import HW, job, made, routing

EACH = np.arange


def a2a(ranks: int, per_node: int, top_k: int, limit: int, dedup: bool) -> tuple[FloatArray, FloatArray]:
    """The fullest links of equal counts in units of a token's copy; what the balanced formula says."""
    experts, tokens = 4 * ranks, 4 * ranks * 8
    node = EACH(ranks) // per_node
    seen = reach(np.full((1, experts), tokens * top_k // experts), node, top_k, limit)
    return loads(np.zeros((1, ranks), dtype=np.int64), seen, LinkRoads.of(node), dedup).worst


@pytest.mark.parametrize(("ranks", "per_node"), [(2, 1), (8, 8), (16, 8), (64, 8), (64, 4), (32, 1)])
@pytest.mark.parametrize(("top_k", "limit"), [(1, 0), (2, 0), (8, 0), (8, 4)])
@pytest.mark.parametrize("dedup", [True, False])
def test_equal_counts_load_links_as_the_balanced_formula_does(
    ranks: int, per_node: int, top_k: int, limit: int, dedup: bool
) -> None:
    fabric = replace(LinkFabric.of(HW, per_node), deduplicate=dedup)
    port, nic = a2a(ranks, per_node, top_k, limit, dedup and top_k > 1)
    copies, nodes = 4 * ranks * 8 * top_k, ranks // per_node
    message = Message(MessageKind.ALL_TO_ALL, copies * 1000, ("ep",), top_k, limit)
    found = loaded_all_to_all_seconds(port[0] * 1000, nic[0] * 1000, ranks, nodes, fabric, top_k > 1)
    assert found == pytest.approx(all_to_all_seconds(message, ranks, per_node, nodes, fabric), rel=1e-9)


ONE = np.array([[5, 1, 0, 2], [0, 0, 8, 0], [3, 3, 1, 1], [0, 4, 4, 0]])  # [source, expert], one expert per rank


def direct(rows: IntArray) -> LinkLoads:
    node = np.array([0, 0, 1, 1])
    return loads(EACH(4)[None], reach(rows, node, 1), LinkRoads.of(node), deduplicate=False)


def check_one_by_hand(found: LinkLoads) -> None:
    """Sources and experts on ranks 0 to 3, two on each of two nodes, every copy on its own way."""
    assert found.node_out.tolist() == [[1, 0, 1, 4]]  # 0 to 1, none, 2 to 3, 3 to 2
    assert found.node_into.tolist() == [[0, 1, 4, 1]]
    assert found.nic_out.tolist() == [[2, 8, 6, 4]]
    assert found.nic_into.tolist() == [[3, 7, 8, 2]]
    assert [x.tolist() for x in found.worst] == [[4], [8]]


def test_bytes_of_each_link_by_hand_where_every_copy_goes_its_own_way() -> None:
    check_one_by_hand(direct(ONE))


def test_an_equal_split_of_uneven_counts_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_one_by_hand(direct(np.full_like(ONE, 2)))
    with pytest.raises(AssertionError):
        check_one_by_hand(direct(np.broadcast_to(ONE.mean(axis=0).astype(np.int64), ONE.shape)))


def test_bytes_of_each_link_by_hand_where_a_token_crosses_once_per_node() -> None:
    node, ten = np.array([0, 0, 1, 1]), 10
    rows = np.array([[ten, ten, 0, 0]] * 4)  # top-2: every token goes to both ranks of node 0
    found = loads(EACH(4)[None], reach(rows, node, 2), LinkRoads.of(node), deduplicate=True)
    assert found.nic_out.tolist() == [[0, 0, ten, ten]] and found.nic_into.tolist() == [[ten, ten, 0, 0]]
    # Rank 0 sends its own to rank 1, and what landed from rank 2; ranks 2 and 3 send nothing inside their node.
    assert found.node_out.tolist() == [[2 * ten, 2 * ten, 0, 0]] == found.node_into.tolist()


def test_tokens_that_reach_ranks_and_nodes_by_hand() -> None:
    node = np.array([0, 0, 1, 1])
    seen = reach(np.array([[4, 4, 4, 4], [8, 0, 4, 4], [0, 0, 8, 8]]), node, 2)
    on_rank = 6 * (1 - 0.5 ** (8 / 6))  # 8 copies of 6 tokens on 2 ranks
    assert seen.node[0].tolist() == [6, 6] and seen.rank[0] == pytest.approx([on_rank] * 4)
    assert seen.node[1].tolist() == [8, 6]  # every token goes to rank 0: chance alone would say 6
    assert seen.rank[1] == pytest.approx([8, 0, on_rank, on_rank])
    assert seen.node[2].tolist() == [0, 8] and seen.rank[2].tolist() == [0, 0, 8, 8]
    assert reach(np.full((1, 16), 4), EACH(16) // 2, 8, limit=4).node.sum() == pytest.approx(8 * 4)
    assert distinct(8, 8) * 8 == pytest.approx(reach(np.full((1, 16), 4), EACH(16) // 2, 8).node.sum())


def drawn(seed: int, ranks: int, local: int, top_k: int) -> IntArray:
    """Counts of each rank's tokens, drawn token by token."""
    rng = np.random.default_rng(seed)
    experts = ranks * local
    popularity = rng.random(experts) ** 3 + 1e-3
    chosen = [rng.choice(experts, top_k, replace=False, p=popularity / popularity.sum()) for _ in range(8 * ranks)]
    return np.array([np.bincount(np.concatenate(chosen[8 * s : 8 * s + 8]), minlength=experts) for s in range(ranks)])


GROUPS = st.tuples(
    st.integers(0, 999), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)
)


@given(GROUPS, st.booleans())
def test_what_is_sent_is_received_and_no_more_arrives_than_copies(
    group: tuple[int, int, int, int, int], dedup: bool
) -> None:
    seed, per_node, nodes, local, top_k = group
    ranks, top_k = per_node * nodes, min(top_k, per_node * nodes * local)
    node = EACH(ranks) // per_node
    rows = drawn(seed, ranks, local, top_k)
    seen = reach(rows, node, top_k)
    by_node = np.stack([seen.copies[:, node == n].sum(axis=1) for n in range(nodes)], axis=1)
    small = 1e-9
    assert (seen.rank <= seen.copies + small).all() and (seen.node <= np.minimum(by_node, 8) + small).all()
    assert (seen.rank <= seen.node[:, node] + small).all()
    assert (np.stack([seen.rank[:, node == n].sum(axis=1) for n in range(nodes)], axis=1) >= seen.node - small).all()
    found = loads(EACH(ranks)[None], seen, LinkRoads.of(node), dedup)
    assert found.node_out.sum() == pytest.approx(found.node_into.sum())
    assert found.nic_out.sum() == pytest.approx(found.nic_into.sum())
    if not dedup:
        assert found.node_into + found.nic_into == pytest.approx((seen.copies.sum(axis=0) - np.diag(seen.copies))[None])


@given(GROUPS)
def test_the_estimate_of_nodes_is_near_what_tokens_drawn_one_by_one_reach(
    group: tuple[int, int, int, int, int],
) -> None:
    seed, per_node, nodes, local, top_k = group
    ranks, top_k = per_node * nodes, min(top_k, per_node * nodes * local)
    rng = np.random.default_rng(seed)
    p = rng.random(ranks * local) ** 2 + 0.01
    chosen = np.array([rng.choice(ranks * local, top_k, replace=False, p=p / p.sum()) for _ in range(400)])
    rows = np.bincount(chosen.ravel(), minlength=ranks * local)[None]
    node = EACH(ranks) // per_node
    true = sum(len(set(t)) for t in (node[chosen // local]).tolist())
    found = reach(rows, node, top_k).node.sum()
    assert 0.62 * true <= found <= 1.12 * true


@given(GROUPS)
def test_exchanges_do_not_see_the_order_of_experts_inside_a_rank(group: tuple[int, int, int, int, int]) -> None:
    seed, per_node, nodes, local, top_k = group
    ranks, top_k = per_node * nodes, min(top_k, per_node * nodes * local)
    node, rows = EACH(ranks) // per_node, drawn(seed, ranks, local, top_k)
    order = np.random.default_rng(seed).permuted(EACH(ranks * local).reshape(ranks, local), axis=1).ravel()
    first, second = (
        loads(EACH(ranks)[None], reach(x, node, top_k), LinkRoads.of(node), True) for x in (rows, rows[:, order])
    )
    for name in ("node_out", "node_into", "nic_out", "nic_into"):
        assert (getattr(first, name) == getattr(second, name)).all()


def test_more_skew_never_makes_the_fullest_rank_lighter() -> None:
    prepared, plan = made(job("mixtral-8x7b", parallel={"ep": 8}, cluster={"gpus_per_node": 4}))
    before = None
    for strength in (1, 1.5, 2, 3, 5, 8, 20):
        r = routing(prepared, plan, kind="hot", strength=strength)
        d, dispatch = r.divisions[0], r.source.messages(r.layers[0].entry).dispatch
        port, nic = fullest(d, r.counts, dispatch)
        now = np.array([r.received.max(), port.max(), nic.max()])
        assert before is None or (now >= before * (1 - 1e-3)).all()
        before = now
    assert before is not None
