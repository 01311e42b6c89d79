"""UW Piper's strategy files load as they are, and mean what they mean there."""

import re
from pathlib import Path

import pytest

from ir.directives import OrderDirective, PlaceDirective, ReplicateDirective, ShardDirective, SplitDirective
from ir.directives.load import DirectiveFile, load_strategy, parse_strategy
from ir.job.build import directives_json, prepare
from ir.job.load import job_from
from ir.plan.plan import OpKind, Plan
from tests.ir.directives.strategies import (
    SHIPPED,
    SPLIT,
    A,
    act,
    compute,
    one_f_one_b,
    order,
    place,
    planned,
    prepared,
    write,
)


def stages_on(plan: Plan, program: int) -> set[int]:
    return {int(m[1]) for t in compute(plan, program) if (m := re.match(r"(\d+)F", t))}


@pytest.mark.parametrize("model", ["tiny-moe", "piper-1b"])
@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("mbs", [None, 2])
def test_shipped_files_load_as_they_are(tmp_path: Path, name: str, model: str, mbs: int | None) -> None:
    one = name == "dp2"
    plan = planned(write(tmp_path, SHIPPED[name]), model, pp=1 if one else 2, ep=1 if one else 2, microbatches=mbs)
    assert plan.programs == (1 if one else 2)
    done = {m[0] for t in plan.texts if (m := re.match(r"\d+F\d+", t))}
    count = 2 if mbs or "custom" in name else 1
    assert done == {f"{s}F{m}" for s in range(1 if one else 4 if "pp4" in name else 2) for m in range(count)}


def test_what_the_files_say_is_what_the_directives_are(tmp_path: Path) -> None:
    found = load_strategy(write(tmp_path, SHIPPED["pp2_dp2_ep2_zero3"]))
    assert (found.groups, found.replicas, found.stages, found.mbs, found.experts) == (2, 2, 2, None, 2)
    assert [type(d) for d in found.directives] == [
        PlaceDirective,
        PlaceDirective,
        ReplicateDirective,
        ReplicateDirective,
        ShardDirective,
        ShardDirective,
    ]
    assert [d.group for d in found.directives if isinstance(d, PlaceDirective)] == [0, 1]
    assert {(d.zero, d.reduce_stream) for d in found.directives if isinstance(d, ReplicateDirective)} == {(3, "dp")}
    assert {(d.axis, d.stream) for d in found.directives if isinstance(d, ShardDirective)} == {("ep", "dp")}
    buckets = load_strategy(write(tmp_path, SHIPPED["pp2_dp2_ep2_bucket100"])).directives
    assert {(d.zero, d.bucket_MiB) for d in buckets if isinstance(d, ReplicateDirective)} == {(0, 100)}
    zero2 = load_strategy(write(tmp_path, SHIPPED["pp2_dp2_ep2_zero2"])).directives
    assert {d.zero for d in zero2 if isinstance(d, ReplicateDirective)} == {2}


def test_file_order_does_not_matter_pass_order_does(tmp_path: Path) -> None:
    value = [SPLIT, *SHIPPED["pp2_dp2_ep2"], one_f_one_b(0, 2, 4), one_f_one_b(1, 2, 4)]
    shuffled = [*reversed([v for v in value if v["op"] != "shard"]), *(v for v in value if v["op"] == "shard")]
    found = load_strategy(write(tmp_path, shuffled))
    kinds = [type(d) for d in found.directives]
    assert kinds == [
        SplitDirective,
        PlaceDirective,
        PlaceDirective,
        ReplicateDirective,
        ReplicateDirective,
        ShardDirective,
        ShardDirective,
        OrderDirective,
    ]


def test_streams_left_out_are_the_compute_stream_s(tmp_path: Path) -> None:
    bare = [place(0, A, None), {"op": "replicate", "filter": {}, "devices": A}]
    bare += [{"op": "shard", "filter": {"EP": "*"}, "device": A}]
    found = parse_strategy(bare).directives
    assert isinstance(found[1], ReplicateDirective) and isinstance(found[2], ShardDirective)
    assert (found[1].reduce_stream, found[1].gather_stream, found[2].stream) == ("default", "default", "default")
    ours = parse_strategy([place(0, A), {"op": "replicate", "filter": {}}, {"op": "shard", "filter": {}}]).directives
    assert isinstance(ours[1], ReplicateDirective) and isinstance(ours[2], ShardDirective)
    assert (ours[1].reduce_stream, ours[2].stream) == ("dp", "ep")


def test_placements_are_the_file_s(tmp_path: Path) -> None:
    loop = planned(write(tmp_path, SHIPPED["pp4_dp2_ep2_interleaved"]), microbatches=2)
    assert (stages_on(loop, 0), stages_on(loop, 1)) == ({0, 2}, {1, 3})
    vee = planned(write(tmp_path, SHIPPED["pp4_dp2_ep2_v_placement"]), microbatches=2)
    assert (stages_on(vee, 0), stages_on(vee, 1)) == ({0, 3}, {1, 2})
    crossing = [i for i in range(len(vee)) if vee.kind[i] == OpKind.SEND]
    assert len(crossing) == 2 * 2 * 2, "stages 1 and 2 share a rank: two transfers per microbatch and direction"


