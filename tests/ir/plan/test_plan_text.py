"""The plan as text: golden files, exact round trips, and a parser that says where and what is wrong."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ir.core.errors import ErrorKind, PiperError
from ir.lower import MessageQueue, PlanPolicy
from ir.plan import read as plan_read
from ir.plan.plan import Plan
from ir.plan.text import parse_plan, plan_digest, plan_text, read_plan
from ir.verify import check_plan
from tests.ir.plans import FIXED, WHOLE, fewer, moe_graph, moe_plan, stage_plan
from tests.ir.verify.edits import differences, with_waits
from tests.refusals import refusal

SINGLE = PlanPolicy(p2p=MessageQueue.SINGLE)
Golden = Callable[[str, str], None]


def program(text: str, number: int) -> str:
    head, *programs = text.split("\nprogram ")
    return f"{head}\nprogram {programs[number]}"


def test_dualpipe_reads_like_this(golden: Golden) -> None:
    golden("dualpipe_4rank_8mb_program1.txt", program(plan_text(stage_plan("dualpipe", 4, 8)), 1))


def test_a_layer_level_plan_reads_like_this(golden: Golden) -> None:
    golden("tiny_moe_dualpipe_2rank_4mb.txt", plan_text(moe_plan("dualpipe", 2, 4, zero=1, layers=2)))


def test_a_zero_3_plan_on_one_queue_reads_like_this(golden: Golden) -> None:
    golden("tiny_moe_1f1b_zero3_single.txt", plan_text(moe_plan("1f1b", 2, 2, SINGLE, zero=3, layers=2)))


@fewer
@given(
    name=st.sampled_from(FIXED),
    ranks=st.integers(1, 4),
    mbs=st.integers(1, 5),
    zero=st.integers(0, 3),
    recompute=st.sampled_from([(), ("full",), ("norm",), ("mlp", "norm")]),
    tied=st.booleans(),
    single=st.booleans(),
    buckets=st.sampled_from([None, 0.001]),
)
def test_layer_level_text_loses_nothing(
    name: str,
    ranks: int,
    mbs: int,
    zero: int,
    recompute: tuple[str, ...],
    tied: bool,
    single: bool,
    buckets: float | None,
) -> None:
    ranks += ranks % 2 if name == "dualpipe" else 0
    options = dict(zero=zero, recompute=recompute, tied=tied, bucket_MiB=buckets, layers=max(4, 2 * ranks))
    plan = moe_plan(name, ranks, mbs, SINGLE if single else PlanPolicy(), **options)
    check_plan(plan, serial=single)
    text = plan_text(plan)
    back = parse_plan(text, moe_graph(name, ranks, mbs, **options))  # type: ignore[arg-type]
    assert not differences(plan, back)
    assert plan_text(back) == text


def test_the_digest_is_that_of_the_text() -> None:
    plan = stage_plan("zbv", 3, 4)
    assert plan_digest(plan) == hashlib.sha256(plan_text(plan).encode()).hexdigest()
    assert plan_digest(plan) != plan_digest(stage_plan("zbv", 3, 5))


def test_the_text_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "from ir.plan.text import plan_digest as d; from tests.ir.plans import moe_plan as m;"
        "print(d(m('dualpipe', 2, 4, zero=3, layers=3, tied=True)))"
    )
    root = Path(__file__).parents[3]
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] != ""


def test_a_plan_of_no_ops_reads_back() -> None:
    text = "piper-plan 1\nmicrobatches = 2\nprograms = 0\nops = 0\n"
    assert plan_text(parse_plan(text, stage_plan("1f1b", 2, 2).graph)) == text


def test_blank_lines_comments_and_spacing_are_free() -> None:
    plan = stage_plan("1f1b", 2, 2)
    text = plan_text(plan)
    loose = (
        text.replace("program 1", "# by hand\n\nprogram 1")
        .replace("  compute", " \t compute")
        .replace(" post", "   post")
    )
    assert not differences(plan, parse_plan(loose, plan.graph))


def test_a_wait_may_name_its_stream_where_the_text_alone_would_do() -> None:
    plan = stage_plan("1f1b", 2, 2)
    text = plan_text(plan).replace("wait 1RECV_F0", "wait recv<0:1RECV_F0")
    assert not differences(plan, parse_plan(text, plan.graph))


def test_a_plan_reads_from_a_file(tmp_path: Path) -> None:
    plan = stage_plan("dualpipe", 2, 4)
    path = tmp_path / "plan.txt"
    path.write_text(plan_text(plan), encoding="utf-8")
    assert not differences(plan, read_plan(path, plan.graph))


def test_a_hand_written_defect_is_refused_by_the_rules() -> None:
    """Parsing says what a text means; whether it may run is `check_plan`'s to say."""
    plan = stage_plan("1f1b", 2, 3)
    lines = plan_text(plan).splitlines()
    k = next(i for i, line in enumerate(lines) if line.split()[1:3] == ["compute", "1B1"])
    n = len(plan)
    text = "\n".join(lines[:k] + lines[k + 2 :]).replace(f"ops = {n}", f"ops = {n - 2}")  # with the send behind it
    refusal(check_plan, parse_plan(text, plan.graph), match="1I1 is missing")


