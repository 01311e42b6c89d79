"""torchrun with fewer nodes than before: another plan for what is left, chosen by the simulator; the same training."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from executor.checkpoint.folder import complete
from executor.launch.torchrun import flags
from ir.core.errors import PiperError
from ir.job import load_job
from ir.job.build import prepare
from piper_sim.app import elastic
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
    assert chosen(job, SETS, 4, 2) == list(SETS)
    fewer = dict(s.split("=", 1) for s in chosen(job, SETS, 2, 2))
    assert fewer["schedule.global_batch"] == "8" and fewer["cluster.nodes"] == "1"
    assert int(fewer["parallel.pp"]) * int(fewer["parallel.dp"]) * int(fewer["parallel.tp"]) == 2


def test_a_schedule_of_ones_own_is_searched_for_no_other_where_all_processes_are_there(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    (tmp_path / "job.toml").write_text(
        '[model]\nconfig = "tiny-llama"\nseq_len = 32\n[parallel]\npp = 2\n[schedule]\ncsv = "own.csv"\n'
    )
    assert chosen(str(tmp_path / "job.toml"), (), 2, 2) == []
    with pytest.raises(PiperError, match="search cannot divide anew what csv places"):
        chosen(str(tmp_path / "job.toml"), (), 1, 1)


def test_pipelines_of_any_length_are_tried(tmp_path: Path) -> None:
    """Four layers and a batch of two on 12: the base itself, two replicas of 6 stages, is no job."""
    sets = ("model.num_hidden_layers=4", "schedule.microbatches=2")
    [tp, pp, cp] = _sizes(job_file(tmp_path), chosen(str(job_file(tmp_path)), sets, 12, 12))
    assert tp * pp * cp in (6, 12) and pp % 3 == 0


def test_what_a_search_is_to_try_is_no_matter_where_it_stays_as_it_was(tmp_path: Path) -> None:
    """`[search] recompute = [...]`, and what such a training is made of, is not searched here."""
    sets = ("parallel.pp=2", 'search.recompute=["none", "full"]', "search.tp=[1]", 'search.pin=["zero"]')
    job = load_job(job_file(tmp_path), chosen(str(job_file(tmp_path)), sets, 4, 4))
    assert prepare(job).ranks == 4 and (job.schedule.recompute, job.parallel.tp) == ("none", 1)


def test_what_was_said_of_ranks_that_are_gone_stops_nobody(tmp_path: Path) -> None:
    """A slow rank, and experts that two ranks divide."""
    sets = (
        "model.config=tiny-moe",
        "parallel.dp=4",
        "parallel.etp=2",
        "cluster.speed={3=0.5}",
        "schedule.microbatches=3",
    )
    job = load_job(job_file(tmp_path), chosen(str(job_file(tmp_path)), sets, 3, 3))
    assert prepare(job).ranks == 3 and job.parallel.etp == 1 and not job.cluster.speed


@pytest.mark.parametrize("tp", [1, 2])
def test_muons_blocks_stay_where_updates_are_of_them(tmp_path: Path, tp: int) -> None:
    """Another tp is another training there; not where whole matrices are orthogonalised."""
    path = job_file(tmp_path)
    muon = ("optimizer.name=muon", "parallel.dp=4", f"parallel.tp={tp}", "schedule.microbatches=2")
    for world in (2, 4, 6):
        assert _sizes(path, chosen(str(path), muon, world, world))[0] == tp
    with pytest.raises(PiperError, match="Muon's updates are of blocks of tp = 2"):
        chosen(str(path), (*muon, "parallel.tp=2"), 3, 3)
    assert chosen(str(path), (*muon, "parallel.tp=2", "optimizer.tp_mode=duplicated"), 3, 3)


def _sizes(job: Path, sets: Sequence[str]) -> list[int]:
    parallel = load_job(job, sets).parallel
    return [parallel.tp, parallel.pp, parallel.cp]


@pytest.mark.parametrize("said", [["--set", "schedule.microbatches=6"], ["--set=schedule.microbatches=6"]])
def test_flags_are_read_as_the_executor_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """In any order and either form; a batch that a flag says stays, and what is saved is gone on from."""
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 3,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "here",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    told: list[Sequence[str]] = []
    monkeypatch.setattr(elastic, "rank_main", lambda args: told.append(args) or 0)
    job = str(job_file(tmp_path))
    assert elastic.main([f"--save={tmp_path / 'saved'}", "--steps", "2", job, *said]) == 0
    asked = flags().parse_args(told[0])
    assert (asked.job, asked.steps, asked.resume) == (job, 2, "if-present")
    prepared = prepare(load_job(job, asked.sets))
    assert prepared.ranks == 3 and prepared.mbs * prepared.mesh.sizes["dp"] == 6


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
