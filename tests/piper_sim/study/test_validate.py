"""The parts of validate that need no run: what ops took, read off a trace; which plan to calibrate on."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.compute.host import HostCosts
from cost_models.profile.profile import MeasuredCost, OpEntry, Profile, ProfileMachine, plan_keys
from ir.job import load_job
from ir.plan.plan import OpKind
from ir.plan.text import plan_digest
from ir.schedules.registry import NAMES
from piper_sim.engine import EngineScenario, play
from piper_sim.pricing.costs import CostModel
from piper_sim.pricing.hosts import ahead, inline
from piper_sim.pricing.prepare import hardware_of, prepare_priced
from piper_sim.study.predict import predict
from piper_sim.study.validate.calibrating import elsewhere
from piper_sim.study.validate.samples import link_keys
from piper_sim.study.validate.times import TraceTimes, alone, dispatch
from piper_sim.study.validate.verdict import predicted
from tests.piper_sim.engine.cases import HEAVY, LAYERS, durations, layers

JOB = """
[model]
config = "tiny-moe"
num_hidden_layers = 8
seq_len = 16
[cluster]
gpu = "h100-sxm"
[parallel]
pp = 2
"""


@HEAVY
@given(LAYERS, st.integers(0, 99))
def test_what_ops_took_by_themselves_is_read_off_a_run(case: dict[str, object], seed: int) -> None:
    plan = layers(**case)  # type: ignore[arg-type]
    given_s = durations(plan, seed)
    host_s = 0.25
    scenario = EngineScenario.of(plan, host=inline(plan, host_s))
    run = play(scenario, given_s, 3)
    assert run.post is not None
    times = TraceTimes(run.post, run.start, run.end)
    took = alone(scenario, times)[1:]
    for kind in (OpKind.COMPUTE, OpKind.SEND, OpKind.COLLECTIVE):
        mine = plan.kind == kind
        assert np.array_equal(took[:, mine], np.broadcast_to(given_s, took.shape)[:, mine])
    # A host that waits nowhere but for its compute needs the same for each op; a meeting's waits are not its own.
    host = dispatch(scenario, times)[1:]
    plain = np.append(plan.collective[:-1] < 0, True)
    first = np.isin(np.arange(len(plan)), plan.bounds[:-1])
    after = np.concatenate([[True], plain[:-1]])
    assert (host[:, after & ~first] == host_s).all()


@HEAVY
@given(LAYERS, st.integers(0, 99), st.sampled_from([0.25, 64.0]))
def test_what_a_device_took_is_read_off_a_run_whose_host_is_ahead_of_it(
    case: dict[str, object], seed: int, launch_s: float
) -> None:
    plan = layers(**case)  # type: ignore[arg-type]
    given_s = durations(plan, seed)
    scenario = EngineScenario.of(plan, host=ahead(plan, HostCosts(launch_s, launch_s, window=1 << 20)))
    run = play(scenario, given_s, 3)
    assert run.post is not None
    mine = plan.kind == OpKind.COMPUTE
    took = alone(scenario, TraceTimes(run.post, run.start, run.end))[1:, mine]
    assert np.array_equal(took, np.broadcast_to(given_s[mine], took.shape))


@pytest.mark.parametrize(
    "name",
    NAMES,
)
@pytest.mark.parametrize("more", [(), ("schedule.microbatches=3",), ("schedule.recompute=full", "parallel.zero=1")])
def test_another_plan_with_all_that_the_judged_one_has(name: str, more: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    job = load_job(str(tmp_path / "job.toml"), (f"schedule.name={name}", *more))
    hardware = hardware_of(job)
    judged = prepare_priced(job, hardware)
    other = elsewhere(job, judged, hardware)
    assert plan_digest(other.plan()) != plan_digest(judged.plan()) and other.mbs != judged.mbs
    assert plan_keys(judged.plan()).keys() <= plan_keys(other.plan()).keys()
    assert (other.schedule != judged.schedule) == (name != "dualpipe")


@pytest.mark.parametrize("more", ["parallel.zero=1", "parallel.zero=3", "parallel.dp=4 parallel.ep=2"])
@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_messages_have_one_name_wherever_it_is_asked(name: str, more: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    job = load_job(str(tmp_path / "job.toml"), (f"schedule.name={name}", "cluster.gpus_per_node=8", *more.split()))
    prepared = prepare_priced(job, hardware_of(job))
    plan = prepared.plan()
    keys = {k for k in link_keys(plan, CostModel(prepared, hardware_of(job))) if k is not None}
    known = plan_keys(plan).keys()
    assert keys <= known and {k for k in known if k.startswith(("p2p", "all_", "reduce_", "all-", "reduce-"))} == keys


def test_a_job_that_gives_its_own_times_is_predicted_by_what_was_measured() -> None:
    table = {
        "model": {"config": "tiny-llama", "seq_len": 64, "num_hidden_layers": 4},
        "parallel": {"pp": 2, "layers": [2, 2]},
        "schedule": {"microbatches": 4},
    }
    said = {"costs": {"stage_times": {"F": 1.0, "B": 2.0}}}
    measured, own = (predict(load_job(x)).planned for x in (table, table | said))
    ops = {c: OpEntry(MeasuredCost(1e-3, 0.0, 5)) for c in plan_keys(measured.plan) if "/" in c or "UPDATE" in c}
    profile = Profile.of(ProfileMachine.elsewhere(), ops)
    found = [predicted(p, profile, inline=True).iteration_s for p in (measured, own)]
    assert found[0] == found[1] < 0.2
