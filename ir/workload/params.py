"""The parameters of every part, under their global Hugging Face names, and how parallelism cuts them."""

from math import prod

from ir.workload.config.compressed import CompressedAttention, CompressedAttentionKeys
from ir.workload.config.spec import AttentionNormKind, LayerNormPlace, ModelConfig, NormLayerKind
from ir.workload.part import Param, PartLayout

Params = tuple[Param, ...]


def local_numel(param: Param, layout: PartLayout) -> int:
    """Elements of a parameter on one device, before ZeRO.

    >>> local_numel(Param("w", (8, 6), ("tp",), dims=(0,)), PartLayout(tp=4))
    12
    """
    return prod(local_shape(param, layout))


def local_shape(param: Param, layout: PartLayout) -> tuple[int, ...]:
    """The shape that one device holds; a last shard may be smaller where the sizes do not divide.

    >>> local_shape(Param("w", (8, 6), ("ep", "etp"), True, (0, 1)), PartLayout(ep=4, etp=2))
    (2, 3)
    """
    shape = list(param.shape)
    for axis, dim in zip(param.sharded, param.dims, strict=True):
        shape[dim] = -(-shape[dim] // int(getattr(layout, axis)))
    return tuple(shape)


def whole(name: str, *shape: int, table: bool = False) -> Param:
    """A parameter that every device of the tensor-parallel group holds."""
    return Param(name, shape, table=table)


def cut(name: str, dim: int, *shape: int, blocks: tuple[int, ...] = (), table: bool = False) -> Param:
    """A parameter cut along `dim` by tensor parallelism."""
    return Param(name, shape, ("tp",), dims=(dim,), blocks=blocks, table=table)


def linear(
    config: ModelConfig, name: str, out: int, into: int, *, column: bool, bias: bool, blocks: tuple[int, ...] = ()
) -> Params:
    """A linear layer's weight and bias. column: cut by output (Megatron's column-parallel), else by input. blocks: of
    the outputs, fused layers.

    GPT-2's Conv1D holds its weight transposed, [in, out].
    """
    flipped = config.names.flipped
    shape = (into, out) if flipped else (out, into)
    weight = cut(f"{name}.weight", int(column == flipped), *shape, blocks=blocks)
    if not bias:
        return (weight,)
    return (weight, cut(f"{name}.bias", 0, out, blocks=blocks) if column else whole(f"{name}.bias", out))


def norm(config: ModelConfig, name: str, size: int) -> Params:
    """A norm's weight and, for a LayerNorm with bias, its bias; nothing where norms have no weights."""
    if not config.form.norm_weights:
        return ()
    weight = whole(f"{name}.weight", size)
    return (
        (weight, whole(f"{name}.bias", size)) if config.norm is NormLayerKind.LAYER and config.norm_bias else (weight,)
    )


def attention(config: ModelConfig, prefix: str) -> Params:
    """Input norm and attention of the decoder layer whose names begin with `prefix`."""
    c, names, at = config, config.names, f"{prefix}self_attn."
    if c.mla:
        return _mla(config, prefix)
    if c.compressed:
        return _compressed(config, prefix, c.compressed)
    q, kv, v, out = (c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.v_dim, c.heads * c.v_dim)
    params = branch_norms(c, prefix, names.attn_norm, "attn_out_norm")
    asked = q + out if c.form.attn_gate else q
    params += _head_gate(c, at)
    if names.qkv:
        sizes = (q, kv, v)
        params += linear(c, prefix + names.qkv, sum(sizes), c.hidden, column=True, bias=c.qkv_bias, blocks=sizes)
    else:
        for name, rows in (("q_proj", asked), ("k_proj", kv), ("v_proj", v)):
            params += linear(c, at + name, rows, c.hidden, column=True, bias=c.qkv_bias)
    if c.qk_norm:
        params += tuple(x for n, rows in (("q", q), ("k", kv)) for x in _qk_norm(c, f"{at}{n}_norm", rows))
    if c.form.sinks or (c.form.window_sinks and c.window):
        params += (cut(f"{at}sinks", 0, c.heads),)
    return params + linear(c, prefix + names.out, c.hidden, out, column=False, bias=c.out_bias)


def distances(config: ModelConfig, prefix: str) -> Params:
    """A number for each kind of distance and head, for all layers of a tower."""
    kinds = config.form.distances
    return (cut(f"{prefix}self_attn.distances.weight", 1, kinds, config.heads, table=True),) if kinds else ()


def _qk_norm(config: ModelConfig, name: str, rows: int) -> Params:
    """The norm of queries or keys, whose features are `rows` over all heads."""
    size, form = config.head_dim, config.form
    match form.qk_over:
        case AttentionNormKind.BARE:
            return ()
        case AttentionNormKind.HEAD:
            weight = Param(f"{name}.weight", (size,), by_heads=True)
            return (weight, Param(f"{name}.bias", (size,), by_heads=True)) if form.qk_bias else (weight,)
        case AttentionNormKind.HEADS:
            return (cut(f"{name}.weight", 0, rows // size, size, table=True),)
        case AttentionNormKind.WIDTH:
            return (cut(f"{name}.weight", 0, rows),)


def _head_gate(config: ModelConfig, at: str) -> Params:
    gated = config.form.head_gate
    return linear(config, f"{at}g_proj", config.heads, config.hidden, column=True, bias=False) if gated else ()


def branch_norms(config: ModelConfig, prefix: str, before: str, behind: str) -> Params:
    """The norms of a layer's branch, by where they stand."""
    names = {LayerNormPlace.BEFORE: (before,), LayerNormPlace.BEHIND: (behind,), LayerNormPlace.BOTH: (before, behind)}
    return tuple(x for name in names[config.form.norms] for x in norm(config, prefix + name, config.hidden))


def _mla(config: ModelConfig, prefix: str) -> Params:
    c, mla, at = config, config.mla, f"{prefix}self_attn."
    assert mla is not None
    q, kv = c.heads * mla.qk_dim, c.heads * (mla.nope_dim + mla.v_dim)
    params = norm(c, f"{prefix}input_layernorm", c.hidden)
    if mla.q_rank:
        # The down-projections are not cut by tensor parallelism: their outputs are small and every head needs them.
        params += (whole(f"{at}q_a_proj.weight", mla.q_rank, c.hidden),)
        params += (whole(f"{at}q_a_proj.bias", mla.q_rank),) if c.qkv_bias else ()
        params += norm(c, f"{at}q_a_layernorm", mla.q_rank)
        params += linear(c, f"{at}q_b_proj", q, mla.q_rank, column=True, bias=False)
    else:
        params += linear(c, f"{at}q_proj", q, c.hidden, column=True, bias=False)
    down = mla.latent_dim
    params += (whole(f"{at}kv_a_proj_with_mqa.weight", down, c.hidden),)
    params += (whole(f"{at}kv_a_proj_with_mqa.bias", down),) if c.qkv_bias else ()
    params += norm(c, f"{at}kv_a_layernorm", mla.kv_rank)
    params += linear(c, f"{at}kv_b_proj", kv, mla.kv_rank, column=True, bias=False)
    params += _head_gate(c, at)
    return params + linear(c, f"{at}o_proj", c.hidden, c.heads * mla.v_dim, column=False, bias=c.out_bias)


def _compressed(config: ModelConfig, prefix: str, x: CompressedAttention) -> Params:
    """One key for all heads, and what makes compressed ones of a layer's tokens, whole on every device. x: the layer's.

    The projection out of each group of heads is cut by groups.
    """
    c, at, h, dim = config, f"{prefix}self_attn.", config.hidden, config.head_dim
    return (
        *norm(c, f"{prefix}input_layernorm", h),
        whole(f"{at}q_a_proj.weight", x.q_rank, h),
        *norm(c, f"{at}q_a_norm", x.q_rank),
        *linear(c, f"{at}q_b_proj", c.heads * dim, x.q_rank, column=True, bias=False),
        whole(f"{at}kv_proj.weight", dim, h),
        *norm(c, f"{at}kv_norm", dim),
        cut(f"{at}o_a_proj.weight", 0, x.out_groups * x.out_rank, c.heads * dim // x.out_groups),
        *linear(c, f"{at}o_b_proj", h, x.out_groups * x.out_rank, column=False, bias=False),
        cut(f"{at}sinks", 0, c.heads),
        *(_compressor(c, f"{at}compressor.", x.keys, dim) if x.keys.rate else ()),
    )


def _compressor(config: ModelConfig, at: str, keys: CompressedAttentionKeys, dim: int) -> Params:
    """What takes tokens, weighed feature by feature, together to one key."""
    features = keys.series * dim
    return (
        *(whole(f"{at}{name}_proj.weight", features, config.hidden) for name in ("kv", "gate")),
        whole(f"{at}position_bias", keys.rate, features, table=True),
        *norm(config, f"{at}kv_norm", dim),
    )


def hyper_connection(config: ModelConfig, name: str, *, ends: bool = False) -> Params:
    """What mixes residual streams into a part's input, and its output into them; at the model's end into one."""
    m, prefix = config.streams, "hc_" if ends else ""
    if not m:
        return ()
    numbers = m if ends else m * (m + 2)
    return (
        whole(f"{name}.{prefix}fn", numbers, m * config.hidden),
        whole(f"{name}.{prefix}base", numbers),
        whole(f"{name}.{prefix}scale", 1 if ends else 3),
    )


def indexer(config: ModelConfig, prefix: str) -> Params:
    """What picks the keys of attention, whole on every device. Nothing trains it: no gradient of the tokens' loss
    reaches what is picked (transformers' class asks for none; DeepSeek's own training adds a loss of its own).
    """
    x = config.compressed
    if x and x.keys.top_k:
        at = f"{prefix}self_attn.compressor.indexer."
        return (
            *_compressor(config, at, x.keys, x.index_dim),
            whole(f"{at}q_b_proj.weight", x.index_heads * x.index_dim, x.q_rank),
            whole(f"{at}scorer.weights_proj.weight", x.index_heads, config.hidden),
        )
    found, mla, at = config.indexer, config.mla, f"{prefix}self_attn.indexer."
    if found is None or mla is None or found.taken:
        return ()
    return (
        whole(f"{at}wq_b.weight", found.heads * found.dim, mla.q_rank),
        whole(f"{at}wk.weight", found.dim, config.hidden),
        whole(f"{at}k_norm.weight", found.dim),
        whole(f"{at}k_norm.bias", found.dim),
        whole(f"{at}weights_proj.weight", found.heads, config.hidden),
    )


def post_norm(config: ModelConfig, prefix: str) -> Params:
    """The norms of a layer's MLP; none where it reads attention's."""
    return () if config.form.parallel == 1 else branch_norms(config, prefix, config.names.mlp_norm, "mlp_out_norm")


def mlp(config: ModelConfig, prefix: str, width: int) -> Params:
    """An MLP of the given width under `prefix` (`model.layers.0.mlp.`)."""
    c, names = config, config.names
    params: Params = ()
    for name in ("gate_proj", names.up) if c.activation.ups == 2 else (names.up,):
        params += linear(c, prefix + name, width, c.hidden, column=True, bias=c.mlp_bias)
    if c.form.act_params:
        params += (whole(f"{prefix}act_fn.alpha", c.form.act_params),)
    return params + linear(c, prefix + names.down, c.hidden, width, column=False, bias=c.mlp_bias)


def experts(config: ModelConfig, prefix: str) -> Params:
    """All experts of a layer: one parameter per matrix, experts first, as transformers 5 stores them."""
    moe = config.moe
    assert moe is not None
    hidden, ups = config.expert_hidden, config.activation.ups
    name, rows, both = ("gate_up_proj" if ups == 2 else "up_proj"), ups * moe.ffn, (moe.ffn,) * ups if ups == 2 else ()
    up = Param(f"{prefix}experts.{name}", (moe.experts, rows, hidden), ("ep", "etp"), True, (0, 1), both)
    down = Param(f"{prefix}experts.down_proj", (moe.experts, hidden, moe.ffn), ("ep", "etp"), True, (0, 2))
    if not config.form.expert_bias:
        return (up, down)
    up_bias = Param(f"{prefix}experts.{name}_bias", (moe.experts, rows), ("ep", "etp"), True, (0, 1), both)
    return (up, up_bias, down, Param(f"{prefix}experts.down_proj_bias", (moe.experts, hidden), ("ep",), True, (0,)))


def router(config: ModelConfig, prefix: str) -> Params:
    """A router's weight, and where it has one its number per expert, under `prefix` (`model.layers.0.mlp.`)."""
    moe = config.moe
    assert moe is not None
    gate = whole(f"{prefix}gate.weight", moe.experts, config.hidden)
    bias = (whole(f"{prefix}gate.bias", moe.experts),) if config.form.router_bias else ()
    return (gate, *bias, *latent(config, f"{prefix}fc1_latent_proj", moe.latent, config.hidden))


def latent(config: ModelConfig, name: str, out: int, into: int) -> Params:
    """A projection into or out of the experts' own space, where they have one."""
    moe = config.moe
    if moe is None or not moe.latent:
        return ()
    weight = whole(f"{name}.weight", out, into)
    return (weight, whole(f"{name}.bias", out)) if config.mlp_bias else (weight,)


def word_embedding(config: ModelConfig) -> Param:
    """The input embedding; where `tied`, also the head's weight."""
    return cut(f"{config.names.embed}.weight", 0, config.vocab, config.hidden, table=True)


def transform(config: ModelConfig) -> Params:
    """An encoder's dense layer and norm before the head; the head that tells sentences apart, where it has one."""
    h = config.hidden
    sizes = {"transform": h} | ({"pooler": h, "sentences": 2} if config.form.pooled else {})
    made = [x for name, rows in sizes.items() for x in (whole(f"{name}.weight", rows, h), whole(f"{name}.bias", rows))]
    return (*made, *norm(config, "transform.norm", h))


def head(config: ModelConfig) -> Params:
    """The head's weight, and its bias where it has one."""
    weight = (
        word_embedding(config) if config.tied else cut("lm_head.weight", 0, config.vocab, config.hidden, table=True)
    )
    return (weight, cut("lm_head.bias", 0, config.vocab)) if config.form.head_bias else (weight,)
