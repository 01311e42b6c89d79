"""How each model type's keys become a `ModelConfig`: one function per family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ir.workload.config.gpt import gpt2, mpt
from ir.workload.config.rope import read_rope
from ir.workload.config.spec import ExpertConfig, LatentAttention, LayerActivation, ModelConfig, NormLayerKind
from ir.workload.config.stored import stored_in
from ir.workload.config.values import ModelValues
from ir.workload.config.windows import check_uniform, layer_windows


def _llama(v: ModelValues) -> ModelConfig:
    return _uniform(v, _decoder(v))


def _decoder(v: ModelValues) -> ModelConfig:
    """What all of llama's descendants have in common, rotary embedding and windows aside."""
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
        init_std=v.number("initializer_range"),
        stored=stored_in(v),
    )


def _mistral(v: ModelValues) -> ModelConfig:
    return _uniform(v, replace(_decoder(v), window=v.size_or("sliding_window", 0)))


def _qwen2(v: ModelValues) -> ModelConfig:
    return replace(_sliding(v), qkv_bias=True)


def _qwen3(v: ModelValues) -> ModelConfig:
    return replace(_sliding(v), qk_norm=True)


def _sliding(v: ModelValues) -> ModelConfig:
    """Layers with windows of their own; one window, where all have it."""
    windows = layer_windows(v)
    one = len(set(windows)) == 1
    return _rotated(v, replace(_decoder(v), window=windows[0] if one else 0, windows=() if one else windows))


def _uniform(v: ModelValues, base: ModelConfig) -> ModelConfig:
    """One window for all layers."""
    check_uniform(v, base.window)
    return _rotated(v, base)


def _rotated(v: ModelValues, base: ModelConfig) -> ModelConfig:
    rope = read_rope(v, base.head_dim)
    return replace(base, rope_theta=rope.theta, rope_scaling=rope.scaling)


def _mixtral(v: ModelValues) -> ModelConfig:
    moe = ExpertConfig(v.size("num_local_experts"), v.size("num_experts_per_tok"), v.size("intermediate_size"))
    moe = replace(moe, balance=_balance(v))
    _check_top_k(v, moe)
    return replace(_mistral(v), moe=moe)


def _balance(v: ModelValues) -> float:
    """The coefficient that a job gives to the loss of each sequence. A file's is that of another loss, which
    transformers' classes add where `output_router_logits` is set: over all layers and the whole batch.
    """
    if v.flag("output_router_logits") and v.given.get("router_aux_loss_coef") != 0:
        message = "transformers' auxiliary loss is one over all layers and the whole batch, another for every plan"
        allowed = "false, and model.router_aux_loss_coef in the job for one of each sequence"
        v.refuse("output_router_logits", message, allowed=allowed)
    return v.number("router_aux_loss_coef") if "router_aux_loss_coef" in v.inline else 0.0


def _qwen3_moe(v: ModelValues) -> ModelConfig:
    only = v.get("mlp_only_layers") or ()
    assert isinstance(only, (list, tuple))
    step = v.size("decoder_sparse_step")
    layers = range(v.size("num_hidden_layers"))
    # Hugging Face: a layer is sparse unless listed, where (layer + 1) % step == 0.
    dense = frozenset(i for i in layers if i in only or (i + 1) % step)
    moe = ExpertConfig(v.size("num_experts"), v.size("num_experts_per_tok"), v.size("moe_intermediate_size"), 0, dense)
    moe = replace(moe, normalised=v.flag("norm_topk_prob"), balance=_balance(v))
    _check_top_k(v, moe)
    window = v.size_or("sliding_window", 0) if v.flag("use_sliding_window") else 0
    return _uniform(v, replace(_decoder(v), qk_norm=True, window=window, moe=moe))