# --- refusals -----------------------------------------------------------------------------


def refused(text: str, plan: Plan, match: str, kind: ErrorKind = ErrorKind.ILLEGAL_PLAN) -> PiperError:
    caught = refusal(parse_plan, text, plan.graph, "plan.txt", match=match)
    assert caught.kind is kind
    assert caught.file == "plan.txt"
    assert caught.key and caught.key.startswith("line ")
    return caught


def small() -> tuple[Plan, str]:
    plan = stage_plan("1f1b", 2, 3)
    return plan, plan_text(plan)


def test_an_unknown_op_is_refused_with_line_and_nearest() -> None:
    plan, text = small()
    error = refused(text.replace("compute  0F1 ", "compute  0FF1 "), plan, "no op 0FF1 on stream compute")
    line = int(error.key.split()[1])  # type: ignore[union-attr]
    assert "0F1" in text.splitlines()[line - 1]
    assert error.suggestion == "0F1"
    assert refused(text.replace("compute  0F1 ", "compute  0f1 "), plan, "not an op: 0f1").suggestion == "0F1"


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("compute  0F1 ", "compute  7F1 ", "no op 7F1"),
        ("compute  0F1 ", "copmute  0F1 ", "no op 0F1 on stream copmute"),
        ("send>1   0SEND_F1", "send>7   0SEND_F1", "no op 0SEND_F1 on stream send>7"),
        ("send>1   0SEND_F1", "recv<1   0SEND_F1", "no op 0SEND_F1 on stream recv<1"),
        ("compute  0F1 ", "compute  0F3 ", "a microbatch that does not exist"),
        ("compute  0F1 ", "compute  0F01", "not an op: 0F01"),
        ("compute  0F1 ", "compute  0FOO", "no op 0FOO on stream compute"),
        ("compute  0F1 ", "compute  0F2 ", "0F2 stands twice in program 0"),
        ("wait 0F1", "wait 0F9", "waits for 0F9, which is not in its program"),
        ("wait 0F1", "wait 1F1", "waits for 1F1, which is not in its program"),
        ("0F1                  post", "0F1                  ", "0F1 is waited for, but does not post"),
        (" free 0F1.act", " post free 0F1.act", "0B1 posts, but nobody waits for it"),
        ("free 0F1.act", "free 0F1.out", "0B1 frees a buffer that nothing writes"),
        ("free 0F1.act", "free 0F1.art", "0B1 frees 0F1.art, which is not in its program"),
        ("free 0F1.act", "free 0F0.act", "0B1 frees a buffer that 0B0 frees"),
        ("free 0F1.act", "alloc 0F1:77", "0F1:77 is no gradient bucket"),
        ("shape 0B* = 0I* 0W*", "shape 0B* = 0I* 1W*", r"shape 0B\* does not cover 0I\* 1W\*"),
        ("shape 0B* = 0I* 0W*", "shape 0B* = 0W* 0V*", r"covers 0V\*, which the graph does not have"),
        ("shape 0B* = 0I* 0W*", "shape 0B* = 0I* 0I*", "covers a node twice"),
        ("shape 0B* = 0I* 0W*", "shape 0B* = 0I* 0W*\nshape 0B* = 0I* 0W*", "said twice"),
        ("microbatches = 3", "microbatches = 4", "a plan of 4 microbatches, for a graph of 3"),
    ],
)
def test_what_the_graph_does_not_allow_is_refused(old: str, new: str, match: str) -> None:
    plan, text = small()
    assert old in text
    refused(text.replace(old, new), plan, match)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("piper-plan 1", "piper-plan 2", "not a plan of this version"),
        ("ops = ", "opps = ", "ops = ''"),
        ("programs = 2", "programs = two", "programs = 'two'"),
        ("programs = 2", "programs = 3", "the text has 2 programs"),
        ("program 1", "program 2", "program 2"),
        ("merge = fused", "merge: fused", "not a header line"),
        ("merge = fused", "merge = fused\nmerge = fused", "not a header line"),
        ("program 0\n", "", "an op outside a program"),
        ("wait 0F1", "weight 0F1", "'weight' out of place"),
        ("0F1                  post", "0F1                  post wait", "wait out of place"),
        ("shape 0B* = 0I* 0W*", "shape 0B* 0I* 0W*", "not a shape"),
        ("- compute  0F1", "- compute", "not an op"),
    ],
)
def test_what_is_no_plan_text_is_refused(old: str, new: str, match: str) -> None:
    plan, text = small()
    assert old in text
    broken = text.replace(old, new)
    if old == "- compute  0F1":
        broken = "\n".join("- compute" if x.startswith(old) else x for x in text.splitlines())
    refused(broken, plan, match, ErrorKind.IO)


