"""transformers' own classes, unmodified, under plans: losses, norms, gradients, parameters as by plain torch."""

import random

import pytest

from tests.executor.frontend.class_runs import PLANS, ClassPlan, far, sets_of


def draws(count: int, seed: int) -> list[tuple[str, ClassPlan, str]]:
    """Compositions: every class and every plan once, the rest as it falls."""
    rng, names = random.Random(seed), ["gemma3", "gpt2", "llama", "mixtral", "qwen3", "deepseek_v3"]
    plans = rng.sample(PLANS, len(PLANS)) * (count // len(PLANS) + 1)
    return [(names[k % len(names)], p, rng.choice(["none", "full"])) for k, p in enumerate(plans[:count])]


T5 = "Both", (2, 2, 3, "1f1b"), "none"
UNLIKE = [("gemma3", (2, 1, 0, "zb1p"), "full"), ("Both", (3, 1, 0, "1f1b"), "full")]  # layers that differ, run again


RECURRENT = [
    ("nemotron_h", (2, 2, 3, "1f1b"), "none"),
    pytest.param("qwen3_next", (2, 1, 0, "zb1p"), "full", marks=pytest.mark.slow),  # 64 steps of its rule, one by one
]


@pytest.mark.parametrize(("name", "plan", "recompute"), [*draws(6, 0), T5, *UNLIKE, *RECURRENT], ids=str)
def test_a_class_as_it_is_trains_as_by_plain_torch(name: str, plan: ClassPlan, recompute: str) -> None:
    assert 0.0 <= far(name, *sets_of(plan, recompute)) <= 1e-10


def test_a_tied_weight_counted_twice_would_be_seen() -> None:
    assert far("gpt2", *sets_of(PLANS[0], "none"), spoilt=True) > 1e-4
