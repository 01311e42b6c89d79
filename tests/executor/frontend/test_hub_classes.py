"""transformers' own classes, unmodified, under plans: losses, norms, gradients, parameters as by plain torch."""

import json
import random

import pytest

from executor.launch.refusals import refuse_module
from executor.modules.user.exports.shared_exports import exports_shared
from tests.executor.frontend import class_runs
from tests.executor.frontend.class_runs import PLANS, ClassPlan, far, prepared_class, sets_of
from tests.executor.frontend.models import hub_classes
from tests.refusals import refusal


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


STILL = 'optimizer.no_decay=["*.indexer.*"]'  # no loss reaches what picks keys, and torch leaves it as it is


INDEXED = [
    ("glm_5", (2, 1, 0, "zb1p")),
    ("deepseek_v4", (2, 1, 0, "zb1p")),
    pytest.param("deepseek_v4", (1, 2, 3, "1f1b"), marks=pytest.mark.slow),
    pytest.param("glm_5", (1, 2, 3, "1f1b"), marks=pytest.mark.slow),
    pytest.param("deepseek_v32", (2, 1, 0, "zb1p"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "plan"), INDEXED)
def test_keys_that_an_indexer_picks_are_the_same_under_every_plan(name: str, plan: ClassPlan) -> None:
    assert 0.0 <= far(name, *sets_of(plan, "none"), STILL) <= 1e-10


def test_experts_that_words_choose_are_spread_too() -> None:
    assert 0.0 <= far("deepseek_v4", *sets_of((1, 2, 1, "1f1b"), "none"), "parallel.ep=2", STILL) <= 1e-10


def test_a_decayed_indexer_would_be_seen_and_is_refused_with_patterns_that_name_it_and_nothing_else() -> None:
    sets = sets_of(PLANS[0], "none")
    assert far("glm_5", *sets) > 1e-4
    exported = class_runs._exports(hub_classes.__file__, "glm_5")
    with exports_shared(exported):
        e = refusal(refuse_module, prepared_class("glm_5", *sets))
    own = "wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"
    patterns = json.loads(str(e.suggestion).removeprefix("no_decay = "))
    assert e.key == "optimizer.no_decay"
    assert {p.removeprefix("model.layers.*.self_attn.indexer.") for p in patterns} == set(own)
    with exports_shared(exported):
        refuse_module(prepared_class("glm_5", *sets, f"optimizer.no_decay={json.dumps(patterns)}"))


def test_a_tied_weight_counted_twice_would_be_seen() -> None:
    assert far("gpt2", *sets_of(PLANS[0], "none"), spoilt=True) > 1e-4
