"""Search against enumeration: the same winner, the same front, bounds that hold, reasons that are true."""

import json
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib import import_module
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ir.core.errors import ErrorKind, PiperError
from ir.job import Job, load_job
from ir.job.load import KEYS
from piper_sim.pricing.prepare import hardware_of
from piper_sim.study import inputs
from piper_sim.study.predict import predict
from piper_sim.study.search import JobSearchResult, search
from piper_sim.study.search.bound import JobBound, JobBounds
from piper_sim.study.search.evaluate import BoundedJob, EvaluatedJob, JobRefusal, full
from piper_sim.study.search.search import front
from piper_sim.study.search.space import JobSpace, replaced
from piper_sim.study.search.workers import JobJournal

Point = tuple[float, float, int]
walked = import_module("piper_sim.study.search.search")  # beside it stands a function of this name


def drawn(seed: int) -> Job:
    """A tiny job and lists of values, the model, cluster, memory and lists drawn."""
    r = random.Random(seed)
    moe = seed % 2
    names = ["1f1b", "interleaved-1f1b", "zb1p", "zbv", "dualpipe", "dualpipev", "v-half", "1f1b-overlap"]
    lists: dict[str, Any] = {
        "tp": [1, 2],
        "pp": r.sample([1, 2, 4], 2),
        "ep": [1, 2, 4] if moe else [1],
        "zero": r.sample([0, 1, 2, 3], 2),
        "name": r.sample(names, 3),
        "microbatch_size": r.choice([[1], [1, 2]]),
        "recompute": r.choice([["none"], ["none", "full"], ["none", ["norm", "activation"]]]),
    }
    model = {"config": "tiny-moe" if moe else "tiny-llama", "seq_len": r.choice([256, 1024])}
    cluster = {"gpu": "h100-sxm", "nodes": 1, "gpus_per_node": 4, "memory_margin_GiB": 0}
    cluster["hbm_GiB"] = r.choice([1.3, 2.1, 80.0])
    more = {"optimizer": {"clip_norm": r.choice([0.0, 1.0])}, "costs": {"interference": r.choice(["none", "pairwise"])}}
    return load_job({"model": model, "cluster": cluster, "schedule": {"global_batch": 16}, "search": lists, **more})


def enumerated(job: Job) -> Iterator[tuple[int, Job, JobBound, Any]]:
    """Every legal configuration with its bounds and its prediction."""
    hardware = hardware_of(job)
    space, bounds = JobSpace.of(job, hardware), JobBounds(hardware)
    for number, changes in enumerate(space):
        try:
            one = space.job_of(changes)
            yield number, one, bounds.of(one), predict(one)
        except PiperError:
            continue


def told(found: JobSearchResult) -> list[tuple[float, float]]:
    return [(p["iteration_s"], max(p["memory"]["device_peak_bytes"].values())) for p in found.pareto]


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3])
def test_what_is_found_is_what_enumeration_finds(seed: int) -> None:
    job = drawn(seed)
    hardware = hardware_of(job)
    points: list[Point] = []
    for number, one, bound, p in enumerated(job):
        for key, values in job.search.overrides.items():
            assert getattr(getattr(one, KEYS[key]), key) in values
        first, peak = JobBounds(hardware).first(one), max(p.to_dict()["memory"]["device_peak_bytes"].values())
        assert first.seconds <= bound.seconds <= p.iteration_s and first.device_bytes <= bound.device_bytes <= peak
        assert bound.excess is None or not p.fits
        if p.fits:
            points.append((p.iteration_s, peak, number))
    found = search(job, budget_s=600.0)
    assert 20 < found.space <= 400 and found.proven and found.pareto_proven
    assert told(found) == [(t, m) for t, m, _ in front(points)]
    assert found.evaluated + len(found.all_rejected) >= found.space


