"""Messages to seconds against closed forms, with latencies set to zero where they would hide them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models import LinkFabric, load_hardware, message_seconds, presets
from cost_models.links.fabric import distinct, ring_all_reduce, ring_gather, sharp_all_reduce, tree_all_reduce
from cost_models.links.loads import LinkBytes, link_bytes
from cost_models.links.protocols import GLOO, NCCL
from ir.core.work import Message, MessageKind

REAL = LinkFabric.of(load_hardware("h100-sxm"))
# One protocol, no latencies, round rates: 100 bytes/s inside a node, 10 between nodes.
IDEAL = replace(
    REAL, node=100.0, pair=100.0, nic=10.0, sharp=0.0, dispatch_node=100.0, dispatch_nic=10.0, dispatch_across=100.0,
    node_latency=0.0, nic_latency=0.0, launch=0.0, protocols=GLOO, few=0.0, ramp=0.0,
)  # fmt: skip
S = 10**6
few = settings(max_examples=60, deadline=None)
groups = st.tuples(st.integers(1, 64), st.sampled_from([1, 2, 4, 8]))


def seconds(kind: str, nbytes: int, nodes: int, per_node: int, fabric: LinkFabric = IDEAL, **extra: int) -> float:
    return message_seconds(Message(MessageKind(kind), nbytes, ("x",), **extra), nodes * per_node, per_node, fabric)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_one_node_collectives_are_the_ring_formulas(n: int) -> None:
    assert seconds("all_reduce", S, 1, n) == pytest.approx(2 * (n - 1) / n * S / 100)
    assert seconds("all_gather", S, 1, n) == pytest.approx((n - 1) / n * S / 100)
    assert seconds("reduce_scatter", S, 1, n) == seconds("all_gather", S, 1, n)
    assert seconds("all_to_all", S, 1, n) == pytest.approx((n - 1) / n * S / 100)


@pytest.mark.parametrize("n", [2, 5, 16])
def test_one_gpu_per_node_is_the_ring_over_nics(n: int) -> None:
    assert seconds("all_reduce", S, n, 1) == pytest.approx(2 * (n - 1) / n * S / 10)
    assert seconds("all_gather", S, n, 1) == pytest.approx((n - 1) / n * S / 10)
    assert seconds("all_to_all", S, n, 1) == pytest.approx((n - 1) / n * S / 10)


@pytest.mark.parametrize("n", [2, 5, 16])
def test_a_tree_moves_all_bytes_up_and_down_at_nccls_share_of_the_rate(n: int) -> None:
    """0.92 (NCCL's tuning); in a node the switch's bytes and those of a chain are the same."""
    assert tree_all_reduce(S, 1, n, IDEAL) == pytest.approx(2 * S / 0.92 / 10)
    assert tree_all_reduce(S, n, 1, IDEAL) == pytest.approx(2 * S / 0.92 / 100)


def test_a_ramp_is_given_in_KiB() -> None:
    assert LinkFabric.of(load_hardware("h100-sxm", {"nvlink_ramp_KiB": 3})).ramp == 3072


def test_hierarchical_all_reduce_is_its_three_steps() -> None:
    flat = 2 * 15 / 16 * S / 80  # 8 NICs of 10 side by side, narrower than NVLink's 100
    steps = 2 * (7 / 8 * S / 100) + 2 * (1 / 2 * S / 8 / 10)
    assert seconds("all_reduce", S, 2, 8) == pytest.approx(min(flat, steps))


def test_p2p_is_bytes_over_the_link_between_them() -> None:
    assert seconds("p2p", S, 1, 2) == pytest.approx(S / 100)
    assert seconds("p2p", S, 2, 1) == pytest.approx(S / 10)


def test_a_pair_may_have_less_than_all_links() -> None:
    mi300x = LinkFabric.of(load_hardware("mi300x"))
    assert mi300x.pair == pytest.approx(mi300x.node / 7)


def test_a_few_gpus_without_a_switch_have_only_their_links_to_each_other() -> None:
    """Eight joined pairwise have all seven links, two have one; where a switch joins them, two have nearly as much."""
    size, found = 2**32, {}
    for name in ("mi300x", "h100-sxm"):
        fabric = LinkFabric.of(load_hardware(name))
        gathers = {n: Message(MessageKind.ALL_GATHER, size * n, ("tp",)) for n in (8, 4, 2)}
        found[name] = [(n - 1) * size / message_seconds(m, n, n, fabric) / fabric.node for n, m in gathers.items()]
        exchange = message_seconds(Message(MessageKind.ALL_TO_ALL, 2 * size, ("cp",)), 2, 2, fabric)
        assert size / exchange == pytest.approx(found[name][2] * fabric.node, rel=0.05)
    assert found["mi300x"] == pytest.approx([1, 3 / 7, 1 / 7], rel=0.05)
    assert min(found["h100-sxm"]) > 0.6


@pytest.mark.parametrize(
    "kind, nodes, per_node, intra, inter, calls",
    [
        ("p2p", 1, 2, 1, 0, 1),
        ("p2p", 2, 1, 0, 1, 1),
        ("all_gather", 1, 8, 7, 0, 1),
        ("all_gather", 2, 1, 0, 1, 1),
        ("all_gather", 5, 1, 0, 3, 1),  # doubling, where a ring has 4 steps
        ("reduce_scatter", 4, 8, 7, 2, 2),  # doubled across, then a ring inside: 7 and 2, not the flat ring's 28 and 3
        ("all_reduce", 1, 8, 14, 0, 1),
        ("all_reduce", 64, 1, 0, 12, 1),  # a tree is logarithmic
        ("all_reduce", 4, 8, 14, 4, 1),  # up and down a chain in each node and a tree of nodes
        ("all_to_all", 1, 8, 7, 0, 1),  # one for each partner
        ("all_to_all", 3, 1, 0, 2, 1),
        ("all_to_all", 2, 8, 7, 1, 1),
    ],
)
def test_an_endless_rate_leaves_the_launch_and_the_hops_of_the_best_algorithm(
    kind: str, nodes: int, per_node: int, intra: int, inter: int, calls: int
) -> None:
    rates = dict.fromkeys(("node", "pair", "nic", "dispatch_node", "dispatch_nic", "dispatch_across"), 1e30)
    slow = replace(IDEAL, **rates, node_latency=1.0, nic_latency=100.0, launch=0.01)
    assert seconds(kind, S, nodes, per_node, slow) == pytest.approx(0.01 * calls + intra + 100 * inter)
    if kind == "all_to_all":
        assert seconds(kind, S, nodes, per_node, slow, fanout=4) == pytest.approx(0.01 + intra + 100 * inter)


def test_latency_counts_steps() -> None:
    slow = replace(IDEAL, node_latency=1.0, nic_latency=100.0, launch=0.5)
    assert [f(0, 8, 1, slow) for f in (ring_all_reduce, ring_gather, tree_all_reduce)] == [14.5, 7.5, 14.5]
    # 2 nodes of 4: a flat ring crosses twice on each way, a chain of 3 goes up and down in each node.
    assert [f(0, 4, 2, slow) for f in (ring_all_reduce, ring_gather, tree_all_reduce)] == [410.5, 106.5, 206.5]
    assert ring_all_reduce(0, 1, 64, slow) == 12600.5


def test_the_least_a_call_takes_is_the_library_s_own_table() -> None:
    """Microseconds of NCCL's tuning table for its low-latency protocol: base 6.6; hops 0.6, 2.7 and, of a tree, 5."""
    nccl = replace(IDEAL, protocols=NCCL, launch=6.6e-6, node_latency=0.6e-6, nic_latency=2.7e-6)
    least = [ring_all_reduce(0, 2, 1, nccl), ring_all_reduce(0, 1, 2, nccl), tree_all_reduce(0, 1, 2, nccl)]
    assert least == pytest.approx([6.6e-6 + 2 * 0.6e-6, 6.6e-6 + 2 * 2.7e-6, 6.6e-6 + 2 * 5e-6], rel=1e-3)


def test_rings_across_nodes_are_no_faster_than_what_is_inside() -> None:
    slow = replace(IDEAL, node=15.0)  # less than two NICs of 10
    assert [ring_gather(S, n, 2, slow) for n in (1, 2)] == pytest.approx([1 / 2 * S / 10, 3 / 4 * S / 15])
    assert ring_gather(S, 1, 2, replace(IDEAL, node=5.0)) == pytest.approx(1 / 2 * S / 10), "no two share a node"


@pytest.mark.parametrize("n", [2, 4, 8])
def test_few_gpus_of_a_node_get_less_and_large_chunks_lose_their_ramp(n: int) -> None:
    whole = replace(IDEAL, few=0.5, ramp=300.0, protocols=(replace(GLOO[0], ramp=1.0),))
    rate = 100 / (1 + 0.5 / (n - 1))
    assert seconds("all_gather", S, 1, n, whole) == pytest.approx(((n - 1) / n * S + 300) / rate)
    assert seconds("all_to_all", S, 1, n, whole) == pytest.approx(((n - 1) / n * S + 300) / rate)
    assert seconds("all_gather", S, n, 1, whole) == pytest.approx((n - 1) / n * S / 10), "not across nodes"
    switch = replace(whole, sharp=1000.0, launch=2.0, protocols=(replace(GLOO[0], ramp=1.0, base=1e6),))
    if n > 2:
        assert seconds("all_reduce", S, 1, n, switch) == pytest.approx(2 + 25e-6 + ((1 + 1 / n) * S + 300) / 1000)
    worse = replace(IDEAL, congestion=0.5)  # of rings over more than two nodes
    assert seconds("all_gather", S, n, 1, worse) == pytest.approx((n - 1) / n * S / (10 * (2 / n) ** 0.5))


@pytest.mark.parametrize("kind", list(MessageKind))
def test_a_group_of_one_and_an_empty_message_cost_nothing(kind: MessageKind) -> None:
    assert message_seconds(Message(kind, S, ("x",)), 1, 1, REAL) == 0.0
    assert message_seconds(Message(kind, 0, ("x",)), 16, 8, REAL) == 0.0


@pytest.mark.parametrize("ranks, per_node", [(0, 1), (8, 0), (-1, 1)])
def test_impossible_groups_are_refused(ranks: int, per_node: int) -> None:
    with pytest.raises(ValueError, match="from 1 up"):
        message_seconds(Message(MessageKind.ALL_REDUCE, S, ("x",)), ranks, per_node, REAL)


@given(group=groups, nbytes=st.integers(0, 10**10))
@few
def test_hierarchical_is_never_slower_than_a_flat_ring(group: tuple[int, int], nbytes: int) -> None:
    nodes, per_node = group
    if nodes * per_node == 1:
        return
    assert seconds("all_reduce", nbytes, nodes, per_node, REAL) <= ring_all_reduce(nbytes, per_node, nodes, REAL)
    assert seconds("all_gather", nbytes, nodes, per_node, REAL) <= ring_gather(nbytes, per_node, nodes, REAL)


@given(
    group=groups, nbytes=st.integers(0, 10**10), more=st.integers(0, 10**10), kind=st.sampled_from(list(MessageKind))
)
@few
def test_more_bytes_are_never_faster(group: tuple[int, int], nbytes: int, more: int, kind: MessageKind) -> None:
    nodes, per_node = group
    assert seconds(kind, nbytes + more, nodes, per_node, REAL) >= seconds(kind, nbytes, nodes, per_node, REAL)


@given(group=groups, nbytes=st.integers(10**3, 10**10))
@few
def test_an_all_reduce_is_no_faster_than_an_all_gather_without_in_switch_sums(
    group: tuple[int, int], nbytes: int
) -> None:
    nodes, per_node = group
    plain = replace(REAL, sharp=0.0)
    both = [seconds(kind, nbytes, nodes, per_node, plain) for kind in ("all_gather", "reduce_scatter", "all_reduce")]
    assert both[0] == both[1] <= both[2]


def test_in_switch_reduction_needs_a_switch_and_three_members() -> None:
    assert sharp_all_reduce(S, 8, IDEAL) == sharp_all_reduce(S, 2, REAL) == float("inf")
    assert sharp_all_reduce(10**9, 8, REAL) < ring_all_reduce(10**9, 8, 1, REAL)


def test_small_messages_cost_about_a_launch() -> None:
    assert 10e-6 < seconds("all_reduce", 32768, 1, 8, REAL) < 25e-6


def test_a_plain_all_to_all_splits_by_tier() -> None:
    # 16 ranks, 8 per node: 7/16 of the bytes stay in the node, 8/16 leave it.
    assert seconds("all_to_all", 16 * 100, 2, 8) == pytest.approx(max(700 / 100, 800 / 10))


def test_a_token_crosses_the_network_once_per_node() -> None:
    copies, tokens = 8, 100
    nodes = distinct(copies, 4)
    expected = tokens * nodes * 3 / 4 / 10
    assert seconds("all_to_all", tokens * copies, 4, 8, fanout=copies) == pytest.approx(expected)
    loads = link_bytes(Message(MessageKind.ALL_TO_ALL, tokens * copies, ("ep",), copies), 32, 8)
    assert loads.nic == pytest.approx(10 * expected)
    assert loads.node == pytest.approx(tokens * nodes * distinct(copies / nodes, 8) * 7 / 8)
    assert loads.loads(0.0, IDEAL) == (0.0, 0.0), "what takes no time loads nothing"
    plain = LinkBytes(800 * 7 / 32, 800 * 24 / 32)  # to each of 32 ranks as much, or every copy by itself
    assert link_bytes(Message(MessageKind.ALL_TO_ALL, 800, ("ep",)), 32, 8) == plain
    assert link_bytes(Message(MessageKind.ALL_TO_ALL, 800, ("ep",), copies), 32, 8, deduplicate=False) == plain
    once_per_copy = replace(IDEAL, deduplicate=False)
    assert seconds("all_to_all", tokens * copies, 4, 8, once_per_copy, fanout=copies) == pytest.approx(800 * 3 / 4 / 10)


def test_a_dispatch_in_one_node_is_bytes_to_distinct_ranks() -> None:
    expected = 100 * distinct(8, 8) * 7 / 8 / 100
    assert seconds("all_to_all", 800, 1, 8, fanout=8) == pytest.approx(expected)
    assert link_bytes(Message(MessageKind.ALL_TO_ALL, 800, ("ep",), 8), 8, 8) == LinkBytes(expected * 100, 0.0)


def test_limiting_nodes_saves_network_bytes() -> None:
    free, limited = (seconds("all_to_all", 8 * S, 8, 8, fanout=8, nodes_limit=limit) for limit in (0, 4))
    assert limited / free == pytest.approx(4 / distinct(8, 8))
    assert seconds("all_to_all", 8 * S, 8, 8, fanout=8, nodes_limit=8) == pytest.approx(free)


def test_nodes_that_are_filled_evenly_need_not_be_counted() -> None:
    message = Message(MessageKind.ALL_TO_ALL, S, ("ep",))
    assert message_seconds(message, 8, 4, IDEAL, nodes=2) == message_seconds(message, 8, 4, IDEAL)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_in_an_all_to_all_everybody_waits_for_the_slowest(ranks: int) -> None:
    slowest = np.random.default_rng(0).normal(1.0, 0.1, (20_000, ranks)).max(axis=1).mean()
    plain, spread = (seconds("all_to_all", S, 1, ranks, replace(IDEAL, spread=s)) for s in (0.0, 0.1))
    assert spread / plain == pytest.approx(slowest, rel=0.005)


@given(group=groups, nbytes=st.integers(1, 10**9))
@few
def test_an_all_reduce_loads_links_as_a_reduce_scatter_and_a_gather_do(group: tuple[int, int], nbytes: int) -> None:
    nodes, per_node = group
    load = {k: link_bytes(Message(k, nbytes, ("x",)), nodes * per_node, per_node) for k in MessageKind}
    both, halves = load[MessageKind.ALL_REDUCE], (load[MessageKind.REDUCE_SCATTER], load[MessageKind.ALL_GATHER])
    assert both.node == pytest.approx(sum(x.node for x in halves)) == pytest.approx(2 * nbytes * (1 - 1 / per_node))
    assert both.nic == pytest.approx(sum(x.nic for x in halves))
    assert both.nic == pytest.approx(2 * nbytes / per_node * (1 - 1 / nodes))


@given(copies=st.integers(1, 64), places=st.integers(1, 512), limit=st.integers(0, 16))
@few
def test_distinct_places_are_bounded(copies: int, places: int, limit: int) -> None:
    reached = distinct(copies, places, limit)
    assert min(1, copies) - 1e-9 <= reached <= min(copies, places, limit or places) + 1e-9
    assert distinct(1, places) == pytest.approx(1)


@pytest.mark.parametrize("preset", presets())
def test_every_preset_prices_every_message(preset: str) -> None:
    hw = load_hardware(preset)
    fabric = LinkFabric.of(hw, gpus_per_node=8)
    assert fabric.gpus_per_node == 8
    assert max(fabric.nic, fabric.dispatch_nic) <= hw.nic_Gbps * 1e9 / 8, "nothing is faster than its line"
    assert max(fabric.node, fabric.pair, fabric.dispatch_node, fabric.sharp) <= hw.nvlink_GBps * 1e9
    for kind in MessageKind:
        assert 0 < seconds(kind, 10**6, 2, 8, fabric) < 1
