"""Ranks on a Ray cluster of two nodes: one machine's numbers; who is lost is named; too small a one is refused."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executor.launch.on_ray import environments, main
from tests.executor.launch.events import until
from tests.executor.launch.processes import gone, pids
from tests.executor.runs import job_file, run

SETS = ("parallel.pp=2", "parallel.dp=2")


def test_ranks_of_a_node_are_neighbours() -> None:
    order, told = environments(["n2", "n1", "n2", "n1", "n1"])
    assert order == [0, 2, 1, 3, 4]
    assert [t["RANK"] for t in told] == list("01234") and {t["WORLD_SIZE"] for t in told} == {"5"}
    assert [(t["LOCAL_RANK"], t["LOCAL_WORLD_SIZE"]) for t in told] == [
        ("0", "2"), ("1", "2"), ("0", "3"), ("1", "3"), ("2", "3")]  # fmt: skip


@pytest.mark.parametrize(
    ("args", "said"), [(["job.toml"], "--ranks"), (["job.toml", "--ranks", "2", "--fast"], "--fast")]
)
def test_flags_are_refused_before_anything_starts(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    assert said in json.loads(capsys.readouterr().out)["error"]["message"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster of two nodes, of two ranks each."""
    from ray import cluster_utils  # `make test-all` installs it

    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    yield cluster.address
    cluster.shutdown()


def _start(address: str, ranks: int, folder: Path, *args: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "executor.launch.on_ray", "--ranks", str(ranks), "--address", address]
    sets = [word for s in SETS for word in ("--set", s)]
    return subprocess.Popen([*line, str(job_file(folder)), *sets, *args], stdout=subprocess.PIPE, text=True)


def _object(process: subprocess.Popen[str], code: int) -> dict[str, Any]:
    said, _ = process.communicate(timeout=240)
    assert process.returncode == code, said
    (line,) = said.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.slow
def test_two_nodes_compute_what_one_does(address: str, tmp_path: Path) -> None:
    found = _object(_start(address, 4, tmp_path, "--steps", "3"), 0)
    assert found["losses"] == run(*SETS, steps=3, memory=False).object["losses"]


@pytest.mark.slow
def test_a_killed_rank_is_named_once(address: str, tmp_path: Path) -> None:
    process = _start(address, 4, tmp_path, "--steps", "100000", "--out", str(tmp_path / "out"))
    until((tmp_path / "out" / "ranks.json").exists, limit_s=120)
    os.kill(pids(tmp_path / "out")[3], signal.SIGKILL)
    assert _object(process, 4)["error"]["rank"] == 3
    assert all(map(gone, pids(tmp_path / "out")))


@pytest.mark.slow
def test_a_cluster_that_is_too_small_is_refused(address: str, tmp_path: Path) -> None:
    error = _object(_start(address, 5, tmp_path), 2)["error"]
    assert error["kind"] == "usage" and "5 ranks on a cluster of 4 CPUs" in error["message"]