def small(hbm_GiB: float = 80.0, **search_keys: Any) -> Job:
    """A dozen configurations of a tiny model on four GPUs."""
    lists = {"tp": [1, 2], "pp": [1, 2, 4], "name": ["1f1b", "gpipe"], "zero": [1], "microbatch_size": [1]}
    pins = {"pin": ["recompute", "layers", "cp", "ep"]}
    cluster = {"gpu": "h100-sxm", "nodes": 1, "gpus_per_node": 4, "memory_margin_GiB": 0, "hbm_GiB": hbm_GiB}
    model = {"config": "tiny-llama", "seq_len": 1024}
    table = {"model": model, "cluster": cluster, "schedule": {"global_batch": 16}, "search": lists | pins | search_keys}
    return load_job(table)


def test_a_bound_made_too_tight_loses_the_winner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what the test above would see if a bound were wrong."""
    base, honest = small(), JobBounds.of
    job = replace(base, parallel=replace(base.parallel, pp=4))
    best = search(job)
    assert best.best is not None and "parallel.pp" in best.best["changes"]
    wanted = best.best["iteration_s"]

    def tight(self: JobBounds, one: Job) -> JobBound:
        bound = honest(self, one)
        more = replace(bound, seconds=9 * bound.seconds, device_bytes=2 * bound.device_bytes)
        return more if one.parallel.pp < 4 else bound

    monkeypatch.setattr(JobBounds, "of", tight)
    lost = search(job)
    assert lost.best is not None and lost.proven and lost.best["iteration_s"] > wanted


@pytest.mark.parametrize(("pp", "left_out"), [([2, 4], True), ([1, 4], False)])
def test_lists_are_all_that_is_tried(pp: list[int], left_out: bool) -> None:
    """Against all of them, written out by hand: the job's own pipeline of one is no answer where it is not listed."""
    base = {
        "model": {"config": "tiny-llama", "num_hidden_layers": 8, "seq_len": 2048},
        "cluster": {"gpu": "h100-sxm", "nodes": 1, "gpus_per_node": 4},
    }
    lists = {"pp": pp, "name": ["1f1b", "gpipe"], "tp": [1], "zero": [1], "microbatch_size": [1], "recompute": ["none"]}

    def job(p: int, name: str, **more: Any) -> Job:
        parallel = {"pp": p, "dp": 4 // p, "zero": 1, "layers": "even"}
        return load_job({**base, "parallel": parallel, "schedule": {"global_batch": 8, "name": name}, **more})

    found = search(job(1, "1f1b", search={**lists, "layers": ["even"]}))
    steps = [predict(job(p, name)).iteration_s for p in pp for name in ("1f1b", "gpipe")]
    assert found.proven and found.best is not None and found.best["iteration_s"] == min(steps)
    assert (predict(job(1, "1f1b")).iteration_s < min(steps)) == left_out  # it would have won


@pytest.mark.parametrize(("room", "wins"), [(80.0, 0.0), (14.0, 1.0)])
def test_the_host_keeps_an_optimizer_where_nothing_else_fits(room: float, wins: float) -> None:
    """Found is what all values simulated one by one give: without offload where it fits, with it where it must."""
    base = {"model": {"config": "llama3-8b", "num_hidden_layers": 4, "seq_len": 1024}, "schedule": {"microbatches": 2}}
    base |= {"cluster": {"gpu": "h100-sxm", "nodes": 1, "gpus_per_node": 2, "hbm_GiB": room}, "parallel": {"pp": 2}}

    def job(**more: object) -> Job:
        return load_job({**base, **more})

    values = [0.0, 0.5, 1.0]
    free = ["tp", "cp", "pp", "zero", "layers", "microbatch_size", "recompute", "name", "stages_per_rank"]
    found = search(job(search={"offload": values, "pin": free}))
    runs = {v: predict(job(optimizer={"offload": v})) for v in values}
    best = min((v for v in values if runs[v].fits), key=lambda v: runs[v].iteration_s)
    assert best == wins and found.proven and found.best is not None
    assert found.best["iteration_s"] == runs[best].iteration_s
    assert runs[0.0].iteration_s < runs[0.5].iteration_s < runs[1.0].iteration_s


@pytest.mark.parametrize(("zero", "nic", "copies"), [(3, 20.0, 2), (3, 4000.0, 1), (1, 20.0, 1)])
def test_shards_stay_inside_a_node_where_that_pays(zero: int, nic: float, copies: int) -> None:
    """Found is the quicker of both, simulated by themselves; ZeRO-1 keeps gradients whole, none is tried."""
    model = {"config": "llama3-8b", "num_hidden_layers": 4, "seq_len": 1024}
    cluster = {"gpu": "h100-sxm", "nodes": 2, "gpus_per_node": 4, "nic_Gbps": nic}
    base = {"model": model, "cluster": cluster, "schedule": {"global_batch": 16}}
    pins = ["tp", "cp", "pp", "layers", "microbatch_size", "recompute", "name", "stages_per_rank"]
    found = search(load_job({**base, "parallel": {"zero": zero}, "search": {"zero": [zero], "pin": pins}}))
    runs = {n: predict(load_job({**base, "parallel": {"zero": zero, "dp_replicate": n}})) for n in (1, 2)}
    tried = (1, 2) if zero == 3 else (1,)
    assert found.proven and found.best is not None and found.space == len(tried)
    assert copies == min(tried, key=lambda n: runs[n].iteration_s)
    assert found.best["changes"].get("parallel.dp_replicate", 1) == copies
    assert found.best["iteration_s"] == runs[copies].iteration_s


def test_neither_workers_nor_the_seed_change_what_is_found() -> None:
    one = search(small())
    two, other = search(small(), workers=2), search(small(seed=7))
    for found in (two, other):
        assert found.proven and found.pareto == one.pareto and found.best == one.best
    assert [r.to_dict() for r in two.all_rejected] == [r.to_dict() for r in one.all_rejected]
    assert two.evaluated == one.evaluated


def test_a_search_cut_off_anywhere_goes_on_from_its_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed again and again, the last line torn as often as not: the same answer, and nothing simulated twice."""
    path, whole, r, ends = tmp_path / "kept.jsonl", search(small()), random.Random(0), 0
    monkeypatch.setattr(JobJournal, "add", _dying(JobJournal.add, r))
    while True:
        before = path.read_bytes().count(b"\n") if path.exists() else 0
        try:
            found = search(small(), workers=1 + (ends > 2), journal=str(path))
            break
        except KeyboardInterrupt:
            ends += 1
            text = path.read_bytes()
            assert text.count(b"\n") > before
            if r.random() < 0.5:
                path.write_bytes(text + b'{"changes": "{')
    assert ends >= 2 and (found.best, found.pareto, found.evaluated) == (whole.best, whole.pareto, whole.evaluated)
    assert [x.to_dict() for x in found.all_rejected] == [x.to_dict() for x in whole.all_rejected]
    assert path.read_bytes().count(b"\n") == 1 + found.evaluated
    with pytest.raises(PiperError, match="of another job"):
        search(small(hbm_GiB=40.0), journal=str(path))


def test_ctrl_c_reaches_the_process_that_searches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sends it to all: here to the first worker, as soon as there is one, which goes on."""
    workers, submit = list[Any](), ProcessPoolExecutor.submit

    def disturbed(pool: ProcessPoolExecutor, *args: Any) -> Any:
        found = submit(pool, *args)
        if not workers:
            workers.extend(pool._processes.values())
            os.kill(workers[0].pid, signal.SIGINT)
        return found

    monkeypatch.setattr(ProcessPoolExecutor, "submit", disturbed)
    search(small(), workers=2)
    workers[0].join()
    assert workers[0].exitcode == 0


def test_workers_that_die_at_the_very_end_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    job = small(microbatch_size=[1, 2])
    submit, whole = ProcessPoolExecutor.submit, search(job)

    def dying(pool: ProcessPoolExecutor, what: Any, *args: Any) -> Any:
        found = submit(pool, what, *args)
        for p in list(pool._processes.values()) if what is full else ():
            os.kill(p.pid or 0, signal.SIGKILL)
        return found

    monkeypatch.setattr(ProcessPoolExecutor, "submit", dying)
    assert len(whole.pareto) > 1 and search(job, workers=2).pareto == whole.pareto


def test_what_was_beaten_in_another_order_is_asked_for_its_allocators(tmp_path: Path) -> None:
    """Another seed, or a slower machine, comes to it before what beat it: here nothing in the journal was asked."""
    path, whole = tmp_path / "kept.jsonl", search(small())
    search(small(), journal=str(path))
    head, *rows = path.read_text().splitlines()
    for row in (kept := [json.loads(r) for r in rows]):
        if row["found"]["kind"] is None:
            row["found"]["device_bytes"] = None
    path.write_text("\n".join([head, *map(json.dumps, kept)]) + "\n")
    for _ in range(2):  # by what the journal held, then by what it has learned
        found = search(small(), journal=str(path))
        assert (found.best, found.pareto, found.evaluated) == (whole.best, whole.pareto, whole.evaluated)


def test_a_journal_is_of_what_files_held_and_of_this_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's own config, an order's table: changed where they lie, nothing that was found of them is taken."""
    config = json.loads((Path(__file__).parents[4] / "ir/workload/config/presets/tiny-llama.json").read_text())
    table = {
        "model": {"config": str(tmp_path / "config.json"), "seq_len": 64},
        "parallel": {"dp": 2},
        "search": {"tp": [1, 2], "pp": [1], "name": ["1f1b"], "pin": ["recompute"]},
    }

    def found(width: int) -> JobSearchResult:
        (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": width}))
        return search(load_job(table), journal=str(tmp_path / "kept.jsonl"))

    assert found(128).best == found(128).best
    with pytest.raises(PiperError, match="of another job, file"):
        found(256)
    found(128)
    monkeypatch.setattr(inputs, "program_digest", lambda: "another")
    with pytest.raises(PiperError, match="version of piper-sim"):
        found(128)


@pytest.mark.parametrize("text", ["notes without an end", "one\ntwo", '{"schema_version": 1, "space": "ab"}\n{"chan'])
def test_a_file_that_is_no_journal_of_this_space_is_left_as_it_is(text: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(PiperError, match="of another job"):
        search(small(), journal=str(path))
    assert path.read_text() == text


def test_a_journal_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PiperError, match="not a regular file"):
        search(small(), journal=str(tmp_path / "pipe"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        with pytest.raises(PiperError) as full_disk:
            search(small(), journal=str(tmp_path / "kept.jsonl"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (full_disk.value.kind, full_disk.value.key) == (ErrorKind.IO, "--journal")


def _dying(add: Callable[..., None], r: random.Random) -> Callable[..., None]:
    def dies(self: JobJournal, one: BoundedJob, found: EvaluatedJob) -> None:
        new = json.dumps(one.changes, sort_keys=True) not in self.known
        add(self, one, found)
        if new and r.random() < 0.7:
            raise KeyboardInterrupt

    return dies


@pytest.mark.parametrize(("share", "simulated"), [(0.5, 5), (0.0, 0)])
def test_bounds_leave_time_to_simulate(monkeypatch: pytest.MonkeyPatch, share: float, simulated: int) -> None:
    """A clock that is a second later whenever it is asked: the bounds of the whole space would take all the budget.

    Of nothing that was left, nothing but the job itself is simulated: the control.
    """
    job = small(zero=[0, 1, 2, 3], microbatch_size=[1, 2, 4])
    whole = len(list(JobSpace.of(job, hardware_of(job))))
    monkeypatch.setattr(walked, "time", SimpleNamespace(monotonic=count().__next__))
    monkeypatch.setattr(walked, "SIMULATED", share)
    found = search(job, budget_s=0.8 * whole)
    assert found.evaluated - 1 >= simulated and (simulated or found.evaluated == 1)
    assert found.space == whole and not found.proven and not found.pareto_proven


def test_the_order_in_which_a_large_space_is_bounded_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = search(drawn(3), budget_s=600.0)
    monkeypatch.setattr(walked, "MANY", 0)
    other = search(drawn(3), budget_s=600.0)
    assert usual.proven and other.proven and usual.space == other.space
    assert [(p["iteration_s"], p["memory"]) for p in usual.pareto] == [
        (p["iteration_s"], p["memory"]) for p in other.pareto
    ]


def test_a_budget_of_nothing_still_knows_the_space() -> None:
    found = search(small(), budget_s=0.0)
    assert not found.proven and found.evaluated == 0 and found.best is None and found.space > 8
    assert "budget" in found.to_dict()["reason"]


def test_where_none_can_be_built_the_reason_most_have_is_said() -> None:
    found = search(small(tp=[3]))
    reasons = [r.reason for r in found.all_rejected]
    said = str(found.to_dict()["reason"])
    most = max(set(reasons), key=reasons.count)
    assert found.proven and found.evaluated == 0 and reasons.count(said.partition("): ")[2]) == reasons.count(most)
    assert f"({reasons.count(most)} of {found.space})" in said


def test_every_reason_is_true() -> None:
    lists = {"tp": [1, 2, 8], "dp": [1, 2, 4], "name": ["1f1b", "dualpipe"], "layers": ["balanced", [4, 4]]}
    job = small(1.3, **lists, pin=["recompute", "cp", "ep"])
    found = search(job, budget_s=600.0)
    assert found.proven and found.pareto_proven and len(found.all_rejected) + len(found.pareto) == found.space
    assert any("simulated" in r.reason for r in found.all_rejected)
    for r in found.all_rejected:
        one = replaced(job, r.changes)
        if r.kind is JobRefusal.ILLEGAL:
            with pytest.raises(PiperError) as refusal:
                predict(one)
            assert refusal.value.kind.exit_code in (2, 3) and r.reason
        elif r.kind is JobRefusal.MEMORY:
            assert not predict(one).fits and ("rank" in r.reason) and "GiB" in r.reason
        else:
            p = predict(one).to_dict()
            peak = max(p["memory"]["device_peak_bytes"].values())
            after = "simulated" in r.reason  # of equal ones the first is kept
            assert any((t <= p["iteration_s"] if after else t < p["iteration_s"]) and m <= peak for t, m in told(found))
            assert after or "at least" in r.reason
    assert {r.kind for r in found.all_rejected} >= {JobRefusal.ILLEGAL, JobRefusal.MEMORY}


OPTIONS = """
costs.dispatcher=deepep | costs.software=megatron | routing.kind=zipf | routing.kind=hot | cluster.speed={3=0.5}
cluster.speed={3=1.7,1=1.2} | costs.host_model=inline | costs.interference=maxmin | parallel.order=ep tp cp dp pp
parallel.order=pp tp cp ep dp | precision.compute=fp8 | optimizer.clip_norm=0 | schedule.merge=template
schedule.merge=profile | schedule.delay_wgrad=true | cluster.gpus_per_node=3 | model.tie_word_embeddings=true
costs.free=['all_to_all'] | parallel.bucket_MiB=1 | model.attention=unfused | parallel.cp=2
schedule.microbatch_size=2 | costs.stage_times={F=0.01,B=0.02} | schedule.recompute=["norm","activation"]
schedule.recompute=full & schedule.recompute_layers=1::2 | schedule.recompute=mlp & schedule.recompute_layers=1
schedule.recompute=operators & schedule.recompute_layers=[0,5] | costs.grouped_gemm=false
optimizer.name=muon & parallel.zero=0 | optimizer.name=muon & parallel.zero=1 & optimizer.tp_mode=distributed
parallel.dp_replicate=2 & parallel.zero=2 | parallel.dp_replicate=2 & parallel.zero=3
costs.software=megatron-core & model.tie_word_embeddings=true & parallel.zero=1
"""


@pytest.mark.parametrize("option", [o.strip() for line in OPTIONS.split("\n") for o in line.split("|") if o.strip()])
def test_bounds_hold_whatever_a_job_asks_for(option: str) -> None:
    r = random.Random(option)
    model = {"config": "tiny-moe", "seq_len": 1024, "num_hidden_layers": 8}
    names = ["1f1b", "zb1p", "zbv", "dualpipe", "dualpipev", "1f1b-overlap", "interleaved-1f1b"]
    for _ in range(2):
        parallel = {"pp": r.choice([2, 4]), "tp": r.choice([1, 2]), "dp": r.choice([2, 4]), "ep": 2}
        parallel["zero"] = r.randrange(4)
        table = {"model": model, "parallel": parallel, "schedule": {"name": r.choice(names), "microbatches": 8}}
        job = load_job(table, option.split(" & "))
        bounds, p = JobBounds(hardware_of(job)), predict(job)
        first, bound, peak = bounds.first(job), bounds.of(job), p.to_dict()["memory"]["device_peak_bytes"]
        assert first.seconds <= bound.seconds <= p.iteration_s
        assert first.device_bytes <= bound.device_bytes <= max(peak.values())


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe", "interleaved-1f1b"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_bounds_hold_over_two_towers(name: str, recompute: str) -> None:
    model = {"model_type": "t5", "num_layers": 5, "num_decoder_layers": 3, "seq_len": 64, "encoder_seq_len": 1024}
    for pp, zero in ((2, 1), (4, 3)):
        schedule = {"name": name, "microbatches": 8, "recompute": recompute}
        job = load_job({"model": model, "parallel": {"pp": pp, "dp": 2, "zero": zero}, "schedule": schedule})
        bounds, p = JobBounds(hardware_of(job)), predict(job)
        bound, peak = bounds.of(job), p.to_dict()["memory"]["device_peak_bytes"]
        assert bounds.first(job).seconds <= bound.seconds <= p.iteration_s
        assert bound.device_bytes <= max(peak.values())


def test_a_job_that_recomputes_some_layers_is_searched_beside_all_and_none() -> None:
    table = {"model": {"config": "tiny-llama", "num_hidden_layers": 4, "seq_len": 64}, "parallel": {"pp": 2}}
    table |= {"schedule": {"name": "1f1b", "microbatches": 4, "recompute": ["mlp", "attention"], "recompute_layers": 1}}
    job = load_job(table | {"search": {"tp": [1], "pp": [2], "cp": [1], "zero": [1], "pin": ["name"]}})
    space = JobSpace.of(job, hardware_of(job))
    found = {(str(x.schedule.recompute), x.schedule.recompute_layers) for x in (space.job_of(c) for c in space)}
    assert ("('mlp', 'attention')", 1) in found and {r for r, n in found if n is None} >= {"none", "full"}
    assert search(job, budget_s=60.0).proven


def test_another_recompute_says_that_the_job_s_layers_are_left_out() -> None:
    model = {"config": "tiny-llama", "num_hidden_layers": 4, "seq_len": 64}
    schedule = {"name": "1f1b", "microbatches": 4, "recompute": "full", "recompute_layers": "1::2"}
    lists = {"tp": [1], "pp": [2], "zero": [1], "recompute": ["none", "full", ["norm"]], "pin": ["name"]}
    found = search(load_job({"model": model, "parallel": {"pp": 2}, "schedule": schedule, "search": lists}))
    assert {"none", ("norm",)} & {p["changes"].get("schedule.recompute") for p in found.pareto}
    for p in found.pareto:
        new = {k.split(".")[1]: v for k, v in p["changes"].items() if k.startswith("schedule.")}
        said = {k: v for k, v in (schedule | new).items() if v is not None}
        by_hand = load_job({"model": model, "parallel": {"pp": 2}, "schedule": said})
        assert predict(by_hand).iteration_s == p["iteration_s"]
