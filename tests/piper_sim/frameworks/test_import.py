"""`piper-sim import`: each argument in one list, facts as the frameworks mean them, refusals that say what to mend."""

import json
import shlex
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.core.errors import PiperError
from ir.job.build import prepare
from ir.job.load import job_from
from piper_sim.app.cli import main
from piper_sim.frameworks.importing import ASSUMED, UNDERSTOOD, UNKNOWN, ImportedJob, import_launch
from piper_sim.frameworks.table import chains, facts, rows
from tests.refusals import refusal

SCRIPT = (Path(__file__).parents[2] / "fuzz" / "seeds" / "megatron.sh").read_text()
TEXTS = tomllib.loads((Path(__file__).parents[2] / "data" / "launches.toml").read_text())
JOB = {"tp": 2, "pp": 4, "zero": 1, "sequence_parallel": True, "layers": "even", "overlap_grad_reduce": False}


def imported(tmp_path: Path, text: str, name: str = "run.sh", framework: str | None = None) -> ImportedJob:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return import_launch(str(tmp_path / name), framework)


def listed(found: ImportedJob, name: str) -> list[str]:
    return [e.argument.name for e in found.entries if e.list == name and e.argument.name]


def test_a_script_with_arrays_sums_and_defaults_is_one_job(tmp_path: Path) -> None:
    found = imported(tmp_path, SCRIPT)
    assert found.framework == "megatron" and found.job["parallel"] == JOB
    rest = {"stages_per_rank": 2, "microbatch_size": 1, "microbatches": 16}
    assert found.job["schedule"] == {"name": "interleaved-1f1b", **rest}
    assert found.job["cluster"] == {"gpu": "h100-sxm", "nodes": 4, "gpus_per_node": 8}
    model = found.job["model"]
    assert (model["model_type"], model["num_key_value_heads"], model["intermediate_size"]) == ("llama", 4, 1344)
    assert (model["seq_len"], model["vocab_size"], model["attention_dropout"]) == (2048, 32000, 0)
    assert listed(found, UNKNOWN) == ["--frobnicate"]
    assert "--data-path" in listed(found, UNDERSTOOD)  # nobody ran `ls`
    prepared = prepare(job_from(found.job))
    assert (prepared.mbs, prepared.mesh.sizes["dp"], prepared.layers) == (16, 4, (2,) * 8)


@pytest.mark.parametrize("row", TEXTS["formats"], ids=lambda row: row["name"])
def test_every_format_says_whose_it_is_and_what_it_states(tmp_path: Path, row: dict[str, Any]) -> None:
    (tmp_path / "llama.yaml").write_text("extends: [base.yaml]\nhidden_size: 64\nnum_layers: 9\n")
    (tmp_path / "base.yaml").write_text("num_attention_heads: 4\nseq_length: 128\nhidden_size: 32\n")
    found = imported(tmp_path, row["text"], row["name"])
    assert (found.framework, found.job[row["section"]]) == (row["framework"], row["expected"])
    assert not listed(found, UNKNOWN)
    if found.framework == "primus":  # nearest file first
        assert [found.job["model"][k] for k in ("num_hidden_layers", "hidden_size", "seq_len")] == [4, 64, 128]
    prepare(job_from(found.job))


WORDS = st.text(st.characters(codec="ascii", exclude_characters="\0\r\n\\"), min_size=1, max_size=8)
NAMES = st.sampled_from([n for r in rows("megatron") for n in r.names if "*" not in n]) | st.from_regex(
    "[a-z_]{1,9}", fullmatch=True
)
VALUES = (
    st.none() | st.integers(-3, 10**6).map(str) | WORDS | st.sampled_from(["true", "null", "[1,2]", "${X}", "1e-5"])
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(NAMES, VALUES), min_size=1, max_size=12))
def test_every_argument_of_a_script_with_junk_is_in_exactly_one_list(arguments: list[tuple[str, str | None]]) -> None:
    import tempfile

    words = [f"--{n.replace('_', '-')}" + ("" if v is None else f"={shlex.quote(v)}") for n, v in arguments]
    with tempfile.TemporaryDirectory() as folder:
        found = imported(Path(folder), "torchrun train.py " + " \\\n ".join(words) + "\n")
    lists = found.to_dict()
    given_ = Counter(f"--{n.replace('_', '-')}" for n, _ in arguments)
    got = Counter(e["argument"] for n in (UNDERSTOOD, ASSUMED, UNKNOWN) for e in lists[n] if e["argument"])  # type: ignore[attr-defined]
    assert got == given_
    assert all(e.note or e.key for e in found.entries), "an entry that says neither key nor why"
    json.dumps(lists)


