"""The reference modules train what transformers' classes train, in float64: losses, norms, parameters after 3 steps.

Presets made small, files of the Hub made small, drawn configs; `hub_campaign` draws more. Agreement is about 1e-15 of
losses and norms, 1e-12 of parameters.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from executor.modules.attention import attention
from executor.runtime.batch import Microbatch, MicrobatchLoader
from ir.workload.config.load import ModelConfig, config_from, raw_config
from ir.workload.config.spec import ExpertConfig
from tests.executor.modules import hub
from tests.executor.modules.hub import gap
from tests.executor.modules.hub_campaign import CLOSE, Outcome, judge
from tests.executor.modules.hub_draws import DRAWS, draw
from tests.ir.workload import models

torch.set_num_threads(1)
FAR = 1e-6  # a control must be at least so far off
DRAWN = 3 * len(DRAWS)
SIZES: Mapping[str, object] = {
    **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 8, "num_experts_per_tok": 2},
    **{"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 8, "first_k_dense_replace": 1},
    **{"kv_lora_rank": 6, "q_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4},
    **{"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16, "d_model": 16, "n_layers": 2, "n_heads": 4},
    **{"max_seq_len": 16, "sliding_window": 3, "max_window_layers": 1, "n_group": 4, "topk_group": 2},
    **{"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
}


def small(raw: Mapping[str, object], **more: object) -> dict[str, Any]:
    """A config with other sizes; what is null, one of a kind, or no size stays."""
    cut = {k: SIZES[k] if k in SIZES and v not in (None, 1) else v for k, v in raw.items()}
    return {**cut, **more}


def _distinct() -> dict[str, dict[str, Any]]:
    """Presets that differ in more than sizes."""
    found = {json.dumps(small(raw_config(n)), sort_keys=True): n for n in reversed(hub.built())}
    return {n: small(raw_config(n)) for n in found.values()}


# Stretched over 8 tokens where their own files say thousands: here sequences have 12.
LLAMA31 = small(models.LLAMA31_8B)
LLAMA31["rope_scaling"] = {**LLAMA31["rope_scaling"], "original_max_position_embeddings": 8}
V3 = small(models.DEEPSEEK_V3)
V3["rope_scaling"] = {**V3["rope_scaling"], "original_max_position_embeddings": 8}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
QWEN3 = {**small(raw_config("qwen3-8b")), "use_sliding_window": True, "sliding_window": 3, "layer_types": KINDS}
CASES: Mapping[str, Mapping[str, Any]] = {
    **_distinct(),
    "Llama-3.1": LLAMA31,
    "Llama 4 Scout's angles": {**LLAMA31, "rope_scaling": {**LLAMA31["rope_scaling"], "high_freq_factor": 1.0}},
    "DeepSeek-V3's own file": V3,
    "Qwen3-30B-A3B's own file": small(models.QWEN3_30B),
    "theta in rope_parameters": small(raw_config("tiny-llama"), rope_theta=5e5, rope_parameters={"rope_theta": 5e5}),
    "windows by layer": QWEN3,
    "windows by max_window_layers": small(raw_config("qwen2-7b"), use_sliding_window=True, max_window_layers=1),
    "V2 with YaRN": {**small(raw_config("deepseek-v2")), "rope_scaling": V3["rope_scaling"]},
    "GPT-2 with scores as they are": small(raw_config("gpt2"), scale_attn_weights=False),
    "GPT-2 with scores by layer": small(raw_config("gpt2"), scale_attn_by_inverse_layer_idx=True),
    "a word for padding": small(raw_config("tiny-llama"), pad_token_id=3),
    "the last word for padding, beside experts, tied": small(
        models.QWEN3_30B, pad_token_id=-1, tie_word_embeddings=True
    ),
    "latent norms": small(raw_config("deepseek-v2-lite"), rms_norm_eps=0.01),
}


@pytest.mark.parametrize("case", CASES)
def test_we_train_what_transformers_trains(case: str) -> None:
    found = gap(CASES[case])
    assert found.largest <= CLOSE, found


def test_what_predicts_the_token_after_the_next_reads_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of one's own masks their labels; DeepSeek-V3's module embeds the tokens that come next all the same."""
    given = MicrobatchLoader.batch

    def masked(data: MicrobatchLoader, step: int, replica: int, mb: int) -> Microbatch:
        batch = given(data, step, replica, mb)
        labels = batch.labels.clone()
        labels[:, :7] = labels[:1, 9] = -100
        return replace(batch, labels=labels)

    monkeypatch.setattr(MicrobatchLoader, "batch", masked)
    case = next(c for c in CASES.values() if c.get("num_nextn_predict_layers"))
    found = gap(case)
    assert found.largest <= CLOSE, found


@pytest.mark.parametrize("seed", range(DRAWN))
def test_drawn_configs_are_equal_or_refused(seed: int) -> None:
    outcome, said = judge(draw(seed))
    assert outcome in (Outcome.EQUAL, Outcome.REFUSED), (said, draw(seed))


def _moe(c: ModelConfig, **changed: Any) -> ModelConfig:
    assert isinstance(c.moe, ExpertConfig)
    return replace(c, moe=replace(c.moe, **changed))


CONTROLS: Mapping[str, tuple[Mapping[str, Any], Callable[[ModelConfig], ModelConfig]]] = {
    "another theta": (LLAMA31, lambda c: replace(c, rope_theta=1e4)),
    "scaling dropped": (LLAMA31, lambda c: replace(c, rope_scaling=None)),
    "YaRN dropped": (V3, lambda c: replace(c, rope_scaling=None)),
    "YaRN's scores as they are": (V3, lambda c: replace(c, score_scale=1.0)),
    "halves for neighbours": (V3, lambda c: replace(c, rope_pairs=False)),
    "every group of experts": (V3, lambda c: _moe(c, groups=0, top_groups=0)),
    "weights as they are": (V3, lambda c: _moe(c, normalised=False)),
    "weights unscaled": (V3, lambda c: _moe(c, scale=1.0)),
    "windows dropped": (QWEN3, lambda c: replace(c, windows=())),
    "windows of other layers": (QWEN3, lambda c: replace(c, windows=(0, 3, 3))),
    "a window one wider": (QWEN3, lambda c: replace(c, windows=(4, 0, 4))),
    "features turned": (small(raw_config("nemotron-15b")), lambda c: replace(c, rope_share=1.0)),
    "padding trained": (CASES["a word for padding"], lambda c: replace(c, padding=None)),
    "scores of GPT-2": (CASES["GPT-2 with scores by layer"], lambda c: replace(c, score_by_layer=False)),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_a_config_read_otherwise_is_seen(control: str) -> None:
    raw, changed = CONTROLS[control]
    read = config_from(raw, "x")
    assert changed(read) != read
    assert gap(raw, changed(read)).largest > FAR


def test_norms_inside_latent_attention_with_the_configs_epsilon_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LATENT_EPS", 0.01)
    assert gap(CASES["latent norms"]).largest > FAR


def test_the_oracle_is_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left alone, transformers rounds angles, norms and softmaxes to float32; first steps enlarge that."""
    monkeypatch.setattr(hub, "Doubled", nullcontext)
    found = gap(CASES["tiny-llama"])
    assert found.losses < FAR and found.largest > CLOSE
