"""Every model family at sizes a test can train: overrides of a preset, tokens divisible by experts."""

from collections.abc import Mapping

from ir.workload.config.load import ModelConfig, load_config

SMALL: Mapping[str, object] = {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 64, "intermediate_size": 48}
HEADS: Mapping[str, object] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS: Mapping[str, object] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT: Mapping[str, object] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
}
GPT: Mapping[str, object] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
DRY: Mapping[str, object] = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}

YARN = {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
SLIDING: Mapping[str, object] = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}

TINY: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "llama": ("llama3-8b", {**SMALL, **HEADS, "rope_scaling": LLAMA3}),
    "llama tied": ("llama3-8b", {**SMALL, **HEADS, "tie_word_embeddings": True, "mlp_bias": True}),
    "mistral": ("mistral-7b", {**SMALL, **HEADS, "sliding_window": 3}),
    "qwen2": ("qwen2-7b", {**SMALL, **HEADS}),
    "qwen3": ("qwen3-8b", {**SMALL, **HEADS, **SLIDING}),
    "gpt2": ("gpt2", {**GPT, **DRY, "n_positions": 64}),
    "gpt2 untied": ("gpt3-175b", {**GPT, **DRY, "n_positions": 64, "tie_word_embeddings": False}),
    "mpt": ("mpt-1b", {**GPT, "max_seq_len": 64}),
    "nemotron": ("nemotron-15b", {**SMALL, **HEADS}),
    "mixtral": ("mixtral-8x7b", {**SMALL, **HEADS, "num_local_experts": 4}),
    "qwen3_moe": ("qwen3-30b-a3b", {**SMALL, **HEADS, **EXPERTS, "num_experts": 4, "mlp_only_layers": [0]}),
    "deepseek_v2": ("deepseek-v2-lite", {**SMALL, **LATENT, **EXPERTS}),
    "deepseek_v2 limited": ("deepseek-v2", {**SMALL, **LATENT, **EXPERTS, "q_lora_rank": 12, "n_group": 4}),
    "deepseek_v3": (
        "deepseek-v3",
        {**SMALL, **LATENT, **EXPERTS, "q_lora_rank": 12, "n_group": 4, "topk_group": 2, "rope_scaling": YARN},
    ),
    "kimi": ("kimi-k2", {**SMALL, **LATENT, **EXPERTS, "q_lora_rank": 12, "rope_scaling": YARN}),
}


def tiny(family: str, **more: object) -> ModelConfig:
    """A family's small model."""
    preset, overrides = TINY[family]
    return load_config(preset, {**overrides, **more})
