"""Bad input: the exit code, the kind, the key, and the nearest fix."""

import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

SETTINGS = tomllib.loads((Path(__file__).parent / "bad_settings.toml").read_text(encoding="utf-8"))["settings"]


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


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("model.seqlen=128", "seq_len"),
        ("model.attentio=flash", "attention"),
        ("cluster.node=2", "cluster.nodes"),
        ("cluster.gpu_per_node=2", "cluster.gpus_per_node"),
        ("cluster.memory_margin=2", "cluster.memory_margin_GiB"),
        ("search.objectiv=cost", "search.objective"),
        ("search.memory_limit=2", "search.memory_limit_GiB"),
    ],
)
def test_a_typo_in_an_open_section_may_be_of_a_key_that_is_the_jobs_own(
    cli: Any, job: Any, typo: str, meant: str
) -> None:
    error = cli("simulate", job(), "--set", typo).error
    assert error["suggestion"] == meant and meant.rpartition(".")[2] in error["allowed"].split(", ")


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
    sizes = {"pp": 1, "dp": 1, "ep": 1, "tp": 12}
    result = cli(
        "simulate", job(model={"config": "llama3-8b", "num_attention_heads": 48, "head_dim": 128}, parallel=sizes)
    )
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
    for key in ("model.config", "cluster.gpu"):  # a name longer than a file's may be
        result = cli("simulate", job(), "--set", f"{key}={'x' * 300}")
        assert result.error["key"] == key and "mistake" not in result.error["message"]


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


@pytest.mark.parametrize(
    ("said", "meant"),
    [("predict", "simulate"), ("train", "run"), ("help", "--help"), ("version", "--version"), ("simulat", "simulate")],
)
def test_a_command_by_another_name_is_told_ours(cli: Any, said: str, meant: str) -> None:
    error = cli(said, "job.toml").error
    assert (error["key"], error["suggestion"]) == ("piper-sim", meant)


def test_the_version_is_the_package_s(cli: Any) -> None:
    told = cli("--version", as_json=False)
    assert (told.code, told.out) == (0, f"piper-sim {version('piper-sim')}\n")
    assert cli("--version").json == {"schema_version": 1, "version": version("piper-sim")}
    assert cli("--json", "--version", as_json=False).out == cli("--version").out
