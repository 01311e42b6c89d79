"""torchrun with fewer nodes than before: another plan for what is left, chosen by the simulator; the same training."""

from pathlib import Path

import pytest

from executor.checkpoint.folder import complete
from piper_sim.app.elastic import chosen
from tests.clusters.nodes import Node, Process, machines, why_not
from tests.executor.launch.events import until
from tests.executor.launch.processes import objects
from tests.executor.runs import job_file, run

STEPS = 12
SETS = ("parallel.pp=2", "parallel.dp=2", "cluster.nodes=2", "cluster.gpus_per_node=2")
MEET = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"


def test_the_job_itself_or_another_plan_of_the_same_batch(tmp_path: Path) -> None:
    job = str(job_file(tmp_path))
    assert chosen(job, SETS, 4, 2) == []
    fewer = dict(s.split("=", 1) for s in chosen(job, SETS, 2, 2))
    assert fewer["schedule.global_batch"] == "8" and fewer["cluster.nodes"] == "1"
    assert int(fewer["parallel.pp"]) * int(fewer["parallel.dp"]) * int(fewer["parallel.tp"]) == 2


def _agent(node: Node, folder: Path) -> Process:
    meeting = ["--rdzv-backend", "c10d", "--rdzv-id", "7", "--rdzv-endpoint", "n1:29500", "--rdzv-conf", MEET]
    line = ["torchrun", "--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3", *meeting]
    job = [str(job_file(folder)), *(word for s in SETS for word in ("--set", s)), "--watchdog", "5"]
    saving = ["--steps", str(STEPS), "--save", str(folder / "saved"), "--every", "2"]
    return node.start(*line, "-m", "piper_sim.app.elastic", *job, *saving, log=folder / f"{node.name}.log")


@pytest.mark.slow
def test_a_lost_node_leaves_a_smaller_run_of_the_same_training(tmp_path: Path) -> None:
    assert not (reason := why_not()), reason
    with machines(tmp_path, 2) as cluster:
        first, second = cluster.nodes
        agent, _ = _agent(first, tmp_path), _agent(second, tmp_path)
        until(lambda: max(complete(tmp_path / "saved"), default=0) >= 2, every_s=0.2, limit_s=200)
        second.kill()
        assert agent.wait(300) == 0, (tmp_path / "n1.log").read_text()[-4000:]
    *_, lost, found = objects((tmp_path / "n1.log").read_text())
    assert lost["error"]["rank"] in (2, 3) and found["ranks"] == 2 and found["first_step"] >= 2
    alone = run(*SETS, steps=STEPS, memory=False).object
    assert found["plan_digest"] != alone["plan_digest"]
    assert found["losses"] == pytest.approx(alone["losses"][found["first_step"] :], rel=1e-9)
