"""Traces of a user's training: times put in come out by op class; other names, broken files and waits do not."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cost_models.profile.profile import Profile
from ir.graph.classes import node_classes
from ir.graph.graph import PerStepOp
from ir.job.build import PreparedJob
from ir.job.load import job_from
from piper_sim.pricing.prepare import hardware_of, prepare_priced
from piper_sim.study.calibrate.kineto import read_kineto
from tests.piper_sim.study.calibrate.kineto_trace import AUTOGRAD, Trace, nccl
from tests.refusals import refusal

US = 1e-6


def prepared_of(*sets: str) -> PreparedJob:
    table = {
        "model": {"config": "tiny-llama", "num_hidden_layers": 4, "seq_len": 128},
        "parallel": {"pp": 2},
        "schedule": {"name": "1f1b", "microbatches": 4},
    }
    job = job_from(table, sets)
    return prepare_priced(job, hardware_of(job))


def read(prepared: PreparedJob, *paths: str) -> Profile:
    return read_kineto(paths, prepared, hardware_of(prepared.job))


def seconds(profile: Profile, prepared: PreparedJob) -> dict[str, float]:
    """Of every node of the job that the profile knows, by its text."""
    g = prepared.plan().graph
    named = zip(g.nodes, node_classes(g), strict=True)
    found = {n.text(): profile.ops[c].time for n, c in named if c in profile.ops}
    return {name: m.median_s for name, m in found.items() if m is not None}


def test_a_range_takes_what_its_kernels_take_without_the_gaps(tmp_path: Path) -> None:
    t = Trace()
    for _ in range(3):
        t.range("0F0/l0.attn", (100.0, 50.0))
        t.range("l0.mlp", (200.0,))
        t.range("W/l0.mlp", (70.0, 10.0))
    prepared = prepared_of()
    profile = read(prepared, t.write(tmp_path / "trace.json"))
    took = seconds(profile, prepared)
    assert took["0F/l0.attn"] == pytest.approx(150 * US) and took["1F/l3.attn"] == took["0F/l0.attn"], "equal layers"
    assert took["0F/l0.mlp"] == pytest.approx(200 * US) and took["0W/l1.mlp"] == pytest.approx(80 * US)
    assert set(took) == {f"{s}{k}/l{n}.{p}" for s, n in ((0, 0), (0, 1), (1, 2), (1, 3))
                         for k, p in (("F", "attn"), ("F", "mlp"), ("W", "mlp"))}  # fmt: skip
    (entry,) = [e for k, e in profile.ops.items() if k.startswith("F/attn")]
    assert entry.alone and entry.time is not None and entry.time.count == 3 and entry.shape is not None
    assert profile.machine.gpu == "NVIDIA H100 80GB HBM3" and profile.machine.cores == 0
    assert not any("by themselves" in line for line in profile.origins)


def test_backward_is_launched_by_a_thread_that_has_no_ranges(tmp_path: Path) -> None:
    t = Trace()
    t.range("0B0/l0.mlp", (300.0,), AUTOGRAD)
    prepared = prepared_of()
    took = seconds(read(prepared, t.write(tmp_path / "trace.json")), prepared)
    assert took["0I/l0.mlp"] + took["0W/l0.mlp"] == pytest.approx(300 * US) and min(took.values()) > 0


def test_a_stage_is_divided_over_its_parts_and_what_is_named_inside_is_taken_out(tmp_path: Path) -> None:
    t = Trace()
    t.range("0F0", (900.0, 100.0))
    t.range("1F0", (640.0,), 71, ("1F0/head.head", 300.0), ("1F0/l2", 60.0))
    prepared = prepared_of()
    took = seconds(read(prepared, t.write(tmp_path / "trace.json")), prepared)
    first = {k: v for k, v in took.items() if k.startswith("0F/")}
    assert took["1F/head.head"] == pytest.approx(300 * US)
    rest = sum(took[k] for k in ("1F/head.norm",))
    assert rest > 0 and set(first) == {"0F/embed.embed", "0F/l0.attn", "0F/l0.mlp", "0F/l1.attn", "0F/l1.mlp"}


def test_an_update_is_the_optimizers_own_ranges_on_the_trace_of_its_rank(tmp_path: Path) -> None:
    files = []
    for rank, us in ((0, 500.0), (1, 800.0)):
        t = Trace(rank, 2)
        t.range("Optimizer.zero_grad#AdamW.zero_grad", (20.0,))
        t.range("Optimizer.step#AdamW.step", (us,))
        files.append(t.write(tmp_path / f"{rank}.json"))
    prepared = prepared_of("model.vocab_size=512", "parallel.layers=[1, 3]")
    profile = read(prepared, *files)
    updates = [n for n in prepared.plan().graph.nodes if n.kind is PerStepOp.UPDATE]
    assert len({n.numel for n in updates}) == 2
    took = seconds(profile, prepared)
    assert took["0UPDATE/p0"] == pytest.approx(520 * US) and took["1UPDATE/p1"] == pytest.approx(820 * US)


@pytest.mark.parametrize("kernels", [True, False], ids=["by kernels", "by the host"])
def test_an_update_has_all_that_is_launched_in_its_range(kernels: bool, tmp_path: Path) -> None:
    t = Trace(0, 2)
    t.range("UPDATE", (100.0,), 71, ("Optimizer.step#AdamW.step", 300.0), ("Optimizer.zero_grad#AdamW.zero_grad", 20.0))
    t.range("Optimizer.zero_grad#SGD.zero_grad", (7.0,))
    if not kernels:
        t.events = [e for e in t.events if e["cat"] == "user_annotation"]
    whole = sum(e["dur"] for e in t.events if e["name"] in ("UPDATE", "Optimizer.zero_grad#SGD.zero_grad"))
    prepared = prepared_of()
    took = seconds(read(prepared, t.write(tmp_path / "trace.json")), prepared)
    assert took["0UPDATE/p0"] == pytest.approx((427 if kernels else whole) * US)


def test_two_optimizers_are_one_update(tmp_path: Path) -> None:
    t = Trace(0, 2)
    for _ in range(3):
        t.range("Optimizer.step#AdamW.step", (100.0,))
        t.range("Optimizer.step#Muon.step", (500.0,))
    prepared = prepared_of()
    took = seconds(read(prepared, t.write(tmp_path / "trace.json")), prepared)
    assert took["0UPDATE/p0"] == pytest.approx(600 * US)


def test_stages_that_share_layers_are_divided_so_that_each_takes_what_it_took(tmp_path: Path) -> None:
    """Layers, table of words and head of times of their own, seen as whole stages alone."""
    layer, embed, head = 310.0, 25.0, 140.0
    files = []
    for stage, us in enumerate((2 * layer + embed, 2 * layer, 2 * layer, 2 * layer + head)):
        t = Trace(stage, 4)
        for mb, noise in enumerate((1.0, 1.0, 30.0, 1.0)):  # one of them was held up
            t.range(f"{stage}F{mb}", (us * noise,))
        files.append(t.write(tmp_path / f"{stage}.json"))
    prepared = prepared_of("parallel.pp=4", "parallel.layers=[2, 2, 2, 2]", "model.num_hidden_layers=8")
    profile = read(prepared, *files)
    assert "5 op classes were never timed by themselves: their parts of ranges are modelled" in profile.origins
    took = seconds(profile, prepared)
    assert took["1F/l2.attn"] + took["1F/l2.mlp"] == pytest.approx(layer * US, rel=1e-3)
    assert took["0F/embed.embed"] == pytest.approx(embed * US, rel=0.01)
    assert took["3F/head.head"] + took["3F/head.norm"] == pytest.approx(head * US, rel=0.01)


def test_a_trace_of_a_cpu_goes_by_the_ranges_themselves(tmp_path: Path) -> None:
    t = Trace()
    t.add("user_annotation", "0F0/l0.attn", 10.0, 400.0, 71, {})
    t.add("user_annotation", "0F0/l0.mlp", 500.0, 100.0, 71, {})
    prepared = prepared_of()
    took = seconds(read(prepared, t.write(tmp_path / "trace.json")), prepared)
    assert took["0F/l0.attn"] == pytest.approx(400 * US) and took["0F/l0.mlp"] == pytest.approx(100 * US)


# -- messages ---------------------------------------------------------------------------------------------------------


def test_a_collective_takes_what_the_last_to_come_took(tmp_path: Path) -> None:
    files = []
    for rank in (0, 1):
        t = Trace(rank, 2)
        for k in range(10):
            waited = 700.0 if k % 2 == rank else 0.0
            args = nccl("allreduce", 1000, "[0, 1]", k)
            t.kernel(90.0 + waited, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", **args)
        t.kernel(40.0, "ncclDevKernel_SendRecv(ncclDevKernelArgs)",
                 **nccl("send", 512, "[0, 1]", 1, dtype="BFloat16", **{"Src Rank": 0, "Dst Rank": 1}))  # fmt: skip
        files.append(t.write(tmp_path / f"{rank}.json"))
    links = read(prepared_of(), *files).links
    assert links["all_reduce 2@1 4000"].median_s == pytest.approx(90 * US) and links["all_reduce 2@1 4000"].count == 10
    assert links["p2p@1 1024"].median_s == pytest.approx(40 * US)


def test_nodes_are_the_jobs_and_a_list_cut_short_is_made_whole(tmp_path: Path) -> None:
    t = Trace(0, 64)
    cut = {"Process Group Ranks": "[0, 1, 2, ..., 63]", "Group size": 32}
    t.kernel(50.0, "ncclDevKernel_AllGather", **{**nccl("_allgather_base", 8, "[0, 8]", 1), "Out msg nelems": 16})
    t.kernel(60.0, "ncclDevKernel_ReduceScatter", **{**nccl("_reduce_scatter_base", 64, "", 2), **cut})
    whole = {**cut, "Global rank start": 0, "Global rank stride": 2}
    t.kernel(60.0, "ncclDevKernel_ReduceScatter", **{**nccl("_reduce_scatter_base", 128, "", 3), **whole})
    t.kernel(10.0, "ncclKernel_of_an_old_torch")
    profile = read(prepared_of(), t.write(tmp_path / "trace.json"))
    assert set(profile.links) == {"all_gather 2@2 64", "reduce_scatter 32 256", "reduce_scatter 32@8 512"}
    assert any("1 NCCL kernels" in line for line in profile.origins)


def test_nccls_kernels_are_no_part_of_the_op_around_them(tmp_path: Path) -> None:
    t = Trace()
    begin = t.now
    t.kernel(30.0)
    t.kernel(9000.0, "ncclDevKernel_AllReduce", **nccl("allreduce", 4, "[0, 1]", 1))
    t.add("user_annotation", "0F0/l0.attn", begin - 1, t.now - begin + 2, 71, {})
    prepared = prepared_of()
    assert seconds(read(prepared, t.write(tmp_path / "t.json")), prepared)["0F/l0.attn"] == pytest.approx(30 * US)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_trace_of_another_job_is_refused_with_what_a_name_may_be(tmp_path: Path) -> None:
    t = Trace()
    t.range("0F0/blocks.3.attention", (5.0,))
    t.range("ProfilerStep#3", (5.0,))
    caught = refusal(read, prepared_of(), t.write(tmp_path / "trace.json"), match="no range in it is named")
    assert "2F0" in str(caught.allowed) and "record_function" in str(caught.suggestion)


Change = Callable[[dict[str, Any]], object]
BROKEN: dict[str, tuple[Change, str]] = {
    "no events": (lambda t: t.pop("traceEvents"), "trace.json:1"),
    "an event that is none": (lambda t: t["traceEvents"].insert(2, "x"), "traceEvents[2]"),
    "a range without an end": (lambda t: t["traceEvents"][-1].pop("dur"), "traceEvents["),
    "a time that is text": (lambda t: t["traceEvents"][-1].update(ts="3"), "traceEvents["),
    "a range that runs backwards": (lambda t: t["traceEvents"][-1].update(dur=-2), "traceEvents["),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_trace_is_refused_with_its_place(name: str, tmp_path: Path) -> None:
    t = Trace()
    t.range("0F0/l0.attn", (100.0,))
    table = t.table()
    change, place = BROKEN[name]
    change(table)
    (tmp_path / "trace.json").write_text(json.dumps(table))
    caught = refusal(read, prepared_of(), str(tmp_path / "trace.json"))
    assert place in f"{caught.file} {caught.key}" and caught.suggestion


def test_text_that_ends_too_early_is_refused_with_its_line(tmp_path: Path) -> None:
    t = Trace()
    t.range("0F0/l0.attn", (100.0,))
    text = json.dumps(t.table(), indent=1)
    with gzip.open(tmp_path / "trace.json.gz", "wt") as f:
        f.write(text[: len(text) // 2])
    caught = refusal(read, prepared_of(), str(tmp_path / "trace.json.gz"), match="not JSON")
    assert int(str(caught.key).split()[1].rstrip(",")) > 5
    (tmp_path / "half.json.gz").write_bytes((tmp_path / "trace.json.gz").read_bytes()[:40])
    refusal(read, prepared_of(), str(tmp_path / "half.json.gz"), match="cannot read")
