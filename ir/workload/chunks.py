"""A model as chunks of parts, in order: embedding, decoder layers, MTP modules, head. Sizes are `work`'s."""

from functools import lru_cache

from ir.core.ops import Pass
from ir.workload import params as p
from ir.workload.config.spec import LayerNormPlace, ModelConfig
from ir.workload.mixer_params import mixer
from ir.workload.part import ENCODER, Chunk, KeptBuffer, Param, Part

# Parts that read a residual stream need it again in I: a norm's gradient reads the norm's input, and the norm's output
# is rebuilt from it. No weight gradient does: every linear keeps its own input.


@lru_cache(maxsize=16)
def chunks(config: ModelConfig) -> tuple[Chunk, ...]:
    """The model's chunks, in order.

    >>> from ir.workload import load_config
    >>> cs = chunks(load_config("deepseek-v3", {"num_hidden_layers": 4}))
    >>> [c.name for c in cs]
    ['embed', 'l0', 'l1', 'l2', 'l3', 'mtp0', 'head']
    >>> [part.name for part in cs[4].parts]
    ['attn', 'router', 'experts', 'shared', 'add']
    """
    out = [_embed(config)]
    moe = 0
    for layer in range(config.layers):
        tags = {"L": layer} | ({"MOE": moe} if config.is_moe(layer) else {})
        parts, far = _layer(config, layer, ""), ""
        if config.encoder:
            parts, far = _tower(config, layer), "" if config.encodes(layer) else f"l{config.encoder - 1}"
        out.append(Chunk(f"l{layer}", parts, tags, encoder=far))
        moe += config.is_moe(layer)
    last = out[-1].name
    out += [_mtp(config, k, moe + k, last) for k in range(config.mtp)]
    head = _head(config, p.norm(config, config.names.norm, config.hidden))
    return (*out, Chunk("head", head, reads=last if config.mtp else None))


def _embed(config: ModelConfig) -> Chunk:
    params: tuple[Param, ...] = (p.word_embedding(config),)
    if config.positions:
        params += (p.whole("transformer.wpe.weight", config.positions, config.hidden, table=True),)
    if config.form.token_types:
        params += (p.whole("transformer.token_types.weight", config.form.token_types, config.hidden, table=True),)
    if config.form.embed_norm:
        params += p.norm(config, "transformer.embedding_norm", config.hidden)
    return Chunk("embed", (Part("embed", (), (), params),))


def _layer(config: ModelConfig, layer: int, reads: str) -> tuple[Part, ...]:
    """A decoder layer whose input is the output of part `reads` ("": of the chunk before)."""
    config, prefix = config.at(layer), f"{config.names.layers}.{layer}."
    first = _mixed(config, layer, reads)
    if not config.is_moe(layer) and not config.has_mlp(layer):
        return first
    stream = first[-1].name if first else reads
    after = _read_again(config, stream)
    norm = p.post_norm(config, prefix)
    inner = f"{config.names.mlp}."
    if not config.is_moe(layer):
        params = norm + p.mlp(config, prefix + inner, config.ffn)
        # Beside attention an MLP reads what attention reads: what attention adds is not needed again.
        return (*first, Part("mlp", (stream,), () if config.form.parallel else after, params))
    moe = config.moe
    assert moe is not None
    # The experts read the router's output through the dispatch that a `shard` directive puts between the two.
    routed = Part("experts", ("router",), (), p.experts(config, prefix + inner))
    shared: tuple[Part, ...] = ()
    if moe.shared_ffn:
        own = p.mlp(config, f"{prefix}{inner}shared_experts.", moe.shared_ffn)
        own += (
            (p.whole(f"{prefix}{inner}shared_expert_gate.weight", 1, config.hidden),) if config.form.shared_gate else ()
        )
        shared = (Part("shared", ("router",), (), own, tuple(q.name for q in norm)),)
    back = p.latent(config, f"{prefix}{inner}fc2_latent_proj", config.hidden, moe.latent)
    again = (KeptBuffer(stream, Pass.I),) if config.streams else ()  # for the gradients of how streams are mixed
    add = Part("add", ("experts", *(s.name for s in shared), stream), again, back)
    mixed = p.hyper_connection(config, f"{prefix}ffn_hc")
    router = Part(
        "router", (stream,), () if config.form.parallel else after, (*mixed, *norm, *p.router(config, prefix + inner))
    )
    # Shared experts stand behind the routed ones: their forward runs beside combine, their backward beside its mirror.
    return (*first, router, routed, *shared, add)


