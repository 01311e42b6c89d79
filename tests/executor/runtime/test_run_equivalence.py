"""Every plan trains as one process does: bitwise where one copy of everything exists, else to rounding."""

import numpy as np
import pytest

from tests.executor.runs import alone, distance, error, merged, run, same

ROUNDING = 1e-10
DUAL = ("schedule.name=dualpipe",)
TIED = ("model.tie_word_embeddings=true",)
SAME = ("losses", "grad_norms", "plan_digest")
UNEVEN = ("model.num_hidden_layers=5",)
BITWISE: list[tuple[str, ...]] = [
    ("schedule.name=1f1b",),
    ("schedule.name=gpipe",),
    ("schedule.name=zb1p",),
    ("schedule.name=zbv",),
    ("schedule.name=interleaved-1f1b",),
    ("schedule.name=dualpipev",),
    ("schedule.name=1f1b-overlap",),
    ("schedule.name=interleaved-1f1b-overlap", "schedule.microbatches=5"),
    ("schedule.name=1f1b", "parallel.pp=1"),
    ("schedule.name=1f1b", "parallel.pp=3", *UNEVEN, "parallel.layers=[2,1,2]"),
    ("schedule.name=zb1p", "schedule.microbatches=1"),
    ("schedule.name=1f1b", "parallel.pp=3", "schedule.microbatches=2", *UNEVEN, "parallel.layers=[1,3,1]"),
    ("schedule.name=zbv", "schedule.microbatches=5"),
    ("schedule.name=zbv", "schedule.recompute=full", "optimizer.clip_norm=0.1"),
    ("schedule.name=1f1b", "optimizer.name=sgd", "optimizer.lr=0.5", "optimizer.clip_norm=0"),
    ("schedule.name=zb1p", "precision.compute=fp32", "schedule.microbatch_size=2"),
    ("schedule.name=1f1b", "precision.compute=bf16"),
    ("schedule.name=zbv", "precision.compute=bf16", "precision.params=fp32", "precision.residual=fp32"),
    ("schedule.name=interleaved-1f1b", "precision.compute=bf16", "precision.residual=fp32", "schedule.recompute=full"),
    (*DUAL, "schedule.microbatches=1", "schedule.recompute=full"),
    ("schedule.name=1f1b", "schedule.recompute=full", "schedule.recompute_layers=1"),
    ("schedule.name=zbv", "schedule.p2p=ordered"),
    ("schedule.name=interleaved-1f1b", "schedule.p2p=ordered", "schedule.microbatches=3"),
]


def _name(sets: tuple[str, ...]) -> str:
    return " ".join(s.partition("=")[2] if "name" in s else s.partition(".")[2] for s in sets)


@pytest.mark.parametrize("sets", BITWISE, ids=_name)
def test_a_pipeline_equals_one_process_bitwise(sets: tuple[str, ...]) -> None:
    assert error(run(*sets), alone(*sets)) == 0.0


ROUNDED: list[tuple[str, ...]] = [
    DUAL,
    (*DUAL, "parallel.bucket_MiB=0.05"),
    (*DUAL, "schedule.microbatches=5", "optimizer.clip_norm=0"),
    (*DUAL, "optimizer.name=sgd", "optimizer.lr=0.5", "parallel.zero=0"),
    (*DUAL, *TIED),
    (*DUAL, "schedule.p2p=ordered", "parallel.zero=2"),
    ("schedule.name=looped-bfs",),  # its backward takes the microbatches from the last to the first
    ("schedule.name=1f1b", *TIED),
    ("schedule.name=1f1b", *TIED, "parallel.zero=0", "schedule.microbatches=3"),
    ("parallel.pp=1", *TIED),
]


@pytest.mark.parametrize("sets", ROUNDED, ids=_name)
def test_copies_equal_one_process_up_to_the_order_of_sums(sets: tuple[str, ...]) -> None:
    assert 0.0 < error(run(*sets), alone(*sets)) <= ROUNDING


@pytest.mark.parametrize("sets", [("schedule.name=zbv", "schedule.microbatches=5"), DUAL, TIED], ids=_name)
def test_ranks_that_are_threads_train_as_processes_do_to_the_bit(sets: tuple[str, ...]) -> None:
    apart, together = (run(*sets, backend=b, memory=True) for b in ("gloo", "local"))
    assert same(apart, together)
    assert {k: apart.object[k] for k in SAME} == {k: together.object[k] for k in SAME}
    peaks = [[*ran.object["memory"]["peak_allocated_bytes"].values()] for ran in (apart, together)]
    assert np.abs(np.diff(peaks, axis=0)).max() < 1024  # a neighbour may hold the vector of the norm a moment longer


