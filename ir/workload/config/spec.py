"""What the model graph needs to know of a model, in one vocabulary, whatever its Hugging Face keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ir.workload.config.compressed import CompressedAttention
from ir.workload.config.keys import ParamNames, names_of
from ir.workload.config.recurrence import LayerMixer

# Of a config: what the duration of a kernel does not depend on, or what the kernels of a layer show by themselves.
NOT_KERNELS = frozenset(
    "layers source windows rope_scaling rope_pairs score_scale score_by_layer stored".split()  # noqa: SIM905
)
# What is told of a config only where it has it: profiles were taken before there was such a thing.
NEWER: Mapping[str, object] = {
    "compressed": None,
    "streams": 0,
    "mtp_repeated": False,
    "value_dim": 0,
    "window_kv_heads": 0,
}


class NormLayerKind(StrEnum):
    """Kinds of normalisation."""

    RMS = "rmsnorm"
    LAYER = "layernorm"


class LayerActivation(StrEnum):
    """The MLP's nonlinearity. Gated ones have two up-projections, gate and up; the others have one."""

    SWIGLU = "swiglu"
    GEGLU = "geglu"
    GELU = "gelu"
    RELU2 = "relu2"
    XIELU = "xielu"

    @property
    def ups(self) -> int:
        """Number of up-projections."""
        return 2 if self in (LayerActivation.SWIGLU, LayerActivation.GEGLU) else 1


class LayerNormPlace(StrEnum):
    """Where the norms of a layer's two branches stand: before a branch's linears, behind them, or both."""

    BEFORE = "before"
    BEHIND = "behind"
    BOTH = "both"


class AttentionNormKind(StrEnum):
    """What a norm of queries and keys is over: a head's features with one weight for all heads (HEAD), with weights of
    each head's own (HEADS), with none (BARE); or the features of all heads at once (WIDTH).
    """

    HEAD = "head"
    HEADS = "heads"
    BARE = "bare"
    WIDTH = "width"


@dataclass(frozen=True, slots=True)
class LayerForm:
    """What models have beside llama's, GPT-2's and DeepSeek's layers; the defaults are theirs.

    parallel: attention and MLP read the same stream, through one norm or two; 0: one after the other. norm_weights:
    norms have any. qk_over, qk_bias: of the norm of queries and keys. sinks: a number per head in softmax's sum;
    window_sinks: only in layers with a window. chunked: windows are stretches that do not see each other. no_rope:
    layers without rotary embedding. score_cap, logit_cap: scores and logits are squeezed by a tanh, 0 for not.
    shared_gate: a token weighs the shared experts' output. act_params: numbers that an activation learns. attn_gate:
    attention's output is weighed by a sigmoid of as many features, projected with the queries; head_gate: by
    one number for each head. recurrent_norms: where norms stand in layers with a recurrence, if that is
    elsewhere.
    multipliers: numbers, by their key, that change results and
    no kernel but where embeddings and logits are multiplied ("embedding", "logits"). Of encoders: bidirectional: a
    token sees those behind it, too; final_norm: there is one before the head; transform: a dense layer, an activation
    and a norm stand between stream and logits; token_types: embeddings of which sentence a token is of; pooled: a
    second head tells whether two sentences follow each other, from the first token. distances: how many kinds of
    distances have a number for each head, added to scores.
    """

    norms: LayerNormPlace = LayerNormPlace.BEFORE
    parallel: int = 0
    norm_weights: bool = True
    qk_over: AttentionNormKind = AttentionNormKind.HEAD
    qk_bias: bool = False
    sinks: bool = False
    chunked: bool = False
    no_rope: frozenset[int] = frozenset()
    score_cap: float = 0.0
    logit_cap: float = 0.0
    head_bias: bool = False
    embed_norm: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    shared_gate: bool = False
    act_params: int = 0
    attn_gate: bool = False
    head_gate: bool = field(default=False, repr=False)  # profiles were taken before there was such a thing
    window_sinks: bool = field(default=False, repr=False)
    recurrent_norms: LayerNormPlace | None = field(default=None, repr=False)
    bidirectional: bool = False
    final_norm: bool = True
    transform: bool = False
    token_types: int = 0
    pooled: bool = False
    distances: int = 0
    multipliers: tuple[tuple[str, float], ...] = ()

    def multiplied(self, what: str) -> bool:
        """Whether "embedding" or "logits" are multiplied by a number."""
        return any(name == what for name, _ in self.multipliers)


