"""Several flushes in a step: whole schedules one behind the other, fewer activations, and one update."""

import pytest

from ir.core.errors import PiperError
from ir.job.build import prepare
from ir.job.load import job_from
from ir.schedules.registry import NAMES, build, default_chunks, flushed
from ir.schedules.schedule import check_complete
from ir.verify import check_plan
from piper_sim.study.predict import predict
from tests.refusals import refusal

JOB = {
    "model": {"config": "tiny-moe", "seq_len": 64, "num_hidden_layers": 8},
    "parallel": {"pp": 2, "dp": 2, "ep": 2, "zero": 1},
    "costs": {"cuda_graphs": "step"},  # else so small a model waits for its host, bubble or not
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("flushes", [1, 2, 3])
def test_every_schedule_runs_whole_as_often(name: str, flushes: int) -> None:
    one, many = build(name, 2, 4), flushed(lambda m: build(name, 2, m), 4 * flushes, flushes)
    check_complete(many.orders, many.placements)
    assert (many.microbatches, many.chunks, many.name) == (4 * flushes, default_chunks(name), name)
    for alone, order in zip(one.orders, many.orders, strict=True):
        assert len(order) == flushes * len(alone)
        for k in range(flushes):
            part = order.cells()[k * len(alone.cells()) :][: len(alone.cells())]
            assert [a.mb - 4 * k for a in type(order).of(part).actions()] == alone.mb.tolist()


@pytest.mark.parametrize("name", ["gpipe", "dualpipe", "zbv"])
def test_a_flush_costs_a_bubble_saves_activations_and_updates_once(name: str) -> None:
    found = []
    for flushes in (1, 2, 4):
        job = job_from(JOB | {"schedule": {"name": name, "microbatches": 16, "flushes": flushes}})
        check_plan(prepare(job).plan())
        found.append(predict(job))
    assert found[0].iteration_s < found[1].iteration_s < found[2].iteration_s
    peaks = [int(p.planned.memory.peak.max()) for p in found]
    assert peaks[0] >= peaks[1] >= peaks[2] and (name != "gpipe" or peaks[0] > 1.2 * peaks[2])
    updates = [sum("UPDATE" in p.plan.shapes[s].text for s in p.plan.shape.tolist()) for p in found]
    assert updates[0] and len(set(updates)) == 1


def test_what_does_not_divide_or_says_itself_what_runs_is_refused() -> None:
    caught = refusal(prepare, job_from(JOB | {"schedule": {"microbatches": 8, "flushes": 3}}))
    assert (caught.key, caught.suggestion) == ("schedule.microbatches", "microbatches = 9")
    with pytest.raises(PiperError) as caught:
        prepare(job_from(JOB | {"schedule": {"csv": "order.csv", "flushes": 2}}))
    assert caught.value.key == "schedule.flushes" and "csv" in caught.value.message
