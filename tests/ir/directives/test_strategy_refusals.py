"""What a strategy file is refused for: exit code, file, and what the message says."""

from collections.abc import Callable
from copy import deepcopy
from hashlib import sha256
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ir.core.errors import ErrorKind, PiperError
from ir.directives.load import load_strategy
from tests.fuzz.corrupt import in_tree
from tests.ir.directives.strategies import (
    SHIPPED,
    SPLIT,
    A,
    B,
    act,
    one_f_one_b,
    order,
    place,
    planned,
    replicate,
    write,
)
from tests.refusals import refusal


def refused(path: str, **keys: Any) -> PiperError:
    found = refusal(planned, path, **keys)
    assert found.file and (found.suggestion or found.allowed)
    return found


@pytest.mark.parametrize(
    ("sizes", "key", "fix"),
    [
        ({"pp": 1}, "parallel.pp", "pp = 2"),
        ({"pp": 4, "dp": 1, "ep": 1}, "parallel.pp", "pp = 2"),
        ({"dp": 4}, "parallel.dp", "dp = 2"),
        ({"dp": 1, "ep": 1}, "parallel.dp", "dp = 2"),
        ({"microbatches": 8}, "schedule.microbatches", "microbatches = 4"),
        ({"stages_per_rank": 2}, "schedule.stages_per_rank", "stages_per_rank = 1"),
    ],
)
def test_sizes_must_agree_with_the_job(tmp_path: Path, sizes: dict[str, Any], key: str, fix: str) -> None:
    error = refused(write(tmp_path, [*SHIPPED["pp2_dp2_ep2"], SPLIT]), **sizes)
    assert (error.kind.exit_code, error.key, error.suggestion) == (2, key, fix)


def test_axes_of_the_job_that_the_file_does_not_shard(tmp_path: Path) -> None:
    dense = [d for d in SHIPPED["pp2_dp2_ep2"] if d["op"] != "shard"]
    assert refused(write(tmp_path, dense)).key == "parallel.ep"