def test_what_a_script_does_is_not_done(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    do = f"touch {marker}"
    text = f"X=$({do})\n{do}\npython t.py --num-layers $({do}) --hidden-size `{do}`\n"
    found = imported(tmp_path, text)
    assert not marker.exists() and listed(found, UNKNOWN) == ["--num-layers", "--hidden-size"]
    with pytest.raises(PiperError, match="not YAML"):
        imported(tmp_path, f"model: !!python/object/apply:os.system ['touch {marker}']\n", "x.yaml")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "a: [1, 2\n", "not YAML"),
        ("a.yaml", "&a [" + "*a," * 200 + "1]", "aliases|not YAML"),
        ("a.yaml", "hello: 1\n", "which framework"),
        ("a.json", "[1]", "no table of arguments"),
        ("a.sh", "echo hello\n", "no command with arguments"),
        ("a.sh", "torchrun x.py --a 'b\n", "a quote is not closed"),
    ],
)
def test_files_that_are_no_launch_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    refusal(imported, tmp_path, text, name, match=message)


def test_a_batch_script_that_wraps_its_command_and_writes_its_json(tmp_path: Path) -> None:
    found = imported(tmp_path, TEXTS["texts"]["wrapped"], "run.slurm")
    assert found.framework == "deepspeed" and not listed(found, UNKNOWN)
    assert listed(found, ASSUMED) == ["--rampup-batch-size"]
    assert found.job["parallel"] == {"pp": 3, "zero": 1, "layers": "balanced"} and set(
        found.job["precision"].values()
    ) == {"bf16"}
    assert [found.job["cluster"][k] for k in ("nodes", "gpus_per_node")] == [6, 4]
    assert [found.job["schedule"][k] for k in ("microbatch_size", "microbatches")] == [2, 3]
    assert "bf16.enabled" in [e.argument.name for e in found.entries if "ds." in e.argument.file]


def test_doubts_are_said_where_the_job_differs_from_the_file(tmp_path: Path) -> None:
    text = "python t.py --num-layers 5 --hidden-size 64 --num-attention-heads 4 --pipeline-model-parallel-size 2 {}"
    args = "--world-size 3 --mtp-num-layers 1 --recompute-granularity full --recompute-method block"
    args += " --recompute-num-layers 1"
    found = imported(
        tmp_path, text.format(args + " --global-batch-size 7 --micro-batch-size 2 --no-rope-fusion --lr auto")
    )
    assert {"--world-size", "--no-rope-fusion"} <= set(listed(found, ASSUMED))
    assert found.job["schedule"]["recompute_layers"] == 1 and "--recompute-num-layers" in listed(found, UNDERSTOOD)
    assert "--lr" in listed(found, UNDERSTOOD)
    assert found.job["parallel"]["layers"] == "balanced"
    assert "--world-size" not in listed(imported(tmp_path, text.format("--world-size 4")), ASSUMED)


TITAN = '[model]\nname = "llama3"\nflavor = "8B"\nconverters = [{}]\n[quantize.linear.float8]\nfilter_fqns = [{}]\n'

LOSS = "model:\n  pretrained_model_name_or_path: meta-llama/Meta-Llama-3-8B\nstep_scheduler:\n  local_batch_size: 1\n"
LOSS += "loss_fn:\n  _target_: nemo_automodel.components.loss.{}"
MPT = "model:\n  name: mpt_causal_lm\n  d_model: 64\n  n_heads: 4\n  n_layers: 2\n  loss_fn: {}\n"
MPT += "device_train_microbatch_size: 1\n"
DYNAMO = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\ndynamo_config:\n  dynamo_backend: {}\n"
SCRIPT_LINE = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4\n"


@pytest.mark.parametrize(
    ("name", "text", "argument", "there", "elsewhere"),
    [
        (
            "a.txt",
            "--num-layers 4 --overlap-p2p-comm false --pipeline-model-parallel-size {}",
            "--overlap-p2p-comm",
            1,
            2,
        ),
        ("a.txt", "--num-layers 4 --fp8-recipe mxfp8 --bf16 {}", "--fp8-recipe", "", "--fp8-format hybrid"),
        ("t.toml", TITAN.replace("{}", '"float8"', 1), "quantize.linear.float8.filter_fqns", '"output"', '"wq"'),
        ("t.toml", TITAN.replace("{}", "", 1), "quantize.linear.float8.filter_fqns", '"wq"', None),
        ("a.txt", "--num-layers 4 --no-fp8-wgrad --bf16 {}", "--no-fp8-wgrad", "", "--fp8-format hybrid"),
        ("b.yaml", LOSS, "loss_fn._target_", "masked_ce.MaskedCrossEntropy", "linear_ce.FusedLinearCrossEntropy"),
        ("b.yaml", LOSS, "loss_fn._target_", "te_parallel_ce.TEParallelCrossEntropy", "chunked_ce.ChunkedCrossEntropy"),
        ("b.yaml", LOSS + "\n  fp32_upcast: {}", "loss_fn.fp32_upcast", "true", "false"),
        ("m.yaml", MPT, "model.loss_fn", "fused_crossentropy", "torch_crossentropy"),
        ("c.yaml", DYNAMO, "dynamo_config.dynamo_backend", "'NO'", "INDUCTOR"),
        ("d.sh", "export CUDA_LAUNCH_BLOCKING={}\n" + SCRIPT_LINE, "CUDA_LAUNCH_BLOCKING", 0, 1),
    ],
)
def test_what_bears_on_nothing_of_the_job_is_understood_and_assumed_elsewhere(
    tmp_path: Path, name: str, text: str, argument: str, there: object, elsewhere: object
) -> None:
    assert argument in listed(imported(tmp_path, text.replace("{}", str(there)), name), UNDERSTOOD)
    if elsewhere is not None:
        assert argument in listed(imported(tmp_path, text.replace("{}", str(elsewhere)), name), ASSUMED)


