"""`piper-sim run` from outside: its object, its files, and what it refuses before any process starts."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from executor.device.device import gpu_of
from executor.launch.refusals import refuse
from executor.launch.run import _durations
from ir.core.errors import ErrorKind, PiperError
from ir.job import load_job
from ir.job.build import prepare
from ir.workload import load_config
from piper_sim.app.cli import main
from piper_sim.study.history.logs import read_log
from tests.executor.launch.processes import python
from tests.executor.runs import JOB, job_file, run


def command(capfd: pytest.CaptureFixture[str], *args: str, code: int = 0) -> dict[str, Any]:
    """Run a command in this process; stdout is one JSON object and nothing else."""
    assert main([*args, "--json"]) == code
    out = capfd.readouterr().out
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    assert found["schema_version"] == 1
    return found


Answers = Callable[..., dict[str, Any]]


@pytest.fixture
def ran(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Answers:
    """`piper-sim run` of the tests' job with these flags, on two ranks unless they say another number."""
    job = str(job_file(tmp_path))
    return lambda *flags, code=0: command(capfd, "run", job, "-n", "2", *flags, code=code)


@pytest.fixture
def simulated(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Answers:
    """`piper-sim simulate` of the same job."""
    job = str(job_file(tmp_path))
    return lambda *flags: command(capfd, "simulate", job, *flags)


def test_every_plan_of_one_global_batch_prints_the_same_numbers(ran: Answers, simulated: Answers) -> None:
    found = {}
    for name, ranks in (("1f1b", 2), ("zbv", 2), ("dualpipe", 2), ("gpipe", 1)):
        sets = ["--set", f"schedule.name={name}", "--set", f"parallel.pp={ranks}"]
        found[name] = ran("-n", str(ranks), "--steps", "2", *sets)
        predicted = simulated(*sets)
        assert found[name]["plan_digest"] == predicted["plan_digest"] != ""
        assert found[name]["ranks"] == ranks and found[name]["trace"] is None
        assert len(found[name]["losses"]) == len(found[name]["grad_norms"]) == 2
    for key in ("losses", "grad_norms"):
        want = found["1f1b"][key]
        assert all(f[key] == pytest.approx(want, rel=1e-12) for f in found.values())
        assert found["gpipe"][key] == want == found["zbv"][key]


def test_a_framework_s_bytes_are_in_the_plan_that_runs(ran: Answers, simulated: Answers) -> None:
    framework = ["--set", "costs.software=nanotron"]
    done, predicted = ran("--steps", "1", *framework), simulated(*framework)
    assert done["plan_digest"] == predicted["plan_digest"] != simulated()["plan_digest"]


def test_files_are_written_and_never_overwritten(ran: Answers, simulated: Answers, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = ran("--out", str(out))
    assert found["trace"] == str(out / "trace.tsv")
    assert {p.name for p in out.iterdir()} == {
        "ranks.json", "run.json", "log.jsonl", "metrics.prom", "plan.txt", "trace.tsv", "trace.json.gz", "timeline.png"
    }  # fmt: skip
    metrics = dict(re.findall(r'^piper_sim_(\w+)\{plan="\w{64}"\} (\S+)$', (out / "metrics.prom").read_text(), re.M))
    assert float(metrics["loss"]) == found["losses"][-1] and float(metrics["step"]) == len(found["losses"]) - 1
    predicted = simulated()
    assert float(metrics["predicted_step_seconds"]) == predicted["iteration_s"]
    measured = float(metrics["step_seconds"])
    assert float(metrics["measured_to_predicted"]) == measured / predicted["iteration_s"]
    assert float(metrics["mfu"]) == pytest.approx(predicted["mfu"] * predicted["iteration_s"] / measured)
    before = (out / "ranks.json").read_text()
    error = ran("--out", str(out), code=2)["error"]
    assert error["kind"] == "io" and "--force" in error["suggestion"] and (out / "ranks.json").read_text() == before
    ran("--out", str(out), "--force")
    assert (out / "ranks.json").read_text() != before
    assert ran("--out", str(job_file(tmp_path)), code=2)["error"]["kind"] == "io"


def records(file: Path) -> list[bytes]:
    """TensorFlow's: length, checksum, data, checksum."""
    raw, out = file.read_bytes(), []
    while raw:
        size = int.from_bytes(raw[:8], "little")
        out.append(raw[12 : 12 + size])
        raw = raw[16 + size :]
    return out


def test_tensorboard_gets_every_step_and_history_reads_it(
    ran: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = tmp_path / "board"
    saved = ["--save", str(tmp_path / "saved"), "--every", "2", "--resume", "if-present"]
    for steps in ("2", "4"):
        done = ran("--steps", steps, *saved, "--tensorboard", str(events))
    files = sorted(events.iterdir())
    last = [Event.FromString(record) for record in records(files[1])]
    losses = [(e.step, v.simple_value) for e in last for v in e.summary.value if v.tag == "loss"]
    assert len(files) == 2 and [step for step, _ in losses] == [2, 3]
    assert [x for _, x in losses] == pytest.approx(done["losses"], rel=1e-6)
    assert any(e.session_log.status == e.session_log.START and e.step == 2 for e in last)  # hides steps done twice
    assert [step for step, _ in read_log(str(files[0])).steps] == [0, 1]
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    error = ran("--tensorboard", str(events), code=2)["error"]
    assert error["kind"] == "missing_dependency" and "piper-sim[tensorboard]" in error["suggestion"]
    monkeypatch.undo()
    assert ran("--tensorboard", str(job_file(tmp_path)), code=2)["error"]["key"] == "--tensorboard"


def test_a_run_is_replayed_from_its_own_files(ran: Answers, tmp_path: Path) -> None:
    trace = str(tmp_path / "out" / "trace.tsv")
    first = ran("--emulate", "0.002", "--out", str(tmp_path / "out"))
    again = ran("--replay", trace)
    assert again["plan_digest"] == first["plan_digest"] and again["losses"] is None
    assert again["iteration_s"] >= 4 * 2 * 3 * 0.002  # microbatches, layers of a rank, passes: no op is quicker
    other = ["--set", "schedule.microbatches=5"]
    for flags, key, words in (
        (["--replay", trace, "--emulate", "0.01"], "--replay", "either a given time or that of a trace"),
        (["--replay", str(tmp_path / "none.tsv")], "TRACE", "cannot read a trace"),
        (["--replay", str(job_file(tmp_path))], "line 1", "not a header"),
        (["--replay", trace, *other], "--replay", "a trace of another plan: the trace lacks op"),
    ):
        error = ran(*flags, code=2)["error"]
        assert (error["key"], words in error["message"]) == (key, True), error


def test_people_get_a_timeline_and_a_line_per_step(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = ["run", str(job_file(tmp_path)), "-n", "2", "--steps", "2"]
    line += ["--save", str(tmp_path / "saved"), "--resume", "if-present"]
    assert main(line) == 0
    out = capfd.readouterr().out
    assert "rank 1" in out and "step 1: loss 5." in out and "s per step (median) on 2 ranks" in out
    assert main([*line, "--out", str(tmp_path / "out")]) == 0
    out = capfd.readouterr().out
    assert out == f"nothing left to do: {tmp_path / 'saved' / 'step-000002'} is of step 2\n"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["plan.txt", "run.json"]


@pytest.mark.parametrize(
    ("sets", "flags", "kind", "words"),
    [
        (['schedule.recompute=["operators"]', "run.compile=true"], [], "job", "operators inside of compiled code"),
        (["precision.compute=fp16"], [], "job", "fp16"),
        (['model.quantization_config={quant_method="fp8"}'], [], "model", "stored in fp8"),
        (["precision.gather=bf16"], [], "job", "gather"),
        (["optimizer.no_decay=['*.wieght']"], [], "job", "no parameter is called '*.wieght'"),
        (["run.compile=true"], ["--racecheck"], "usage", "compiled code touches memory unseen"),
        (["run.eval_source=nothing.txt", "run.eval_every=1"], [], "io", "cannot read tokens"),
        (["data.source=nothing.txt"], [], "io", "cannot read tokens"),
        (["model.module=my.py:build"], [], "job", "needs the graph captured from it"),
        (["schedule.name=dualpipe"], ["--backend", "nccl"], "usage", "nccl needs a CUDA GPU for each of 2 ranks"),
        ([], ["--backend", "nccl", "--emulate", "0.01"], "usage", "nccl moves what a GPU computes"),
        ([], ["--emulate", "-1"], "usage", "-1.0 seconds"),
        ([], ["--emulate", "nan"], "usage", "nan seconds"),
        ([], ["--emulate-comm", "inf"], "usage", "inf seconds"),
        (["precision.compute=fp16"], ["--emulate", "0.01"], "job", "fp16"),
        ([], ["--steps", "0"], "usage", "0 steps"),
        ([], ["--watchdog", "0"], "usage", "0.0 seconds"),
        ([], ["-n", "0"], "usage", "0 processes for a job of 2 ranks"),
    ],
)
def test_what_is_not_there_yet_is_refused(
    sets: list[str], flags: list[str], kind: str, words: str, ran: Answers
) -> None:
    error = ran(*flags, *(x for s in sets for x in ("--set", s)), code=2)["error"]
    assert (error["kind"], words in error["message"]) == (kind, True) and error["suggestion"]


@pytest.mark.parametrize(
    ("ranks", "sets"),
    [
        (1, []),
        (1, ["parallel.layers=[2,2]"]),
        (2, ["parallel.tp=2", "parallel.pp=4"]),
        (2, ["parallel.dp=4", "cluster.nodes=2", "cluster.gpus_per_node=8", "parallel.pp=4"]),
        (3, ["schedule.name=dualpipe"]),
    ],
)
def test_a_wrong_number_of_ranks_says_how_to_shrink_the_job(ranks: int, sets: list[str], ran: Answers) -> None:
    line = ["-n", str(ranks), *(x for s in sets for x in ("--set", s))]
    error = ran(*line, code=2)["error"]
    assert error["kind"] == "usage" and error["key"] == "-n"
    fix = error["suggestion"].split()
    assert fix[0] == "--set" and ran(*line, *fix)["ranks"] == ranks


def test_paths_in_a_job_start_at_its_folder(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "deep"
    folder.mkdir()
    config = load_config("tiny-llama", {"num_hidden_layers": 2})
    raw = {
        "model_type": "llama", "hidden_size": config.hidden, "intermediate_size": config.ffn, "num_hidden_layers": 2,
        "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads, "vocab_size": config.vocab,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "text.txt").write_text("the same tokens, whoever reads them, from wherever they are read; " * 4)
    text = JOB.replace('"tiny-llama"', '"config.json"').replace("num_hidden_layers = 4\n", "")
    job_file(folder, text=text + '[data]\nsource = "text.txt"\n')
    monkeypatch.chdir(tmp_path)
    assert command(capfd, "run", "deep/job.toml", "-n", "2")["ranks"] == 2


_WITHOUT_TORCH = """
import sys
from importlib.machinery import PathFinder

class Hidden(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] == "torch" else super().find_spec(name, path, target)

sys.meta_path[:] = [Hidden if f is PathFinder else f for f in sys.meta_path]
from piper_sim.app.cli import main
from piper_sim.study.history.logs import read_log
sys.exit(main(sys.argv[1:]))
"""


def test_without_torch_everything_but_run_works(tmp_path: Path) -> None:
    def go(*args: str) -> subprocess.CompletedProcess[str]:
        return python("-c", _WITHOUT_TORCH, *args, str(job_file(tmp_path)), "--json")

    done = go("run", "-n", "2")
    error = json.loads(done.stdout)["error"]
    assert done.returncode == 2 and error["kind"] == "missing_dependency"
    assert "pip install 'piper-sim[exec]'" in error["suggestion"]
    assert go("simulate").returncode == 0


def test_a_refusal_comes_before_any_process(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(PiperError):
        run("precision.compute=fp16", out=out)
    assert not out.exists()


def test_nccl_runs_a_plan_only_on_hardware_queues_that_let_it_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    jobs = {n: prepare(load_job(job_file(tmp_path), [f"schedule.name={n}"])) for n in ("1f1b", "dualpipe")}
    for queues, refused in (("8", None), ("1", ErrorKind.DEADLOCK), ("many", ErrorKind.USAGE), ("33", ErrorKind.USAGE)):
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
        found = []
        for job in jobs.values():
            try:
                refuse(job, "nccl")
            except PiperError as error:
                found.append(error.kind)
        assert found == ([] if refused is None else [refused] * (1 if refused is ErrorKind.DEADLOCK else 2))


def test_a_launcher_may_give_each_rank_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    job = prepare(load_job(job_file(tmp_path)))
    for seen, here, refused in (("5", 2, False), ("", 2, True), ("5", 0, True)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
        with pytest.raises(PiperError, match="nccl needs a CUDA GPU") if refused else nullcontext():
            refuse(job, "nccl", here=here)
    assert gpu_of(3) == 0
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert gpu_of(3) == 3


def test_a_step_counts_from_the_end_of_the_one_before_unless_something_else_was_done_there() -> None:
    """Steps of 2 s with 1 s between them; behind the second a checkpoint of 10 s."""
    ends = (2.0, 5.0, 17.0, 20.0)
    rows = [(k + 3, 0, "0F0", 0.0, end - 2.0, end) for k, end in enumerate(ends)]
    rank = {"first_step": 3, "rows": rows, "paused": [4]}
    assert _durations([rank]) == [2.0, 3.0, 2.0, 3.0]
    assert _durations([{**rank, "paused": []}]) == [2.0, 3.0, 12.0, 3.0]
