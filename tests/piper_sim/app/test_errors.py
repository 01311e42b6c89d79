"""Bad input: the exit code, the kind, the key, and the nearest fix. One line of the table per mistake."""

from pathlib import Path
from typing import Any

import pytest

# --set …, kind, key, part of the suggestion (or of what is allowed)
SETTINGS = [
    # typos, answered with the nearest word
    ("schedule.nmae=1f1b", "job", "schedule.nmae", "name"),
    ("shedule.name=1f1b", "job", "shedule", "schedule"),
    ("schedule.name=dualpip", "job", "schedule.name", "dualpipe"),
    ("schedule.name=", "job", "schedule.name", "1f1b"),
    ("parallel.zro=1", "job", "parallel.zro", "zero"),
    ("model.config=tiny-mo", "model", "model.config", "tiny-moe"),
    ("model.num_hiden_layers=3", "model", "model.num_hiden_layers", "num_hidden_layers"),
    ("model.attention=flsh", "job", "model.attention", "flash"),
    ("cluster.gpu=h100", "hardware", "cluster.gpu", "h100-sxm"),
    ("cluster.nic_gbps=100", "hardware", "cluster.nic_gbps", "nic_Gbps"),
    ("schedule.recompute=selectve", "job", "schedule.recompute", "selective"),
    ('schedule.recompute=["nrom"]', "job", "schedule.recompute", "norm"),
    ("optimizer.name=adam", "job", "optimizer.name", "adamw"),
    ("costs.interference=pairwize", "job", "costs.interference", "pairwise"),
    ("precision.compute=bf17", "job", "precision.compute", "bf16"),
    ("parallel.layers=evne", "job", "parallel.layers", "even"),
    # types: no truth value is a number, no text one either
    ("parallel.pp=true", "job", "parallel.pp", "integer"),
    ("parallel.pp=2.0", "job", "parallel.pp", "parallel.pp = 2"),
    ('parallel.pp="2"', "job", "parallel.pp", "parallel.pp = 2"),
    ("parallel.pp=nan", "job", "parallel.pp", "integer"),
    ("parallel.zero=true", "job", "parallel.zero", "integer"),
    ("parallel.sequence_parallel=1", "job", "parallel.sequence_parallel", "true"),
    ("schedule.name=3", "job", "schedule.name", '"3"'),
    ("optimizer.lr=nan", "job", "optimizer.lr", "number"),
    ("optimizer.clip_norm=inf", "job", "optimizer.clip_norm", "number"),
    ("cluster.sms=true", "hardware", "cluster.sms", ""),
    ("model.torch_dtype=2020-01-01", "job", "model.torch_dtype", "text"),
    ("cluster.speed=1", "job", "cluster.speed", "table"),
    # ranges
    ("parallel.pp=0", "job", "parallel.pp", "parallel.pp = 1"),
    ("parallel.zero=4", "job", "parallel.zero", "3"),
    ("parallel.zero=-1", "job", "parallel.zero", "0"),
    ("parallel.prefetch=-1", "job", "parallel.prefetch", "0"),
    ("parallel.bucket_MiB=0", "job", "parallel.bucket_MiB", "more than 0"),
    ("schedule.microbatches=0", "job", "schedule.microbatches", "1"),
    ("schedule.microbatch_size=-3", "job", "schedule.microbatch_size", "1"),
    ("model.seq_len=0", "job", "model.seq_len", "1"),
    ("model.seq_len=100000000000", "job", "model.seq_len", ""),
    ("model.hidden_size=nan", "model", "model.hidden_size", "positive integer"),
    ("cluster.memory_margin_GiB=-1", "job", "cluster.memory_margin_GiB", "from 0 up"),
    ("cluster.hbm_GiB=0", "hardware", "cluster.hbm_GiB", ""),
    ("cluster.hbm_GiB=nan", "hardware", "cluster.hbm_GiB", ""),
    ("cluster.speed={0=0}", "job", "cluster.speed", "factor"),
    ("cluster.speed={0=-1}", "job", "cluster.speed", "factor"),
    ("cluster.speed={0=true}", "job", "cluster.speed", "factor"),
    ("cluster.speed={x=1}", "job", "cluster.speed", "factor"),
    ('cluster.speed={"²"=1}', "job", "cluster.speed", "factor"),
    ("cluster.speed={4=0.5}", "job", "cluster.speed", "0..3"),
    # too much for one machine, refused before it is built
    ("schedule.microbatches=1000000000", "job", "schedule.microbatches", "333333"),
    ("schedule.microbatches=100000", "job", "schedule.microbatches", "microbatches"),
    ("model.num_hidden_layers=1000000000", "model", "model.num_hidden_layers", "1000"),
    ("model.hidden_size=100000000000000", "job", "model.seq_len", "smaller"),
    # sizes that do not go together
    ("parallel.pp=64", "job", "parallel.layers", "4 stages"),
    ("parallel.tp=8", "job", "parallel.tp", "tp = 4"),
    ("parallel.ep=3", "job", "parallel.ep", "ep = 2"),
    ("parallel.ep=16", "job", "parallel.ep", "ep = 8"),
    ("parallel.layers=[4]", "job", "parallel.layers", "2 counts"),
    ("parallel.layers=[1,2]", "job", "parallel.layers", "+1"),
    ("parallel.layers=[5,-1]", "job", "parallel.layers", "0 or more"),
    ("parallel.order=tp cp", "job", "parallel.order", "tp cp ep dp pp"),
    ("cluster.nodes=3", "job", "parallel.dp", "dp = 12"),
    ("schedule.stages_per_rank=2", "job", "schedule.stages_per_rank", "interleaved-1f1b"),
    # not built yet: said, not ignored
    ("model.graph=x.json", "job", "model.config", "leave out config"),
    ("costs.software=megatrom", "job", "costs.software", "megatron"),
    ("routing.kind=file", "job", "routing.file", "tokens.csv"),
    ("routing.file=x.csv", "job", "routing.kind", 'routing.kind = "file"'),
    ("parallel.reshard=false", "job", "parallel.reshard", "leave it out"),
]


