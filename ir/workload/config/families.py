"""What several keys of a config say together, by model type: a row of `forms.toml` with that worked out."""

from collections.abc import Callable, Mapping
from typing import Any

from ir.core.errors import nearest
from ir.workload.config.compressed import read_compressed
from ir.workload.config.keys import INERT, INSIDE, ROWS, fits
from ir.workload.config.kinds import BY_KIND
from ir.workload.config.mixers import EXPERTS, ahead, blocks
from ir.workload.config.spec import (
    AttentionIndexer,
    ExpertConfig,
    IndexedLatentAttention,
    LatentAttention,
    NormLayerKind,
)
from ir.workload.config.values import ModelValues

Row = Mapping[str, Any]
STORED = ("fp8", "mxfp4")


_CONV = "linear_conv_kernel_dim"


def worked(v: ModelValues) -> Row:
    """A type's row. Raises PiperError (model): keys that do not go together."""
    kind = str(v.get("model_type"))
    return _WORKED[kind](v, ROWS[kind]) if kind in _WORKED else ROWS[kind]


def _megatron(v: ModelValues, row: Row) -> Row:
    """Arguments of Megatron-LM that say several things at once."""
    if not blocks(v) and v.get("num_hidden_layers") is None:
        v.refuse("num_hidden_layers", "missing, and no pattern of layers is given", allowed="a positive integer")
    if not blocks(v) and v.get("mtp_hybrid_override_pattern"):
        message = "without a pattern of layers a prediction module is as the last layer"
        v.refuse("mtp_hybrid_override_pattern", message, allowed="null", fix="leave it out")
    layer = v.one_of("normalization", ("LayerNorm", "RMSNorm")) == "LayerNorm"
    place = v.one_of("position_embedding_type", ("learned_absolute", "rope", "none"))
    bias, experts = v.flag("add_bias_linear"), v.get("num_experts") is not None
    more: Row = {
        "norm": NormLayerKind.LAYER if layer else NormLayerKind.RMS,
        "norm_bias": layer,
        "qk_bias": layer and v.flag("qk_layernorm"),
        "rope": place == "rope",
        "qkv_bias": bias or v.flag("add_qkv_bias"),
        **dict.fromkeys(("out_bias", "mlp_bias", *(("expert_bias",) if experts else ())), bias),
    }
    positions = {"positions": row["max_positions"]} if place == "learned_absolute" else {}
    ffn = v.get("moe_intermediate_size") or v.get("intermediate_size") or 4 * v.size("hidden_size")
    moe = {"moe": {**row["moe"], "ffn": ffn}} if experts else {}
    left = {"moe", *(() if blocks(v) else ("mixer",))}
    sparse = {"sparse": "blocks"} if EXPERTS in (*blocks(v), *(ahead(v) if blocks(v) else ())) else {}
    moe = {"moe": {**moe["moe"], **sparse}} if moe else {}
    layers = {"layers": len(blocks(v))} if blocks(v) else {}
    if encoder := v.size_or("encoder_num_layers", 0):
        if experts or blocks(v) or v.flag("qk_layernorm"):
            what = "experts, a pattern of layers or norms of queries and keys"
            v.refuse("encoder_num_layers", f"an encoder beside {what} is not built", allowed="null")
        layers = {"layers": encoder + v.size("num_hidden_layers"), "encoder": encoder, "head_bias": True}
    latent: Row = {"mla": (mla := _latent(v)), "head_dim": mla.qk_dim} if v.get("kv_lora_rank") else {}
    return {**{k: x for k, x in row.items() if k not in left}, **more, **positions, **moe, **layers, **latent}


def _shared_keys(v: ModelValues, row: Row) -> Row:
    """GPT-BigCode: all heads share keys and values, or none do."""
    return {**row, "kv_heads": 1 if v.flag("multi_query") else row["kv_heads"]}


def _falcon(v: ModelValues, row: Row) -> Row:
    """Two generations: whose keys and values heads share, and how many norms stand before parallel halves."""
    new, norms = v.flag("new_decoder_architecture"), v.size_or("num_ln_in_parallel_attn", 0)
    shared = 1 if v.flag("multi_query") and not new else row["kv_heads"] if new else row["heads"]
    both = (norms or 2) if new else 1
    more = {"kv_heads": shared, "parallel": new or v.flag("parallel_attn"), "parallel_norms": both}
    return {**row, **more, "rope": not v.flag("alibi")}


def _gpt2(v: ModelValues, row: Row) -> Row:
    """GPT-2, and GPT-3 in its words."""
    each = v.size("n_embd") // v.size("n_head")
    return {**row, "score_scale": 1.0 if v.flag("scale_attn_weights") else each**0.5}


