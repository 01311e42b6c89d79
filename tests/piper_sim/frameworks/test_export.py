"""`piper-sim export --to FRAMEWORK`: what is written reads back as the job; what it cannot say is refused or listed."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.core.errors import PiperError
from ir.job.build import PreparedJob, precision_of, prepare
from ir.job.load import job_from
from ir.job.table import keys_of
from piper_sim.frameworks.exporting import FRAMEWORKS, LAUNCH, ExportedJob, export_launch
from piper_sim.frameworks.importing import UNDERSTOOD, ImportedJob, import_launch
from tests.piper_sim.frameworks.launches import files_of, written
from tests.refusals import refusal

TITAN = {"config": "llama3-8b", "seq_len": 2048}
CLUSTER = {"gpu": "h800-sxm", "nodes": 2, "gpus_per_node": 8}


def prepared(**sections: dict[str, Any]) -> PreparedJob:
    return prepare(job_from({"model": {"config": "tiny-llama", "seq_len": 64}, "cluster": CLUSTER} | sections))


def read_back(made: ExportedJob) -> ImportedJob:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in made.files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        return import_launch(str(Path(folder) / LAUNCH))


@st.composite
def jobs(draw: st.DrawFn, frameworks: tuple[str, ...] = FRAMEWORKS) -> tuple[str, PreparedJob]:
    """A framework, and a job that it can say."""
    framework = draw(st.sampled_from(frameworks))
    megatron = framework in ("megatron", "megatron-bridge", "primus")
    hf = framework in ("deepspeed", "accelerate")
    moe = draw(st.booleans()) and framework not in ("torchtitan", *(("deepspeed", "accelerate") if hf else ()))
    tp, pp = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)] if not hf else [(1, 1)]))
    cp = 1 if hf else draw(st.sampled_from([1, 2]))
    sp = tp > 1 and not hf and (moe or framework == "torchtitan" or draw(st.booleans()))
    titan = [1] if pp > 1 else [2, 3]
    zero = draw(st.sampled_from([0, 1, 2, 3] if megatron or hf else [0, 3] if framework == "automodel" else titan))
    ep = draw(st.sampled_from([1, 2])) if moe else 1
    chunks = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    model: dict[str, Any] = {"config": "tiny-moe" if moe else "tiny-llama", "num_hidden_layers": 8, "seq_len": 64}
    schedule: dict[str, Any] = {"microbatches": draw(st.integers(pp, 9))}
    schedule["microbatch_size"] = draw(st.sampled_from([1, 2]))
    if chunks > 1:
        schedule["name"] = "interleaved-1f1b"
        schedule["microbatches"] *= pp if megatron else 1  # its rounds are whole
    elif pp > 1 and not megatron:
        schedule["name"] = draw(st.sampled_from(["1f1b", "gpipe", "zbv"]))
    if draw(st.booleans()):
        schedule["recompute"] = "full"
    elif megatron:
        choices = ["none", "selective", ["norm", "mlp"], ["norm"], *[["norm", "activation"]] * moe]
        schedule["recompute"] = draw(st.sampled_from(choices))
    elif framework == "torchtitan":
        schedule["recompute"] = draw(st.sampled_from(["none", ["operators"]]))
    if schedule.get("recompute") == "full" and draw(st.booleans()):
        some = {"torchtitan": ["1::2", "2::3", "0::1"]}.get(framework, [0, 1, 3] if megatron else [None])
        schedule["recompute_layers"] = draw(st.sampled_from(some))
    parallel = {"tp": tp, "pp": pp, "cp": cp, "zero": zero, "sequence_parallel": sp, "ep": ep}
    if zero and (not hf or (framework == "deepspeed" and zero == 3)):
        parallel["dp_replicate"] = draw(st.sampled_from([1, 1, 2]))
    if megatron and pp == 2:
        parallel["layers"] = draw(st.sampled_from(["even", [3, 5] * chunks if chunks == 1 else [1, 3, 2, 2]]))
    precision = {"compute": draw(st.sampled_from(["bf16", "fp8"] if megatron else ["bf16"]))}
    if megatron and draw(st.booleans()):
        precision |= {"params": "bf16", "reduce": "bf16"} | ({"gather": "fp8"} if precision["compute"] == "fp8" else {})
    if megatron and draw(st.booleans()):
        precision |= {"residual": "fp32"}
    model = TITAN if framework == "torchtitan" else model
    optimizer = {"lr": draw(st.sampled_from([1e-3, 3e-4])), "clip_norm": draw(st.sampled_from([0.0, 1.0]))}
    return framework, prepared(
        model=model, parallel=parallel, schedule=schedule, precision=precision, optimizer=optimizer
    )


@settings(max_examples=40, deadline=None)
@given(jobs())
def test_import_and_export_are_a_fixed_point(drawn: tuple[str, PreparedJob]) -> None:
    framework, job = drawn
    once = read_back(export_launch(job, framework))
    not_all = {e.fact for e in once.entries if e.list != "understood" and e.argument.name}
    assert once.framework == framework and not_all <= {"overlapped_gather"}  # asked for where plans wait, too
    back = prepare(job_from(once.job))
    assert (back.mesh.sizes, back.mbs, back.layout) == (job.mesh.sizes, job.mbs, job.layout)
    whole = job.job.parallel.zero in (1, 2)
    gathered, meant = (precision_of(j.job).sync_bytes(whole)[1] for j in (back, job))
    assert gathered == meant  # said, where FSDP keeps weights in a format that it does not send
    autocast = framework == "accelerate" and not job.job.parallel.zero
    assert precision_of(back.job).stream == ("fp32" if autocast else precision_of(job.job).stream)
    assert back.base.recompute == job.base.recompute
    assert back.job.optimizer.lr == (job.job.optimizer.lr if framework != "accelerate" else 1e-3)
    assert read_back(export_launch(back, framework)).job == once.job


@pytest.mark.parametrize(
    ("framework", "sections", "key"),
    [
        ("megatron", {"parallel": {"pp": 2}, "schedule": {"name": "dualpipe"}}, "schedule.name"),
        ("megatron", {"parallel": {"pp": 2}, "schedule": {"name": "zb1p"}}, "schedule.name"),
        ("megatron", {"parallel": {"pp": 2}, "schedule": {"microbatches": 8, "flushes": 2}}, "schedule.flushes"),
        ("megatron-bridge", {"schedule": {"recompute": ["attention"]}}, "schedule.recompute"),
        ("torchtitan", {"model": {"config": "tiny-llama", "num_hidden_layers": 3}}, "model.config"),
        ("torchtitan", {"model": TITAN, "parallel": {"zero": 1}}, "parallel.zero"),
        ("torchtitan", {"model": TITAN, "parallel": {"zero": 3, "pp": 2}}, "parallel.zero"),
        ("deepspeed", {"parallel": {"pp": 2}}, "parallel.pp"),
        ("accelerate", {"parallel": {"ep": 2}, "model": {"config": "tiny-moe"}}, "parallel.ep"),
        ("primus", {"precision": {"compute": "fp64"}}, "precision.compute"),
        ("accelerate", {"parallel": {"zero": 3, "dp_replicate": 2}}, "parallel.dp_replicate"),
        ("deepspeed", {"parallel": {"zero": 2, "dp_replicate": 2}}, "parallel.dp_replicate"),
        # One replica of each dense weight, and four of each expert: tp does not cut them.
        ("torchtitan", {"model": {"config": "mixtral-8x7b"}, "parallel": {"tp": 4, "pp": 4}}, "parallel.zero"),
        ("automodel", {"model": {"config": "mixtral-8x7b"}, "parallel": {"tp": 4, "pp": 4}}, "parallel.zero"),
        ("torchtitan", {"model": {"config": "qwen3-30b-a3b"}, "parallel": {"tp": 8}}, "parallel.tp"),  # four KV heads
    ],
)
def test_what_a_framework_cannot_say_is_refused_by_its_key(framework: str, sections: dict[str, Any], key: str) -> None:
    e = refusal(export_launch, prepared(**sections), framework, match=f"{framework} cannot say {key}")
    assert e.key == key
    assert "frozenset" not in e.message and "('" not in e.message, "as a job would say it"


GRADIENTS = {"precision.grads", "precision.reduce"}  # accelerate leaves them to DeepSpeed


@pytest.mark.parametrize(
    ("framework", "zero", "gather"), [("megatron", 1, "bf16"), ("primus", 2, "bf16"), ("automodel", 3, None)]
)
def test_a_format_that_a_launch_does_not_say_is_listed_by_its_key(
    framework: str, zero: int, gather: str | None
) -> None:
    """Weights kept whole in fp32 come back from an update in fp32, and are read back as gathered in bf16."""
    job = prepared(parallel={"zero": zero}, precision={"params": "fp32"})
    left_out = export_launch(job, framework).left_out
    assert left_out.get("precision.gather") == gather
    assert {k.partition(".")[2] for k in left_out if k.startswith("precision.")} <= {*keys_of("precision")}


def test_what_does_not_decide_the_plan_is_listed() -> None:
    made = export_launch(prepared(costs={"interference": "none"}, optimizer={"lr": 0.5}), "accelerate")
    assert set(made.left_out) == {"cluster.gpu", "costs.interference", "optimizer.lr", *GRADIENTS}
    assert made.left_out["cluster.gpu"] == "h100-sxm"
    left = export_launch(prepared(cluster=CLUSTER | {"gpu": "h100-sxm"}), "megatron").left_out.keys()
    assert left <= {"costs.software", "parallel.bucket_MiB"}  # one bucket, where Megatron has its own


@pytest.mark.parametrize("framework", ["megatron", "deepspeed", "automodel"])
def test_an_order_of_one_stage_that_a_launch_does_not_say_is_listed(framework: str) -> None:
    """GPipe keeps what all microbatches need for backward; what is read back, what one does."""
    job = prepared(schedule={"name": "gpipe", "microbatches": 8}, parallel={"zero": 0})
    made = export_launch(job, framework)
    back = prepare(job_from(read_back(made).job))
    assert job.mesh.sizes["pp"] == 1 and job.schedule != back.schedule == made.left_out["schedule.name"]


@pytest.mark.parametrize("framework", ["megatron", "accelerate", "deepspeed"])
def test_a_job_that_does_not_fill_its_node_starts_as_many_processes_as_it_has_ranks(framework: str) -> None:
    made = export_launch(prepared(cluster={"gpu": "h100-sxm"}, parallel={"dp": 3}), framework)
    cluster = read_back(made).job["cluster"]
    assert (cluster["nodes"], cluster["gpus_per_node"]) == (1, 3)


def test_a_layout_string_comes_back_as_it_went() -> None:
    layout = "Ett|(tt|)*2ttL"
    model, schedule = {"config": "tiny-llama", "num_hidden_layers": 8}, {"layout": layout, "microbatches": 4}
    made = export_launch(prepared(model=model, parallel={"pp": 4}, schedule=schedule), "megatron")
    assert read_back(made).job["schedule"]["layout"] == layout


def test_what_changes_against_the_launch_that_was_imported() -> None:
    job = {"parallel": {"tp": 2}, "schedule": {"microbatches": 4}}
    before = read_back(export_launch(prepared(**job), "megatron"))
    same = export_launch(prepare(job_from(before.job)), "megatron")
    assert same.changed(before) == []
    job["parallel"] |= {"tp": 4, "zero": 3}
    job["schedule"]["recompute"] = "full"
    changed = {r["argument"]: (r["was"], r["now"]) for r in export_launch(prepared(**job), "megatron").changed(before)}
    assert changed.pop("--tensor-model-parallel-size") == ("2", "4")
    assert changed.pop("--global-batch-size") == ("32", "16")
    assert set(changed) >= {"--recompute-granularity", "--use-megatron-fsdp", "--use-distributed-optimizer"}
    assert not {"--num-layers", "--hidden-size", "--lr", "--bf16"} & set(changed)


def test_what_is_presumed_and_not_asked_for_is_a_change(tmp_path: Path) -> None:
    made = export_launch(prepared(parallel={"tp": 2}, schedule={"microbatches": 4}), "megatron")
    less = made.files[LAUNCH].replace("--overlap-grad-reduce \\\n", "").rstrip() + " --ckpt-format torch_dist\n"
    (tmp_path / LAUNCH).write_text(less, encoding="utf-8")
    changed = made.changed(import_launch(str(tmp_path / LAUNCH)))
    row = {"argument": "--overlap-grad-reduce", "was": None, "now": True, "key": "parallel.overlap_grad_reduce"}
    assert changed == [row]


@pytest.mark.parametrize("more", ["--rotary-percent 1.0", "--use-flash-attn", "--init-method-std 0.02"])
def test_what_is_usual_does_not_change_where_it_is_no_longer_said(tmp_path: Path, more: str) -> None:
    made = export_launch(prepared(parallel={"tp": 2}, schedule={"microbatches": 4}), "megatron")
    (tmp_path / LAUNCH).write_text(made.files[LAUNCH].rstrip() + f" {more}\n", encoding="utf-8")
    before = import_launch(str(tmp_path / LAUNCH))
    assert export_launch(prepare(job_from(before.job)), "megatron").changed(before) == []
    (tmp_path / LAUNCH).write_text(made.files[LAUNCH].rstrip() + " --rotary-percent 0.5\n", encoding="utf-8")
    half = import_launch(str(tmp_path / LAUNCH))
    assert [r["argument"] for r in made.changed(half)] == ["--rotary-percent"]


LAUNCHES = Path(__file__).parents[4] / "shared" / "data" / "launches"


if LAUNCHES.is_dir():

    @pytest.mark.slow
    def test_public_launches_come_back_as_the_launches_they_went_out_as(tmp_path: Path) -> None:
        kept = 0
        for n, (launch, files) in enumerate(files_of(LAUNCHES).items()):
            if launch.startswith("olmo-core"):
                continue
            found = import_launch(str(written(files, tmp_path / str(n))))
            if found.framework not in FRAMEWORKS:
                continue
            try:
                once = read_back(export_launch(prepare(job_from(found.job)), found.framework))
            except PiperError:  # the job, or what of it the framework cannot say
                continue
            assert read_back(export_launch(prepare(job_from(once.job)), found.framework)).job == once.job
            kept += 1
        assert kept >= 150


def test_a_pattern_of_layers_goes_to_megatron_and_comes_back() -> None:
    job = prepared(model={"config": "nemotron-nano-9b-v2", "seq_len": 4096}, parallel={"tp": 8, "pp": 2})
    made = export_launch(job, "megatron")
    text = made.files[LAUNCH]
    assert "pretrain_hybrid.py" in text and "--hybrid-layer-pattern 'M-M-M-MM-M-" in text and "--spec " in text
    back = read_back(made)
    named = {e.argument.name: e.list for e in back.entries}
    assert [named[f"--{n}"] for n in ("hybrid-layer-pattern", "mamba-num-heads", "spec")] == [UNDERSTOOD] * 3
    again = prepare(job_from(back.job))
    assert again.config.mixer == job.config.mixer and again.layers == job.layers


@pytest.mark.parametrize(
    ("word", "flag", "left"),
    [(None, False, None), ("serial", False, None), ("shared", True, None), ("overlapped", False, "serial")],
)
def test_what_stands_beside_all_to_alls_is_exported_or_said_to_be_left_out(
    word: str | None, flag: bool, left: str | None
) -> None:
    own = {} if word is None else {"expert_all_to_all": word}
    job = prepared(
        model={"config": "qwen3-30b-a3b", "seq_len": 4096},
        parallel={"ep": 8},
        costs={"software": "megatron-core"},
        schedule={"name": "1f1b", "microbatches": 8, **own},
    )
    made = export_launch(job, "megatron")
    assert ("--moe-shared-expert-overlap" in made.files[LAUNCH]) is flag
    assert made.left_out.get("schedule.expert_all_to_all") == left
    assert read_back(made).job["schedule"].get("expert_all_to_all") == ("shared" if flag else None)


@pytest.mark.parametrize("repeated", [True, False])
def test_prediction_modules_of_a_pattern_go_to_megatron_and_come_back(repeated: bool) -> None:
    ahead = {"num_nextn_predict_layers": 2, "mtp_use_repeated_layer": repeated}
    job = prepared(model={"config": "nemotron-3-nano-30b-a3b", "seq_len": 4096, **ahead}, parallel={"ep": 8})
    made = export_launch(job, "megatron")
    assert "E/*E/*E'" in made.files[LAUNCH] and ("--mtp-use-repeated-layer" in made.files[LAUNCH]) is repeated
    again = prepare(job_from(read_back(made).job))
    assert (again.config.mtp, again.config.mtp_repeated, again.layout) == (2, repeated, job.layout)
    assert again.config.mixer == job.config.mixer


@pytest.mark.parametrize("preset", ["qwen3-next-80b-a3b", "granite-4.0-h-small"])
def test_layers_that_no_pattern_says_are_refused_by_the_key(preset: str) -> None:
    job = prepared(model={"config": preset, "seq_len": 4096}, parallel={"ep": 8})
    assert str(refusal(export_launch, job, "megatron").key).startswith("model.")


def test_megatron_shares_kv_heads_between_ranks() -> None:
    job = prepared(model={"config": "qwen3-30b-a3b"}, parallel={"tp": 8})
    assert read_back(export_launch(job, "megatron")).job["parallel"]["tp"] == 8