def test_a_launch_says_how_its_stages_are_rounded_and_what_is_gathered_in_fp8(tmp_path: Path) -> None:
    for way, stages in (("up", 4), ("down", 3)):  # 48 layers by 7 are 7 stages, on 2 ranks 8 or 6
        found = imported(tmp_path, TEXTS["texts"]["auto"].format(2, 7, way), "a.yaml", "automodel")
        assert found.job["schedule"]["stages_per_rank"] == stages and not found.to_dict()["unknown"]
    text = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --bf16 --fp8-param-gather {}"
    assert "gather" not in imported(tmp_path, text.format("")).job["precision"]
    assert imported(tmp_path, text.format("--fp8-format e4m3")).job["precision"]["gather"] == "fp8"


def test_the_command_prints_a_job_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    assert main(["import", str(tmp_path / "run.sh")]) == 0
    text = capsys.readouterr().out
    assert '# unknown: --frobnicate "3"' in text and "# assumed: cluster.gpu" in text
    (tmp_path / "job.toml").write_text(text)
    assert main(["import", str(tmp_path / "run.sh"), "--json", "--from", "megatron-lm"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema_version"] == 1 and tomllib.loads(text) == found["job"]
    assert main(["import", str(tmp_path / "run.sh"), "--from", "megatrn"]) == 2
    assert "fix: megatron" in capsys.readouterr().err


def test_the_table_is_whole() -> None:
    """Each fact has a key of the job, each row a source and a way to be read; no framework names an argument twice."""
    keys = facts()["keys"]
    for framework in {f for chain in chains().values() for f in chain} | {"launcher", "environment"}:
        seen: dict[str, str] = {}
        for row in rows(framework):
            assert row.source and (row.note or row.fact) and (not row.fact or row.fact in keys), row
            for name in row.names:
                assert seen.setdefault(name, row.fact) == row.fact or row.how.split()[0] in ("is", "else"), (name, row)


LAUNCHES = Path(__file__).parents[4] / "shared" / "data" / "launches"


if LAUNCHES.is_dir():  # public launches are not kept here: a machine that has them holds us to them

    def test_public_launches(tmp_path: Path) -> None:
        from tests.piper_sim.frameworks.launches import coverage

        measured = coverage(LAUNCHES, tmp_path)
        assert not measured.unlisted and not measured.untrue
        assert measured.lists[UNKNOWN] < 0.01 * sum(measured.lists.values())
        assert measured.right / measured.stated >= 0.95, measured.wrong[:20]
        assert measured.matter[UNDERSTOOD] >= 0.95 * measured.matter.total() > 6000, measured.rest.most_common(20)


def test_a_pattern_of_layers_says_how_many_there_are_and_where_stages_end(tmp_path: Path) -> None:
    text = (
        "torchrun pretrain_hybrid.py --hidden-size 64 --num-attention-heads 8 --mamba-num-groups 2 --seq-length 64 "
        "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --bf16 --spec a.of.mine stack "
        "--pipeline-model-parallel-size 2 --hybrid-layer-pattern {}"
    )
    found = imported(tmp_path, text.format("'M-M|M*-|M-|MM-'"))
    assert {"--hybrid-layer-pattern", "--mamba-num-groups"} <= {*listed(found, UNDERSTOOD)}
    assert "--spec" in listed(found, ASSUMED)
    job = prepare(job_from(found.job))
    assert (job.layers, job.stages, job.config.layers) == ((3, 3, 2, 3), 4, 11)
    mixer = job.config.mixer
    assert mixer is not None and (mixer.heads, mixer.groups, mixer.inner) == (2, 2, 128)
    assert mixer.layers == {0, 2, 3, 6, 8, 9} and mixer.unmixed == {1, 5, 7, 10}
    assert "--hybrid-layer-pattern" in listed(imported(tmp_path, text.format("MXM")), UNKNOWN)
    ahead = imported(tmp_path, text.format("'MM|M*/*-/*-' --mtp-use-repeated-layer"))
    assert {"--hybrid-layer-pattern", "--mtp-use-repeated-layer"} <= {*listed(ahead, UNDERSTOOD)}
    job = prepare(job_from(ahead.job))
    assert (job.config.layers, job.config.mtp, job.config.mtp_repeated) == (4, 2, True)
    assert job.layout == ("Ett", "ttmmL") and job.config.attends(4) and job.config.has_mlp(4)
    assert "--hybrid-layer-pattern" in listed(imported(tmp_path, text.format("'MM/*-/M-'")), UNKNOWN)


def test_a_gpts_prediction_module_is_one_more_layer(tmp_path: Path) -> None:
    text = (
        "torchrun pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --swiglu "
        "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --bf16 --disable-bias-linear {}"
    )
    plain, ahead = (prepare(job_from(imported(tmp_path, text.format(x)).job)) for x in ("", "--mtp-num-layers 1"))
    assert (plain.config.mtp, ahead.config.mtp) == (0, 1)
    names = [[p.name for p in c.parts] for c in (e.chunk for e in ahead.base.entries) if c.name == "mtp0"]
    assert names[0] == ["embed", "proj", "attn", "mlp", "norm", "head"]


@pytest.mark.parametrize(
    ("choice", "recompute", "layers", "doubtful"),
    [
        ("op", ["operators"], None, False),
        ("1", ["mlp", "attention"], None, False),
        ("3", ["mlp", "attention"], "2::3", False),
        ("sometimes", ["operators"], None, True),
    ],
)
def test_torchtitans_choices(
    tmp_path: Path, choice: str, recompute: list[str], layers: str | None, doubtful: bool
) -> None:
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[activation_checkpoint]\nmode = "selective"\n'
    found = imported(tmp_path, f'{text}selective_ac_option = "{choice}"\n', "t.toml")
    schedule = found.job["schedule"]
    assert (schedule["recompute"], schedule.get("recompute_layers")) == (recompute, layers)
    assert ("activation_checkpoint.selective_ac_option" in listed(found, ASSUMED)) == doubtful


TOWERS = "--hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 --max-position-embeddings 48 --vocab-size 96"
TOWERS += " --micro-batch-size 2 --global-batch-size 16 --bf16"


def test_programs_say_which_model_is_trained(tmp_path: Path) -> None:
    """Megatron's BERT and T5 have a GPT's arguments, and are none; other programs' models are said to be presumed."""
    start = "torchrun --nproc_per_node 8 {} --num-layers 3 --seq-length 48 " + TOWERS
    bert = imported(tmp_path, start.format("pretrain_bert.py"))
    model = bert.job["model"]
    assert (model["model_type"], model["num_hidden_layers"], model["seq_len"]) == ("megatron-bert", 3, 48)
    assert prepare(job_from(bert.job)).config.form.bidirectional
    gpt = imported(tmp_path, start.format("pretrain_gpt.py"))
    assert gpt.job["model"]["model_type"] == "gpt2" and "--num-layers" in listed(gpt, UNDERSTOOD)
    other = imported(tmp_path, start.format("tools/pretrain_vision_classify.py"))
    assert other.job["model"] == gpt.job["model"] and "--num-layers" in listed(other, ASSUMED)


def test_two_towers_have_lengths_and_layers_of_their_own(tmp_path: Path) -> None:
    start = "torchrun --nproc_per_node 8 pretrain_t5.py --encoder-num-layers 3 --decoder-num-layers 2 "
    found = imported(tmp_path, f"{start} --encoder-seq-length 48 --decoder-seq-length 16 {TOWERS}")
    job = prepare(job_from(found.job))
    assert (job.config.layers, job.config.encoder) == (5, 3) and not listed(found, UNKNOWN)
    assert (job.job.model.seq_len, job.job.model.encoder_seq_len) == (16, 48)
    assert "--decoder-num-layers" in listed(found, UNDERSTOOD)
    same = imported(tmp_path, f"torchrun pretrain_t5.py --num-layers 4 --seq-length 32 {TOWERS}")
    both = prepare(job_from(same.job))
    assert (both.config.layers, both.config.encoder, both.job.model.seq_len) == (8, 4, 32)
    one = imported(tmp_path, f"torchrun pretrain_gpt.py --num-layers 4 --decoder-num-layers 2 --seq-length 32 {TOWERS}")
    assert one.job["model"]["n_layer"] == 4 and "--decoder-num-layers" in listed(one, ASSUMED)
