"""The keys of a Hugging Face config.json, per model type: what they may hold, and Hugging Face's own defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Holds(StrEnum):
    """What a key may hold; the text stands in error messages."""

    SIZE = "a positive integer"
    COUNT = "an integer, 0 or more"
    SIZE_OR_NULL = "a positive integer or null"
    RATIO = "a number above 0"
    WEIGHT = "a number, 0 or more"
    CHANCE = "a number from 0 to below 1"
    FLAG = "true or false"
    TEXT = "a string"
    COUNTS = "a list of integers, 0 or more"
    TABLE = "an object"
    ANYTHING = "anything"


@dataclass(frozen=True, slots=True)
class Key:
    """One key: what it may hold and what it means to leave it out. `default` is Hugging Face's."""

    holds: Holds
    default: object = None
    required: bool = False


Table = Mapping[str, Key]


def _must(*names: str) -> dict[str, Key]:
    return {n: Key(Holds.SIZE, required=True) for n in names}


def _sizes(**defaults: int | None) -> dict[str, Key]:
    return {n: Key(Holds.SIZE_OR_NULL if d is None else Holds.SIZE, d) for n, d in defaults.items()}


def _flags(**defaults: bool) -> dict[str, Key]:
    return {n: Key(Holds.FLAG, d) for n, d in defaults.items()}


def _dropouts(**defaults: float) -> dict[str, Key]:
    return {n: Key(Holds.CHANCE, d) for n, d in defaults.items()}


# Known to Hugging Face, without a meaning for the training graph: accepted in a file and inline, never read.
INERT = tuple(
    """
    _name_or_path architectures auto_map aux_loss_alpha bos_token_id dtype eos_token_id ep_size gradient_checkpointing
    layer_types logit_scale max_window_layers moe_router_dtype n_ctx norm_topk_prob output_router_logits pad_token_id
    pretraining_tp quantization_config rope_interleave rope_parameters rope_scaling router_aux_loss_coef
    router_jitter_noise routed_scaling_factor scale_attn_weights scoring_func seq_aux summary_type task_specific_params
    tokenizer_class topk_method torch_dtype transformers_version use_bfloat16 use_cache
    """.split()  # noqa: SIM905  (forty quoted lines say no more)
)

_COMMON = {
    "model_type": Key(Holds.TEXT, required=True),
    "initializer_range": Key(Holds.RATIO, 0.02),
    **_dropouts(resid_pdrop=0.0, embd_pdrop=0.0),
    **{n: Key(Holds.ANYTHING) for n in INERT},
}