def test_both_copies_of_dualpipe_stay_equal_and_a_repeated_run_is_the_same() -> None:
    sets = (*DUAL, "optimizer.clip_norm=0.1")
    first, second = run(*sets, steps=3), run(*sets, steps=3)
    assert same(first, second)
    assert first.params[0].keys() == first.params[1].keys() == alone(*sets, steps=3).params.keys()
    assert all(np.array_equal(first.params[0][n], first.params[1][n]) for n in first.params[0])
    assert error(first, alone(*sets, steps=3)) <= ROUNDING
    assert first.object["losses"] == second.object["losses"] and len(first.object["losses"]) == 3


def test_training_goes_somewhere() -> None:
    start, end = alone(steps=0), alone(steps=2)
    assert distance(end.params, start.params) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "sets",
    [
        ("schedule.name=zb2p",),
        ("schedule.name=v-half",),
        ("schedule.name=v-min",),
        ("schedule.name=interleaved-1f1b", "schedule.microbatches=3"),
        ("schedule.name=1f1b", "schedule.recompute=full"),
        ("schedule.name=zbv", 'schedule.recompute=["mlp", "attention"]', "schedule.recompute_layers=1::2"),
        ("schedule.name=interleaved-1f1b", "schedule.recompute=mlp", "schedule.recompute_layers=[0, 3, 6]"),
        (*DUAL, "schedule.recompute=full", "schedule.recompute_layers=:3"),
        ("schedule.name=zbv", "precision.compute=bf16", "precision.params=fp32"),
        (*DUAL, "parallel.zero=0"),
        (*DUAL, "parallel.pp=4", "schedule.microbatches=10", "parallel.zero=0"),
        (*DUAL, "parallel.pp=4"),
        ("schedule.name=dualpipev", "parallel.pp=4", "schedule.microbatches=9"),
        ("schedule.name=zbv", "parallel.pp=4", "schedule.microbatches=6"),
        ("schedule.name=interleaved-1f1b", "parallel.pp=4"),
    ],
    ids=_name,
)
def test_more_plans_equal_one_process(sets: tuple[str, ...]) -> None:
    sets = (*sets, "model.num_hidden_layers=8")
    assert error(run(*sets, steps=3), alone(*sets, steps=3)) <= (ROUNDING if DUAL[0] in sets else 0.0)


def test_dualpipe_on_four_ranks_equals_one_process() -> None:
    sets = (*DUAL, "parallel.pp=4", "schedule.microbatches=8")
    ran = run(*sets)
    assert error(ran, alone(*sets)) <= ROUNDING
    assert merged(ran.params).keys() == alone(*sets).params.keys()


# -- selective recompute: unfused attention whose scores backward makes again ------------------------------------------

SCORES = ("model.attention=unfused", "model.seq_len=128")


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_scores_made_again_train_as_stored_ones_do_in_less_memory(schedule: str) -> None:
    sets = (*SCORES, f"schedule.name={schedule}")
    one = alone(*sets)
    stored, again = (run(*sets, f"schedule.recompute={how}", memory=True) for how in ("none", "selective"))
    assert error(stored, one) <= 1e-10 and error(again, one) <= 1e-10
    peaks = [ran.object["memory"]["peak_allocated_bytes"]["0"] for ran in (stored, again)]
    assert peaks[1] < 0.9 * peaks[0], "what only one of them keeps grows with the square of the 128 tokens"


def test_memory_falls_with_the_layers_made_again() -> None:
    sets = ("model.seq_len=64", "schedule.name=gpipe", "schedule.recompute=full", "model.num_hidden_layers=4")
    some = ("0", "1::2", ":3", ":")
    ran = [run(*sets, f"schedule.recompute_layers={x}", memory=True).object for x in some]
    peaks = [max(x["memory"]["peak_allocated_bytes"].values()) for x in ran]
    assert peaks == sorted(set(peaks), reverse=True)
    assert all(x["grad_norms"] == ran[0]["grad_norms"] for x in ran)


def test_flash_attention_has_nothing_to_make_again() -> None:
    sets = ("model.seq_len=64", "schedule.name=1f1b")
    plain, selective = (run(*sets, f"schedule.recompute={how}", memory=True).object for how in ("none", "selective"))
    for key in ("losses", "grad_norms"):
        assert plain[key] == selective[key]
    assert plain["memory"]["peak_allocated_bytes"] == selective["memory"]["peak_allocated_bytes"]