@pytest.mark.parametrize(("setting", "kind", "key", "fix"), SETTINGS)
@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_a_bad_setting_exits_2_and_names_file_key_and_fix(
    cli: Any, job: Any, command: str, setting: str, kind: str, key: str, fix: str
) -> None:
    path = job()
    result = cli(command, path, "--set", setting)
    assert result.code == 2, result.out
    error = result.error
    assert (error["kind"], error["key"]) == (kind, key)
    assert fix in f"{error['allowed']} {error['suggestion']}"
    assert error["file"] == path
    text = cli(command, path, "--set", setting, as_json=False)
    assert text.code == 2 and text.out == "" and key in text.err and "Traceback" not in text.err


def test_odd_ranks_are_refused_for_dualpipe_and_the_fix_is_dualpipev(cli: Any, job: Any) -> None:
    result = cli("simulate", job(parallel={"pp": 3}, schedule={"name": "dualpipe"}))
    assert result.code == 2 and result.error["kind"] == "job" and result.error["key"] == "parallel.pp"
    assert "dualpipev" in result.error["suggestion"]


def test_61_layers_on_64_stages(cli: Any, job: Any) -> None:
    sizes = {"pp": 64, "dp": 1, "ep": 1}
    result = cli("simulate", job(model={"config": "deepseek-v3"}, parallel=sizes))
    assert result.code == 2 and result.error["key"] == "parallel.layers"
    assert "61 layers on 64 stages" in result.error["message"]


def test_heads_and_kv_heads_limit_tp(cli: Any, job: Any) -> None:
    sizes = {"pp": 1, "dp": 1, "ep": 1, "tp": 16}
    result = cli("simulate", job(model={"config": "llama3-8b"}, parallel=sizes))
    assert result.code == 2 and "KV heads = 8" in result.error["message"] and result.error["suggestion"] == "tp = 8"


def test_sizes_without_a_common_refinement(cli: Any, job: Any) -> None:
    sizes = {"pp": 1, "tp": 3, "dp": 2, "ep": 2}
    model = {"num_attention_heads": 3, "num_key_value_heads": 3, "vocab_size": 258, "moe_intermediate_size": 33}
    result = cli("simulate", job(model={**model, "seq_len": 126}, parallel=sizes))
    assert result.code == 2 and result.error["key"] == "parallel.ep"
    assert "no common refinement" in result.error["message"] and "ep = " in result.error["suggestion"]


def test_pp_may_vary_fastest(cli: Any, job: Any) -> None:
    first = cli("simulate", job(parallel={"order": "pp tp cp ep dp"}))
    assert first.code == 0 and first.json["plan_digest"] == cli("simulate", job()).json["plan_digest"]


