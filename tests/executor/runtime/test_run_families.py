"""Experts, latent attention, MTP and older families train through any plan as in one process."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.executor.families import TINY
from tests.executor.runs import alone, distance, job_file, merged, two_steps

ROUNDING = 1e-10


def sets(family: str, *more: str) -> tuple[str, ...]:
    """A family's small model as overrides of the tests' job; four layers, as the job has."""
    preset, inline = TINY[family]
    given = {k: v for k, v in inline.items() if k != "num_hidden_layers"}
    return (f"model.config={preset}", *(s for k, v in given.items() for s in _set(f"model.{k}", v)), *more)


def _set(key: str, value: object) -> list[str]:
    """A table's keys one by one: JSON has no words for it that TOML has."""
    if isinstance(value, dict):
        return [s for k, v in value.items() for s in _set(f"{key}.{k}", v)]
    return [f"{key}={json.dumps(value)}"]


def error(*given: str, than: tuple[str, ...] | None = None) -> float:
    """How far a run of two steps is from one process (of other overrides, if `than`), as `runs.error` has it.

    Only planned, not predicted: no cost model stands between the job and what is run.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found, ends = two_steps(folder, str(job_file(folder)), given)
    got = merged(ends)
    assert not any(np.isnan(a).any() for a in got.values())
    one = alone(*(than or given))
    wanted = {f"grad/{n}": g for n, g in one.grads.items()} | {f"param/{n}": p for n, p in one.params.items()}
    numbers = np.array([*found["losses"], *found["grad_norms"]]) / np.array([*one.losses, *one.grad_norms])
    return float(np.max([distance(got, wanted), np.abs(numbers - 1).max()]))  # NaN stays NaN, and fails


def _name(given: tuple[str, ...]) -> str:
    return " ".join(s.partition("=")[2] for s in given if s.startswith(("schedule", "parallel"))) or "1f1b"


MOE = ("model.config=tiny-moe",)
PLANS: list[tuple[str, ...]] = [
    ("schedule.name=1f1b",),
    ("schedule.name=zb1p", "optimizer.clip_norm=0.1"),
    ("schedule.name=zbv", "schedule.microbatches=5"),
    ("schedule.name=interleaved-1f1b",),
    ("schedule.name=zbv", "schedule.recompute=full"),
    ("schedule.name=1f1b", "schedule.recompute=mlp", "parallel.pp=3", "parallel.layers=[1,2,1]"),
]


@pytest.mark.parametrize("plan", PLANS, ids=_name)
def test_experts_in_a_pipeline_equal_one_process_bitwise(plan: tuple[str, ...]) -> None:
    assert error(*MOE, *plan) == 0.0


FAMILIES = [
    sets("mixtral", "schedule.name=zb1p"),
    sets("deepseek_v2 limited", "schedule.name=zbv"),
    sets("kimi", "schedule.name=1f1b", "schedule.recompute=full"),
    sets("gpt2 untied", "schedule.name=zbv", "schedule.microbatches=3"),
    sets("nemotron", "schedule.name=interleaved-1f1b"),
]


@pytest.mark.parametrize("given", FAMILIES, ids=lambda g: g[0].partition("=")[2])
def test_families_in_a_pipeline_equal_one_process_bitwise(given: tuple[str, ...]) -> None:
    assert error(*given) == 0.0


COPIES = [
    (*MOE, "schedule.name=dualpipe"),
    sets("kimi", "schedule.name=dualpipe", "schedule.microbatches=5", "schedule.recompute=full"),
    sets("mixtral", "schedule.name=dualpipe", "parallel.zero=0"),
    sets("gpt2", "schedule.name=1f1b"),  # tied
    # Embedding and head of the MTP module are the model's own: two uses of one tensor.
    sets("deepseek_v3", "schedule.name=zb1p", "parallel.layers=[2,2]"),
    sets("deepseek_v3", "schedule.name=dualpipe", "parallel.layers=[2,2]"),
]


@pytest.mark.parametrize("given", COPIES, ids=lambda g: f"{g[0].partition('=')[2]} {g[-1].partition('=')[2]}")
def test_copies_of_experts_equal_one_process_up_to_the_order_of_sums(given: tuple[str, ...]) -> None:
    assert 0.0 < error(*given) <= ROUNDING


@pytest.mark.parametrize("config", ["tiny-llama", "tiny-moe"])
def test_stored_scores_train_as_flash_attention_does(config: str) -> None:
    given = (f"model.config={config}", "model.attention=unfused", "schedule.name=zb1p")
    assert 0.0 < error(*given, than=given[:1]) <= ROUNDING


def test_a_wrong_expert_weight_would_be_seen() -> None:
    """The negative control: without normalised weights the same model trains elsewhere."""
    other = (*MOE, "schedule.name=1f1b", "model.norm_topk_prob=true")
    assert error(*MOE, than=other) > 1e-6
