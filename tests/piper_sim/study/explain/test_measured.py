"""Traces explained: what a run's rows say is what its simulation says; Kineto's kernels become rows."""

import json
import signal
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ir.trace.text import write_trace
from ir.trace.trace import Trace
from piper_sim.app.cli import main
from piper_sim.study.explain import StepExplanation, explained
from piper_sim.study.explain.kineto import read_traces
from piper_sim.study.explain.measured import explain_traces
from piper_sim.study.prediction import Prediction
from tests.piper_sim.pricing.prediction_cases import asked
from tests.refusals import refusal


def job(**sections: Any) -> dict[str, Any]:
    out: dict[str, Any] = {
        "model": {"config": "tiny-llama", "seq_len": 512, "num_hidden_layers": 8},
        "cluster": {"gpu": "h800-sxm", "nodes": 1, "gpus_per_node": 8},
        "parallel": {"pp": 4, "dp": 2, "layers": [2, 2, 2, 2]},
        "schedule": {"name": "1f1b", "microbatches": 8},
        "costs": {"interference": "none", "free": ["host"]},
    }
    for section, keys in sections.items():
        out[section] = {**out.get(section, {}), **keys}
    return out


def trace_of_all(p: Prediction, steps: Sequence[int] = (0, 1)) -> Trace:
    """What a run on all ranks would leave: the rows of every replica's own class."""
    n, rows = len(p.plan), []
    names = [p.plan.streams[s][1] for s in p.plan.stream.tolist()]
    for position, k in enumerate(p.planned.classes.of.tolist()):
        for s in steps:
            start, end = (x[s, k * n : (k + 1) * n].tolist() for x in (p.run.start, p.run.end))
            for i in range(n):
                rank = int(p.plan.program[i]) * p.prepared.mesh.program_stride + position
                rows.append((s, rank, names[i], p.plan.text(i), start[i], start[i], end[i]))
    return Trace.of({"writer": "executor"}, rows)


def sums(found: StepExplanation) -> None:
    assert sum(sum(row.values()) for row in found.idle.values()) == sum(c["seconds"] for c in found.causes)
    assert sum(found.spent.values()) == found.iteration_s and min(found.spent.values()) >= 0
    path = found.critical_path
    assert path[0]["start_s"] == 0 and path[-1]["end_s"] == found.iteration_s
    assert all(a["end_s"] == b["start_s"] for a, b in pairwise(path))


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved-1f1b", "zbv", "dualpipe"])
def test_a_trace_says_what_the_simulation_of_it_says(name: str) -> None:
    layers = [1] * 8 if name in ("interleaved-1f1b", "zbv") else [2] * 4
    p, _ = asked(job(schedule={"name": name}, parallel={"layers": layers}))
    known, found = explained(p), explain_traces([trace_of_all(p)])
    sums(found)
    assert found.iteration_s == pytest.approx(known.iteration_s, rel=0.01)
    for cause in ("compute", "warmup", "drain", "link", "split"):
        assert found.spent.get(cause, 0.0) == pytest.approx(known.spent.get(cause, 0.0), abs=0.04 * known.iteration_s)


@pytest.mark.parametrize("slow", [0, 3, 6])
def test_a_slow_rank_is_named_in_a_trace(slow: int) -> None:
    p, _ = asked(job(cluster={"speed": {str(slow): 0.5}}))
    found = explain_traces([trace_of_all(p)])
    sums(found)
    assert (found.causes[0]["cause"], found.causes[0]["rank"]) == ("straggler", slow)
    calm, _ = asked(job())
    assert all(c["cause"] != "straggler" for c in explain_traces([trace_of_all(calm)]).causes)