def _offset(v: ModelValues, row: Row) -> Row:
    """RoBERTa: the first two positions are of padding."""
    positions = v.size("max_position_embeddings")
    if positions < 3:
        v.refuse("max_position_embeddings", "two positions are of padding", allowed="3 or more")
    return {**row, "max_positions": positions - 2}


def _t5(v: ModelValues, row: Row) -> Row:
    """Two towers; a word says activation and gate."""
    encoder = v.size("num_layers")
    acts = {"relu": ("relu", False), "gelu": ("gelu", False), "gated-gelu": ("gelu_new", True)}
    acts |= {"gated-silu": ("silu", True)}
    act, gated = acts[v.one_of("feed_forward_proj", tuple(acts))]
    for key, own in (("is_gated_act", gated), ("dense_act_fn", act)):  # what it says, written out
        if v.get(key) not in (None, own):
            message = f"{v.get(key)!r}, but feed_forward_proj = {v.get('feed_forward_proj')!r} is otherwise"
            v.refuse(key, message, allowed=str(own), fix=f"leave {key} out")
    layers = encoder + v.size_or("num_decoder_layers", encoder)
    said = "scale_decoder_outputs" if "scale_decoder_outputs" in v.given else "tie_word_embeddings"
    scaled = {"multipliers": {"logits": v.size("d_model") ** -0.5}} if v.flag(said) and row["scales"] else {}
    return {**row, "act": act, "gated": gated, "layers": layers, "encoder": encoder, **scaled}


def _mpt(v: ModelValues, row: Row) -> Row:
    """MosaicML's MPT, as llm-foundry has it: transformers' class knows neither learned positions nor biases."""
    drop, alibi = _mpt_attention(v)
    learned = v.flag("learned_pos_emb") and not alibi  # as llm-foundry has it: ALiBi stands in for positions
    more = {"ffn": v.size("expansion_ratio") * v.size("d_model"), "attn_dropout": drop}
    more |= {"positions": v.size("max_seq_len") if learned else 0}
    return {**row, **more, **dict.fromkeys(("biases", "norm_bias"), not v.flag("no_bias"))}


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


def _latent(v: ModelValues) -> LatentAttention:
    """Ranks and head sizes of latent attention."""
    nope, rope = (v.size(f"{x}_head_dim") for x in ("qk_nope", "qk_rope"))
    values = v.size_or("v_head_dim", v.size("hidden_size") // v.size("num_attention_heads"))  # MiniCPM3's, if null
    return LatentAttention(v.size_or("q_lora_rank", 0), v.size("kv_lora_rank"), nope, rope, values)


def _dense_latent(v: ModelValues, row: Row) -> Row:
    return {**row, "mla": (mla := _latent(v)), "head_dim": mla.qk_dim}


def _kimi(v: ModelValues, row: Row) -> Row:
    """Kimi Linear: sizes of its recurrence stand in a table, or beside it."""
    said = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim", "short_conv_kernel_size": _CONV}
    heads, dim, conv = (v.size_or(f"linear_attn_config.{a}", v.size(b)) for a, b in said.items())
    mixer = {**row["mixer"], "heads": heads, "groups": heads, "head_dim": dim, "state": dim, "conv": conv}
    return {**_dense_latent(v, row), "mixer": mixer}


def _ling(v: ModelValues, row: Row) -> Row:
    """Ling 3. transformers writes another head_dim than it read (qk_rope_head_dim), and the one it used beside it."""
    dim = v.size("head_dim")
    if v.get("linear_head_dim") not in (None, dim):
        message = f"{v.get('linear_head_dim')}, but transformers' class takes head_dim = {dim} for it"
        v.refuse("linear_head_dim", message, allowed=f"{dim} or null", fix=f"head_dim = {v.get('linear_head_dim')}")
    return _dense_latent(v, row)


def _command(v: ModelValues, row: Row) -> Row:
    """Command A+: norms by which number they have; the first layers' MLPs have a width of their own."""
    rms = v.get("rms_norm_eps") is not None
    norm = {"norm": NormLayerKind.RMS, "norm_eps": "@rms_norm_eps"} if rms else {}
    return {**row, **norm, "ffn": v.size_or("prefix_dense_intermediate_size", v.size("intermediate_size"))}


def _scaled(v: ModelValues, row: Row) -> Row:
    """AFMoE: embeddings are multiplied where a switch says so."""
    return {**row, "multipliers": {"embedding": "root"}} if v.flag("mup_enabled") else row


def _deepseek(v: ModelValues, row: Row) -> Row:
    mla = _latent(v)
    if v.get("head_dim") not in (None, mla.rope_dim):  # transformers' class would turn so many features
        message = f"{v.get('head_dim')}, but qk_rope_head_dim = {mla.rope_dim} features are turned"
        v.refuse("head_dim", message, allowed=f"{mla.rope_dim} or null", fix="leave head_dim out")
    # One group of experts limits nothing (Kimi-K2).
    groups = {"groups": 1} if v.get("topk_method") == "greedy" else {}
    return {**row, "mla": mla, "head_dim": mla.qk_dim, "moe": {**row["moe"], **groups}}


def _indexed(v: ModelValues, row: Row) -> Row:
    """DeepSeek's sparse attention: an indexer in each layer, or in some (GLM-5.2), whose picks those behind share."""
    found = _deepseek(v, row)
    mla: LatentAttention = found["mla"]
    sizes = mla.q_rank, mla.kv_rank, mla.nope_dim, mla.rope_dim, mla.v_dim
    heads, dim, top = (v.size(f"index_{key}") for key in ("n_heads", "head_dim", "topk"))
    if dim < mla.rope_dim:
        message = f"{dim} features, of which qk_rope_head_dim = {mla.rope_dim} are turned"
        v.refuse("index_head_dim", message, allowed=f"{mla.rope_dim} or more")
    return {**found, "mla": IndexedLatentAttention(*sizes, AttentionIndexer(heads, dim, top, _shared_picks(v)))}


def _shared_picks(v: ModelValues) -> frozenset[int]:
    """Layers that attend to what the layer before them picked."""
    if "indexer_types" not in v.table:
        return frozenset()
    layers, given = v.size("num_hidden_layers"), v.get("indexer_types")
    assert given is None or isinstance(given, (list, tuple))
    every, ahead = v.size("index_topk_freq"), v.size_or("index_skip_topk_offset", 0)
    kinds = given or ["shared" if max(i - ahead + 1, 0) % every else "full" for i in range(layers)]
    if len(kinds) != layers or set(kinds) - {"full", "shared"} or kinds[0] != "full":
        message = f"{len(kinds)} kinds for {layers} layers, of which the first is {kinds[0]!r}"
        v.refuse("indexer_types", message, allowed=f'{layers} of "full" and "shared", "full" first')
    return frozenset(i for i, kind in enumerate(kinds) if kind == "shared")


_WORKED: Mapping[str, Callable[[ModelValues, Row], Row]] = {
    **BY_KIND,
    "megatron": _megatron,
    "gpt_bigcode": _shared_keys,
    "falcon": _falcon,
    "gpt2": _gpt2,
    "mpt": _mpt,
    "t5": _t5,
    "mt5": _t5,
    **dict.fromkeys(("roberta", "camembert", "xlm-roberta"), _offset),
    "deepseek_v2": _deepseek,
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "sarvam_mla"), _deepseek),
    **dict.fromkeys(("youtu", "minicpm3"), _dense_latent),
    "afmoe": _scaled,
    "cohere2_moe": _command,
    "kimi_linear": _kimi,
    "bailing_hybrid": _ling,
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _indexed),
    "deepseek_v4": lambda v, row: {**row, "compressed": read_compressed(v)},
}


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


