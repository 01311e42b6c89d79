"""How each model type's keys become a `ModelConfig`: one function per family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ir.workload.config.spec import Activation, Mla, ModelConfig, Moe, Norm
from ir.workload.config.values import Values

_GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")


def _llama(v: Values) -> ModelConfig:
    heads, hidden = v.size("num_attention_heads"), v.size("hidden_size")
    if v.size_or("head_dim", 0) == 0:
        v.divides("num_attention_heads", hidden, "hidden_size")
    kv_heads = v.size_or("num_key_value_heads", heads)
    if heads % kv_heads:
        v.divides("num_key_value_heads", heads, "num_attention_heads")
    v.one_of("hidden_act", ("silu", "swish"))
    bias = v.flag("attention_bias")
    return ModelConfig(
        source=v.source,
        model_type=str(v.get("model_type")),
        layers=v.size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=v.size_or("head_dim", hidden // heads),
        ffn=v.size("intermediate_size"),
        vocab=v.size("vocab_size"),
        max_positions=v.size("max_position_embeddings"),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=v.flag("mlp_bias"),
        tied=v.flag("tie_word_embeddings"),
        attn_dropout=v.number("attention_dropout"),
        hidden_dropout=v.number("resid_pdrop"),
        embed_dropout=v.number("embd_pdrop"),
        norm_eps=v.number("rms_norm_eps"),
        rope_theta=v.number("rope_theta"),
        init_std=v.number("initializer_range"),
    )


def _mistral(v: Values) -> ModelConfig:
    return replace(_llama(v), window=v.size_or("sliding_window", 0))


def _qwen2(v: Values) -> ModelConfig:
    return replace(_llama(v), qkv_bias=True, window=_optional_window(v))


def _qwen3(v: Values) -> ModelConfig:
    return replace(_llama(v), qk_norm=True, window=_optional_window(v))


def _optional_window(v: Values) -> int:
    return v.size_or("sliding_window", 0) if v.flag("use_sliding_window") else 0


def _mixtral(v: Values) -> ModelConfig:
    moe = Moe(v.size("num_local_experts"), v.size("num_experts_per_tok"), v.size("intermediate_size"))
    moe = replace(moe, balance=v.number("router_aux_loss_coef"))
    _check_top_k(v, moe)
    return replace(_mistral(v), moe=moe)


def _qwen3_moe(v: Values) -> ModelConfig:
    only = v.get("mlp_only_layers")
    assert isinstance(only, (list, tuple))
    step = v.size("decoder_sparse_step")
    layers = range(v.size("num_hidden_layers"))
    # Hugging Face: a layer is sparse unless listed, where (layer + 1) % step == 0.
    dense = frozenset(i for i in layers if i in only or (i + 1) % step)
    moe = Moe(v.size("num_experts"), v.size("num_experts_per_tok"), v.size("moe_intermediate_size"), 0, dense)
    moe = replace(moe, normalised=v.flag("norm_topk_prob"), balance=v.number("router_aux_loss_coef"))
    _check_top_k(v, moe)
    return replace(_qwen3(v), moe=moe)


def _deepseek(v: Values) -> ModelConfig:
    mla = Mla(
        v.size_or("q_lora_rank", 0),
        v.size("kv_lora_rank"),
        v.size("qk_nope_head_dim"),
        v.size("qk_rope_head_dim"),
        v.size("v_head_dim"),
    )
    first, every = v.size("first_k_dense_replace"), v.size("moe_layer_freq")
    ffn, groups = v.size("moe_intermediate_size"), v.size_or("n_group", 1)
    # One group of experts limits nothing (Kimi-K2).
    limited = v.size_or("topk_group", groups) if groups > 1 else 0
    moe = Moe(
        experts=v.size("n_routed_experts"),
        top_k=v.size("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=ffn * v.size_or("n_shared_experts", 0),
        dense_layers=frozenset(i for i in range(v.size("num_hidden_layers")) if i < first or i % every),
        groups=groups if limited else 0,
        top_groups=limited,
        scoring=v.one_of("scoring_func", ("softmax", "sigmoid")),
        normalised=v.flag("norm_topk_prob"),
        scale=v.number("routed_scaling_factor"),
        balance=v.number("aux_loss_alpha"),
    )
    if moe.balance and not v.flag("seq_aux"):
        # Over the tokens of a microbatch: another loss for every plan.
        v.refuse("seq_aux", "the auxiliary loss is one of sequences", allowed="true", fix="true")
    _check_top_k(v, moe)
    _check_groups(v, moe)
    mtp = v.size("num_nextn_predict_layers")
    if mtp > 1:
        # A second module reads the first one's hidden state beside the last layer's; nobody has published one.
        v.refuse("num_nextn_predict_layers", f"{mtp} prediction modules are not built", allowed="0, 1", fix="1")
    heads = v.size("num_attention_heads")
    # Hugging Face's DeepSeek files repeat the heads as KV heads; MLA has a key and a value for every head.
    base = _llama(replace(v, given={**v.given, "num_key_value_heads": heads, "head_dim": mla.qk_dim}))
    return replace(base, mla=mla, moe=moe, mtp=mtp)


def _check_top_k(v: Values, moe: Moe) -> None:
    if moe.top_k > moe.experts:
        message = f"{moe.top_k} experts per token, but there are {moe.experts}"
        v.refuse("num_experts_per_tok", message, allowed=f"1 to {moe.experts}", fix=str(moe.experts))


def _check_groups(v: Values, moe: Moe) -> None:
    if not moe.groups:
        return
    v.divides("n_group", moe.experts, "n_routed_experts")
    if moe.top_groups > moe.groups:
        message = f"{moe.top_groups} groups per token, but there are {moe.groups}"
        v.refuse("topk_group", message, allowed=f"1 to {moe.groups}", fix=str(moe.groups))


def _nemotron(v: Values) -> ModelConfig:
    v.one_of("hidden_act", ("relu2",))
    shown = {**v.given, "hidden_act": "silu", "rms_norm_eps": v.number("norm_eps")}
    base = _llama(replace(v, given=shown))
    # LayerNorm1P: a LayerNorm with bias whose weight is stored minus one.
    share = v.number("partial_rotary_factor")
    return replace(base, activation=Activation.RELU2, norm=Norm.LAYER, norm_bias=True, rope_share=share)


def _gpt2(v: Values) -> ModelConfig:
    v.divides("n_head", v.size("n_embd"), "n_embd")
    act = v.one_of("activation_function", _GELU)
    hidden, heads = v.size("n_embd"), v.size("n_head")
    return ModelConfig(
        source=v.source,
        model_type="gpt2",
        layers=v.size("n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=v.size_or("n_inner", 4 * hidden),
        vocab=v.size("vocab_size"),
        max_positions=v.size("n_positions"),
        positions=v.size("n_positions"),
        rope=False,
        activation=Activation.GELU,
        act=act,
        norm=Norm.LAYER,
        norm_bias=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=v.flag("tie_word_embeddings"),
        attn_dropout=v.number("attn_pdrop"),
        hidden_dropout=v.number("resid_pdrop"),
        embed_dropout=v.number("embd_pdrop"),
        norm_eps=v.number("layer_norm_epsilon"),
        init_std=v.number("initializer_range"),
    )


def _mpt(v: Values) -> ModelConfig:
    v.divides("n_heads", v.size("d_model"), "d_model")
    hidden, heads = v.size("d_model"), v.size("n_heads")
    inner = v.get("attn_config")
    assert isinstance(inner, Mapping)
    drop = inner.get("attn_pdrop", 0.0)
    learned = v.flag("learned_pos_emb") and ("learned_pos_emb" in v.given or not inner.get("alibi"))
    bias = not v.flag("no_bias")
    return ModelConfig(
        source=v.source,
        model_type="mpt",
        layers=v.size("n_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=v.size("expansion_ratio") * hidden,
        vocab=v.size("vocab_size"),
        max_positions=v.size("max_seq_len"),
        positions=v.size("max_seq_len") if learned else 0,
        rope=False,
        activation=Activation.GELU,
        act="gelu",
        norm=Norm.LAYER,
        norm_bias=bias,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        tied=v.flag("tie_word_embeddings"),
        attn_dropout=float(drop) if isinstance(drop, (int, float)) else 0.0,
        hidden_dropout=v.number("resid_pdrop"),
        embed_dropout=v.number("emb_pdrop"),
        norm_eps=v.number("layer_norm_epsilon"),
        init_std=v.number("initializer_range"),
    )


FAMILIES: Mapping[str, Callable[[Values], ModelConfig]] = {
    "llama": _llama,
    "gpt2": _gpt2,
    "mpt": _mpt,
    "nemotron": _nemotron,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
