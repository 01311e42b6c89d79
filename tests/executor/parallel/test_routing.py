"""Routing forced, recorded, evened out: every plan agrees with one process; what a run wrote can be simulated."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.launch import run as cli
from executor.modules.functions import balanced
from ir.core.errors import PiperError
from ir.job import load_job
from ir.job.routing.described import spread, zipf
from ir.job.routing.forced import ForcedExperts, choices
from ir.job.run_options import JobRunOptions
from piper_sim.study.predict import predict
from tests.executor.parallel.expert_cases import ONE, ROUNDING
from tests.executor.runs import Ran, alone, distance, error, job_file, judged, merged, run

PIPED = (*ONE, "parallel.pp=2", "model.num_hidden_layers=4")
COEF = "model.router_aux_loss_coef=0.5"
SIZES = st.integers(1, 16).flatmap(lambda e: st.tuples(st.just(e), st.integers(1, e), st.integers(1, 60)))


@given(SIZES, st.floats(0, 4), st.integers(0, 99))
def test_choices_keep_to_the_counts_and_no_token_goes_twice_to_one_expert(
    size: tuple[int, int, int], strength: float, seed: int
) -> None:
    experts, top_k, tokens = size
    counts = np.random.default_rng(seed).permutation(spread(zipf(experts, strength), tokens, top_k))
    found = choices(counts, tokens, top_k, str(seed))
    assert found.shape == (tokens, top_k)
    assert np.bincount(found.ravel(), minlength=experts).tolist() == counts.tolist()
    assert all(len(set(row)) == top_k for row in found.tolist())
    assert np.array_equal(found, choices(counts, tokens, top_k, str(seed)))


FORCED = "routing.forced=true", "routing.kind=zipf", "routing.strength=0.7", "routing.seed=3"


@pytest.mark.parametrize(
    "sets",
    [
        pytest.param((*ONE, "parallel.dp=4", "schedule.microbatches=1"), marks=pytest.mark.slow),
        (*PIPED, "schedule.name=dualpipe", "schedule.microbatches=2"),
    ],
    ids=["four replicas", "two, in a pipeline"],
)
def test_under_forced_routing_every_plan_is_one_process(sets: tuple[str, ...]) -> None:
    own, forced = run(*sets), run(*sets, *FORCED)
    assert error(forced, alone(*sets, *FORCED)) <= ROUNDING < 1e-3 < distance(merged(own.grads), merged(forced.grads))


def _recorded(*sets: str, folder: Path) -> Ran:
    """A run whose counts stand in folder/routing.csv."""
    prepared, plan = judged(folder, *sets)
    found, trace = cli.run(prepared, plan, JobRunOptions(prepared.ranks, out=folder, watchdog_s=60.0))
    return Ran(sets, plan, found, trace, (), ())


def test_a_recorded_run_is_simulated_and_forced(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    _recorded(*PIPED, folder=first)
    said = (*PIPED, "routing.kind=file", f"routing.file={first / 'routing.csv'}")
    usual = predict(load_job(str(job_file(tmp_path)), PIPED)).iteration_s
    uneven = predict(load_job(str(job_file(tmp_path)), said)).iteration_s
    assert uneven != usual
    _recorded(*said, "routing.forced=true", folder=second)
    assert (first / "routing.csv").read_text() == (second / "routing.csv").read_text()


@pytest.mark.slow
def test_what_was_recorded_is_forced_on_one_process_too(tmp_path: Path) -> None:
    _recorded(*PIPED, folder=tmp_path)
    sets = (*PIPED, "routing.kind=file", f"routing.file={tmp_path / 'routing.csv'}", "routing.forced=true")
    assert error(run(*sets), alone(*sets)) <= ROUNDING


def test_a_forced_run_has_the_counts_that_are_simulated(tmp_path: Path) -> None:
    sets = (*PIPED, *FORCED, "schedule.recompute=full")
    _recorded(*sets, folder=tmp_path)
    prepared, plan = judged(tmp_path, *sets)
    counts = ForcedExperts.of(prepared, plan.graph).counts
    head, *lines = (tmp_path / "routing.csv").read_text().splitlines()
    assert head == "layer,microbatch,source,expert,tokens"
    found = np.zeros((4, 4, 2, 8), dtype=np.int64)
    for line in lines:
        *at, tokens = map(int, line.split(","))
        found[tuple(at)] = tokens
    assert all((found[layer, mb] == counts.tokens(layer, mb)).all() for layer in range(4) for mb in range(4))


@pytest.mark.slow
def test_another_seed_is_another_run() -> None:
    ran, other = (run(*ONE, *FORCED[:-1], f"routing.seed={seed}") for seed in (3, 4))
    assert error(ran, alone(*ONE, *FORCED)) <= ROUNDING
    assert error(other, alone(*ONE, *FORCED)) > 1e-3


def test_there_is_nothing_to_force_without_experts(tmp_path: Path) -> None:
    with pytest.raises(PiperError, match="nothing to force: no layer of tiny-llama has experts"):
        judged(tmp_path, "routing.forced=true")


# -- the loss that evens experts out ----------------------------------------------------------------------------------


def test_the_loss_of_each_sequence_is_deepseeks_with_its_gradient() -> None:
    """By torch's own backward of the formula: arXiv:2412.19437, equations 17 to 20, and DeepSeek-V2's code."""
    torch.manual_seed(0)
    size, length, experts, top_k, alpha = 3, 5, 8, 2, 0.7
    scores = torch.randn(size * length, experts, dtype=torch.float64).softmax(-1).requires_grad_()
    indices = scores.detach().topk(top_k, -1).indices
    weights = scores.gather(-1, indices)
    dy = torch.randn_like(weights)
    passed, loss = balanced(weights, scores, indices, size, alpha / size)
    (passed * dy).sum().backward()
    got, scores.grad = scores.grad, None
    once = torch.nn.functional.one_hot(indices, experts).double().view(size, length, top_k, experts).sum((1, 2))
    often = once * experts / (length * top_k)
    by_hand = alpha * (often * scores.view(size, length, experts).mean(1)).sum(1).mean()
    ((scores.gather(-1, indices) * dy).sum() + by_hand).backward()
    assert got is not None and scores.grad is not None and torch.allclose(got, scores.grad, rtol=1e-13, atol=1e-15)
    assert abs(loss.item() - by_hand.item()) < 1e-14 and torch.equal(passed, weights)


@pytest.mark.parametrize(
    "sets",
    [
        (*ONE, COEF, "schedule.microbatch_size=2", "schedule.recompute=full"),
        (*PIPED, COEF, "schedule.name=dualpipe", "parallel.zero=1"),
        pytest.param((*PIPED, COEF, "schedule.name=zb1p", "parallel.ep=1", "parallel.zero=3"), marks=pytest.mark.slow),
    ],
    ids=["recomputed", "dualpipe", "experts on every rank"],
)
def test_it_is_one_loss_under_every_plan(sets: tuple[str, ...]) -> None:
    ran, off = run(*sets), alone(*sets, "model.router_aux_loss_coef=0")
    assert error(ran, alone(*sets)) <= ROUNDING < 1e-3 < distance(merged(ran.grads), off.grads)
    assert np.isclose(ran.object["losses"][0], off.losses[0], rtol=1e-12)  # it is not one of them
    layers = 4 if "parallel.pp=2" in sets else 2
    assert all(0.5 * layers <= x < 0.75 * layers for x in ran.object["aux_losses"])  # 0.5 a layer where all is even


@pytest.mark.slow
def test_it_is_the_same_number_on_one_rank_and_on_four() -> None:
    one = run("model.config=tiny-moe", "model.num_hidden_layers=4", COEF, "parallel.pp=1", "schedule.microbatches=8")
    four = run(*PIPED, COEF)
    assert np.allclose(one.object["aux_losses"], four.object["aux_losses"], rtol=1e-12, atol=0)


@pytest.mark.parametrize("key", ["tp", "cp"])
def test_it_is_refused_where_sequences_are_cut(key: str) -> None:
    with pytest.raises(PiperError, match="auxiliary loss of sequences that several ranks share") as info:
        run("model.config=tiny-moe", COEF, "parallel.pp=1", f"parallel.{key}=2")
    assert info.value.key == "model.router_aux_loss_coef" and info.value.allowed == "0"


def test_a_loss_of_whole_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PiperError, match="the auxiliary loss is one of sequences"):
        judged(tmp_path, "model.config=deepseek-v3", "model.aux_loss_alpha=0.1", "model.seq_aux=false")