_LLAMA = {
    **_COMMON,
    **_must("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    **_sizes(num_key_value_heads=None, head_dim=None, max_position_embeddings=2048),
    **_flags(tie_word_embeddings=False, attention_bias=False, mlp_bias=False),
    **_dropouts(attention_dropout=0.0),
    "hidden_act": Key(Holds.TEXT, "silu"),
    "rms_norm_eps": Key(Holds.RATIO, 1e-6),
    "rope_theta": Key(Holds.RATIO, 10000.0),
}
_WINDOW = {**_flags(use_sliding_window=False), **_sizes(sliding_window=None)}
# Hugging Face adds it to the loss only where `output_router_logits` is set, which it is not by itself.
_BALANCE = {"router_aux_loss_coef": Key(Holds.WEIGHT, 0.0)}
_EXPERTS = {**_must("moe_intermediate_size"), **_sizes(num_experts_per_tok=8)}
_DEEPSEEK = {
    **_LLAMA,
    **_EXPERTS,
    **_must("n_routed_experts", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    **_sizes(q_lora_rank=None, n_shared_experts=None, n_group=None, topk_group=None, moe_layer_freq=1),
    "first_k_dense_replace": Key(Holds.COUNT, 0),
    "num_nextn_predict_layers": Key(Holds.COUNT, 0),
    **_flags(norm_topk_prob=False),
    "routed_scaling_factor": Key(Holds.RATIO, 1.0),
    "scoring_func": Key(Holds.TEXT, "softmax"),
    "aux_loss_alpha": Key(Holds.WEIGHT, 0.0),  # its classes have 0.001, and this loss in training code of one's own
    "seq_aux": Key(Holds.FLAG, True),
}
# Hugging Face's DeepSeek-V3 knows no other scoring.
_DEEPSEEK3 = {
    **_DEEPSEEK,
    **_flags(norm_topk_prob=True),
    "routed_scaling_factor": Key(Holds.RATIO, 2.5),
    "scoring_func": Key(Holds.TEXT, "sigmoid"),
}
_GPT2 = {
    **_COMMON,
    **_must("vocab_size", "n_embd", "n_layer", "n_head"),
    **_sizes(n_positions=1024, n_inner=None),
    **_flags(tie_word_embeddings=True),
    **_dropouts(attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1),
    "activation_function": Key(Holds.TEXT, "gelu_new"),
    "layer_norm_epsilon": Key(Holds.RATIO, 1e-5),
}
_MPT = {
    **_COMMON,
    **_must("vocab_size", "d_model", "n_heads", "n_layers"),
    **_sizes(max_seq_len=2048, expansion_ratio=4),
    **_flags(tie_word_embeddings=True, learned_pos_emb=True, no_bias=True),
    **_dropouts(emb_pdrop=0.0),
    "attn_config": Key(Holds.TABLE, MappingProxyType({})),
    "layer_norm_epsilon": Key(Holds.RATIO, 1e-5),
    **{n: Key(Holds.ANYTHING) for n in ("init_device", "init_config", "norm_type", "verbose", "embedding_fraction")},
}
_NEMOTRON = {
    **{k: v for k, v in _LLAMA.items() if k != "rms_norm_eps"},
    "hidden_act": Key(Holds.TEXT, "relu2"),
    "norm_eps": Key(Holds.RATIO, 1e-5),
    "partial_rotary_factor": Key(Holds.RATIO, 0.5),
}
_MIXTRAL = {
    **{k: v for k, v in _LLAMA.items() if k not in ("attention_bias", "mlp_bias")},
    **_sizes(num_local_experts=8, num_experts_per_tok=2, sliding_window=None),
    **_BALANCE,
}
_QWEN3_MOE = {
    **_LLAMA,
    **_EXPERTS,
    **_WINDOW,
    **_must("num_experts"),
    **_sizes(decoder_sparse_step=1),
    **_flags(norm_topk_prob=False),
    **_BALANCE,
    "mlp_only_layers": Key(Holds.COUNTS, ()),
}

TYPES: Mapping[str, Table] = {
    "llama": _LLAMA,
    "gpt2": _GPT2,
    "mpt": _MPT,
    "nemotron": _NEMOTRON,
    "mistral": {**_LLAMA, "sliding_window": Key(Holds.SIZE_OR_NULL, 4096)},
    "mixtral": _MIXTRAL,
    "qwen2": {**{k: v for k, v in _LLAMA.items() if k != "attention_bias"}, **_WINDOW},
    "qwen3": {**_LLAMA, **_WINDOW, **_sizes(head_dim=128)},
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
    "deepseek_v3": {"num_experts": "n_routed_experts", **_DROP},
}


def aliases(model_type: str) -> Mapping[str, str]:
    """Other spellings of a model type's keys.

    >>> aliases("gpt2")["num_hidden_layers"], aliases("llama")["attn_pdrop"]
    ('n_layer', 'attention_dropout')
    """
    return ALIASES.get(model_type, _DROP)


def fits(holds: Holds, value: object) -> bool:
    """Whether a value is what a key may hold. `true` is no integer here.

    >>> fits(Holds.SIZE, 4), fits(Holds.SIZE, True), fits(Holds.SIZE, 4.0)
    (True, False, False)
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    whole = isinstance(value, int) and not isinstance(value, bool)
    match holds:
        case Holds.SIZE:
            return whole and _above(value, 1)
        case Holds.COUNT:
            return whole and _above(value, 0)
        case Holds.SIZE_OR_NULL:
            return value is None or (whole and _above(value, 1))
        case Holds.RATIO:
            return number and _above(value, 0.0) and value != 0
        case Holds.WEIGHT:
            return number and _above(value, 0.0)
        case Holds.CHANCE:
            return number and _above(value, 0.0) and not _above(value, 1.0)
        case Holds.FLAG:
            return isinstance(value, bool)
        case Holds.TEXT:
            return isinstance(value, str)
        case Holds.COUNTS:
            return isinstance(value, (list, tuple)) and all(fits(Holds.COUNT, v) for v in value)
        case Holds.TABLE:
            return isinstance(value, Mapping)
        case Holds.ANYTHING:
            return True


def _above(value: object, least: float) -> bool:
    # NaN and infinity fail: the first compares false, the second is not below the largest size we accept.
    return isinstance(value, (int, float)) and least <= value < 1e15
