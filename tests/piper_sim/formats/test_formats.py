"""`piper-sim export --to FORMAT`: what other tools read, read back here by other means than wrote it."""

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet
import pytest

from ir.core.errors import PiperError
from ir.job.load import job_from
from ir.plan.plan import OpKind
from ir.schedules.custom import from_csv
from piper_sim.app.cli import main
from piper_sim.formats.chakra import chakra_files
from piper_sim.formats.torch_csv import order_csv
from piper_sim.study.predict import predict
from piper_sim.study.prediction import Prediction

Fields = list[tuple[int, int | bytes]]
JOB = """[model]
config = "tiny-moe"
seq_len = 64
[cluster]
nodes = 2
gpus_per_node = 2
[parallel]
pp = 2
dp = 2
ep = 2
[schedule]
name = "{}"
microbatches = 4
"""


def predicted(schedule: str) -> Prediction:
    import tomllib

    return predict(job_from(tomllib.loads(JOB.format(schedule))))


def number(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at


def fields(data: bytes) -> Fields:
    """A protobuf message by its wire format alone."""
    out, at = Fields(), 0
    while at < len(data):
        tag, at = number(data, at)
        value, at = number(data, at)
        if tag & 7 == 2:
            out.append((tag >> 3, data[at : at + value]))
            at += value
        else:
            assert tag & 7 == 0, "no other kind of value is written"
            out.append((tag >> 3, value))
    return out


def messages(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        size, at = number(data, at)
        yield data[at : at + size]
        at += size


def attributes(node: Fields) -> dict[str, int | bytes]:
    found = (fields(v) for k, v in node if k == 10 and isinstance(v, bytes))
    return {bytes(f[0][1]).decode(): f[1][1] for f in found}  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zbv", "dualpipe"])
def test_chakra_has_the_plan_s_nodes_and_bytes_on_every_rank(schedule: str) -> None:
    p = predicted(schedule)
    files, plan = chakra_files(p.plan, p.last_step), p.plan
    groups = json.loads(files.pop("comm_group.json"))
    assert len(files) == 4
    ends: Counter[tuple[object, ...]] = Counter()
    for rank in range(4):
        data = files[f"rank.{rank}.et"]
        assert isinstance(data, bytes)
        head, *nodes = (fields(m) for m in messages(data))
        rows = range(*map(int, plan.bounds[rank // 2 : rank // 2 + 2]))
        assert dict(head)[1] and len(nodes) == len(rows)
        kinds = {OpKind.COMPUTE: 4, OpKind.SEND: 5, OpKind.RECV: 6, OpKind.COLLECTIVE: 7}
        assert [dict(n)[3] for n in nodes] == [kinds[OpKind(int(plan.kind[i]))] for i in rows]
        assert [dict(n)[2] for n in nodes] == [plan.text(i).encode() for i in rows]
        wanted = sum(m.bytes for i in rows if (m := plan.shapes[int(plan.shape[i])].message))
        assert sum(int(attributes(n).get("comm_size", 0)) for n in nodes) == wanted > 0
        ids = {dict(n)[1] for n in nodes}
        for n in nodes:
            for _, packed in (f for f in n if f[0] in (4, 5)):
                at = 0
                while at < len(packed):  # type: ignore[arg-type]
                    before, at = number(packed, at)  # type: ignore[arg-type]
                    assert before in ids and before < dict(n)[1]  # type: ignore[operator]
            a = attributes(n)
            if "comm_tag" in a:
                key = tuple(a[k] for k in ("comm_src", "comm_dst", "comm_tag", "comm_size"))
                ends[key] += 1 if dict(n)[3] == 5 else -1
                assert rank in (a["comm_src"], a["comm_dst"])
            elif "pg_name" in a:
                assert rank in groups[bytes(a["pg_name"]).decode()]  # type: ignore[arg-type]
    assert ends and not any(ends.values()), "a send without its receive"


def test_durations_are_the_predictions() -> None:
    p = predicted("1f1b")
    data = chakra_files(p.plan, p.last_step)["rank.0.et"]
    assert isinstance(data, bytes)
    nodes = [dict(fields(m)) for m in messages(data)][1:]
    took = {
        op: end - start
        for r, op, start, end in zip(
            *(getattr(p.last_step, k) for k in ("rank", "op", "start_s", "end_s")), strict=True
        )
        if r == 0
    }
    assert len(nodes) == len(took)
    for n in nodes:
        assert abs(int(n.get(7, 0)) - 1e6 * took[bytes(n[2]).decode()]) <= 1  # type: ignore[arg-type]


def test_torch_csv_is_our_order_again_and_two_copies_are_refused(tmp_path: Path) -> None:
    """That torch's runtime makes the same gradients of it to the bit: tests/executor/runtime/test_torch_oracle.py."""
    p = predicted("zbv")
    (tmp_path / "a.csv").write_text(order_csv(p.prepared))
    again = from_csv(str(tmp_path / "a.csv"))
    assert [o.cells() for o in again.orders] == [line.split(",") for line in order_csv(p.prepared).splitlines()]
    with pytest.raises(PiperError, match="each stage on one rank"):
        order_csv(predicted("dualpipe").prepared)


def test_the_command_writes_each_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "my job.toml"
    job.write_text(JOB.format("1f1b"))

    def export(name: str, *more: str) -> int:
        return main(["export", str(job), "--to", name, "--out", str(tmp_path / name), "--json", *more])

    for name, files in {
        "torch-csv": ["schedule.csv"],
        "piper-json": ["strategy.json"],
        "perfetto": ["trace.json.gz"],
        "slurm": ["job.sbatch"],
        "megatron-lm": ["launch.sh"],
    }.items():
        assert export(name) == 0
        found = json.loads(capsys.readouterr().out)
        assert [Path(f).name for f in found["files"]] == files
    assert found["left_out"] == {"costs.software": "megatron-core"}
    assert export("torch-csv") == 2 and "exists already" in capsys.readouterr().out
    assert export("torch-csv", "--force") == 0
    capsys.readouterr()
    assert export("perfeto") == 2 and json.loads(capsys.readouterr().out)["error"]["suggestion"] == "perfetto"
    assert export("dataframe") == 0
    written = pyarrow.parquet.read_table(tmp_path / "dataframe" / "trace.parquet")
    assert written.num_rows == len(predicted("1f1b").last_step.op)
    monkeypatch.setattr("piper_sim.formats.tables.find_spec", lambda name: None)
    assert export("dataframe", "--force") == 2 and "missing_dependency" in capsys.readouterr().out


def test_the_batch_script_says_nodes_rendezvous_signal_and_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "it's.toml"
    job.write_text(JOB.format("1f1b"))
    sets = "schedule.name='zb1p'"
    assert main(["export", str(job), "--to", "slurm", "--out", str(tmp_path), "--set", sets]) == 0
    script = tmp_path / "job.sbatch"
    text = script.read_text()
    for line in ("--nodes=2", "--gpus-per-node=2", "--signal=B:USR1@300", "--requeue", "--ntasks-per-node=1"):
        assert f"#SBATCH {line}\n" in text
    assert "--nnodes 2 --nproc-per-node 2" in text and "scontrol requeue" in text
    bash = shutil.which("bash")
    if bash is None:
        return
    assert subprocess.run([bash, "-n", str(script)], check=False).returncode == 0
    # Run it with SLURM's commands stood in for: what would be started, and with --resume once there is a checkpoint.
    for name, body in {"srun": 'echo "$@"', "scontrol": "echo node1; echo node2"}.items():
        (tmp_path / name).write_text(f"#!{bash}\n{body}\n")
        (tmp_path / name).chmod(0o755)
    manifest = tmp_path / "done" / "step-000100" / "manifest.json"
    part = tmp_path / "begun" / "step-000100.tmp-1" / "manifest.json"
    for file in (manifest, part):
        file.parent.mkdir(parents=True)
        file.touch()
    for folder, tasks in ((tmp_path / "begun", "node"), (tmp_path / "done", "gpu")):
        (folder / "stop").touch()
        env = {
            "TASKS": tasks,
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "RUNS": str(folder),
        }
        said = subprocess.run([bash, str(script)], env=env, capture_output=True, text=True, check=True).stdout
        assert (f"-m executor {job} --set {sets} --steps 1000" in said) == (tasks == "node")
        assert ("--rdzv-endpoint node1:20007" in said) == (tasks == "node") != ("--ntasks=4" in said)
        assert ("--resume" in said) == (tasks == "gpu") and not (folder / "stop").exists()