def test_experts_are_exchanged_around_each_moe_layer(tmp_path: Path) -> None:
    plan = planned(write(tmp_path, SHIPPED["pp2_dp2_ep2"]))
    exchanges = [t for t in plan.texts if t.endswith((".dispatch", ".combine"))]
    assert len(exchanges) == 4 * 2 * 2  # layers, forward and input gradient, there and back
    assert not any("W" in t.split("/")[0] for t in exchanges)


def test_ep_n_is_the_n_th_moe_layer(tmp_path: Path) -> None:
    value = [place(0, [0, 1]), {"op": "replicate", "filter": {}}]
    value += [{"op": "shard", "filter": {"EP": 1}, "devices": [0, 1]}]
    table = {
        "model": {"config": "deepseek-v2-lite", "num_hidden_layers": 4, "seq_len": 128},
        "parallel": {"dp": 2},
        "schedule": {"directives": write(tmp_path, value)},
    }
    plan = prepare(job_from(table)).plan()
    exchanged = {t.split("/")[1].split(".")[0] for t in plan.texts if t.endswith((".dispatch", ".combine"))}
    assert exchanged == {"l2"}, "layer 0 is dense, so the experts are those of layers 1, 2, 3"


def test_custom_order_interleaves_the_group_on_rank_1_only(tmp_path: Path) -> None:
    plan = planned(write(tmp_path, SHIPPED["pp2_dp2_ep2_custom_order"]))
    first = [t.split("/")[0] for t in compute(plan, 0) if t[1] in "FBIW"]
    assert [t[-1] for t in first if "F" in t] == sorted(t[-1] for t in first if "F" in t)
    at = {
        k: [i for i, t in enumerate(compute(plan, 1)) if re.match(k, t)] for k in ("1F0", "1F1", "1[BIW]0", "1[BIW]1")
    }
    assert max(at["1F0"]) < min(at["1[BIW]0"] + at["1F1"])
    assert max(at["1[BIW]0"] + at["1F1"]) < min(at["1[BIW]1"])
    assert min(at["1F1"]) < max(at["1[BIW]0"]) and min(at["1[BIW]0"]) < max(at["1F1"]), "they take turns"


def test_1f1b_rows_are_the_named_schedule(tmp_path: Path) -> None:
    value = [*SHIPPED["pp2_dp2_ep2"], SPLIT, one_f_one_b(0, 2, 4), one_f_one_b(1, 2, 4)]
    table = {
        "model": {"config": "tiny-moe", "seq_len": 128},
        "parallel": {"pp": 2, "dp": 2, "ep": 2, "zero": 0},
        "schedule": {"name": "1f1b", "microbatches": 4},
    }
    ours = prepare(job_from(table)).plan()
    assert planned(write(tmp_path, value)).texts == ours.texts


def test_naming_halves_in_a_row_splits_that_backward(tmp_path: Path) -> None:
    row = order([act(1, 0, "F")], [act(1, 1, "F"), act(1, 0, "BI")], [act(1, 0, "BW")])
    ops = compute(planned(write(tmp_path, [*SHIPPED["pp2_dp2_ep2"], SPLIT, row])), 1)
    last = max(i for i, t in enumerate(ops) if t.startswith("1F1"))
    assert min(i for i, t in enumerate(ops) if t.startswith("1W0")) > last, "the weight half stands behind the group"
    assert min(i for i, t in enumerate(ops) if t.startswith("1I0")) < last


def test_a_split_for_each_stage_is_one_split(tmp_path: Path) -> None:
    each = [SPLIT | {"filter": {"PP": s}} for s in range(2)]
    whole = planned(write(tmp_path, [*SHIPPED["pp2_dp2_ep2"], SPLIT]))
    assert planned(write(tmp_path, [*SHIPPED["pp2_dp2_ep2"], *each])).texts == whole.texts


def test_microbatches_come_from_the_job_where_the_file_has_no_split(tmp_path: Path) -> None:
    path = write(tmp_path, SHIPPED["pp2_dp2_ep2"])
    assert (prepared(path).mbs, prepared(path, microbatches=6).mbs) == (1, 6)


def test_ep_is_the_file_s_where_the_job_leaves_it_out(tmp_path: Path) -> None:
    assert prepared(write(tmp_path, SHIPPED["pp2_dp2_ep2"]), ep=1).mesh.sizes["ep"] == 2


def test_a_strategy_parses_back_from_its_own_json(tmp_path: Path) -> None:
    for value in SHIPPED.values():
        found = parse_strategy([*value, *([] if any(d["op"] == "split" for d in value) else [SPLIT])])
        again: list[object] = []
        for d in found.directives:
            made = d.json()
            again += made if isinstance(made, list) else [made]
        assert isinstance(parse_strategy(again), DirectiveFile) and parse_strategy(again).directives == found.directives


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zbv", "dualpipe", "dualpipev"])
def test_a_job_s_own_directives_place_its_layers_as_it_does(tmp_path: Path, name: str) -> None:
    model = {"config": "tiny-llama", "seq_len": 64, "num_hidden_layers": 9, "vocab_size": 1024}
    sections = {"model": model, "parallel": {"pp": 2, "zero": 0}}
    named = prepare(job_from({**sections, "schedule": {"name": name, "microbatches": 4}}))
    file = write(tmp_path, directives_json(named.strategy))
    given = prepare(job_from({**sections, "schedule": {"directives": str(file)}}))
    assert given.layers == named.layers and given.strategy == named.strategy
