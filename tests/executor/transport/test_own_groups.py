"""A rank makes its own groups alone, in an order in which nobody waits for ever, at no cost that the world raises."""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from executor.launch.launch import launch
from executor.runtime.program import RankPlan
from executor.runtime.rank import topology
from executor.runtime.worker import RankContext
from executor.transport.base import TransportError, TransportTopology
from executor.transport.groups import GlooTransport
from ir.core.work import MessageKind
from ir.job import load_job
from ir.job.build import prepare
from ir.plan.places import RankPlacement
from ir.plan.plan import OpKind, Plan
from tests.executor.transport.fake_nccl import CountingStore, FakeNccl

DEMO = Path(__file__).parents[3] / "piper_sim" / "app" / "commands" / "demo.toml"
WORLD = 2048
OF_WORLD = "0"  # what torch's keys of the world's own group begin with


def drawn(world: int, seed: int) -> TransportTopology:
    """Channels of a pipeline, a ring or by chance; groups of a mesh's rows and columns or by chance."""
    draw = random.Random(seed)
    pairs = [(a, b) for a in range(world) for b in range(world) if a != b]
    ring = [(a, (a + 1) % world) for a in range(world)]
    chain = [c for a, b in ring[:-1] for c in ((a, b), (b, a))]
    channels = draw.choice([ring, chain, draw.sample(pairs, draw.randrange(len(pairs)))])
    width = draw.choice([w for w in range(1, world + 1) if world % w == 0])
    rows = [tuple(range(at, at + width)) for at in range(0, world, width)]
    mesh = [*rows, *zip(*rows, strict=True)]
    lots = [tuple(sorted(draw.sample(range(world), draw.randint(1, world)))) for _ in range(draw.randint(0, 6))]
    names = [f"{draw.choice('abc')}:{k}" for k in range(12)]
    groups = draw.choice([mesh, lots, mesh + lots])
    draw.shuffle(names)
    return TransportTopology.of(world, channels, dict(zip(names, groups, strict=False)))


def rounds(orders: Sequence[Sequence[tuple[str, tuple[int, ...]]]]) -> int | None:
    """Make groups, each once all its members stand at it: in how many rounds all are made; None: in none."""
    left, n = [list(order) for order in orders], 0
    while any(left):
        heads = {order[0] for order in left if order}
        ready = [g for g in heads if all(left[m] and left[m][0] == g for m in g[1])]
        if not ready:
            return None
        for _, members in ready:
            for m in members:
                left[m].pop(0)
        n += 1
    return n


def orders(t: TransportTopology) -> list[list[tuple[str, tuple[int, ...]]]]:
    return [[(g.label, g.members) for g in t.own(rank)] for rank in range(t.world)]


def test_whatever_the_topology_no_rank_waits_for_ever() -> None:
    stuck = 0
    for seed in range(400):
        found = orders(drawn(2 + seed % 9, seed))
        assert rounds(found) is not None
        stuck += rounds([order[:: -1 if rank % 2 else 1] for rank, order in enumerate(found)]) is None
    assert stuck > 200  # where every second rank goes the other way, most topologies stop


def test_a_long_pipeline_does_not_wait_down_its_length() -> None:
    chain = [c for a in range(63) for c in ((a, a + 1), (a + 1, a))]
    found = orders(TransportTopology.of(64, chain, {"all": tuple(range(64))}))
    assert rounds(found) == 5
    by_name = [sorted(order, key=lambda g: (g[1], g[0])) for order in found]
    assert (rounds(by_name) or 0) > 63


def _drawn_rank(ctx: RankContext, seeds: list[int]) -> list[list[float]]:
    """Make what is drawn, use all of it, and take it down again."""
    out = []
    for seed in seeds:
        t = drawn(ctx.world, seed)
        store = CountingStore(ctx.store(f"groups-{seed}"))
        gloo = GlooTransport(store, ctx.rank, t, timeout_s=60)
        own = {g.label: g for g in t.own(ctx.rank)}
        asked = [label for key in store.asked if (label := key.split("/")[0]) != OF_WORLD]
        assert {*asked} == {*own} and all(asked.count(g.label) <= 1 + 2 * len(g.members) for g in own.values())
        boxes = {(a, b): torch.zeros(1) for a, b in t.channels if b == ctx.rank}
        moves = [gloo.recv(a, box) for (a, _), box in boxes.items()]
        moves += [gloo.send(b, torch.tensor([float(a)])) for a, b in t.channels if a == ctx.rank]
        sums = []
        for name, members in t.groups:
            if ctx.rank in members:
                sums.append(torch.tensor([float(ctx.rank)]))
                gloo.all_reduce(name, sums[-1]).wait()
        for move in moves:
            move.wait()
        gloo.barrier()
        gloo.close()
        assert not dist.is_initialized()
        out.append([*(float(box) for box in boxes.values()), *(float(x) for x in sums)])
    return out