def _tower(config: ModelConfig, layer: int) -> tuple[Part, ...]:
    """A layer of two towers: the encoder's last has its norm, the decoder's first its embedding."""
    first = layer == config.encoder
    parts = _layer(config, layer, "embed" if first else "")
    if first:
        return (*_embed(config).parts, *parts)
    if layer == config.encoder - 1:
        stream, norm = parts[-1].name, p.norm(config, "encoder.final_norm", config.hidden)
        return (*parts, Part("norm", (stream,), (KeptBuffer(stream, Pass.I),), norm))
    return parts


def _mixed(config: ModelConfig, layer: int, reads: str) -> tuple[Part, ...]:
    """What mixes a layer's tokens: attention, a recurrence, or nothing."""
    prefix, keeps = f"{config.names.layers}.{layer}.", _read_again(config, reads)
    recurrent = mixer(config, prefix) if config.is_recurrent(layer) else ()
    if not config.attends(layer):
        return (Part("mixer", (reads,), keeps, recurrent),) if recurrent else ()
    own = p.distances(config, prefix) if layer in (0, config.encoder) else ()
    mixed, still = p.hyper_connection(config, f"{prefix}attn_hc"), p.indexer(config, prefix)
    params = (*mixed, *p.attention(config, prefix), *own)
    attn = Part("attn", (reads,), keeps, params, frozen=still)
    if recurrent:  # beside attention, whose norm it reads
        return (attn, Part("mixer", ("attn",), (), recurrent))
    if not config.encoder or config.encodes(layer):
        return (attn,)
    # Keys and values are of the encoder's output, which their weights' gradients read again.
    kept = (*_read_again(config, "attn"), KeptBuffer(ENCODER, Pass.W))
    return (attn, Part("cross", ("attn", ENCODER), kept, p.attention(config, f"{prefix}cross.")))


def _read_again(config: ModelConfig, part: str) -> tuple[KeptBuffer, ...]:
    """Where no norm stands before them, linears read the stream, and so does their weight gradient; so it does of what
    mixes several streams.
    """
    reads = config.form.norms is LayerNormPlace.BEHIND or config.streams
    return (KeptBuffer(part, Pass.W if reads else Pass.I),)


def _read_by_norm(config: ModelConfig, part: str) -> tuple[KeptBuffer, ...]:
    return (KeptBuffer(part, Pass.W if config.streams else Pass.I),)


def _head(config: ModelConfig, norm: tuple[Param, ...], reads: str = "") -> tuple[Part, ...]:
    """Final norm, an encoder's dense layer, then logits and loss. Weight gradients read what stands before them:
    nobody rebuilds that.
    """
    parts: tuple[Part, ...] = ()
    if config.form.final_norm:
        mixed = p.hyper_connection(config, "model.hc_head", ends=True)
        parts, reads = (Part("norm", (reads,), _read_by_norm(config, reads), (*mixed, *norm)),), "norm"
    if config.form.transform:
        parts += (Part("transform", (reads,), (KeptBuffer(reads, Pass.W),), p.transform(config)),)
        reads = "transform"
    return (*parts, Part("head", (reads,), (KeptBuffer(reads, Pass.W),), p.head(config)))


def _mtp(config: ModelConfig, k: int, moe: int, last: str) -> Chunk:
    """DeepSeek-V3's multi-token prediction, arXiv:2412.19437 section 2.2: the hidden state of the last layer, or of the
    module before, and the next token's embedding, each normed, projected together from 2h to h; one decoder layer; the
    shared head. A module hands on what its head reads, as Megatron's does.
    """
    c, layer = config, config.layers + (0 if config.mtp_repeated else k)
    prefix = f"{c.names.layers}.{layer}."
    joined = (
        *p.norm(c, f"{prefix}enorm", c.hidden),
        *p.norm(c, f"{prefix}hnorm", c.hidden),
        p.whole(f"{prefix}eh_proj.weight", c.hidden, 2 * c.hidden),
    )
    parts = (
        *_embed(c).parts,
        Part("proj", ("", "embed"), (KeptBuffer("", Pass.I), KeptBuffer("embed", Pass.I)), joined),
        *_layer(c, layer, "proj"),
    )
    parts += _head(c, p.norm(c, f"{prefix}shared_head.norm", c.hidden), parts[-1].name)
    tags = {"MTP": k} | ({"MOE": moe} if c.is_moe(layer) else {})
    return Chunk(f"mtp{k}", parts, tags, reads=f"mtp{k - 1}" if k else last, gives=parts[-2].name)
