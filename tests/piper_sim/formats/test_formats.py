"""`piper-sim export --to FORMAT`: what other tools read, read back here by other means than wrote it."""

import io
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from chakra.schema.protobuf.et_def_pb2 import GlobalMetadata, Node
from chakra.src.third_party.utils.protolib import decodeMessage, encodeMessage
from google.protobuf.unknown_fields import UnknownFieldSet

from ir.job.load import job_from
from ir.plan.plan import OpKind
from ir.schedules.custom import from_csv
from piper_sim.app.cli import main
from piper_sim.formats.chakra import chakra_files
from piper_sim.formats.torch_csv import order_csv
from piper_sim.study.predict import predict
from piper_sim.study.prediction import Prediction
from tests.refusals import refusal

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
    return predict(job_from(tomllib.loads(JOB.format(schedule))))


def read(data: bytes | str) -> Iterator[Any]:
    """The messages of a file, by MLCommons' reader and classes."""
    assert isinstance(data, bytes)
    file, kind = io.BytesIO(data), GlobalMetadata
    while decodeMessage(file, message := kind()):
        for part in (message, *message.attr):
            assert not len(UnknownFieldSet(part)), "a field that et_def.proto has not"
        yield message
        kind = Node
    assert not file.read(), "it stopped before the end"


def said(node: Any, name: str, value: str) -> Any:
    """An attribute as the feeder reads it: by one of the values, whatever was written; that of another is empty."""
    return next((getattr(a, value) for a in node.attr if a.name == name), None)


class Fed:
    """A rank as ASTRA-sim's feeder and workload run it: ops whose data_deps are done, by id, one compute at a time."""

    def __init__(self, rank: int, nodes: list[Any]) -> None:
        self.rank, self.left, self.done = rank, {n.id: n for n in nodes}, set[int]()
        self.computed = list[str]()

    def free(self) -> list[Any]:
        return [n for _, n in sorted(self.left.items()) if self.done.issuperset(n.data_deps)]

    def finish(self, node: Any) -> None:
        self.done.add(node.id)
        del self.left[node.id]