def test_a_bad_split_and_a_slow_link_are_named_in_a_trace() -> None:
    p, _ = asked(job(parallel={"layers": [1, 1, 5, 1]}))
    first = explain_traces([trace_of_all(p)]).causes[0]
    assert (first["cause"], first["rank"] // 2) == ("split", 2)
    p, _ = asked(job(cluster={"gpus_per_node": 2, "nodes": 4, "nic_Gbps": 1}))
    assert explain_traces([trace_of_all(p)]).causes[0]["cause"] == "link"


def test_a_file_a_file_for_each_rank_and_the_job_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    p, _ = asked(job())
    whole = trace_of_all(p)
    paths = [tmp_path / f"{r}.tsv" for r in range(8)]
    for r, path in enumerate(paths):
        rows = np.flatnonzero(whole.rank == r).tolist()
        columns = [(0, r, whole.stream[i], whole.op[i]) for i in rows if whole.step[i] == 1]
        times = [(whole.post_s[i], whole.start_s[i], whole.end_s[i]) for i in rows if whole.step[i] == 1]
        path.write_text(write_trace(Trace.of({}, [(*a, *b) for a, b in zip(columns, times, strict=True)])))
    (tmp_path / "all.tsv").write_text(write_trace(whole))
    lines = [f"{s}.{k} = {json.dumps(v)}\n" for s, t in job().items() for k, v in t.items()]
    (tmp_path / "job.toml").write_text("".join(lines))
    assert main(["explain", "--json", "--trace", *map(str, paths)]) == 0
    assert set(json.loads(capsys.readouterr().out)["idle"]) == {"0", "1", "2", "3"}
    assert main(["explain", str(tmp_path / "job.toml"), "--json", "--trace", str(tmp_path / "all.tsv")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["difference"].values()) == pytest.approx(found["iteration_s"] - p.iteration_s, abs=1e-15)
    assert found["what_ifs"]
    for other, op in (("schedule.microbatches=9", "lacks 0B8"), ("schedule.microbatches=7", "computed 0B7")):
        asked_of = ["explain", str(tmp_path / "job.toml"), "--set", other]
        assert main([*asked_of, "--json", "--trace", str(paths[0])]) == 2
        assert op in json.loads(capsys.readouterr().out)["error"]["message"]
    refusal(explain_traces, [whole, whole], match="in two traces")
    assert main(["explain", "--json"]) == 2
    assert main(["explain", "a", "b", "--trace", "c", "--json"]) == 2


def test_what_is_computed_side_by_side_is_spent_once() -> None:
    rows = [(0, 0, "compute", f"0F{k}", 0.0, float(k), k + 1.5) for k in range(4)]
    rows += [(0, 0, "compute", "0B0", 0.0, 0.5, 0.75), (0, 1, "compute", "1F0", 0.0, 2.0, 4.0)]
    found = explain_traces([Trace.of({}, rows)])
    sums(found)
    assert found.iteration_s == 4.5 and found.spent["compute"] == (4.5 + 2.0) / 2


C, S, R = "compute", "send>1", "recv<0"
IN_TURN: dict[str, list[tuple[int, int, str, str, float, float, float]]] = {
    "ops of no length that end together": [
        (0, 0, C, "0F0", 0, 0, 1), (0, 0, C, "0F1", 2, 2, 2), (0, 0, C, "0F2", 2, 2, 2), (0, 0, C, "0B0", 4, 4, 5),
    ],
    "sends that end before anybody receives": [
        (0, 0, C, "0F0", 0, 0, 1), (0, 0, S, "0SEND_F0", 1, 1, 2), (0, 0, C, "0F1", 2, 2, 2.125),
        (0, 0, S, "0SEND_F1", 2.25, 2.25, 2.5), (0, 1, R, "1RECV_F1", 2, 2, 2.5), (0, 1, C, "1F1", 2.5, 2.5, 3),
        (0, 1, R, "1RECV_F0", 3, 3, 4), (0, 1, C, "1F0", 4, 4, 5), (0, 0, C, "0B0", 5, 5, 6),
    ],
}  # fmt: skip


@pytest.mark.parametrize("what", IN_TURN)
def test_nothing_waits_for_itself_by_way_of_others(what: str) -> None:
    """Else a wait is traced back round and round: the alarm is for that."""

    def round_and_round(*_: object) -> None:
        raise AssertionError("no end of it")

    before = signal.signal(signal.SIGALRM, round_and_round)
    signal.alarm(20)
    try:
        found = explain_traces([Trace.of({}, IN_TURN[what])])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    sums(found)
    assert found.critical_path[-1]["op"] == "0B0"


def test_a_step_that_was_cut_short_is_not_the_median() -> None:
    """Of three steps the last one stops in its middle, as a killed run leaves it."""

    def trace(rows: Sequence[tuple[int, int, str, str, float]]) -> Trace:
        return Trace.of({}, [(*row[:4], row[4], row[4], row[4] + 1) for row in rows])

    def ops(s: int, at: float) -> list[tuple[int, int, str, str, float]]:
        links = [(s, 0, "send>1", "0SEND_F0", at + 1), (s, 1, "recv<0", "1RECV_F0", at + 1)]
        return [
            (s, 0, "compute", "0F0", at),
            *links,
            (s, 1, "compute", "1F0", at + 2),
            (s, 0, "compute", "0B0", at + 4),
        ]

    rows = [*ops(0, 0.0), *ops(1, 5.0), *ops(2, 10.0)]
    assert explain_traces([trace(rows)]).iteration_s == explain_traces([trace(rows[:-2])]).iteration_s == 5
    refusal(explain_traces, [trace([*rows, rows[5]])], match="0F0 of rank 0 stands twice in step 1")
    skewed = [(s, r, stream, op, at + 50 * r) for s, r, stream, op, at in rows]
    refusal(explain_traces, [trace(skewed)], match="its clock is another")


def test_only_steps_that_all_ranks_have_are_explained() -> None:
    """A trace of each rank, of which one began later: else the step of the rank alone is explained, without a word."""

    def trace(rank: int, steps: Sequence[int]) -> Trace:
        ends = {s: 10.0 * s + (5 if s == 2 else 3) for s in steps}
        return Trace.of({}, [(s, rank, "compute", f"{rank}F0", 10.0 * s, 10.0 * s, end) for s, end in ends.items()])

    found = explain_traces([trace(0, range(5)), trace(1, [2])])
    assert (found.iteration_s, list(found.idle)) == (5.0, ["0", "1"])
    alien = [trace(0, [0, 1]), trace(1, [2, 3])]
    error = refusal(explain_traces, alien, match="no step has all ranks: step 0 lacks rank 1")
    assert error.suggestion == "traces of the same steps of one run"


def test_what_ranks_wait_for_between_two_steps_is_in_the_step() -> None:
    """Tokens read late: from end to end, as `run` counts; behind steps that were not profiled, from the first op."""
    rows = [(s, r, "compute", f"{r}F0", 5.0 * s, 5.0 * s, 5.0 * s + 3) for s in (3, 4, 5, 9) for r in (0, 1)]
    found = explain_traces([Trace.of({}, rows)])
    sums(found)
    assert (found.iteration_s, found.spent) == (5.0, {"compute": 3.0, "host": 2.0})
    assert [(x["cause"], x["start_s"], x["end_s"]) for x in found.critical_path] == [("host", 0, 2), ("compute", 2, 5)]
    assert explain_traces([Trace.of({}, [x for x in rows if x[0] in (4, 9)])]).iteration_s == 3.0


def kernel(name: str, ts: float, dur: float, launch: int, **args: object) -> list[dict[str, Any]]:
    call = {"ph": "X", "cat": "cuda_runtime", "name": "launch", "ts": float(launch), "dur": 1.0, "pid": 1, "tid": 1}
    return [
        {**call, "args": {"correlation": launch}},
        {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": {"correlation": launch, **args}},
    ]


def note(name: str, ts: float, dur: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1}


@pytest.mark.parametrize("named", [True, False])
def test_kineto_traces_one_file_for_each_rank(named: bool, tmp_path: Path) -> None:
    """Rank 1 computes 300 us where rank 0 does 100; both then meet for 50 in an all-reduce that rank 0 waits in."""
    paths = []
    for rank, took in enumerate((100.0, 300.0)):
        meet = {"Collective name": "allreduce", "Process Group Name": "0"}
        events = [note("ProfilerStep#5", 0, 500), *kernel("gemm", 20, took, 10)]
        events += [*kernel("ncclDevKernel_AllReduce", 20 + took, 350 - took, 30, **meet), *kernel("adam", 370, 40, 40)]
        events += [note("0F0", 5, 10), note("UPDATE", 38, 5)] if named else []
        paths.append(str(tmp_path / f"{rank}.json"))
        Path(paths[-1]).write_text(json.dumps({"traceEvents": events, "distributedInfo": {"rank": rank}}))
    traces, unnamed = read_traces(paths), ["kernels", "kernels #2"]
    assert sorted(traces[0].op) == [
        *(["0F0", "UPDATE"] if named else []),
        "allreduce 0 #1",
        *([] if named else unnamed),
    ]
    found = explain_traces(traces)
    sums(found)
    assert found.iteration_s == pytest.approx(390e-6)
    first = found.causes[0]
    assert (first["cause"], first["rank"]) == ("straggler" if named else "split", 1)
    assert first["seconds"] == pytest.approx(100e-6 if named else 200e-6, rel=0.3)
    assert [(x["rank"], x["cause"]) for x in found.critical_path][-2:] == [(0, "collective"), (0, "compute")]


def test_a_file_without_kernels_is_named_not_left_out(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{rank}.json") for rank in range(2)]
    for rank, path in enumerate(paths):
        events = [note("ProfilerStep#5", 0, 500), *kernel("gemm", 20, 100, 10 if rank == 0 else 900)]
        Path(path).write_text(json.dumps({"traceEvents": events, "distributedInfo": {"rank": rank}}))
    assert refusal(read_traces, paths, match="no GPU kernel in it, in any of its steps").file == paths[1]


def test_times_since_1970_keep_their_nanoseconds(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{rank}.json") for rank in range(2)]
    for rank, path in enumerate(paths):
        top = {"baseTimeNanoseconds": 1_750_000_000_000_000_000 + 1000 * rank, "distributedInfo": {"rank": rank}}
        Path(path).write_text(json.dumps({"traceEvents": kernel("gemm", 20.1, 1.3, 10), **top}))
    first, second = read_traces(paths)
    assert (first.end_s - first.start_s) * 1e6 == pytest.approx(1.3, abs=1e-6)
    assert (second.start_s - first.start_s) * 1e6 == pytest.approx(1.0, abs=1e-6)
