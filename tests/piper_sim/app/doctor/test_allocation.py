"""What the doctor asks of ranks together: green here, and red for what is planted."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from executor.launch.watch.verdict import RankFailed
from executor.launch.watch.watchdog import FAILED
from ir.core.errors import ErrorKind
from ir.core.work import MessageKind
from ir.job.load import job_from
from piper_sim.app.doctor import allocation, collectives, machine, runs
from piper_sim.app.doctor import ranks as together
from piper_sim.app.doctor.forecast import forecast
from piper_sim.app.doctor.ranks import AllocationRanks
from tests.executor.launch.processes import free_port
from tests.refusals import refusal

FOLLOWER = "from piper_sim.app.doctor import allocation; raise SystemExit(allocation.follow())"
JOB = job_from({**runs.JOB, "cluster": {"gpu": "cpu"}})


def _environment(rank: int, port: str) -> dict[str, str]:
    here = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {"RANK": str(rank), "WORLD_SIZE": "2", **here}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[AllocationRanks, "subprocess.Popen[bytes]"]]:
    """Rank 0's doctor, here, and rank 1's."""
    port, handlers = str(free_port()), {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGALRM)}
    with pytest.MonkeyPatch.context() as m:
        for name, value in _environment(0, port).items():
            m.setenv(name, value)
        other = subprocess.Popen([sys.executable, "-c", FOLLOWER], env={**os.environ, **_environment(1, port)})
        yield AllocationRanks.meet(), other
        other.kill()
        other.wait()
    for sign, handler in handlers.items():
        signal.signal(sign, handler)


@pytest.fixture
def ranks(pair: tuple[AllocationRanks, Any]) -> AllocationRanks:
    return pair[0]


def test_versions_are_the_same_everywhere_or_it_is_said_where_they_are_not(ranks: AllocationRanks) -> None:
    found = ranks.everywhere(machine.versions)
    assert allocation.alike(found)["torch"] == found[1]["torch"]
    older = {**found[0], "torch": "2.10.0"}
    error = refusal(lambda: allocation.alike([found[0], older, older]))
    assert (error.key, error.message) == ("torch", f"torch is {found[0]['torch']} on ranks 0, 2.10.0 on ranks 1, 2")


def test_what_is_wrong_with_one_ranks_machine_is_said_with_its_rank(ranks: AllocationRanks, tmp_path: Path) -> None:
    assert ranks.everywhere(machine.sees, str(tmp_path)) == [True, True]
    error = refusal(lambda: ranks.everywhere(machine.sees, f"/proc/self/task/{os.getpid()}"))  # rank 0's own
    assert error.kind is ErrorKind.IO and error.message.startswith("rank 1 on ")


def test_together_they_train_what_one_trains(ranks: AllocationRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    assert allocation.equality(ranks)["connect_s"]
    real = runs.curve
    monkeypatch.setattr(runs, "curve", lambda *args: [x * (1 + 1e-11) for x in real(*args)])
    assert "2 ranks on gloo are 1.0e-11" in refusal(lambda: allocation.equality(ranks)).message


@pytest.mark.parametrize("layout", [(1, 1), (2, 2), (3, 3), (6, 6), (16, 8)])
def test_an_allocation_of_any_size_has_a_job(layout: tuple[int, int]) -> None:
    prepared = runs.MachineRanks(*layout).prepared(allocation.sections(layout[0]), "fp64")
    assert prepared.ranks == layout[0]


def test_each_collective_gives_what_it_ought_to(ranks: AllocationRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = collectives.collectives(ranks, None)
    assert found["messages"] == 5 * len(collectives.SIZES["gloo"]) and "name a JOB" in found["undecided"]
    assert all(row["seconds"] > 0 for row in found["table"])
    call = ranks.call
    told = partial(call, "tests.piper_sim.app.doctor.faulty_ranks:without")
    for kind in map(str, MessageKind):
        monkeypatch.setattr(ranks, "call", lambda fn, args, kind=kind: told({**args, "kind": kind}))
        assert refusal(lambda: collectives.collectives(ranks, None)).message.startswith(f"{kind} of 1024 bytes")


def test_a_long_message_takes_what_the_hardware_says_or_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    at = runs.MachineRanks(4, 2)
    monkeypatch.setattr(at, "call", lambda *_: [({"odd": [], "links": []}, 0.0)] * 4)
    wants = list(collectives.asked(at))
    assert {w.members for w in wants} == {(0, 1, 2, 3), (0, 1), (0, 2)}

    def found(times: float, short: float, *more: float) -> Any:
        def seconds(*_: object) -> dict[tuple[int, int], list[float]]:
            known = {(i, s): [1.0] for i, w in enumerate(wants) for s in w.sizes}
            predicted = {
                (i, row["bytes"]): row["predicted_s"]
                for i, row in zip((k for k, _ in known), _table(at, known), strict=True)
            }
            return {
                key: [p * (times if key[1] == 2**22 else short) for times in (times, *more)]
                for key, p in predicted.items()
            }

        monkeypatch.setattr(collectives, "spans", seconds)
        return collectives.collectives(at, JOB)

    def _table(at: Any, known: Any) -> Any:
        with monkeypatch.context() as m:
            m.setattr(collectives, "spans", lambda *_: known)
            m.setattr(collectives, "FACTOR", 1e12)
            return collectives.collectives(at, JOB)["table"]

    for factor in (0.55, 1.0, 1.9):
        assert "undecided" not in found(factor, 9.0)  # of short ones nothing is asked
    for factor in (0.45, 2.1):
        error = refusal(lambda factor=factor: found(factor, 1.0))
        assert "all_reduce of 4194304 bytes, 4 ranks on 2 nodes" in error.message and "cpu" in (error.allowed or "")
    found(9.0, 1.0, 1.0)  # one of the repetitions is as predicted: the others were disturbed


def test_exchanges_schedules_and_steps_of_pairs(ranks: AllocationRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    assert allocation.in_pairs(ranks, runs.exchanges)["least"] == 0
    monkeypatch.setattr("piper_sim.app.doctor.forecast.apart_from_median", lambda r: 9.0)  # a busy machine
    assert allocation.in_pairs(ranks, forecast)["spread"] == 9.0
    monkeypatch.setattr(runs, "NAMES", ("1f1b", "zbv"))
    assert allocation.in_pairs(ranks, runs.schedules)["schedules"] == 2
    real = runs.curve
    wrong = lambda p, *args, **more: [x * (1 + 1e-11 * (p.schedule == "zbv")) for x in real(p, *args, **more)]  # noqa: E731
    monkeypatch.setattr(runs, "curve", wrong)
    assert "zbv on gloo" in refusal(lambda: runs.schedules(ranks)).message
    monkeypatch.setattr(ranks, "ranks", 3)
    assert "no pairs" in str(allocation.in_pairs(ranks, runs.schedules)["undecided"])


def test_saved_and_resumed_in_a_folder_that_all_see(ranks: AllocationRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(allocation.restart(ranks, None)["off"], float)
    monkeypatch.setattr(ranks, "everywhere", lambda fn, *args: ["one", "other"])
    assert "--shared" in str(allocation.restart(ranks, None)["undecided"])


@pytest.mark.parametrize("kind", together.FAULTS)
def test_what_befalls_a_rank_is_reported_of_it(
    kind: str, ranks: AllocationRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = allocation.failure(ranks, kind)
    assert found["op"] and (found["rank"] == 1 or kind == "cut off")
    run = ranks.run
    if kind != "cut off":  # of a connection that ends either end is named
        other = {"kind": kind, "rank": 0}
        monkeypatch.setattr(ranks, "run", lambda *args, fault: run(*args, fault=other))
        assert "rank 0 blamed" in refusal(lambda: allocation.failure(ranks, kind)).message
    monkeypatch.setattr(allocation, "LONG", 2)
    monkeypatch.setattr(ranks, "run", lambda *args, fault: run(*args))
    assert "was not missed" in refusal(lambda: allocation.failure(ranks, kind)).message


def test_who_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    port = str(free_port())
    for name, value in _environment(0, port).items():
        monkeypatch.setenv(name, value)
    assert f"not all ranks came to 127.0.0.1:{port}" in refusal(lambda: AllocationRanks.meet(0.5)).message
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)  # a launcher's: it outlives its ranks
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert "ranks 1 did not come in 0 s" in refusal(lambda: AllocationRanks.meet(0.4)).message


def test_a_doctor_that_is_killed_is_missed(
    pair: tuple[AllocationRanks, "subprocess.Popen[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, other = pair
    assert ranks.everywhere(machine.clock)
    other.kill()
    other.wait()
    monkeypatch.setattr(together, "AT_ONCE_S", 0.2)
    with pytest.raises(RankFailed, match="no word from ranks 1"):
        allocation.equality(ranks)
    ranks._to_end()
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert "the launcher ends all" in refusal(lambda: ranks.everywhere(machine.clock)).message
    assert ranks.follow() == FAILED  # and one that follows does not stay
    ranks._at_last()  # nothing runs
    ranks._running = True
    assert "the launcher ends all" in refusal(ranks._at_last).message


def _torchrun(nodes: int, *args: str) -> list[tuple[int, str, str]]:
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--nnodes", str(nodes)]
    code = "import sys; from piper_sim.app.cli import main; sys.exit(main(sys.argv[1:]))"
    line = [sys.executable, "-m", "torch.distributed.run", *meeting, "--nproc-per-node", "2", "--no-python"]
    line += [sys.executable, "-c", code, "doctor", *args]
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    pipe = subprocess.PIPE
    agents = [subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, env=env) for _ in range(nodes)]
    said = [agent.communicate(timeout=300) for agent in agents]
    return [(agent.returncode, *texts) for agent, texts in zip(agents, said, strict=True)]


def test_a_job_that_names_other_hardware_is_red(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    sections = {**runs.JOB, "cluster": {"gpu": "h100-sxm"}}
    text = [f"[{s}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in keys.items()) for s, keys in sections.items()]
    job.write_text("".join(text))
    ((code, out, err),) = _torchrun(1, str(job), "--json")
    assert code, err
    found = json.loads(out)
    *before, last = found["checks"]
    assert not found["passed"] and last["name"] == "every collective by size" and "h100-sxm" in last["error"]["allowed"]
    assert {c["colour"] for c in before} == {"green"} and allocation.NOT_TOGETHER in found["not_checked"]


@pytest.mark.slow
def test_two_machines_are_asked_all_and_rank_0_speaks() -> None:
    ends = _torchrun(2, "--json")
    assert [code for code, *_ in ends] == [0, 0], ends
    (found,) = [json.loads(out) for _, out, _ in ends if out]
    assert found["passed"] and [c["name"] for c in found["checks"]][-4:-1] == [
        f"a rank that is {kind} is named" for kind in together.FAULTS
    ]
