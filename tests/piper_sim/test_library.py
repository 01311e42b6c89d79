"""The library: what a script or a notebook gets, the same as the commands print, and nothing heavy before its time."""

import json
import subprocess
import sys
from typing import Any

import pytest

import piper_sim
from cost_models.profile.file import profile_text
from cost_models.profile.profile import MeasuredCost, OpEntry, Profile, ProfileMachine
from piper_sim.app.cli import main

TABLE: dict[str, Any] = {
    "model": {"config": "tiny-llama", "seq_len": 64},
    "parallel": {"pp": 2, "dp": 2},
    "schedule": {"name": "vpp", "microbatches": 4},
}


@pytest.fixture(scope="module")
def predicted() -> piper_sim.Prediction:
    return piper_sim.predict(piper_sim.load_job(TABLE))


def test_importing_it_loads_nothing_heavy() -> None:
    heavy = ("torch", "matplotlib", "pandas", "simpy", "numba", "numpy")
    code = f"import sys, piper_sim; dir(piper_sim); print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
    code = "import sys, piper_sim; piper_sim.predict, piper_sim.compare; print('pandas' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_every_public_name_is_there_and_no_other() -> None:
    assert all(getattr(piper_sim, name).__doc__ for name in piper_sim.__all__)
    with pytest.raises(AttributeError, match="prediction"):
        piper_sim.prediction  # noqa: B018


def test_a_job_is_read_from_a_file_as_from_a_mapping(tmp_path: Any) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[model]\nconfig = "tiny-llama"\nseq_len = 64\n[parallel]\npp = 2\n')
    read = piper_sim.load_job(path, set=["schedule.microbatches=4"])
    given = {"model": {"config": "tiny-llama", "seq_len": 64}, "parallel": {"pp": 2}, "schedule": {"microbatches": 4}}
    assert read.schedule == piper_sim.load_job(given).schedule
    with pytest.raises(piper_sim.PiperError, match="unknown key") as e:
        piper_sim.load_job({"model": {"config": "tiny-llama"}, "parallel": {"pipeline": 2}})
    assert e.value.key == "parallel.pipeline" and e.value.kind is piper_sim.ErrorKind.JOB


def test_tables_hold_what_the_object_says(predicted: piper_sim.Prediction) -> None:
    found, memory, times = predicted.to_dict(), predicted.memory, predicted.breakdown
    assert found["fits"] is predicted.fits and found["iteration_s"] == predicted.iteration_s
    assert times.sum(axis=1).tolist() == pytest.approx([predicted.iteration_s] * 2, rel=1e-9)
    assert {str(r): row for r, row in zip(times.index, times.to_dict("records"), strict=True)} == found[
        "time_breakdown"
    ]
    parts = [*found["memory"]["breakdown_bytes"]["0"], "cache"]
    assert memory[parts].sum(axis=1).tolist() == memory["device_peak"].tolist()
    assert memory["device_peak"].tolist() == list(found["memory"]["device_peak_bytes"].values())
    assert (memory["low"] <= memory["device_peak"]).all() and (memory["device_peak"] <= memory["high"]).all()


def test_the_trace_is_the_step(predicted: piper_sim.Prediction) -> None:
    trace = predicted.trace
    assert list(trace.columns) == ["step", "rank", "stream", "op", "post_s", "start_s", "end_s"]
    assert len(trace) == len(predicted.plan) and (trace.start_s <= trace.end_s).all()
    assert sorted(trace[trace.stream == "compute"].op.str[:2].unique())[0] == "0B" or "0F0" in set(trace.op)


def test_what_is_done_to_a_table_or_an_object_stays_there(predicted: piper_sim.Prediction) -> None:
    explained = piper_sim.explain(piper_sim.load_job(TABLE))
    known = json.dumps([predicted.to_dict(), explained.to_dict()]), [predicted.memory, predicted.breakdown]
    found, causes = predicted.to_dict(), explained.to_dict()
    found["memory"]["capacity_bytes"], found["time_breakdown"]["0"]["compute"] = 0, 99.0
    causes["causes"][0]["seconds"], causes["what_ifs"][0]["gain_s"], causes["idle"]["0"]["x"] = 9, 9, 9
    for table in (predicted.memory, predicted.breakdown, predicted.trace):
        table.iloc[:, 0] = 7
    assert json.dumps([predicted.to_dict(), explained.to_dict()]) == known[0]
    assert all(a.equals(b) for a, b in zip([predicted.memory, predicted.breakdown], known[1], strict=True))