def test_gloo_makes_and_uses_what_is_drawn() -> None:
    world, seeds = 5, [1, 2, 3, 5, 8, 13, 21, 34]
    found = launch(_drawn_rank, world, {"seeds": seeds})
    for k, seed in enumerate(seeds):
        t = drawn(world, seed)
        for rank in range(world):
            sent = [float(a) for a, b in t.channels if b == rank]
            assert found[rank][k] == sent + [float(sum(m)) for _, m in t.groups if rank in m]


# -- at scale ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> Plan:
    """DeepSeek-V3 on 2,048 GPUs."""
    return prepare(load_job(str(DEMO))).plan()


def needed(plan: Plan, rank: int) -> Mapping[str, set[str]]:
    """What a rank's own program says that it does, by label."""
    program, out = RankPlan.of(plan, rank), dict[str, set[str]]()
    for i in range(program.first, program.last):
        if (meeting := program.meetings.get(i)) is not None:
            if len(meeting.members) > 1:
                out.setdefault(meeting.group, set()).add(str(meeting.kind))
        elif (kind := program.shape(i).kind) in (OpKind.SEND, OpKind.RECV):
            a, b = (rank, program.peer(i)) if kind is OpKind.SEND else (program.peer(i), rank)
            out.setdefault(f"{a}>{b}", set()).add(str(MessageKind.P2P))
    return out


def in_budget(plan: Plan, rank: int, start: Callable[[CountingStore, TransportTopology], int]) -> bool:
    """Whether a start makes no more groups than the rank's own and the world's, and asks the store once for each."""
    store = CountingStore(dist.HashStore())
    try:
        made = start(store, topology(plan))
    finally:
        dist.destroy_process_group()
    own = [key for key in store.asked if key.split("/")[0] != OF_WORLD]
    return made <= len(needed(plan, rank)) + 1 and len(own) <= made and len(store.asked) <= made + 4


@pytest.mark.parametrize("rank", [0, WORLD // 2, WORLD - 1])
def test_a_start_at_2048_ranks_is_within_its_budget(demo: Plan, rank: int) -> None:
    def start(store: CountingStore, t: TransportTopology) -> int:
        nccl = FakeNccl(store, rank, t, alone=True)
        want = needed(demo, rank)
        assert {*nccl.made} == {*want, "world"} and {*nccl.noted} == {(g, k) for g, ks in want.items() for k in ks}
        assert len(nccl.noted) == sum(map(len, want.values()))  # each once
        assert nccl.made.pop("world") == 1 and sum(nccl.made.values()) <= 132 * 7 // 8
        assert all(blocks >= 14 for blocks in nccl.made.values())
        return len(want) + 1

    assert in_budget(demo, rank, start)


def test_a_start_that_makes_every_group_of_the_world_is_not(demo: Plan) -> None:
    def start(store: CountingStore, t: TransportTopology) -> int:
        dist.init_process_group("fake", store=store, rank=0, world_size=WORLD)
        make = [*t.channels, *(members for _, members in t.groups if len(members) > 1)]
        for members in make:
            dist.new_group(sorted(members), backend="fake")
        return len(make)

    assert not in_budget(demo, 0, start)


def test_who_is_gone_while_groups_are_made_is_named(demo: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise dist.DistStoreError("wait timeout")

    monkeypatch.setattr(FakeNccl, "_connection", gone)
    with pytest.raises(TransportError, match="rank 128: wait timeout") as info:
        FakeNccl(dist.HashStore(), 0, topology(demo), alone=True)
    assert info.value.peers == (128,)
    dist.destroy_process_group()


def test_a_communicator_has_its_name_before_it_is_made(demo: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Recorder:
        BackendType, group_desc = dist.ProcessGroup.BackendType, ""

        def __init__(self, *_: object) -> None:
            self._note: Callable[[str], None] = calls.append

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: self._note(name)

    monkeypatch.setattr(dist, "ProcessGroup", Recorder)
    monkeypatch.setattr(FakeNccl, "_connection", Recorder)
    FakeNccl(dist.HashStore(), 0, topology(demo), alone=True)
    dist.destroy_process_group()
    made = ["_set_default_backend", "_register_backend", "_set_group_name", "_set_group_desc"]
    n = len(needed(demo, 0))
    assert calls[: 5 * n] == [*made, "eager_connect_single_device"] * n and not {*calls[5 * n :]} & {*made}


def test_all_members_give_a_communicator_as_many_blocks(demo: Plan) -> None:
    t = topology(demo)
    found: dict[str, set[int]] = {}
    for rank in (0, 1, 128, 129, 1024, WORLD - 1):
        for group in t.own(rank):
            found.setdefault(group.label, set()).add(group.crowd)
    assert len(found) > 20 and all(len(crowds) == 1 for crowds in found.values())


def test_a_topology_is_what_all_programs_need_and_each_group_is_worked_out_once(
    demo: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    real = RankPlacement.group

    def group(*args: object) -> tuple[int, ...]:
        nonlocal calls
        calls += 1
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(RankPlacement, "group", group)
    t = topology(demo)
    assert calls <= 2 * len(t.groups)  # a group of several axes or streams, more than once
    monkeypatch.undo()
    for rank in range(0, WORLD, 97):
        assert {g.label: {*map(str, g.kinds)} for g in t.own(rank)} == needed(demo, rank)
