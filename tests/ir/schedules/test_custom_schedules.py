"""Schedules of the user's own: PyTorch's CSV and Python builders."""

from pathlib import Path
from typing import Any

import pytest

from ir.core.errors import ErrorKind, PiperError
from ir.job.build import prepare
from ir.job.load import job_from
from ir.schedules.custom import from_builder, from_csv, from_rows
from ir.schedules.registry import NAMES, build
from ir.schedules.schedule import Schedule
from ir.verify import check_plan
from tests.refusals import refusal

GOOD = "def build(ranks, mbs):\n    return [[f'{r}{k}{m}' for k in 'FB' for m in range(mbs)] for r in range(ranks)]\n"


def read(tmp_path: Path, text: str | bytes) -> Schedule:
    path = tmp_path / "schedule.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return from_csv(path)


def ran(tmp_path: Path, code: str, reference: str = "mine.py:build", ranks: int = 2, mbs: int = 2) -> Schedule:
    (tmp_path / "mine.py").write_text(code)
    return from_builder(f"{tmp_path}/{reference}", ranks, mbs)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("zb2p", "v-half", "v-min")])
def test_every_schedule_survives_its_own_csv(tmp_path: Path, name: str) -> None:
    made = build(name, 4, 9)
    found = read(tmp_path, "\n".join(",".join(o.cells()) for o in made.orders))
    assert [o.cells() for o in found.orders] == [o.cells() for o in made.orders]
    assert found.placements == made.placements
    assert (found.ranks, found.microbatches, found.chunks) == (4, 9, made.chunks)


def test_bubbles_blanks_and_a_last_line_break_are_nothing(tmp_path: Path) -> None:
    found = read(tmp_path, " 0F0 ,,0F1,0B0,,0B1\r\n,1F0,1B0,1F1,1B1\r\n\r\n\n")
    assert [o.cells() for o in found.orders] == [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("", 2, "no ops"),
        ("0F0,0B0\n\n1F0,1B0", 2, "rank 1 has no ops"),
        ("hello,world", 2, "not an op: 'hello'"),
        ("0UNSHARD,0F0,0B0", 2, "not an op: '0UNSHARD'"),
        (b"\xff\xfe0F0", 2, "not UTF-8"),
        ("0F0,0B0\n0F0,1F0,1B0,1B0", 2, "stage 0 of microbatch 0 is on ranks 0 and 1"),
        ("0F0,2F0,2B0,0B0\n1F0,1B0", 2, "3 stages on 2 ranks"),
        ("0F0,0B0\n1F999999999,1B0", 2, "too many"),
        ("0F0,0B0,0F2,0B2\n1F0,1B0,1F2,1B2", 2, "stage 0 of microbatch 1 is in no rank's row"),
        ("0F0\n1F0,1B0", 3, "stage 0 does I or B of microbatch 0 0 times"),
        ("0F0,0F0,0B0\n1F0,1B0", 3, "stage 0 does F of microbatch 0 2 times"),
        ("0F0,0I0\n1F0,1I0,1W0", 3, "stage 0 does W or B of microbatch 0 0 times"),
    ],
)
def test_a_csv_with_a_mistake(tmp_path: Path, text: str | bytes, code: int, says: str) -> None:
    found = refusal(read, tmp_path, text)
    assert found.kind.exit_code == code and says in found.message
    assert found.file == str(tmp_path / "schedule.csv") and found.key in (
        "schedule.csv",
        "schedule.microbatches",
        "line 1",
    )