JOBS: list[tuple[str, bytes, str]] = [
    ("empty", b"", "model.config"),
    ("a comment", b"# nothing\n", "model.config"),
    ("binary", b"\x00\xff\xfe\x80", "line 1"),
    ("not TOML", b"model: tiny-moe", "line 1, column 6"),
    ("a key twice", b'[model]\nconfig="tiny-moe"\nconfig="tiny-llama"\n', "line 3, column 20"),
    ("a section twice", b'[model]\nconfig="tiny-moe"\n[model]\nseq_len=1\n', "line 3, column 7"),
    ("a section as a value", b"model = 3", "model"),
    ("an array of sections", b'[[model]]\nconfig="tiny-moe"', "model"),
    ("nested beyond reason", b"x=" + b"[" * 5000, "JOB"),
    ("a number of 5,000 digits", b"[model]\nseed=" + b"1" * 5000, "JOB"),
    ("two megabytes", b"#" * 2_000_000, "JOB"),
    ("a long text", b'[model]\nconfig="' + b"x" * 5000 + b'"', "model.config"),
    ("a NUL in a path", b'[model]\nconfig="a\\u0000b"', "model.config"),
]


@pytest.mark.parametrize(("name", "content", "key"), JOBS, ids=[j[0] for j in JOBS])
def test_a_file_that_is_no_job(cli: Any, tmp_path: Path, name: str, content: bytes, key: str) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    result = cli("simulate", path)
    assert result.code == 2 and result.error["kind"] == "job" and result.error["file"] == str(path)
    assert (result.error["key"] or "") == key


def test_a_byte_order_mark_and_windows_line_ends_are_fine(cli: Any, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b'\xef\xbb\xbf[model]\r\nconfig = "tiny-llama"\r\nseq_len = 128\r\n')
    assert cli("simulate", path).code == 0


def test_missing_files_and_folders_are_io_errors(cli: Any, job: Any, tmp_path: Path) -> None:
    for path in (tmp_path / "nope.toml", tmp_path):
        result = cli("simulate", path)
        assert result.code == 2 and result.error["kind"] == "io" and result.error["file"] == str(path)
    for key in ("model.config", "cluster.gpu", "schedule.directives", "schedule.csv"):
        result = cli("simulate", job(), "--set", f"{key}={tmp_path}/nope.json")
        assert result.code == 2 and result.error["kind"] == "io" and "nope.json" in result.error["file"]


@pytest.mark.parametrize("setting", ["x", "=3", "a.=3", ".b=3", "schedule=3", "schedule.name.x=3"])
def test_a_set_that_sets_nothing(cli: Any, job: Any, setting: str) -> None:
    result = cli("simulate", job(), "--set", setting)
    assert result.code == 2 and result.error["kind"] == "usage" and result.error["key"].startswith("--set")


def test_hardware_from_a_file(cli: Any, job: Any, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text('{"base": "h100-sxm", "name": "mine", "hbm_GiB": 40}')
    assert cli("simulate", job(), "--set", f"cluster.gpu={path}").json["memory"]["capacity_bytes"] == 40 * 2**30
    for content in (
        "",
        "[]",
        "{",
        '{"base": 3}',
        '{"base": "h100-sxm", "hbm_GiB": -1}',
        '{"base": "h100-sxm", "x": 1}',
    ):
        path.write_text(content)
        result = cli("simulate", job(), "--set", f"cluster.gpu={path}")
        assert result.code == 2 and result.error["kind"] == "hardware" and result.error["message"]


def test_without_torch_run_says_how_to_install_it(cli: Any, job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper_sim.app.cli.find_spec", lambda name: None)
    result = cli("run", job(), "-n", 4)
    assert result.code == 2 and result.error["kind"] == "missing_dependency"
    assert "pip install 'piper-sim[exec]'" in result.error["suggestion"]


@pytest.mark.parametrize(
    ("args", "key", "fix"),
    [
        ([], "piper-sim", "demo"),
        (["simulat", "x"], "piper-sim", "simulate"),
        (["train", "x"], "piper-sim", ""),
        (["simulate"], "piper-sim simulate", "--help"),
        (["simulate", "a", "b"], "b", "--help"),
        (["simulate", "a", "--forse"], "--forse", "--force"),
        (["schedule", "1f1b", "--ranks", "two", "--microbatches", "4"], "--ranks", "--help"),
        (["schedule", "1f1b", "--rank", "2", "--microbatches", "4"], "piper-sim schedule", "--help"),
        (
            ["schedule", "1f1b", "--ranks", "2", "--microbatches", "4", "--p2p-mode", "bufered"],
            "--p2p-mode",
            "buffered",
        ),
        (["compare", "a", "--schedules", "dualpip"], "--schedules", "dualpipe"),
        (["compare", "a", "--schedules", ""], "--schedules", ""),
    ],
)
def test_bad_flags(cli: Any, args: list[str], key: str, fix: str) -> None:
    result = cli(*args)
    assert result.code == 2 and result.error["kind"] == "usage" and result.error["key"] == key
    assert fix in (result.error["suggestion"] or "")
