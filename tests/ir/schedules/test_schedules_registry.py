"""Schedules by name: aliases, defaults, and refusals that say what would do."""

from typing import Any

import pytest

from ir.core.errors import ErrorKind
from ir.schedules.registry import NAMES, build, canonical, default_chunks
from tests.refusals import refusal

REFUSALS = [
    (("dualpip", 4, 8), "unknown schedule 'dualpip'", "dualpipe"),
    (("1f1", 4, 8), "unknown schedule '1f1'", "1f1b"),
    (("zero-bubble-w", 4, 8), "unknown schedule 'zero-bubble-w'", "zbv"),
    (("dualpipe", 3, 12), "dualpipe needs an even number of ranks to pair them, not 3", "4 ranks, or dualpipev"),
    (("1f1b", 0, 8), "1f1b needs at least 1 rank, not 0", "1"),
    (("dualpipe", 0, 8), "dualpipe needs at least 2 ranks, not 0", "2"),
    (("gpipe", 4, 0), "gpipe needs at least 1 microbatch, not 0", "4"),
    (("1f1b", 4, 8, 2), "1f1b needs 1 stage per rank, not 2", "1, or interleaved-1f1b"),
    (("interleaved", 4, 8, 1), "interleaved-1f1b needs at least 2 stages per rank, not 1", "2, or 1f1b"),
    (("looped-bfs", 4, 8, 1), "looped-bfs needs at least 2 stages per rank, not 1", "2, or gpipe"),
    (("zb1p", 4, 8, 0), "zb1p needs at least 1 stage per rank, not 0", "1"),
    (("zb2p", 4, 8, 2), "zb2p needs 1 stage per rank, not 2", "1"),
    (("zbv", 4, 8, 3), "zbv needs 2 stages per rank, not 3", "2"),
    (("v-half", 4, 8, 1), "v-half needs 2 stages per rank, not 1", "2"),
    (("v-min", 4, 8, 4), "v-min needs 2 stages per rank, not 4", "2"),
    (("dualpipev", 4, 8, 1), "dualpipev needs 2 stages per rank, not 1", "2"),
    (("dualpipe", 4, 8, 2), "dualpipe needs 1 stage per rank, not 2; its two copies are not chunks", "1"),
]


@pytest.mark.parametrize(("shape", "message", "fix"), REFUSALS, ids=["-".join(map(str, r[0])) for r in REFUSALS])
def test_a_shape_that_does_not_exist_is_refused_with_what_would_do(shape: Any, message: str, fix: str) -> None:
    caught = refusal(build, *shape)
    error = caught
    assert (error.kind, error.kind.exit_code, error.message) == (ErrorKind.USAGE, 2, message)
    assert error.suggestion and error.suggestion.startswith(fix)
    assert error.allowed and error.key


def test_common_aliases_are_accepted() -> None:
    known = {
        "1F1B": "1f1b",
        "GPipe": "gpipe",
        "vpp": "interleaved-1f1b",
        "Interleaved": "interleaved-1f1b",
        "interleaved1f1b": "interleaved-1f1b",
        "ScheduleInterleaved1F1B": "interleaved-1f1b",
        "LoopedBFS": "looped-bfs",
        "looped_bfs": "looped-bfs",
        "zb-h1": "zb1p",
        "zbh1": "zb1p",
        "interleaved-zero-bubble": "zb1p",
        "ZB-H2": "zb2p",
        "zero-bubble-v": "zbv",
        "zbvzerobubble": "zbv",
        "zb-v": "zbv",
        "V-Half": "v-half",
        "vmin": "v-min",
        "dual-pipe": "dualpipe",
        "DualPipeV": "dualpipev",
        "dualpipe-v": "dualpipev",
    }
    assert {alias: canonical(alias) for alias in known} == known
    assert [canonical(name) for name in NAMES] == list(NAMES)
    assert [default_chunks(name) for name in NAMES] == [1, 1, 2, 1, 2, 2, 1, 1, 2, 2, 2, 1, 2]