def fed(files: Mapping[str, bytes | str]) -> list[Fed]:
    """Run all ranks to the end of what they can do. A send ends at once, a receive with its send, a collective when all
    of its group stand at it: as often as they did before.
    """
    groups = json.loads(files["comm_group.json"])
    ranks = [Fed(r, list(read(files[f"rank.{r}.et"]))[1:]) for r in range(len(files) - 1)]
    sent, moved = Counter[tuple[int, ...]](), True
    while moved:
        moved, at = False, defaultdict[tuple[str, int], list[tuple[Fed, Any]]](list)
        for rank in ranks:
            free = rank.free()
            for n in [n for n in free if n.type == 4][:1]:
                rank.computed.append(n.name)
                rank.finish(n)
                moved = True
            for n in (n for n in free if n.type in (5, 6)):
                key = tuple(said(n, f"comm_{k}", "int32_val") for k in ("src", "dst", "tag"))
                assert key[n.type == 6] == rank.rank, "issued by the rank at its end"
                if n.type == 5 or sent[key]:
                    sent[key] += 1 if n.type == 5 else -1
                    rank.finish(n)
                    moved = True
            for n in (n for n in free if n.type == 7):
                at[said(n, "pg_name", "string_val"), said(n, "comm_type", "int64_val")].append((rank, n))
        for (group, _), members in at.items():
            assert int(group) > 0, "0 is all ranks, whatever the file says"
            first = {r.rank: (r, n) for r, n in reversed(members)}
            if set(first) == set(groups[group]):
                moved = True
                for r, n in first.values():
                    r.finish(n)
    return ranks


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zbv", "dualpipe"])
def test_chakra_is_read_by_mlcommons_package_and_runs_by_astra_sims_rules_in_the_plans_order(schedule: str) -> None:
    p = predicted(schedule)
    files, plan = dict(chakra_files(p.plan, p.last_step)), p.plan
    assert len(files) == 5
    kinds = {OpKind.COMPUTE: 4, OpKind.SEND: 5, OpKind.RECV: 6, OpKind.COLLECTIVE: 7}
    moved = Counter[int]()
    for rank in range(4):
        head, *nodes = read(files[f"rank.{rank}.et"])
        rows = range(*map(int, plan.bounds[rank // 2 : rank // 2 + 2]))
        assert head.version and len(nodes) == len(rows)
        assert [n.type for n in nodes] == [kinds[OpKind(int(plan.kind[i]))] for i in rows]
        assert [n.name for n in nodes] == [plan.text(i) for i in rows]
        moved.update(n.type for n in nodes)
        wanted = sum(m.bytes for i in rows if (m := plan.shapes[int(plan.shape[i])].message))
        sizes = [(n.type, said(n, "comm_size", "int64_val")) for n in nodes]
        assert sum(size or 0 for kind, size in sizes if kind == 7) == wanted > 0
        assert {size for kind, size in sizes if kind in (5, 6)} == {64 * p.planned.prepared.config.hidden * 2}
    assert moved[5] == moved[6] > 0
    for rank in fed(files):
        assert not rank.left, f"rank {rank.rank} waits at {[n.name for n in rank.free()]}"
        program = [plan.text(i) for i in range(*map(int, plan.bounds[rank.rank // 2 : rank.rank // 2 + 2]))]
        assert rank.computed == [t for t in program if t in set(rank.computed)]


def test_the_reader_sees_a_lost_send_and_an_order_that_only_ctrl_deps_say() -> None:
    """The controls of the test above: what is left out shows."""
    p = predicted("1f1b")
    files = dict(chakra_files(p.plan, p.last_step))
    head, *nodes = read(files["rank.0.et"])

    def rewritten(kept: list[Any]) -> list[Fed]:
        out = io.BytesIO()
        for message in (head, *kept):
            encodeMessage(out, message)
        return fed(files | {"rank.0.et": out.getvalue()})

    whole = rewritten(nodes)[0].computed
    for n in nodes:
        n.data_deps[:] = [d for d in n.data_deps if d not in n.ctrl_deps]
    loose = rewritten(nodes)[0]
    assert not loose.left and loose.computed != whole
    send = next(n for n in nodes if n.type == 5)
    for n in nodes:
        n.data_deps[:] = [d for d in n.data_deps if d != send.id]
    assert any(r.left for r in rewritten([n for n in nodes if n is not send]))


def test_mlcommons_own_command_says_the_same(tmp_path: Path) -> None:
    """chakra_jsonizer writes one JSON object behind the other."""
    p = predicted("dualpipe")
    for name, data in chakra_files(p.plan, p.last_step).items():
        if not isinstance(data, bytes):
            continue
        (trace := tmp_path / name).write_bytes(data)
        out = tmp_path / "out.json"
        command = [sys.executable, "-m", "chakra.src.jsonizer.jsonizer"]
        subprocess.run([*command, "--input_filename", trace, "--output_filename", out], check=True)
        found = [json.loads(x) for x in out.read_text().replace("}{", "}\0{").split("\0")][1:]
        assert [n["name"] for n in found] == [n.name for n in list(read(data))[1:]]
        sizes = (int(a["int64Val"]) for n in found for a in n["attr"] if a["name"] == "comm_size")
        assert sum(sizes) == sum(said(n, "comm_size", "int64_val") or 0 for n in list(read(data))[1:]) > 0


def test_durations_are_the_predictions() -> None:
    p = predicted("1f1b")
    nodes = list(read(chakra_files(p.plan, p.last_step)["rank.0.et"]))[1:]
    t = p.last_step
    rows = zip(t.rank, t.op, t.start_s, t.end_s, strict=True)
    took = {op: end - start for r, op, start, end in rows if r == 0}
    assert len(nodes) == len(took)
    for n in nodes:
        assert abs(n.duration_micros - 1e6 * took[n.name]) <= 1


def test_torch_csv_is_our_order_again_and_two_copies_are_refused(tmp_path: Path) -> None:
    """That torch's runtime makes the same gradients of it to the bit: tests/executor/runtime/test_torch_oracle.py."""
    p = predicted("zbv")
    (tmp_path / "a.csv").write_text(order_csv(p.prepared))
    again = from_csv(str(tmp_path / "a.csv"))
    assert [o.cells() for o in again.orders] == [line.split(",") for line in order_csv(p.prepared).splitlines()]
    refusal(order_csv, predicted("dualpipe").prepared, match="each stage on one rank")


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
    # The job keeps a stage's gradients in one piece; Megatron, asked to overlap, cuts them by 40 million in fp32.
    assert found["left_out"] == {"costs.software": "megatron-core", "parallel.bucket_MiB": 40e6 * 4 / 2**20}
    assert export("torch-csv") == 2 and "exists already" in capsys.readouterr().out
    assert export("torch-csv", "--force") == 0
    capsys.readouterr()
    assert export("perfeto") == 2 and json.loads(capsys.readouterr().out)["error"]["suggestion"] == "perfetto"
    assert export("dataframe") == 0
    written = pyarrow.parquet.read_table(tmp_path / "dataframe" / "trace.parquet")
    assert written.num_rows == len(predicted("1f1b").last_step.op)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert export("dataframe", "--force") == 2 and "missing_dependency" in capsys.readouterr().out


def test_a_script_names_a_job_whose_path_is_no_text(tmp_path: Path) -> None:
    """A file system of another encoding: bash opens what Python has opened."""
    job = tmp_path / os.fsdecode(b"caf\xe9.toml")
    job.write_text(JOB.format("1f1b"))
    assert main(["export", str(job), "--to", "slurm", "--out", str(tmp_path)]) == 0
    assert b"\nJOB='" + os.fsencode(job) + b"'\n" in (tmp_path / "job.sbatch").read_bytes()


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
