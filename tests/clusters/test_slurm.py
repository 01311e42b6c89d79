"""The batch script under SLURM itself: accepted, run on two nodes, taken up behind a lost node and behind its limit."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from executor.checkpoint.folder import complete
from piper_sim.app.cli import main
from tests.clusters.slurm import GPUS, Slurm, slurm, why_not
from tests.executor.launch import events
from tests.executor.runs import JOB, run

NODES, STEPS = 3, 16
MESH = ("parallel.pp=2", "parallel.dp=2", "parallel.zero=1", "cluster.nodes=2", f"cluster.gpus_per_node={GPUS}")
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

pytestmark = pytest.mark.slow


def until(happened: Callable[[], bool]) -> None:
    """Each look is a command; requeues take their time."""
    events.until(happened, every_s=0.5, limit_s=300)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    assert not (reason := why_not()), reason
    with slurm(tmp_path_factory.mktemp("slurm"), NODES) as found:
        yield found


@pytest.fixture(scope="module")
def losses() -> list[float]:
    """Of the same training on one machine, undisturbed."""
    found: list[float] = run(*MESH, steps=STEPS).object["losses"]
    return found


class Batch:
    """A job handed to SLURM in a folder of its own."""

    def __init__(self, cluster: Slurm, folder: Path, *flags: str, **env: str) -> None:
        self.cluster, self.folder, self.runs = cluster, folder, folder / "runs" / "job"
        (folder / "job.toml").write_text(JOB)
        line = ["export", "job.toml", "--to", "slurm", "--out", str(folder)]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            assert main([*line, *(word for s in MESH for word in ("--set", s))]) == 0
        script, usual = folder / "job.sbatch", {"STEPS": str(STEPS), "EVERY": "4", "BACKEND": "gloo"}
        assert "to start at" in cluster.run("sbatch", "--test-only", *flags, str(script))
        self.number = cluster.submit(script, f"--chdir={folder}", *flags, **{**usual, **env})

    def state(self) -> str:
        return self.cluster.job(self.number)["JobState"]

    def restarts(self) -> int:
        return int(self.cluster.job(self.number)["Restarts"])

    def steps(self) -> int:
        """The newest checkpoint."""
        return max(complete(self.runs), default=0)

    def log(self) -> str:
        return "".join(f.read_text() for f in self.folder.glob("*.log"))

    def objects(self) -> list[dict[str, Any]]:
        """What its runs have printed."""
        return [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]

    def ended(self) -> str:
        until(lambda: self.state() in OVER)
        return self.state()


def _followed(found: dict[str, Any], losses: list[float], tolerance: float = 0.0) -> None:
    """A run's losses are those of the training that nobody disturbed."""
    first = found["first_step"]
    assert found["losses"] == pytest.approx(losses[first : first + len(found["losses"])], rel=tolerance, abs=0)


@pytest.mark.parametrize("tasks", ["node", "gpu"])
def test_two_nodes_train_as_one_machine_does(tasks: str, cluster: Slurm, losses: list[float], tmp_path: Path) -> None:
    batch = Batch(cluster, tmp_path, TASKS=tasks)
    assert batch.ended() == "COMPLETED", batch.log()
    (found,) = batch.objects()
    assert len(found["losses"]) == STEPS and batch.steps() == STEPS
    _followed(found, losses)


def test_a_killed_node_costs_some_steps_and_no_more(cluster: Slurm, losses: list[float], tmp_path: Path) -> None:
    batch = Batch(cluster, tmp_path)
    until(lambda: batch.steps() >= 4)
    nodes = cluster.run("scontrol", "show", "hostnames", cluster.job(batch.number)["NodeList"]).split()
    number = int(nodes[1][1:])
    cluster.machines.made[number].kill()
    try:
        assert batch.ended() == "COMPLETED", batch.log()
    finally:
        cluster.machines.boot(number)
        cluster.daemon(number)
    assert batch.restarts() == 1 and batch.steps() == STEPS
    *_, found = batch.objects()
    assert found["first_step"] >= 4
    _followed(found, losses)


def test_ahead_of_its_limit_it_saves_and_goes_on_under_another_plan(cluster: Slurm, tmp_path: Path) -> None:
    limit = "--time=2", "--signal=B:USR1@100"  # SLURM looks every half minute or so
    batch = Batch(cluster, tmp_path, *limit, STEPS="10000", EVERY="10000")
    until(lambda: batch.steps() > 0)
    (tmp_path / "job.toml").write_text(JOB.replace('"1f1b"', '"zb1p"'))
    until(lambda: batch.restarts() == 1)
    cluster.run("scontrol", "update", f"jobid={batch.number}", "timelimit=60")
    done, first, holder = batch.steps(), batch.objects(), (batch.runs / "lock").read_text()
    until(lambda: (batch.runs / "lock").read_text() not in ("", holder))  # another run trains
    (batch.runs / "stop").touch()  # as its trap does, but nobody puts it back
    assert batch.ended() == "COMPLETED" and batch.restarts() == 1 and not (batch.runs / "stop").exists()
    before, after = batch.objects()
    assert [before] == first and len(before["losses"]) == done == after["first_step"]
    assert batch.steps() == done + len(after["losses"]) and before["plan_digest"] != after["plan_digest"]
    alone = run(*MESH, steps=batch.steps()).object["losses"]
    _followed(before, alone)
    _followed(after, alone, 1e-9)


def test_what_is_cancelled_or_refused_does_not_come_back(cluster: Slurm, tmp_path: Path) -> None:
    (tmp_path / "cancelled").mkdir()
    (tmp_path / "refused").mkdir()
    batch = Batch(cluster, tmp_path / "cancelled", STEPS="1000")
    until(lambda: batch.steps() >= 4)
    cluster.run("scancel", str(batch.number))
    refused = Batch(cluster, tmp_path / "refused", BACKEND="nccl")
    assert refused.ended() == "FAILED" and refused.restarts() == 0 and "nccl needs a CUDA GPU" in refused.log()
    assert batch.ended() == "CANCELLED" and batch.restarts() == 0