def test_a_bucket_may_be_begun_only_once() -> None:
    plan = moe_plan("1f1b", 1, 2, zero=2, layers=1)
    text = plan_text(plan)
    word = next(w for w in text.split() if w.startswith("0RS0/") and ":" in w)
    refused(text.replace(word, f"{word} {word}"), plan, "is allocated twice")
    refused(text.replace(word, word.replace(":", ":0")), plan, "no gradient bucket and its bytes")


def test_limits_are_checked_before_anything_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan, text = small()
    refused(text.replace("ops = ", "ops = 99"), plan, "the text has", ErrorKind.IO)
    refused(text.replace(f"ops = {len(plan)}", "ops = 9999999"), plan, "ops = '9999999'", ErrorKind.IO)
    refused(text.replace(f"ops = {len(plan)}", "ops = 5"), plan, "more ops than the header's 5", ErrorKind.IO)
    monkeypatch.setattr(plan_read, "MAX_BYTES", 100)
    refused(text, plan, "the plan is too big", ErrorKind.IO)
    path = tmp_path / "plan.txt"
    path.write_text(text)
    refusal(read_plan, path, plan.graph, match="too big")


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    plan, _ = small()
    assert refusal(read_plan, tmp_path / "none", plan.graph, match="cannot read a plan").kind is ErrorKind.IO
    (tmp_path / "bytes").write_bytes(b"piper-plan 1\n\xff\n")
    assert refusal(read_plan, tmp_path / "bytes", plan.graph, match="not UTF-8").key == "line 2"


@given(st.text(max_size=400))
def test_no_text_does_anything_but_parse_or_be_refused(text: str) -> None:
    plan, good = small()
    for candidate in (text, "piper-plan 1\n" + text, good.replace("wait 0F1", text)):
        try:
            parse_plan(candidate, plan.graph)
        except PiperError as e:
            assert e.kind in (ErrorKind.IO, ErrorKind.ILLEGAL_PLAN)


@given(st.randoms(use_true_random=False))
def test_a_shuffled_text_parses_or_is_refused_but_never_passes_the_rules(rng: object) -> None:
    """Lines moved, dropped or doubled by hand: an error of the parser or of the rules, never a crash."""
    plan = moe_plan("1f1b", 2, 2, zero=2, layers=2)
    lines = plan_text(plan).splitlines()
    first = lines.index("program 0") + 1
    i, j = (rng.randrange(first, len(lines)) for _ in range(2))  # type: ignore[attr-defined]
    match rng.randrange(3):  # type: ignore[attr-defined]
        case 0:
            lines[i], lines[j] = lines[j], lines[i]
        case 1:
            del lines[i]
        case _:
            lines.insert(j, lines[i])
    try:
        back = parse_plan("\n".join(lines), plan.graph)
        check_plan(back)
    except PiperError:
        return
    # Some neighbours may stand in either order; then it is another plan that computes the same.
    assert sorted(back.texts) == sorted(plan.texts)


def test_a_plan_that_text_cannot_say_is_not_written() -> None:
    plan = stage_plan("1f1b", 2, 2, None, WHOLE)
    far = int(plan.bounds[1])
    refusal(plan_text, with_waits(plan, add=(0, far)), match="of program 1")
    for header in ({"ops": "3"}, {"Key": "x"}, {"key": "a\nb"}, {"key": " a"}):
        odd = Plan(**{**{f: getattr(plan, f) for f in plan.__dataclass_fields__}, "header": header})  # type: ignore[arg-type]
        refusal(plan_text, odd, match="cannot be written")


def test_a_plan_of_a_hundred_thousand_ops_is_written_in_a_second_or_so() -> None:
    from time import process_time

    plan = stage_plan("1f1b", 32, 512)
    began = process_time()
    text = plan_text(plan)
    assert len(plan) == 96_256 and process_time() - began < 5  # 0.3 s on a quiet core
    back = parse_plan(text, plan.graph)
    assert process_time() - began < 15  # 0.9 s
    assert np.array_equal(back.buffers.free, plan.buffers.free)
