"""How each model type's keys become a `ModelConfig`: one function per family, on top of the fields in `keys.toml`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ir.core.errors import nearest
from ir.workload.config.keys import INERT, INSIDE, fits
from ir.workload.config.rope import read_rope
from ir.workload.config.spec import ExpertConfig, LatentAttention, LayerActivation, ModelConfig, NormLayerKind
from ir.workload.config.values import ModelValues, check_uniform, layer_windows

GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")
STORED = ("fp8", "mxfp4")


def _config(v: ModelValues, fields: str, **worked_out: Any) -> ModelConfig:
    """The fields that keys say as they stand, and those that are worked out."""
    model_type = str(v.get("model_type"))
    return ModelConfig(
        source=v.source, model_type=model_type, stored=stored_format(v), **{**v.fields(fields), **worked_out}
    )


def stored_format(v: ModelValues) -> str:
    """ "fp8" as in DeepSeek-V3's config.json, whose weights are stored so, "mxfp4" as in gpt-oss's; "" for none."""
    table = v.get("quantization_config")
    if not table:
        return ""
    assert isinstance(table, Mapping)
    method = table.get("quant_method")
    if method not in STORED:
        message = f"a checkpoint quantised by {method!r} is not one to train from"
        v.refuse(
            "quantization_config.quant_method", message, allowed=f"{', '.join(STORED)}, or quantization_config = null"
        )
    return str(method)


def _decoder(v: ModelValues) -> ModelConfig:
    """What all of llama's descendants have in common, rotary embedding and windows aside."""
    heads, hidden = v.size("num_attention_heads"), v.size("hidden_size")
    if v.size_or("head_dim", 0) == 0:
        v.divides("num_attention_heads", hidden, "hidden_size")
    kv_heads = v.size_or("num_key_value_heads", heads)
    if heads % kv_heads:
        v.divides("num_key_value_heads", heads, "num_attention_heads")
    v.one_of("hidden_act", ("silu", "swish"))
    return _config(v, "decoder", kv_heads=kv_heads, head_dim=v.size_or("head_dim", hidden // heads))


def _uniform(v: ModelValues, base: ModelConfig | None = None) -> ModelConfig:
    """One window for all layers."""
    base = base or _decoder(v)
    check_uniform(v, base.window)
    return _rotated(v, base, base.head_dim)


def _rotated(
    v: ModelValues, base: ModelConfig, dim: int, *, partial: bool = False, latent: bool = False
) -> ModelConfig:
    """With the rotary embedding of `dim` features, as `read_rope` reads it."""
    rope = read_rope(v, dim, partial=partial, latent=latent)
    return replace(
        base,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rope_share=rope.share,
        score_scale=rope.score_scale,
    )


def _mistral(v: ModelValues, **more: Any) -> ModelConfig:
    return _uniform(v, replace(_decoder(v), window=v.size_or("sliding_window", 0), **more))


def _sliding(v: ModelValues, **more: Any) -> ModelConfig:
    """Layers with windows of their own; one window, where all have it."""
    windows = layer_windows(v)
    one = len(set(windows)) == 1
    base = replace(_decoder(v), window=windows[0] if one else 0, windows=() if one else windows)
    return replace(_rotated(v, base, base.head_dim), **more)


def _experts(v: ModelValues, **fields: Any) -> ExpertConfig:
    """With top-k that there are experts for."""
    moe = ExpertConfig(top_k=v.size("num_experts_per_tok"), **fields)
    if moe.top_k > moe.experts:
        message = f"{moe.top_k} experts per token, but there are {moe.experts}"
        v.refuse("num_experts_per_tok", message, allowed=f"1 to {moe.experts}", fix=str(moe.experts))
    return moe


def _mixtral(v: ModelValues) -> ModelConfig:
    moe = _experts(v, experts=v.size("num_local_experts"), ffn=v.size("intermediate_size"), balance=balance_of(v))
    return _mistral(v, moe=moe)


def balance_of(v: ModelValues) -> float:
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
    moe = _experts(
        v,
        experts=v.size("num_experts"),
        ffn=v.size("moe_intermediate_size"),
        # Hugging Face: a layer is sparse unless listed, where (layer + 1) % step == 0.
        dense_layers=frozenset(i for i in layers if i in only or (i + 1) % step),
        normalised=v.flag("norm_topk_prob"),
        balance=balance_of(v),
    )
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
    heads = v.size("num_attention_heads")
    # Hugging Face's DeepSeek files repeat the heads as KV heads; MLA has a key and a value for every head.
    shown = replace(v, given={**v.given, "num_key_value_heads": heads, "head_dim": mla.qk_dim})
    pairs = v.get("model_type") == "deepseek_v2" or v.flag("rope_interleave")
    base = replace(_decoder(shown), mla=mla, moe=moe, mtp=mtp, rope_pairs=pairs)
    base = _rotated(v, base, mla.rope_dim, latent=True)
    check_uniform(v, 0)
    return base


def _deepseek_experts(v: ModelValues) -> ExpertConfig:
    # transformers' classes leave moe_layer_freq out, as all published models have 1; DeepSeek's own code has it.
    first, every = v.size("first_k_dense_replace"), v.size("moe_layer_freq")
    ffn, method = v.size("moe_intermediate_size"), str(v.get("topk_method"))
    # One group of experts limits nothing (Kimi-K2).
    groups = 1 if method == "greedy" else v.size_or("n_group", 1)
    limited = v.size_or("topk_group", groups) if groups > 1 else 0
    moe = _experts(
        v,
        experts=v.size("n_routed_experts"),
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
    check_groups(v, moe, method)
    return moe


def check_groups(v: ModelValues, moe: ExpertConfig, method: str) -> None:
    """Refuse groups of experts that a token's experts do not lie in."""
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
    base = _decoder(replace(v, given={**v.given, "hidden_act": "silu", "rms_norm_eps": v.number("norm_eps")}))
    base = _rotated(v, base, base.head_dim, partial=True)
    check_uniform(v, 0)
    # LayerNorm1P: a LayerNorm with bias whose weight is stored minus one.
    return replace(base, activation=LayerActivation.RELU2, norm=NormLayerKind.LAYER, norm_bias=True)


def _gpt(v: ModelValues, fields: str, bias: bool, **worked_out: Any) -> ModelConfig:
    """What the two families without rotary embeddings have in common."""
    base = _config(v, fields, rope=False, activation=LayerActivation.GELU, norm=NormLayerKind.LAYER, **worked_out)
    return replace(base, norm_bias=bias, qkv_bias=bias, out_bias=bias, mlp_bias=bias)


def _gpt2(v: ModelValues) -> ModelConfig:
    """GPT-2, and GPT-3 in its words."""
    hidden = v.size("n_embd")
    v.divides("n_head", hidden, "n_embd")
    act, each = v.one_of("activation_function", GELU), hidden // v.size("n_head")
    scale = 1.0 if v.flag("scale_attn_weights") else each**0.5
    return _gpt(v, "gpt2", True, head_dim=each, ffn=v.size_or("n_inner", 4 * hidden), act=act, score_scale=scale)


def _mpt(v: ModelValues) -> ModelConfig:
    """MosaicML's MPT, as llm-foundry has it: transformers' class knows neither learned positions nor biases."""
    hidden = v.size("d_model")
    v.divides("n_heads", hidden, "d_model")
    drop, alibi = _mpt_attention(v)
    learned = v.flag("learned_pos_emb") and not alibi  # as llm-foundry has it: ALiBi stands in for positions
    return _gpt(
        v,
        "mpt",
        not v.flag("no_bias"),
        head_dim=hidden // v.size("n_heads"),
        ffn=v.size("expansion_ratio") * hidden,
        positions=v.size("max_seq_len") if learned else 0,
        act="gelu",
        attn_dropout=drop,
    )


def _mpt_attention(v: ModelValues) -> tuple[float, bool]:
    """Dropout of MPT's attention, and whether it has ALiBi."""
    known, table = INSIDE["attn_config"], v.get("attn_config") or {}
    assert isinstance(table, Mapping)
    for name, value in table.items():
        where, key = f"attn_config.{name}", known.get(name)
        if key is None:
            own = sorted(set(known) - set(INERT))
            message = f"mpt's attn_config has no key {name!r}"
            v.refuse(where, message, allowed=", ".join(own), fix=nearest(name, known))
        if not fits(key.holds, value):
            v.refuse(where, f"{value!r} is not {key.holds}", allowed=key.holds)
        if key.only and value not in key.only:
            v.refuse(where, f"{value!r} is not built", allowed=str(key.only[0]))
    return float(table.get("attn_pdrop", 0.0)), bool(table.get("alibi", True))


FAMILIES: Mapping[str, Callable[[ModelValues], ModelConfig]] = {
    "llama": _uniform,
    "gpt2": _gpt2,
    "mpt": _mpt,
    "nemotron": _nemotron,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": partial(_sliding, qkv_bias=True),
    "qwen3": partial(_sliding, qk_norm=True),
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
