"""The two families without rotary embeddings, GPT-2 and MPT: their keys to a `ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping

from ir.core.errors import nearest
from ir.workload.config.inert import INERT
from ir.workload.config.key import ModelKey, ModelKeyType, fits, inert, only
from ir.workload.config.spec import LayerActivation, ModelConfig, NormLayerKind
from ir.workload.config.stored import stored_in
from ir.workload.config.values import ModelValues

_GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")
# Of MPT's `attn_config`, with transformers' defaults.
_ATTENTION: Mapping[str, ModelKey] = {
    "alibi": ModelKey(ModelKeyType.FLAG, True),
    "attn_pdrop": ModelKey(ModelKeyType.CHANCE, 0.0),
    **only("", attn_type="multihead_attention", prefix_lm=False, qk_ln=False, attn_uses_sequence_id=False),
    **only("", clip_qkv=None, softmax_scale=None),
    **inert({**INERT, "attn_impl": "the same results", "alibi_bias_max": "`run` has no ALiBi", "model_type": "empty"}),
}


def gpt2(v: ModelValues) -> ModelConfig:
    """GPT-2, and GPT-3 in its words."""
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
        activation=LayerActivation.GELU,
        act=act,
        norm=NormLayerKind.LAYER,
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
        score_scale=1.0 if v.flag("scale_attn_weights") else (hidden // heads) ** 0.5,
        score_by_layer=v.flag("scale_attn_by_inverse_layer_idx"),
        stored=stored_in(v),
    )


def mpt(v: ModelValues) -> ModelConfig:
    """MosaicML's MPT, as llm-foundry has it: transformers' class knows neither learned positions nor biases."""
    v.divides("n_heads", v.size("d_model"), "d_model")
    hidden, heads = v.size("d_model"), v.size("n_heads")
    drop, alibi = _attention(v)
    learned = v.flag("learned_pos_emb") and not alibi  # as llm-foundry has it: ALiBi stands in for positions
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
        activation=LayerActivation.GELU,
        act="gelu",
        norm=NormLayerKind.LAYER,
        norm_bias=bias,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        tied=v.flag("tie_word_embeddings"),
        attn_dropout=drop,
        hidden_dropout=v.number("resid_pdrop"),
        embed_dropout=v.number("emb_pdrop"),
        norm_eps=v.number("layer_norm_epsilon"),
        init_std=v.number("initializer_range"),
        stored=stored_in(v),
    )


def _attention(v: ModelValues) -> tuple[float, bool]:
    """Dropout of MPT's attention, and whether it has ALiBi."""
    table = v.get("attn_config") or {}
    assert isinstance(table, Mapping)
    for name, value in table.items():
        where, key = f"attn_config.{name}", _ATTENTION.get(name)
        if key is None:
            near = nearest(name, _ATTENTION)
            own = sorted(set(_ATTENTION) - set(INERT))
            v.refuse(where, f"mpt's attn_config has no key {name!r}", allowed=", ".join(own), fix=near)
        if not fits(key.holds, value):
            v.refuse(where, f"{value!r} is not {key.holds}", allowed=key.holds)
        if key.only and value not in key.only:
            v.refuse(where, f"{value!r} is not built", allowed=str(key.only[0]))
    return float(table.get("attn_pdrop", 0.0)), bool(table.get("alibi", True))
