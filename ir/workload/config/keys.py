"""The keys of a Hugging Face config.json, per model type: what they may hold, and transformers' own defaults."""

from __future__ import annotations

from collections.abc import Mapping

from ir.workload.config.inert import ALONE, INERT, INERT_GPT2, INERT_MPT
from ir.workload.config.key import ModelKey, ModelKeyType, Table, inert, only


def _must(*names: str) -> dict[str, ModelKey]:
    return {n: ModelKey(ModelKeyType.SIZE, required=True) for n in names}


def _sizes(**defaults: int | None) -> dict[str, ModelKey]:
    return {n: ModelKey(ModelKeyType.SIZE_OR_NULL if d is None else ModelKeyType.SIZE, d) for n, d in defaults.items()}


def _nullable(**defaults: int) -> dict[str, ModelKey]:
    return {n: ModelKey(ModelKeyType.SIZE_OR_NULL, d) for n, d in defaults.items()}


def _flags(**defaults: bool) -> dict[str, ModelKey]:
    return {n: ModelKey(ModelKeyType.FLAG, d) for n, d in defaults.items()}


def _dropouts(**defaults: float) -> dict[str, ModelKey]:
    return {n: ModelKey(ModelKeyType.CHANCE, d) for n, d in defaults.items()}


# Keys that other families have too, and that this one's class of transformers ignores: one value says what it does.
_NO_BIASES = only("transformers' class has no such biases", attention_bias=False, mlp_bias=False)
_NO_MLP_BIAS = only("transformers' class has no such biases", mlp_bias=False)
_NO_WINDOW = only("transformers' class has no window", sliding_window=None, use_sliding_window=False)

