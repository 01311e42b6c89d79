"""ZeRO-3 where a part makes again what was made with weights of another: shared experts, and the router's norm."""

from pathlib import Path

import pytest
import torch

from ir.core.errors import PiperError
from ir.graph import zero
from tests.executor.runs import alone, error, judged, run

torch.set_num_threads(1)
SIZES = {
    **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1},
}
MODEL = ("model.config=deepseek-v2", *(f"model.{k}={v}" for k, v in SIZES.items()), "model.topk_method=greedy")
ONE = (*MODEL, "parallel.pp=1", "parallel.zero=0", "schedule.microbatches=4")
PLANS = {  # where the norm is not in the bucket of the experts that read it
    "norms of all tp ranks": ("parallel.tp=2", "parallel.dp=2", 'schedule.recompute=["norm"]'),
    "operators": ("parallel.tp=2", "parallel.dp=2", 'schedule.recompute=["operators"]', "parallel.prefetch=0"),
    "small buckets": ("parallel.dp=2", 'schedule.recompute=["norm"]', "parallel.bucket_MiB=0.0005"),
    "a pipeline": ("parallel.pp=2", "parallel.dp=2", 'schedule.recompute=["norm"]', "parallel.bucket_MiB=0.0005"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_norm_is_made_again_with_weights_that_are_there(name: str) -> None:
    ran = run(*MODEL, "parallel.pp=1", "parallel.zero=3", "schedule.microbatches=2", *PLANS[name])
    assert error(ran, alone(*ONE)) <= 1e-10


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_does_not_gather_them_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = (*MODEL, "parallel.pp=1", "parallel.zero=3", "schedule.microbatches=2", *PLANS[name])
    monkeypatch.setattr(zero, "_borrowers", lambda graph: {})
    with pytest.raises(PiperError):
        judged(tmp_path, *sets, "model.vocab_size=48")  # a model whose plan nobody has kept