def _deepseek(v: ModelValues) -> ModelConfig:
    mla = LatentAttention(
        v.size_or("q_lora_rank", 0),
        v.size("kv_lora_rank"),
        v.size("qk_nope_head_dim"),
        v.size("qk_rope_head_dim"),
        v.size("v_head_dim"),
    )
    moe = _deepseek_experts(v)
    mtp = v.size("num_nextn_predict_layers")
    if mtp > 1:
        # A second module reads the first one's hidden state beside the last layer's; nobody has published one.
        v.refuse("num_nextn_predict_layers", f"{mtp} prediction modules are not built", allowed="0, 1", fix="1")
    rope = read_rope(v, mla.rope_dim, latent=True)
    check_uniform(v, 0)
    heads = v.size("num_attention_heads")
    # Hugging Face's DeepSeek files repeat the heads as KV heads; MLA has a key and a value for every head.
    base = _decoder(replace(v, given={**v.given, "num_key_value_heads": heads, "head_dim": mla.qk_dim}))
    return replace(
        base,
        mla=mla,
        moe=moe,
        mtp=mtp,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rope_pairs=v.get("model_type") == "deepseek_v2" or v.flag("rope_interleave"),
        score_scale=rope.score_scale,
    )


def _deepseek_experts(v: ModelValues) -> ExpertConfig:
    # transformers' classes leave moe_layer_freq out, as all published models have 1; DeepSeek's own code has it.
    first, every = v.size("first_k_dense_replace"), v.size("moe_layer_freq")
    ffn, method = v.size("moe_intermediate_size"), str(v.get("topk_method"))
    # One group of experts limits nothing (Kimi-K2).
    groups = 1 if method == "greedy" else v.size_or("n_group", 1)
    limited = v.size_or("topk_group", groups) if groups > 1 else 0
    moe = ExpertConfig(
        experts=v.size("n_routed_experts"),
        top_k=v.size("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=ffn * v.size_or("n_shared_experts", 0),
        dense_layers=frozenset(i for i in range(v.size("num_hidden_layers")) if i < first or i % every),
        groups=groups if limited else 0,
        top_groups=limited,
        scoring=str(v.get("scoring_func")),
        normalised=v.flag("norm_topk_prob"),
        scale=v.number("routed_scaling_factor"),
        balance=v.number("aux_loss_alpha") if "aux_loss_alpha" in v.inline else 0.0,
    )
    if moe.balance and not v.flag("seq_aux"):
        # Over the tokens of a microbatch: another loss for every plan.
        v.refuse("seq_aux", "the auxiliary loss is one of sequences", allowed="true", fix="true")
    _check_top_k(v, moe)
    _check_groups(v, moe, method)
    return moe


def _check_top_k(v: ModelValues, moe: ExpertConfig) -> None:
    if moe.top_k > moe.experts:
        message = f"{moe.top_k} experts per token, but there are {moe.experts}"
        v.refuse("num_experts_per_tok", message, allowed=f"1 to {moe.experts}", fix=str(moe.experts))


def _check_groups(v: ModelValues, moe: ExpertConfig, method: str) -> None:
    if not moe.groups:
        return
    v.divides("n_group", moe.experts, "n_routed_experts")
    if moe.top_groups > moe.groups:
        message = f"{moe.top_groups} groups per token, but there are {moe.groups}"
        v.refuse("topk_group", message, allowed=f"1 to {moe.groups}", fix=str(moe.groups))
    each = moe.experts // moe.groups
    if each < 2 and method == "noaux_tc":
        v.refuse("n_group", "a group counts by its best two experts, and has one", allowed=f"up to {moe.experts // 2}")
    if moe.top_k > each * moe.top_groups:
        message = f"{moe.top_k} experts per token do not lie in {moe.top_groups} groups of {each}"
        v.refuse("num_experts_per_tok", message, allowed=f"1 to {each * moe.top_groups}")


def _nemotron(v: ModelValues) -> ModelConfig:
    v.one_of("hidden_act", ("relu2",))
    shown = {**v.given, "hidden_act": "silu", "rms_norm_eps": v.number("norm_eps")}
    base = _decoder(replace(v, given=shown))
    rope = read_rope(v, base.head_dim, partial=True)
    check_uniform(v, 0)
    # LayerNorm1P: a LayerNorm with bias whose weight is stored minus one.
    base = replace(base, activation=LayerActivation.RELU2, norm=NormLayerKind.LAYER, norm_bias=True)
    return replace(base, rope_theta=rope.theta, rope_scaling=rope.scaling, rope_share=rope.share)


FAMILIES: Mapping[str, Callable[[ModelValues], ModelConfig]] = {
    "llama": _llama,
    "gpt2": gpt2,
    "mpt": mpt,
    "nemotron": _nemotron,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