def balance_of(v: ModelValues) -> float:
    """The coefficient that a job gives to the loss of each sequence. A file's is that of another loss, which
    transformers' classes add where `output_router_logits` is set: over all layers and the whole batch.
    """
    if v.flag("output_router_logits") and v.given.get("router_aux_loss_coef") != 0:
        message = "transformers' auxiliary loss is one over all layers and the whole batch, another for every plan"
        allowed = "false, and model.router_aux_loss_coef in the job for one of each sequence"
        v.refuse("output_router_logits", message, allowed=allowed)
    if "aux_loss_alpha" in v.inline and v.number("aux_loss_alpha") and not v.flag("seq_aux"):
        # Over the tokens of a microbatch: another loss for every plan.
        v.refuse("seq_aux", "the auxiliary loss is one of sequences", allowed="true", fix="true")
    return next((v.number(k) for k in ("router_aux_loss_coef", "aux_loss_alpha") if k in v.inline), 0.0)


def check_groups(v: ModelValues, moe: ExpertConfig, method: str, key: str = "n_group") -> None:
    """Refuse groups of experts that a token's experts do not lie in. key: what says how many there are."""
    if not moe.groups:
        return
    v.divides(key, moe.experts, "n_routed_experts" if key == "n_group" else "num_experts")
    if moe.top_groups > moe.groups:
        message = f"{moe.top_groups} groups per token, but there are {moe.groups}"
        v.refuse("topk_group", message, allowed=f"1 to {moe.groups}", fix=str(moe.groups))
    each = moe.experts // moe.groups
    if each < 2 and method == "noaux_tc":
        v.refuse(key, "a group counts by its best two experts, and has one", allowed=f"up to {moe.experts // 2}")
    if moe.top_k > each * moe.top_groups:
        message = f"{moe.top_k} experts per token do not lie in {moe.top_groups} groups of {each}"
        top = "num_experts_per_tok" if key == "n_group" else "num_experts_per_token"
        v.refuse(top, message, allowed=f"1 to {each * moe.top_groups}")
