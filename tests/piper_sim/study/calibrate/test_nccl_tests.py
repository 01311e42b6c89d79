"""nccl-tests' output: constants put in come out again; what cannot be right is refused with file and line."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from cost_models.profile.profile import CostSource, lookup
from ir.core.work import MessageKind
from piper_sim.study.calibrate.nccl_tests import TESTS, factor, parse, read_nccl_tests
from tests.piper_sim.study.calibrate.nccl_text import FACTORS, HEADER, row, table
from tests.refusals import refusal

DATA = Path(__file__).parents[3] / "data" / "calibrate"
LL, LL128, SIMPLE = (1.2e-5, 1 / 12e9), (3e-5, 1 / 45e9), (1.5e-4, 1 / 190e9)  # latency, seconds per byte


def fastest(size: int) -> float:
    return min(a + b * size for a, b in (LL, LL128, SIMPLE))


@pytest.mark.parametrize("test", FACTORS)
def test_known_constants_are_found_again(test: str, tmp_path: Path) -> None:
    (tmp_path / "out.txt").write_text(table(test, fastest))
    profile = read_nccl_tests([str(tmp_path / "out.txt")])
    name = "p2p@2" if test == "sendrecv" else f"{TESTS[test]} 16@2"
    curve = profile.curves[name]
    assert len(curve.pieces) == 3 and profile.fit_error < 0.02
    for piece, (latency, beta) in zip(curve.pieces, (LL, LL128, SIMPLE), strict=True):
        assert piece.alpha_s == pytest.approx(latency, rel=0.03) and piece.beta_s_per_byte == pytest.approx(
            beta, rel=0.02
        )
    between = lookup(profile, f"{name} 3000000")
    assert between is not None and between.source is CostSource.INTERPOLATED
    assert between.seconds == pytest.approx(fastest(3000000), rel=0.05)
    exact = profile.links[f"{name} {2**20}"]
    assert exact.count == 40 and exact.median_s == pytest.approx(fastest(2**20), rel=0.01)
    assert profile.machine.gpu == "NVIDIA H100 80GB HBM3" and profile.machine.gpus == 16
    assert "node-0" not in str(profile), "host names stay where they are"


def test_the_factors_are_those_of_nccl_tests() -> None:
    assert all(factor(TESTS[t], n) == FACTORS[t](n) for t in TESTS for n in (2, 3, 16))


def test_one_node_and_several_are_told_apart(tmp_path: Path) -> None:
    text = table("all_reduce", fastest, 8, 8) + table("all_reduce", fastest, 8, 1) + table("sendrecv", fastest, 2, 2)
    (tmp_path / "all.txt").write_text(text)
    assert set(read_nccl_tests([str(tmp_path / "all.txt")]).curves) == {"all_reduce 8@1", "all_reduce 8@8", "p2p@1"}


def test_what_others_print_in_between_is_read_over(tmp_path: Path) -> None:
    lines = table("alltoall", fastest).splitlines()
    noisy = [
        x
        for line in lines
        for x in (f"node-0:812:900 [0] NCCL INFO Channel 00/0 : {len(line)}", f"[1,0]<stdout>:{line}")
    ]
    with gzip.open(tmp_path / "log.gz", "wt") as f:
        f.write("mpirun says hello\n" + "\n".join(noisy))
    assert set(read_nccl_tests([str(tmp_path / "log.gz")]).curves) == {"all_to_all 16@2"}


@pytest.mark.parametrize("name", ["old_all_reduce.txt", "alltoall_no_in_place.txt"])
def test_older_layouts_and_halves_that_were_not_run(name: str) -> None:
    (one,) = parse((DATA / name).read_text(), name)
    assert one.ranks == 2 and len(one.seconds) == 4 and all(len(x) in (1, 2) for x in one.seconds.values())
    assert one.kind is (MessageKind.ALL_REDUCE if "reduce" in name else MessageKind.ALL_TO_ALL)
    assert {len(x) for x in one.seconds.values()} == ({2} if "reduce" in name else {1})


def test_a_test_that_prints_no_name_is_known_by_its_file_or_its_factor() -> None:
    unnamed = table("all_gather", fastest, named=False)
    assert parse(unnamed, "logs/all_gather.txt")[0].kind is MessageKind.ALL_GATHER
    refusal(parse, unnamed, "logs/1.txt", match="all_gather or all_to_all")
    assert parse(table("all_reduce", fastest, named=False), "1.txt")[0].kind is MessageKind.ALL_REDUCE
    assert parse(table("reduce_scatter", fastest, named=False), "1.txt")[0].kind is MessageKind.REDUCE_SCATTER


def swap(a: int, b: int) -> Callable[[str], str]:
    """Two columns of every row, changed about."""

    def change(text: str) -> str:
        out = []
        for line in text.splitlines():
            cells = line.split()
            if cells and cells[0].isdecimal():
                cells[a], cells[b] = cells[b], cells[a]
                line = " ".join(cells)
            out.append(line)
        return "\n".join(out)

    return change


def line_of(text: str, wanted: str) -> int:
    return next(i for i, line in enumerate(text.splitlines(), 1) if wanted in line)


BROKEN: dict[str, tuple[Callable[[str], str], str]] = {
    "time and algbw": (swap(5, 6), "algbw"),
    "algbw and busbw": (swap(6, 7), "that would be"),
    "size and count": (swap(0, 1), "algbw"),
    "out of place and in place halves": (swap(6, 9), "algbw"),
    "a column missing": (lambda t: "\n".join(x[:-8] if x[:1].isspace() else x for x in t.splitlines()), "columns"),
    "another test's name": (lambda t: t.replace("all_reduce_perf", "all_gather_perf"), "busbw"),
    "a test that no plan has": (lambda t: t.replace("all_reduce_perf", "broadcast_perf"), "no message of a plan"),
    "no devices": (lambda t: "\n".join(x for x in t.splitlines() if "Rank" not in x), "Rank"),
    "a rank missing": (lambda t: "\n".join(x for x in t.splitlines() if "Rank  3" not in x), "without gaps"),
    "tests side by side": (lambda t: t.replace("Rank  1 ", "Rank  0 "), "twice"),
    "wrong results": (lambda t: t.replace("Out of bounds values : 0 OK", "Out of bounds values : 7 FAILED"), "wrong"),
    "no header": (lambda t: t.replace(HEADER, ""), "no table"),
    "not a number": (lambda t: t.replace("12.", "12,"), "not numbers"),
    "nothing": (lambda t: "", "no table"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_right_is_refused(name: str, tmp_path: Path) -> None:
    change, message = BROKEN[name]
    path = tmp_path / "out.txt"
    path.write_text(change(table("all_reduce", fastest)))
    caught = refusal(read_nccl_tests, [str(path)], match=message)
    error = caught
    assert error.file is not None and error.file.startswith(str(path)) and error.key == "--from-nccl-tests"
    assert error.suggestion or error.allowed


def test_the_line_that_is_wrong_is_named(tmp_path: Path) -> None:
    text = table("all_reduce", fastest)
    good = row("all_reduce", 2**20, fastest(2**20), 16)
    assert good in text
    path = tmp_path / "out.txt"
    path.write_text(text.replace(good, good.replace(f"{2**20:12d}", f"{2**21:12d}", 1)))
    assert refusal(read_nccl_tests, [str(path)]).file == f"{path}:{line_of(text, good)}"


def test_files_that_are_not_there_or_no_text(tmp_path: Path) -> None:
    refusal(read_nccl_tests, [str(tmp_path / "none.txt")], match="cannot read")
    (tmp_path / "bytes").write_bytes(b"# size\n\xff\xfe")
    caught = refusal(read_nccl_tests, [str(tmp_path / "bytes")], match="not UTF-8")
    assert (caught.file, caught.key) == (str(tmp_path / "bytes"), "line 2")
