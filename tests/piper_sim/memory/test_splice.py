"""Splicing alloc lists: who holds what until when, on lists made by hand. Real ones are in tests/executor."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ir.core.alloc import AllocList
from ir.core.errors import PiperError
from ir.core.flat import update_blocks
from ir.graph.classes import node_classes, sync_class
from ir.graph.graph import Once
from ir.job.build import Prepared, precision_of, prepare
from ir.job.load import job_from
from ir.plan.plan import Plan
from piper_sim.memory.splice import peaks
from piper_sim.memory.splice_account import Account
from piper_sim.memory.splice_sync import SyncMemory

TOKENS = 64  # of a microbatch
PART = {
    # One byte of anchor and 1000 of activations from F to W, an output of 64 * 64 * 2, a gradient of 10 of its own.
    "F": "+1000 +8192 -F1 {x} >F1",
    "I": "{g} +8192 -I0 >I0",
    "W": "-F0",
}


def job(name: str = "gpipe", pp: int = 1, mbs: int = 3, *sets: str) -> tuple[Prepared, Plan]:
    table = {
        "model": {"config": "tiny-llama", "seq_len": TOKENS, "num_hidden_layers": 4},
        "parallel": {"pp": pp},
        "schedule": {"name": name, "microbatches": mbs},
        "optimizer": {"name": "sgd", "clip_norm": 0},
    }
    prepared = prepare(job_from(table, sets))
    return prepared, prepared.plan()


def lists(prepared: Prepared, plan: Plan, **changes: str) -> dict[str, AllocList]:
    """Every part alike, but that embedding reads no tensor, and the loss is a number."""
    out = {}
    for node, key in zip(plan.graph.nodes, node_classes(plan.graph), strict=True):
        if node.once:
            continue
        kind, part = str(node.kind), node.part.split(".")[1]
        text = changes.get(f"{kind}_{part}", changes.get(kind, PART[kind]))
        text = text.format(x="" if part == "embed" else "-x0", g="" if part == "head" else "-g0")
        if part == "embed" and kind == "I":
            text = "-g0 >none"
        if part == "head":
            text = text.replace("+8192 -F1", "+4 -F1")
        out[key] = AllocList.parse(text)
    for kind in (Once.UPDATE, Once.NORM):
        for flat in (False, True):
            key = sync_class(
                kind,
                flat=flat,
                precision=precision_of(prepared.job),
                optimizer=prepared.job.optimizer.name,
                clip=prepared.job.optimizer.clip_norm > 0,
            )
            out[key] = AllocList.parse(changes.get(str(kind), ""))
    return out


def base(prepared: Prepared, plan: Plan, program: int = 0) -> int:
    """What is there all the time."""
    return SyncMemory(prepared, plan, lists(prepared, plan), program).persistent


def test_one_rank_holds_every_microbatch_of_gpipe_and_one_output_on_the_way() -> None:
    prepared, plan = job()
    units = 2 + 4 * 2 + 1  # embedding, attention and MLP of each layer, norm, head
    assert units == len(plan.graph.entries)
    # The most is there when a unit has made its output beside its input; the last one of that size is norm's.
    before_head = 2 * units * 1000 + (units - 1) * 1000 + 2 * 8192
    in_first_i = 3 * units * 1000 + 8192
    expected = base(prepared, plan) + max(before_head, in_first_i)
    assert peaks(prepared, plan, lists(prepared, plan)) == (expected,)


@pytest.mark.parametrize(("pp", "mbs", "flying"), [(2, 5, (2, 1)), (3, 5, (3, 2, 1)), (4, 3, (3, 3, 2, 1))])
def test_what_a_unit_holds_until_w_counts_for_every_microbatch_in_flight(
    pp: int, mbs: int, flying: tuple[int, ...]
) -> None:
    prepared, plan = job("1f1b", pp, mbs)
    small = peaks(prepared, plan, lists(prepared, plan))
    large = peaks(prepared, plan, lists(prepared, plan, F_mlp=PART["F"].replace("1000", "9000")))
    for p, n in enumerate(flying):
        held = n * len([e for e in plan.graph.entries if e.stage == p and e.part.name == "mlp"])
        # The peak may move by the one unit that is under way.
        assert (held - 1) * 8000 <= large[p] - small[p] <= held * 8000


def test_an_input_that_backward_reads_is_held_until_then_though_its_maker_let_go() -> None:
    prepared, plan = job(mbs=3)
    kept = lists(prepared, plan, F_mlp="+1000 +8192 -F1 >F1", W_mlp="-x0 -F0")
    more = peaks(prepared, plan, kept)[0] - peaks(prepared, plan, lists(prepared, plan))[0]
    assert more == 3 * 4 * 8192  # each MLP's input of each microbatch; where the peak is, none of them was alive before


def test_what_crosses_is_held_by_the_table_until_the_plan_frees_it() -> None:
    prepared, plan = job("gpipe", 2, 3)
    small = lists(prepared, plan, F="+1 -F0 {x} >F0", I="{g} +1 -I0 >I0", W="")
    first, last = peaks(prepared, plan, small)
    # Units hold nothing: rank 1 keeps three received inputs, which its W read by the graph, and rank 0 three outputs of
    # one byte, until the gradients that come back prove them sent; a gradient arrives while the one before is in use.
    assert (last - base(prepared, plan, 1)) // 8192 == 3
    assert (first - base(prepared, plan, 0)) // 8192 == 2


def test_an_output_that_is_its_input_dies_once() -> None:
    prepared, plan = job(mbs=1)
    alias = lists(prepared, plan, F_norm="+1000 -x0 >x0")
    assert peaks(prepared, plan, alias)[0] <= peaks(prepared, plan, lists(prepared, plan))[0]


def test_a_list_that_frees_what_is_not_there_is_an_error() -> None:
    prepared, plan = job()
    with pytest.raises(PiperError, match="frees F0, which is not there"):
        peaks(prepared, plan, lists(prepared, plan, W="-F0 -F0"))


def test_a_plan_without_lists_is_refused() -> None:
    prepared, plan = job()
    made = lists(prepared, plan)
    for key in [k for k in made if k.startswith(("W/mlp", "UPDATE/tensor", "NORM/tensor"))]:
        with pytest.raises(PiperError, match="no alloc list"):
            peaks(prepared, plan, {k: v for k, v in made.items() if k != key})


# -- what exists once per step ----------------------------------------------------------------------------------------


def most(made: Mapping[str, AllocList], *sets: str, run: str = "update") -> tuple[SyncMemory, int]:
    prepared, plan = job("dualpipe", 2, 4, *sets)
    sync, account = SyncMemory(prepared, plan, made, 0), Account()
    if run == "update":
        sync.update(account)
    else:
        sync.end(account)
    assert account.now == 0
    return sync, account.peak


def test_the_update_holds_what_the_tensor_before_left_until_it_says_so() -> None:
    prepared, plan = job("dualpipe", 2, 4)
    sync, peak = most(lists(prepared, plan, UPDATE="+4n -~ +2n -T1"))
    sizes = [part for n in (*sync.alone, *(f.updates for f in sync.flat.values())) for part in update_blocks(n)]
    assert max(sizes) < max(f.updates for f in sync.flat.values())
    beside = [a * 4 + b * 4 for a, b in zip([0, *sizes], sizes, strict=False)]
    within = [n * 6 for n in sizes]
    assert peak == max(beside + within)


def test_the_norm_is_taken_at_the_end_where_nothing_clips_and_squares_one_tensor_at_a_time() -> None:
    prepared, plan = job("dualpipe", 2, 4)
    params = len({p.name for e in plan.graph.entries for p in e.part.params})
    sync, peak = most(lists(prepared, plan, NORM="+8n -T0"), run="end")
    pieces = [n for f in sync.flat.values() for n in f.squares or ()]
    assert peak == max(params * 8 + max(sync.alone, default=0) * 8, 2 * params * 8 + max(pieces) * 8)


def test_shards_cover_a_bucket_and_pieces_cover_the_parameters() -> None:
    prepared, plan = job("dualpipe", 2, 4, "parallel.zero=1")
    made = lists(prepared, plan)
    both = [SyncMemory(prepared, plan, made, rank) for rank in range(2)]
    shares = [[f.updates for f in sync.flat.values()] for sync in both]
    assert shares[0] == shares[1]
    numel = sum(p.numel for e in plan.graph.entries for p in e.part.params)
    assert sum(n for sync in both for f in sync.flat.values() for n in f.squares or ()) == numel
    whole = SyncMemory(*job("dualpipe", 2, 4, "parallel.zero=0"), made, 0)
    assert [2 * n for n in shares[0]] == [f.updates for f in whole.flat.values()]