_COMMON = {
    "model_type": ModelKey(ModelKeyType.TEXT, required=True),
    "initializer_range": ModelKey(ModelKeyType.RATIO, 0.02),
    "quantization_config": ModelKey(ModelKeyType.TABLE_OR_NULL),
    **_dropouts(resid_pdrop=0.0, embd_pdrop=0.0),
    **inert(INERT),
    **ALONE,
}
_ROPE = {
    "rope_theta": ModelKey(ModelKeyType.RATIO, 10000.0),
    "rope_parameters": ModelKey(ModelKeyType.TABLE_OR_NULL),
    "rope_scaling": ModelKey(ModelKeyType.TABLE_OR_NULL),
    "partial_rotary_factor": ModelKey(ModelKeyType.RATIO, 1.0),
    "layer_types": ModelKey(ModelKeyType.TEXTS_OR_NULL),
}
_DECODER = {
    **_COMMON,
    **_ROPE,
    **_must("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    **_sizes(num_key_value_heads=None, head_dim=None, max_position_embeddings=2048),
    **_flags(tie_word_embeddings=False, attention_bias=False, mlp_bias=False),
    **_dropouts(attention_dropout=0.0),
    "hidden_act": ModelKey(ModelKeyType.TEXT, "silu"),
    "rms_norm_eps": ModelKey(ModelKeyType.RATIO, 1e-6),
}
_LLAMA = {**_DECODER, **_NO_WINDOW}
_MISTRAL = {
    **_DECODER,
    **_NO_BIASES,
    **_sizes(max_position_embeddings=131072),
    **_nullable(num_key_value_heads=8, sliding_window=4096),
}
# Added to the loss by transformers' classes where `output_router_logits` is set; by us, per sequence, where a job says.
_BALANCE = {
    "router_aux_loss_coef": ModelKey(ModelKeyType.WEIGHT, 0.0),
    "output_router_logits": ModelKey(ModelKeyType.FLAG, False),
}
_EXPERTS = {**_must("moe_intermediate_size"), **_sizes(num_experts_per_tok=8)}
_DEEPSEEK = {
    **_LLAMA,
    **_EXPERTS,
    **_must("n_routed_experts", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    **_must("num_experts_per_tok"),
    **_sizes(n_group=None, topk_group=None, moe_layer_freq=1),
    **_nullable(q_lora_rank=1536, n_shared_experts=2),
    **inert(
        {"head_dim": "transformers puts qk_rope_head_dim there", "num_key_value_heads": "MLA has one for every head"}
    ),
    "first_k_dense_replace": ModelKey(ModelKeyType.COUNT, 0),
    "num_nextn_predict_layers": ModelKey(ModelKeyType.COUNT, 0),
    "routed_scaling_factor": ModelKey(ModelKeyType.RATIO, 1.0),
    "aux_loss_alpha": ModelKey(
        ModelKeyType.WEIGHT, 0.0
    ),  # as `router_aux_loss_coef`; transformers' classes never add it
    "seq_aux": ModelKey(ModelKeyType.FLAG, True),
    **only("its loss is not built", output_router_logits=False),
    **only("its class takes a softmax", scoring_func="softmax"),
    **only("transformers' class weighs experts by their softmax as it is", norm_topk_prob=False),
    "topk_method": ModelKey(
        ModelKeyType.TEXT, "greedy", only=("greedy", "group_limited_greedy"), why="its class has no other"
    ),
}
_DEEPSEEK3 = {
    **_DEEPSEEK,
    **_NO_MLP_BIAS,
    **_sizes(max_position_embeddings=4096, num_experts_per_tok=8),
    **_nullable(n_shared_experts=1, n_group=8, topk_group=4),
    **_flags(norm_topk_prob=True, rope_interleave=True),
    "first_k_dense_replace": ModelKey(ModelKeyType.COUNT, 3),
    "routed_scaling_factor": ModelKey(ModelKeyType.RATIO, 2.5),
    **only("its class takes sigmoids", scoring_func="sigmoid"),
    **only("its class has no other", topk_method="noaux_tc"),
}
_GPT2 = {
    **_COMMON,
    **_must("vocab_size", "n_embd", "n_layer", "n_head"),
    **_sizes(n_positions=1024, n_inner=None),
    **_flags(tie_word_embeddings=True, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False),
    **_dropouts(attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1),
    "activation_function": ModelKey(ModelKeyType.TEXT, "gelu_new"),
    "layer_norm_epsilon": ModelKey(ModelKeyType.RATIO, 1e-5),
    **inert(INERT_GPT2),
}
_MPT = {
    **{k: v for k, v in _COMMON.items() if k != "embd_pdrop"},
    **_must("vocab_size", "d_model", "n_heads", "n_layers"),
    **_sizes(max_seq_len=2048, expansion_ratio=4),
    **_flags(tie_word_embeddings=True, learned_pos_emb=True, no_bias=True),
    **_dropouts(emb_pdrop=0.0),
    "attn_config": ModelKey(ModelKeyType.TABLE_OR_NULL),
    "layer_norm_epsilon": ModelKey(ModelKeyType.RATIO, 1e-5),
    **inert(INERT_MPT),
    **only("scaled logits are not built", logit_scale=None),
    **only("scaled gradients of embeddings are not built", embedding_fraction=1.0),
    "norm_type": ModelKey(ModelKeyType.TEXT, "low_precision_layernorm", only=("low_precision_layernorm", "layernorm")),
}
_NEMOTRON = {
    **{k: v for k, v in _LLAMA.items() if k != "rms_norm_eps"},
    **_sizes(max_position_embeddings=4096),
    "initializer_range": ModelKey(ModelKeyType.RATIO, 0.0134),
    "hidden_act": ModelKey(ModelKeyType.TEXT, "relu2"),
    "norm_eps": ModelKey(ModelKeyType.RATIO, 1e-5),
    "partial_rotary_factor": ModelKey(ModelKeyType.RATIO, 0.5),
}
_MIXTRAL = {
    **_MISTRAL,
    **_sizes(num_local_experts=8, num_experts_per_tok=2, sliding_window=None),
    "rms_norm_eps": ModelKey(ModelKeyType.RATIO, 1e-5),
    "rope_theta": ModelKey(ModelKeyType.RATIO, 1000000.0),
    **_BALANCE,
    **only("noise that no plan could repeat", router_jitter_noise=0),
}
_QWEN = {
    **_DECODER,
    **_NO_MLP_BIAS,
    **_flags(use_sliding_window=False),
    **_sizes(max_position_embeddings=32768),
    **_nullable(num_key_value_heads=32, sliding_window=4096),
    "max_window_layers": ModelKey(ModelKeyType.COUNT, 28),
}
_QWEN3_MOE = {
    **_QWEN,
    **_EXPERTS,
    **_must("num_experts"),
    **_sizes(decoder_sparse_step=1),
    **_nullable(num_key_value_heads=4),
    **_flags(norm_topk_prob=False),
    **_BALANCE,
    **inert({"max_window_layers": "transformers' class has one window for all layers"}),
    "mlp_only_layers": ModelKey(ModelKeyType.COUNTS_OR_NULL),
}

TYPES: Mapping[str, Table] = {
    "llama": _LLAMA,
    "gpt2": _GPT2,
    "mpt": _MPT,
    "nemotron": _NEMOTRON,
    "mistral": _MISTRAL,
    "mixtral": _MIXTRAL,
    "qwen2": {k: v for k, v in _QWEN.items() if k != "attention_bias"},
    "qwen3": {**_QWEN, **_sizes(head_dim=128)},
    "qwen3_moe": _QWEN3_MOE,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK3,
}

# Other spellings of a key: Hugging Face's own attribute maps, and one dropout spelling for every type.
_DROP = {"attn_pdrop": "attention_dropout"}
ALIASES: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
        "attention_dropout": "attn_pdrop",
    },
    "mpt": {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
        "embd_pdrop": "emb_pdrop",
    },
    "mixtral": {"num_experts": "num_local_experts", **_DROP},
    "qwen3_moe": {"num_local_experts": "num_experts", **_DROP},
    "deepseek_v2": {"num_experts": "n_routed_experts", **_DROP},
    "deepseek_v3": {
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
        **_DROP,
    },
}


def aliases(model_type: str) -> Mapping[str, str]:
    """Other spellings of a model type's keys.

    >>> aliases("gpt2")["num_hidden_layers"], aliases("llama")["attn_pdrop"]
    ('n_layer', 'attention_dropout')
    """
    return ALIASES.get(model_type, _DROP)
