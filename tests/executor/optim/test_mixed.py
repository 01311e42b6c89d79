"""Levels, buckets and streams that `replicate` mixes train as one process does, or are refused before a rank starts."""

from pathlib import Path
from typing import Any

import pytest

from executor.launch import run as cli
from ir.core.errors import ErrorKind, PiperError
from ir.graph.sync import buckets
from tests.executor.optim.mixed import LAYERS, ROUNDING, Case, off, outcome
from tests.executor.runs import judged

TWO = (1, 1, 1, 2, 1, "gpipe")
PIPE, DUAL, EXPERTS = (1, 1, 2, 2, 1, "1f1b"), (1, 1, 2, 2, 1, "dualpipe"), (1, 1, 2, 2, 2, "1f1b")


def said(zero: int, bucket_MiB: float | None = None, streams: str = "", **tags: object) -> dict[str, Any]:
    """A directive. streams: of its reductions and of its gathers."""
    out: dict[str, Any] = {"op": "replicate", "filter": tags, "zero": zero}
    if bucket_MiB is not None:
        out["bucket_MiB"] = bucket_MiB
    return out | dict(zip(("reduce_stream", "gather_stream"), streams.split(), strict=False))


def case(layout: tuple[int, int, int, int, int, str], family: str, *directives: dict[str, Any], **more: Any) -> Case:
    return Case(layout, family, more.get("mbs", 2), more.get("prefetch", 1), directives)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_one_layer_at_another_level_trains_the_same(level: int) -> None:
    """Buckets of one stage at two levels once had one name, and one of them was left out of every step."""
    assert off(case(TWO, "llama", said(0), said(level, L="1"))) <= ROUNDING


EQUAL = [
    case(TWO, "llama", said(1), said(1, 0.01, L="0..1"), mbs=3),
    case(TWO, "qwen3", said(1), said(1, None, "zero ep", L=2)),
    case(TWO, "llama", said(2, 0.01), said(3, 0.002, L="1,3"), said(0, L="-"), prefetch=0),
    case((2, 1, 1, 2, 1, "gpipe"), "qwen3", said(0), said(1, L=0), said(2, L=1), said(3, L=2)),
    case((1, 2, 1, 2, 1, "1f1b"), "llama tied", said(3, None, "default ep"), said(1, L="1..2"), prefetch=5),
    case(PIPE, "gpt2", said(2), said(3, 0.01, "zero dp", L="!2"), mbs=4),
    case(EXPERTS, "mixtral", said(1), said(3, EP="*"), said(2, 0.002, EP=1), mbs=3),
    case(EXPERTS, "deepseek_v3", said(3), said(0, EP="*"), said(1, None, "ep dp", EP="-", L=2)),
    case(DUAL, "llama", said(0), said(2, L="0,3"), said(3, L="1"), mbs=4),
    case((1, 1, 2, 1, 1, "dualpipe"), "llama tied", said(1), said(3, L="0..1"), said(0, 0.01, L=3), mbs=4),
    case((1, 1, 2, 2, 1, "zbv"), "llama", said(3, None, "zero zero"), said(2, L="1,2"), prefetch=2),
]


@pytest.mark.parametrize("mix", EQUAL, ids=str)
def test_mixes_train_as_one_process_does(mix: Case) -> None:
    assert off(mix, backend="local") <= ROUNDING


REFUSED = [
    ("microbatches", case(TWO, "llama", said(0), said(1, MB=0))),
    ("unnamed", case(TWO, "llama", said(1, L="*"))),
    ("unnamed", case(TWO, "llama", said(0, L="*"))),
    ("unnamed", case((1, 1, 2, 1, 1, "dualpipe"), "llama", said(0, PP=0))),
    ("two levels", case(PIPE, "llama tied", said(0), said(1, PP=1))),
    ("nothing", case(TWO, "llama", said(0), said(1, L=LAYERS))),
]


@pytest.mark.parametrize(("why", "mix"), REFUSED, ids=lambda x: str(x))
def test_what_cannot_mean_anything_is_refused_before_a_rank_starts(
    why: str, mix: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "launch", lambda *a, **k: pytest.fail("a rank was started"))
    assert outcome(mix)[0] == why


def test_parts_that_share_a_parameter_may_differ_in_size_and_stream_but_not_in_level(tmp_path: Path) -> None:
    pool = case(PIPE, "llama tied", said(1), said(1, 0.01, "zero ep", PP=1))
    _, plan = judged(tmp_path, *pool.mixed(tmp_path))
    (tied,) = (b for b in buckets(plan.graph) if len(b.owners) == 2)
    assert tied.replica.bucket_bytes is None and tied.replica.reduce_stream == "dp"
    with pytest.raises(PiperError, match=r"replicate says zero = 1 for embed.embed, zero = 0 for head.head") as refused:
        judged(tmp_path, *case(PIPE, "llama tied", said(1), said(0, PP=1)).mixed(tmp_path))
    assert refused.value.kind is ErrorKind.DIRECTIVE and str(tmp_path) in str(refused.value)