def test_an_order_that_deadlocks_is_found_in_the_plan(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    table = {"model": {"config": "tiny-llama"}, "parallel": {"pp": 2}, "schedule": {"csv": str(tmp_path / "s.csv")}}
    assert refusal(check_plan, prepare(job_from(table)).plan()).kind.exit_code == 3


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"pp": 1}, "schedule.csv"),
        ({"microbatches": 4}, "schedule.microbatches"),
        ({"stages_per_rank": 2}, "schedule.stages_per_rank"),
    ],
)
def test_a_csv_agrees_with_its_job(tmp_path: Path, keys: dict[str, Any], key: str) -> None:
    (tmp_path / "s.csv").write_text("0F0,0B0\n1F0,1B0\n")
    pp = keys.pop("pp", 2)
    schedule = {"csv": str(tmp_path / "s.csv"), **keys}
    with pytest.raises(PiperError) as found:
        prepare(job_from({"model": {"config": "tiny-llama"}, "parallel": {"pp": pp}, "schedule": schedule}))
    assert found.value.key == key and found.value.kind is ErrorKind.JOB and found.value.suggestion


def test_a_builder_returns_rows_a_mapping_or_a_schedule(tmp_path: Path) -> None:
    rows = ran(tmp_path, GOOD)
    assert [o.cells() for o in rows.orders] == [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    mapping = ran(tmp_path, GOOD.replace("return ", "return dict(enumerate(").rstrip() + "))\n")
    assert [o.cells() for o in mapping.orders] == [o.cells() for o in rows.orders]
    whole = ran(tmp_path, "from ir.schedules.registry import build as b\ndef build(p, m): return b('1f1b', p, m)\n")
    assert whole.name == "1f1b"


def test_a_builder_may_print_and_hold_dataclasses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "from __future__ import annotations\nfrom dataclasses import dataclass\nprint('hello')\n"
    ran(tmp_path, lines + "@dataclass\nclass Row:\n    cells: list[str]\n" + GOOD)
    out, err = capsys.readouterr()
    assert out == "" and "hello" in err, "stdout belongs to the command"
    assert [p.name for p in tmp_path.iterdir()] == ["mine.py"], "nothing is written beside it"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def (", "SyntaxError"),
        ("raise ValueError('why')", "ValueError: why"),
        ("import nowhere_to_be_found", "ModuleNotFoundError"),
        ("import sys; sys.exit(3)", "SystemExit"),
        ("def build(): pass", "TypeError"),
        ("def build(p, m): return build(p, m)", "RecursionError"),
        ("def build(p, m): return [][0]", "mine.py:1"),
        ("other = 1", "no function 'build'"),
        ("build = 3", "no function 'build'"),
        ("def build(p, m): pass", "returned NoneType"),
        ("def build(p, m): return ['0F0 0B0', '1F0 1B0']", "returned list"),
        ("def build(p, m): return [[1], [2]]", "returned list"),
        ("def build(p, m): yield ['0F0']", "returned generator"),
        ("def build(p, m): return [['0X0']]", "not an op"),
        ("def build(p, m): return [['0F0']]", "0 times"),
        (
            "from dataclasses import replace\nfrom ir.schedules.registry import build as b\n"
            "def build(p, m): return replace(b('1f1b', p, m), orders=b('1f1b', p, m).orders[:1])",
            "0 times",
        ),
    ],
)
def test_a_builder_with_a_mistake_is_the_user_s_error(tmp_path: Path, code: str, says: str) -> None:
    found = refusal(ran, tmp_path, code)
    assert says in found.message and found.file == str(tmp_path / "mine.py")
    assert found.key == "schedule.builder"


@pytest.mark.parametrize("reference", ["mine.py", "mine.py:", ":build", "nowhere.py:build", ".:build"])
def test_a_builder_is_named_by_file_and_function(tmp_path: Path, reference: str) -> None:
    found = refusal(ran, tmp_path, GOOD, reference)
    assert found.allowed == "file.py:function" and found.kind is ErrorKind.JOB


def test_two_microbatch_ranges_are_two_placements() -> None:
    found = from_rows([["0F0", "1F1", "1B1", "0B0"], ["1F0", "1B0", "0F1", "0B1"]], "mine")
    assert [(p.mbs, p.rank_of_stage) for p in found.placements] == [(range(0, 1), (0, 1)), (range(1, 2), (1, 0))]