BASE = SHIPPED["pp2_dp2_ep2"]
# file content, exit code, what the message says
BAD: list[tuple[object, int, str]] = [
    ("{{{", 2, "not JSON"),
    ("[" * 100_000, 2, "not JSON"),
    ('[{"op": "place", "filter": {"PP": NaN}, "devices": [0]}]', 2, "NaN"),
    ('[{"op": "place", "op": "place"}]', 2, "twice"),
    ({}, 2, "JSON list"),
    ([], 2, "nothing is placed"),
    ([3], 2, "directive 0 is no object"),
    ([*BASE, {"op": "plce"}], 2, "unknown op 'plce'"),
    ([BASE[0] | {"devces": A}], 2, "unknown key 'devces'"),
    ([place(0, A), place(2, B)], 2, "gaps"),
    ([place(0, [0]), place(1, B)], 2, "differ in length"),
    ([place(0, [0, 1]), place(1, [1, 2])], 2, "overlap"),
    ([place(0, [0, 0])], 2, "devices [0, 0]"),
    ([place(0, [-1, 2])], 2, "devices [-1, 2]"),
    ([place(None, A)], 2, "selects nothing"),
    ([place("*", A), place(1, B)], 2, "which stage"),
    ([place("0..9999999", A)], 2, "too many stages"),
    ([place("0,9999999", A), place(1, B)], 2, "too many stages"),
    ([place(0, A, "a"), place(1, B, "b")], 2, "stream 'b'"),
    ([*BASE, place(0, B)], 2, "stage 0 is placed on"),
    ([*BASE[:2], replicate(0, B), replicate(1, A)], 2, "but stage 0 is placed on [0, 2]"),
    ([*BASE[:2], {"op": "replicate", "filter": {}, "devices": A}], 2, "but stage 1 is placed on [1, 3]"),
    ([*BASE[:2], *BASE[4:]], 2, "no replicate names them"),
    ([*BASE, {"op": "shard", "filter": {"PB": 0}, "devices": A}], 2, "no node carries the tag 'PB'"),
    ([*BASE, {"op": "shard", "filter": {"EP": 99}, "devices": A}], 2, "selects nothing"),
    ([*BASE[:2], replicate(0, A, shard_grads="false")], 2, "shard_grads = 'false'"),
    ([*BASE[:2], replicate(0, A, bucket_size=0)], 2, "bucket size 0"),
    ([*BASE, SPLIT | {"num_microbatches": "__MBS__"}], 2, "num_microbatches"),
    ([*BASE, SPLIT | {"num_microbatches": 10**9}], 2, "num_microbatches"),
    ([*BASE, SPLIT | {"num_microbatches": 10**6}], 2, "too many"),
    ([*BASE, SPLIT | {"dim_name": "PP"}], 2, "dim_name"),
    ([*BASE, SPLIT, SPLIT | {"num_microbatches": 2}], 2, "2 microbatches, 4 before"),
    ([*BASE, SPLIT | {"filter": {"PP": 0}}], 2, "leaves part of the model out"),
    ([*BASE, SPLIT, order([act(0, 0, "F")])], 2, "filters"),
    ([*BASE, SPLIT, order([act(0, 0, "F")], [])], 2, "filters"),
    ([*BASE, SPLIT, order([act(0, 0, "*")], [act(0, 1, "F")])], 2, "'*' is no pass"),
    ([*BASE, SPLIT, order([act(0, 0, "F")], [act(0, 9, "F")])], 2, "selects nothing"),
    ([*BASE, order([act(0, 0, "F")], [act(0, 1, "F")])], 2, "no node carries the tag 'MB'"),
    ([*BASE, SPLIT, order([act(0, 0, "F")], [act(1, 0, "F")])], 2, "programs [0, 1]"),
    ([*BASE, SPLIT, order([act(0, 0, "F")], [act(0, 0, "F")])], 2, "ordered twice"),
    (
        [*BASE, SPLIT, order([act(1, 0, "B")], [act(1, 1, "BI")]), order([act(1, 0, "BI")], [act(1, 1, "F")])],
        2,
        "halves",
    ),
    ([*BASE, SPLIT, order([act(0, 0, "F") | {"EP": "*"}], [act(0, 1, "F")])], 2, "a part of stage 0"),
    ([*BASE, SPLIT, order([act(0, 0, "B")], [act(0, 0, "F")])], 3, "cycle"),
    ([*BASE, SPLIT, order([act(0, 0, "B")], [act(0, 1, "F")]), order([act(1, 1, "F")], [act(1, 0, "F")])], 3, "cycle"),
    ([*BASE, SPLIT, order([act(1, 0, "BW")], [act(1, 0, "BI")])], 3, "cycle"),
    ([*BASE, SPLIT, {"op": "order", "group": 0, "cells": ["0F0"]}], 3, "program"),
    ([*BASE, SPLIT, {"op": "order", "group": 0, "cells": ["F0"]}], 2, "not an op"),
    ([*BASE, SPLIT, {"op": "order", "group": 0, "cells": "0F0"}], 2, "cells = '0F0'"),
    ([*BASE, SPLIT, {"op": "order", "group": 9, "cells": ["0F0"]}], 2, "group 9"),
]


@pytest.mark.parametrize(("value", "code", "says"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_files_with_a_mistake(tmp_path: Path, value: object, code: int, says: str) -> None:
    error = refused(write(tmp_path, value)) if says not in ("not JSON",) else _io(write(tmp_path, value))
    assert error.kind.exit_code == code and says in error.message, error


def _io(path: str) -> PiperError:
    found = refusal(planned, path)
    assert found.file == path and found.kind is ErrorKind.DIRECTIVE
    return found


@pytest.mark.parametrize("name", ["nope.json", "."])
def test_a_file_that_is_not_there(tmp_path: Path, name: str) -> None:
    found = refusal(load_strategy, tmp_path / name)
    assert found.kind is ErrorKind.IO and found.key == "schedule.directives"


def test_what_is_said_of_files_that_are_nearly_right(golden: Callable[[str, str], None], tmp_path: Path) -> None:
    said = []
    for number, name in product(range(30), SHIPPED):
        value, rng = [deepcopy([*SHIPPED[name], one_f_one_b(0, 2, 4)])], Random(f"{name} {number}")
        for _ in range(rng.choice((1, 1, 2))):
            in_tree(value, rng)
        try:
            words = sha256("\n".join(planned(write(tmp_path, value[0]), microbatches=2).texts).encode()).hexdigest()[
                :12
            ]
        except PiperError as error:
            words = f"{error.kind} {error}".replace(str(tmp_path), ".")
        said.append(f"{name} {number}: {words[:400]}\n")
    golden("strategies.txt", "".join(said))