LLAMA_FORM = LayerForm()


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention: ranks of the compressed query and key/value, sizes of one head's pieces.

    q_rank 0: the query is not compressed (DeepSeek-V2-Lite).
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int

    @property
    def qk_dim(self) -> int:
        """Length of one head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Length of the key that all heads share where scores are of compressed ones."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class AttentionIndexer:
    """What picks the keys that a query attends to (DeepSeek-V3.2's sparse attention): heads, features of each, keys for
    each query. No loss of ours trains it. shared: layers that attend to what the layer before them does; taken: it is
    one of these.
    """

    heads: int
    dim: int
    top_k: int
    shared: frozenset[int] = frozenset()
    taken: bool = False

    def at(self, layer: int) -> AttentionIndexer:
        """That of one layer."""
        return replace(self, shared=frozenset(), taken=layer in self.shared)


@dataclass(frozen=True, slots=True)
class IndexedLatentAttention(LatentAttention):
    """Latent attention to keys that an indexer picks."""

    indexer: AttentionIndexer


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """The mixture of experts. ffn: one expert's width; shared_ffn: all shared experts' together, 0 for none.

    dense_layers: decoder layers with an ordinary MLP. top_groups of groups: a token's experts lie in at most so many
    groups of experts (DeepSeek's group-limited routing); 0 of 0 where routing is free. scoring: "softmax" over all
    experts or "sigmoid" of each; normalised: a token's weights are made to add up to 1; then they are times `scale`.
    balance: coefficient of the loss that evens out experts in each sequence, 0 for none. latent: features of the space
    that tokens are taken to for the routed experts, and back from behind them; 0: the model's own.
    """

    experts: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: frozenset[int] = frozenset()
    groups: int = 0
    top_groups: int = 0
    scoring: str = "softmax"
    normalised: bool = True
    scale: float = 1.0
    balance: float = 0.0
    latent: int = 0


class AttentionRopeScalingKind(StrEnum):
    """How rotary angles are stretched for sequences longer than those a model was first trained on."""

    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    DYNAMIC = "dynamic"
    PROPORTIONAL = "proportional"


@dataclass(frozen=True, slots=True)
class AttentionRopeScaling:
    """A stretching of rotary angles by `factor`, as transformers' `modeling_rope_utils` computes it.

    original: tokens of the sequences trained on first. slow, fast: turns over `original` below which an angle is
    stretched, and above which it is left alone (LLAMA3's low_freq_factor and high_freq_factor, YARN's beta_slow and
    beta_fast); between them it is mixed. truncate: YARN's mix starts and ends at whole features. times: of cosines and
    sines.
    """

    kind: AttentionRopeScalingKind
    factor: float
    original: int = 0
    slow: float = 1.0
    fast: float = 32.0
    truncate: bool = True
    times: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A language model: a decoder, an encoder, or both. Sizes are elements; dropouts are probabilities.

    source: the preset or file it came from. positions: learned positions, 0 where none. window: sliding attention
    window in tokens, 0 where none; windows: of each layer, where layers differ. qk_norm: RMSNorm on each head's query
    and key. mtp: multi-token-prediction modules, each behind the one before; mtp_repeated: one, used so often.
    rope_share: of a head's features that are turned; rope_pairs: an angle turns two neighbours, not one feature of
    either half. score_scale: of attention scores, beside 1/sqrt(qk_dim); score_by_layer: divided by 1 + the layer's
    number too. act: Hugging Face's name of an activation that has several. stored: the format that its checkpoint is
    quantised to, "" for none. form: what else its layers have. mixer: of layers that have no attention. encoder: how
    many of the layers, from the first on, are an encoder's that the others attend to; 0 where there is one tower.
    padding: the word whose embedding no gradient reaches, None for none. compressed: attention to a window and
    compressed keys. streams: residual streams that each part reads a mixture of, and that what it gives is mixed into
    (hyper-connections, arXiv:2512.24880); 0: one, to which parts add. value_dim: features of a head's values, where
    they are not as many as a key's. window_kv_heads: KV heads of layers with a window, where layers differ in that.
    """

    source: str
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    positions: int = 0
    rope: bool = True
    activation: LayerActivation = LayerActivation.SWIGLU
    norm: NormLayerKind = NormLayerKind.RMS
    norm_bias: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    window: int = 0
    attn_dropout: float = 0.0
    hidden_dropout: float = 0.0
    embed_dropout: float = 0.0
    mla: LatentAttention | None = None
    moe: ExpertConfig | None = None
    mtp: int = 0
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_share: float = 1.0
    act: str = ""
    init_std: float = 0.02
    windows: tuple[int, ...] = ()
    rope_scaling: AttentionRopeScaling | None = None
    rope_pairs: bool = False
    score_scale: float = 1.0
    score_by_layer: bool = False
    stored: str = ""
    form: LayerForm = LLAMA_FORM
    mixer: LayerMixer | None = None
    encoder: int = 0
    padding: int | None = None
    compressed: CompressedAttention | None = None
    streams: int = 0
    mtp_repeated: bool = False
    value_dim: int = 0
    window_kv_heads: int = 0

    def __hash__(self) -> int:
        """Of what tells models apart: a config is part of the key of many tables."""
        return hash((self.source, self.layers, self.hidden, self.vocab, self.window, self.score_scale))

    def at(self, layer: int) -> ModelConfig:
        """The same with what is true of one decoder layer: its window, its scores' scale, its rotary embedding."""
        if layer >= self.layers:  # a prediction module
            return self
        if self.encodes(layer):
            return replace(self, encoder=0, form=replace(self.form, bidirectional=True))
        if isinstance(self.mla, IndexedLatentAttention) and self.mla.indexer.shared:
            return replace(self, mla=replace(self.mla, indexer=self.mla.indexer.at(layer))).at(layer)
        if self.compressed is not None:
            return replace(self, compressed=self.compressed.at(layer))
        if self.form.recurrent_norms:
            place = self.form.recurrent_norms if self.is_recurrent(layer) else self.form.norms
            return replace(self, form=replace(self.form, norms=place, recurrent_norms=None)).at(layer)
        if not self.windows and not self.score_by_layer and not self.form.no_rope:
            return self
        window = self.windows[layer] if self.windows else self.window
        scale = self.score_scale / (layer + 1) if self.score_by_layer else self.score_scale
        form = replace(self.form, no_rope=frozenset()) if self.form.no_rope else self.form
        rope = self.rope and layer not in self.form.no_rope
        kv_heads = (self.window_kv_heads if window else 0) or self.kv_heads
        own = replace(self, window=window, windows=(), score_scale=scale, score_by_layer=False)
        return replace(own, form=form, rope=rope, kv_heads=kv_heads, window_kv_heads=0)

    def encodes(self, layer: int) -> bool:
        """Whether a layer is of the encoder beside the decoder."""
        return layer < self.encoder

    def is_moe(self, layer: int) -> bool:
        """Whether decoder layer `layer` has experts. MTP modules count on from `layers`, as their weights do."""
        return self.moe is not None and layer not in self.moe.dense_layers

    def has_mlp(self, layer: int) -> bool:
        """Whether decoder layer `layer` has an ordinary MLP."""
        return not self.is_moe(layer) and not (self.mixer is not None and layer in self.mixer.alone)

    def attends(self, layer: int) -> bool:
        """Whether decoder layer `layer` has attention."""
        m = self.mixer
        return m is None or m.beside or layer not in m.layers | m.unmixed

    def is_recurrent(self, layer: int) -> bool:
        """Whether decoder layer `layer` has a recurrence, in place of attention or beside it."""
        return self.mixer is not None and layer in self.mixer.layers

    @property
    def indexer(self) -> AttentionIndexer | None:
        """What picks the keys that queries attend to, where something does."""
        return self.mla.indexer if isinstance(self.mla, IndexedLatentAttention) else None

    @property
    def names(self) -> ParamNames:
        return names_of(self.model_type)

    @property
    def expert_hidden(self) -> int:
        """Features of a token on its way through routed experts."""
        return (self.moe.latent if self.moe else 0) or self.hidden

    @property
    def qk_dim(self) -> int:
        """Length of one head's query and key."""
        return self.mla.qk_dim if self.mla else self.head_dim

    @property
    def v_dim(self) -> int:
        """Length of one head's value."""
        return self.mla.v_dim if self.mla else self.value_dim or self.head_dim