def test_what_a_prompt_shows_is_short(predicted: piper_sim.Prediction) -> None:
    job = piper_sim.load_job(TABLE)
    compared = piper_sim.compare(job, ["1f1b", "gpipe"])
    assert repr(predicted).startswith("Prediction(tiny-llama, interleaved-1f1b, 4 GPUs: 0.0")
    assert set(repr(compared)[len("Comparison(") : -1].split(", ")) == {"1f1b", "gpipe"}
    assert len(repr(piper_sim.explain(job))) < 5000 and len(repr(piper_sim.search(job, budget_s=0.0))) < 5000


def test_a_notebook_gets_a_picture(predicted: piper_sim.Prediction) -> None:
    assert predicted._repr_png_()[:4] == b"\x89PNG"
    html = predicted._repr_html_()
    assert "data:image/png;base64," in html and "interleaved-1f1b" in html and "fits" in html


def test_the_commands_print_what_the_library_gives(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name, pp in (("short", 2), ("long", 4)):
        path = tmp_path / f"{name}.toml"
        model = '[model]\nconfig = "tiny-llama"\nseq_len = 64\nnum_hidden_layers = 8\n'
        path.write_text(f"{model}[parallel]\npp = {pp}\n[schedule]\nmicrobatches = 4\n")
        paths.append(str(path))
    capsys.readouterr()
    assert main(["simulate", paths[0], "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert simulated == json.loads(json.dumps(piper_sim.predict(piper_sim.load_job(paths[0])).to_dict()))
    assert main(["compare", *paths, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    found = piper_sim.compare([piper_sim.load_job(p) for p in paths])
    assert rows == json.loads(json.dumps(found.rows))
    assert {r["job"] for r in rows} == set(paths)
    mine = next(r for r in rows if r["job"] == paths[0])
    assert {k: mine[k] for k in simulated} == simulated, "the same job is the same row, its digest too"
    assert list(found.table.index) == [f"{r['job'].split('/')[-1][:-5]} {r['schedule']}" for r in rows]
    assert found.best is found.predictions[0] and "wins" in found.why and "<table" in found._repr_html_()
    assert main(["compare", *paths, "--schedules", "gpipe,1f1b", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 4


def test_a_job_has_one_digest_in_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    job = piper_sim.load_job(TABLE)
    alone = piper_sim.predict(job).to_dict()["job_digest"]
    [row] = piper_sim.compare(job, ["interleaved-1f1b"]).rows
    assert row["job_digest"] == alone
    other = piper_sim.load_job(TABLE, set=["schedule.stages_per_rank=1", "schedule.name=1f1b"])
    assert piper_sim.predict(other).to_dict()["job_digest"] != alone


def test_what_a_job_leaves_out_does_not_change_its_digest() -> None:
    short = {"model": {"config": "tiny-llama", "seq_len": 64}, "parallel": {"pp": 2}}
    alone = piper_sim.predict(piper_sim.load_job(short)).to_dict()["job_digest"]
    [row] = piper_sim.compare(piper_sim.load_job(short), ["1f1b"]).rows
    left_out = piper_sim.compare([piper_sim.load_job(short)] * 2).rows[0]
    said = piper_sim.load_job({**short, "schedule": {"name": "1f1b", "microbatches": 4, "stages_per_rank": 1}})
    digests = {row["job_digest"], left_out["job_digest"], piper_sim.predict(said).to_dict()["job_digest"]}
    assert digests == {alone}


@pytest.mark.parametrize(
    ("more", "lacking"),
    [
        ([], "cluster.leaf_nodes and costs.interference"),
        (["cluster.leaf_nodes=1"], "costs.interference"),
        (["costs.interference=maxmin"], "cluster.leaf_nodes"),
        (["costs.interference=maxmin", "cluster.leaf_nodes=1"], ""),
    ],
)
def test_uplinks_that_nothing_can_fill_are_told(more: list[str], lacking: str) -> None:
    """A leaf's NICs over its uplinks: who says no leaves, or shares no links, changes nothing by it."""
    sets = ["model.seq_len=4096", "cluster.nodes=4", "cluster.gpus_per_node=1", *more]
    plain, thin = (
        piper_sim.predict(piper_sim.load_job(TABLE, set=[*sets, f"cluster.oversubscription={x}"])).to_dict()
        for x in (1, 64)
    )
    assert (thin["iteration_s"] > plain["iteration_s"]) == (not lacking) and not plain["warnings"]
    said = [f"cluster.oversubscription changes nothing without {lacking}"] if lacking else []
    assert [w.partition(" (")[0] for w in thin["warnings"]] == said


def test_what_is_rarely_meant_is_said(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    few = piper_sim.load_job(TABLE, set=["schedule.name=1f1b", "schedule.microbatches=1"])
    assert piper_sim.predict(few).to_dict()["warnings"] == [
        "1 microbatch on 2 stages: the pipeline never fills; set schedule.microbatches = 2 or more"
    ]
    assert piper_sim.predict(piper_sim.load_job(TABLE)).to_dict()["warnings"] == []
    # Interleaved stages fill when every rank works: rank 0's second stage begins when microbatch 0 has been round.
    assert piper_sim.predict(piper_sim.load_job(TABLE, set=["schedule.microbatches=2"])).to_dict()["warnings"] == []
    thin = piper_sim.predict(piper_sim.load_job(TABLE, set=["schedule.microbatches=1"])).to_dict()["warnings"]
    assert thin == ["1 microbatch on 2 ranks: the pipeline never fills; set schedule.microbatches = 2 or more"]
    path = tmp_path / "job.toml"
    path.write_text('[model]\nconfig = "tiny-llama"\nseq_len = 64\n[parallel]\npp = 4\n[schedule]\nmicrobatches = 2\n')
    capsys.readouterr()
    assert main(["simulate", str(path), "--json"]) == 0
    assert "warning: 2 microbatches on 4 stages" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "total", "active"),
    # Hugging Face's counts of both; 12.9 B active is what Mixtral's paper says.
    [("llama3-8b", 8_030_261_248, 8_030_261_248), ("mixtral-8x7b", 46_702_792_704, 12_879_925_248)],
)
def test_parameters_are_counted(config: str, total: int, active: int) -> None:
    job = piper_sim.load_job({"model": {"config": config, "seq_len": 128}, "parallel": {"pp": 4, "tp": 2}})
    assert piper_sim.predict(job).to_dict()["parameters"] == {"total": total, "active": active}


@pytest.mark.parametrize(("dp", "zero", "said"), [(2, 1, 0), (64, 1, 1), (64, 0, 0)])
def test_shares_of_few_matrices_are_said_to_be_padding(dp: int, zero: int, said: int) -> None:
    job = {"model": {"config": "tiny-llama", "seq_len": 64}, "parallel": {"dp": dp, "zero": zero}}
    found = piper_sim.predict(piper_sim.load_job({**job, "optimizer": {"name": "muon"}})).to_dict()["warnings"]
    assert sum("few matrices for so many replicas" in w for w in found) == said
    assert piper_sim.predict(piper_sim.load_job(job)).to_dict()["warnings"] == []


@pytest.mark.parametrize(("strength", "said"), [(None, 1), (1.0, 1), (4.0, 0)])
def test_a_hot_expert_that_is_no_hotter_is_said_to_be_none(strength: float | None, said: int) -> None:
    routing = {"kind": "hot"} | ({"strength": strength} if strength else {})
    model = {"config": "qwen3-30b-a3b", "num_hidden_layers": 2, "seq_len": 2048}
    job = {"model": model, "parallel": {"dp": 4, "ep": 4}}
    even, hot = (piper_sim.predict(piper_sim.load_job(job | r)).to_dict() for r in ({}, {"routing": routing}))
    assert [("no expert is hotter" in w) for w in hot["warnings"]] == [True] * said and even["warnings"] == []
    assert (hot["iteration_s"] == even["iteration_s"]) == bool(said)


@pytest.mark.parametrize(
    ("of", "gpu", "said"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm", False),
        ("NVIDIA H100 80GB HBM3", "h200-sxm", True),
        ("NVIDIA GB200", "b200-sxm", True),
        ("AMD Instinct MI300X", "mi300x", False),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-40gb", False),
        ("NVIDIA A100-SXM4-80GB", "cpu", True),
        ("NVIDIA H100 PCIe", "h100-sxm", True),
        ("NVIDIA H100 NVL", "h100-sxm", True),
        ("NVIDIA GB200", "gb200-nvl72", False),
        ("", "h100-sxm", True),
        ("", "cpu", False),
    ],
)
def test_a_profile_of_another_device_is_said_to_be_one(of: str, gpu: str, said: bool, tmp_path: Any) -> None:
    machine = ProfileMachine("Xeon", 2, of, 1 if of else 0, {}, "2026-01-01T00:00:00Z")
    (tmp_path / "p.json").write_text(profile_text(Profile.of(machine, {})))
    job = {**TABLE, "cluster": {"gpu": gpu}, "costs": {"profile": str(tmp_path / "p.json")}}
    found = piper_sim.predict(piper_sim.load_job(job)).to_dict()["warnings"]
    warning = f"costs.profile is of {of or 'Xeon'}, cluster.gpu = {gpu!r}: what it holds are that machine's seconds"
    assert found == ([warning] if said else [])


def test_what_was_measured_does_not_change_with_the_cluster_s_keys_and_says_so(tmp_path: Any) -> None:
    """A link of a profile takes what it took, however fast `[cluster]` makes it: doubling it promises no gain of 0."""
    machine = ProfileMachine("Xeon", 2, "NVIDIA H100 80GB HBM3", 1, {}, "2026-01-01T00:00:00Z")
    links = {f"{kind} {n}": MeasuredCost(1e-3, 0.0, 9) for kind in ("p2p@1", "all_gather 2@1") for n in (2**10, 2**30)}
    for name, profile in (("with", Profile.of(machine, {}, links)), ("without", Profile.of(machine, {}))):
        (tmp_path / name).write_text(profile_text(profile))
        job = {**TABLE, "costs": {"profile": str(tmp_path / name)}}
        table = {**job, "cluster": {"gpu": "h100-sxm", "nic_Gbps": 50, "hbm_GiB": 60}}
        found = piper_sim.predict(piper_sim.load_job(table)).to_dict()["warnings"]
        said = "cluster.nic_Gbps: what costs.profile has measured stays as it was measured"
        assert found == ([said] if profile.links else [])
        asked = {w.name for w in piper_sim.explain(piper_sim.load_job(job)).what_ifs}
        assert ("links x 2" in asked) == (not profile.links) and "transfers free" in asked
        asked = {w.name for w in piper_sim.explain(piper_sim.load_job(table)).what_ifs}
        assert ("links as usual" in asked) == (not profile.links)


@pytest.mark.parametrize("key", ["deterministic", "portable_attention"])
def test_which_kernels_run_changes_nothing_that_was_measured_and_says_so(key: str, tmp_path: Any) -> None:
    machine = ProfileMachine("Xeon", 2, "NVIDIA H100 80GB HBM3", 1, {}, "2026-01-01T00:00:00Z")
    timed = {"F/attn 0": OpEntry(MeasuredCost(1e-3, 0.0, 9))}
    for ops in ({}, timed):
        (tmp_path / "p.json").write_text(profile_text(Profile.of(machine, ops)))
        costs = {"profile": str(tmp_path / "p.json"), key: True}
        found = piper_sim.predict(piper_sim.load_job({**TABLE, "costs": costs})).to_dict()["warnings"]
        assert found == ([f"costs.{key}: what costs.profile has measured stays as it was measured"] if ops else [])


@pytest.mark.parametrize("given", [None, 3, "job.toml", TABLE, [TABLE]])
@pytest.mark.parametrize("asked", ["predict", "compare", "search", "explain"])
def test_what_is_no_job_is_refused_with_the_line_that_makes_one(asked: str, given: Any) -> None:
    with pytest.raises(piper_sim.PiperError, match="is no job") as e:
        getattr(piper_sim, asked)(given)
    assert e.value.kind is piper_sim.ErrorKind.USAGE and "load_job" in str(e.value.suggestion)


def test_strings_and_nothing_where_lists_and_files_are_asked_for() -> None:
    job = piper_sim.load_job(TABLE, set="parallel.pp=1")
    assert job.parallel.pp == 1
    for schedules in ("1f1b", ()):
        with pytest.raises(piper_sim.PiperError, match="no list of schedules"):
            piper_sim.compare(job, schedules)
    with pytest.raises(piper_sim.PiperError, match="no job can be read"):
        piper_sim.load_job(None)  # type: ignore[arg-type]
    settings: Any = [1]
    with pytest.raises(piper_sim.PiperError, match="1 sets nothing"):
        piper_sim.load_job(TABLE, set=settings)
    with pytest.raises(piper_sim.PiperError, match="3 is no job"):
        piper_sim.explain(job, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "args", "given", "key"),
    [
        ("compare", ([1, "1f1b"],), {}, "schedule.name"),
        *(("search", (b,), {}, "--budget") for b in (-1, float("nan"), "5")),
        *(("search", (0,), {"workers": w}, "--workers") for w in (0, 1.5, "2")),
    ],
)
def test_numbers_where_names_are_asked_for_and_the_other_way_round(
    asked: str, args: tuple[Any, ...], given: dict[str, Any], key: str
) -> None:
    with pytest.raises(piper_sim.PiperError) as e:
        getattr(piper_sim, asked)(piper_sim.load_job(TABLE), *args, **given)
    assert (e.value.kind, e.value.key) == (piper_sim.ErrorKind.USAGE, key)


def test_a_rank_in_a_mapping_may_be_a_number() -> None:
    slow = [piper_sim.load_job({**TABLE, "cluster": {"speed": {rank: 0.5}}}) for rank in (1, "1")]
    assert slow[0] == slow[1]
