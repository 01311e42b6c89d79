"""Which layers of a config mix tokens by a recurrence, and how: `mixer.*` of a row, and a pattern of layers."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ir.workload.config.recurrence import LayerMixer, LayerMixerKind
from ir.workload.config.spec import ModelConfig
from ir.workload.config.values import FULL, SLIDING, ModelValues, layer_kinds

Row = Mapping[str, Any]
RECURRENT = "linear_attention"
MLP, EXPERTS = "mlp", "moe"
SIGNS = {"M": RECURRENT, "*": FULL, "-": MLP, "E": EXPERTS}  # Megatron-LM's and NVIDIA's
_OLD = {"mamba": RECURRENT, "attention": FULL}
_FIELDS = {f.name for f in fields(LayerMixer)}
_DEFAULT = (RECURRENT, EXPERTS, FULL, MLP)  # of transformers' NemotronHConfig
_PATTERNS = ("hybrid_override_pattern", "hybrid_layer_pattern")
_AHEAD = ("mtp_hybrid_override_pattern", "mtp_layers_block_type")
NUMBERED = ("linear_attn_config.full_attn_layers", "linear_attn_config.kda_layers")
_LIKE = 'mtp_hybrid_override_pattern = "*E"'


def blocks(v: ModelValues) -> tuple[str, ...]:
    """The one thing that each layer is, where a pattern says it (`M-M*`) or a list, or a class has its own; else ().

    Raises PiperError (model): a sign or a name that is none of them; a number of layers that is another; two keys that
    differ.
    """
    said = [k for k in (*_PATTERNS, "layers_block_type") if k in v.table and v.get(k)]
    own = [k for k in said if k in v.inline] or said
    if not own:
        return _DEFAULT if "layers_block_type" in v.table else ()
    kinds, *others = (_spelled(v, k) for k in own)
    if any(other != kinds for other in others):
        v.refuse(own[-1], f"{own[-1]!r} and {own[0]!r} are one key with two values", fix=f"keep {own[-1]}")
    if (deep := v.size_or("num_hidden_layers", len(kinds))) != len(kinds):
        allowed = f"{deep} of {' '.join(SIGNS)}"
        v.refuse(own[0], f"{len(kinds)} layers, and num_hidden_layers = {deep}", allowed=allowed)
    return kinds


def modules(v: ModelValues, layers: int) -> frozenset[int]:
    """The numbers of its prediction modules, which count on from its layers."""
    return frozenset(range(layers, layers + v.size_or("num_nextn_predict_layers", 0)))


def _spelled(v: ModelValues, key: str) -> tuple[str, ...]:
    """The kinds that one key says."""
    given = v.get(key)
    assert isinstance(given, (str, list, tuple))
    known = SIGNS if isinstance(given, str) else {name: name for name in SIGNS.values()} | _OLD
    if odd := [x for x in given if x not in known]:
        v.refuse(key, f"{odd[0]!r} is no kind of layer that is built", allowed=" ".join(known))
    return tuple(known[x] for x in given)


def ahead(v: ModelValues) -> tuple[str, ...]:
    """What a prediction module has behind its projection, mixing tokens and then not; () where there is none.

    Raises PiperError (model): other kinds of layers, or as many; two keys that differ.
    """
    if not v.size_or("num_nextn_predict_layers", 0):
        return ()
    said = [k for k in _AHEAD if k in v.table and v.get(k)]
    own = [k for k in said if k in v.inline] or said
    if not own and _AHEAD[1] in v.table:
        return FULL, EXPERTS  # of transformers' NemotronHConfig
    if not own:
        v.refuse("num_nextn_predict_layers", f"no {_AHEAD[0]} says what its modules have", allowed="0", fix=_LIKE)
    kinds, *others = (_spelled(v, k) for k in own)
    if any(other != kinds for other in others):
        v.refuse(own[-1], f"{own[-1]!r} and {own[0]!r} are one key with two values", fix=f"keep {own[-1]}")
    if len(kinds) != 2 or kinds[0] not in (FULL, RECURRENT) or kinds[1] not in (MLP, EXPERTS):
        message = "prediction modules of other layers are not built"
        v.refuse(own[0], message, allowed="one of * M, then one of E -", fix='"*E"')
    return kinds


def pattern_of(config: ModelConfig) -> str:
    """The signs of a model each of whose layers is one thing; "" of others.

    >>> from ir.workload import load_config
    >>> pattern_of(load_config("nemotron-h-8b"))[:9], pattern_of(load_config("qwen3-next-80b-a3b"))
    ('M-M-M-M*-', '')
    """
    layers = range(config.layers)
    if config.mixer is None or any(_mixes(config, i) == (config.is_moe(i) or config.has_mlp(i)) for i in layers):
        return ""
    signs = {kind: sign for sign, kind in SIGNS.items()}
    mixing = {i: RECURRENT if config.is_recurrent(i) else FULL for i in layers if _mixes(config, i)}
    return "".join(signs[mixing.get(i, EXPERTS if config.is_moe(i) else MLP)] for i in layers)


def ahead_of(config: ModelConfig) -> str:
    """The signs of what its prediction modules have.

    >>> from ir.workload import load_config
    >>> ahead_of(load_config("nemotron-3-nano-30b-a3b", {"num_nextn_predict_layers": 1}))
    '*E'
    """
    first = config.layers
    return ("M" if config.is_recurrent(first) else "*") + ("E" if config.is_moe(first) else "-")


def _mixes(config: ModelConfig, layer: int) -> bool:
    return config.attends(layer) or config.is_recurrent(layer)


def without(kinds: Sequence[str], *which: str) -> frozenset[int]:
    """Numbers of the layers that are none of these."""
    return frozenset(i for i, kind in enumerate(kinds) if kind not in which)


def read_mixer(v: ModelValues, row: Row, said: Row, layers: int) -> LayerMixer | None:
    """The recurrence of a config's layers; None where no layer has one. said: the values of `row["mixer"]`.

    Raises PiperError (model): heads that groups do not divide; layers that are not built.
    """
    by, named = str(said["by"]), str(said.get("named", RECURRENT))
    kinds = blocks(v) if by == "blocks" else _kinds(v, by, layers, named)
    if RECURRENT not in kinds and (said["by"] != "blocks" or not kinds):
        return None
    own = {k: x for k, x in said.items() if k in _FIELDS}
    wide = "inner" if said.get("inner") else "expand"  # what says how many features all heads have
    inner = said.get("inner") or said.get("expand", 0) * said["hidden"]
    own["heads"] = said.get("heads") or inner // said["head_dim"]
    if own["head_dim"] == "auto":
        own["head_dim"] = inner // own["heads"]
    if str(row.get(wide)).startswith("@") and own["heads"] * own["head_dim"] != inner:
        key = str(row["head_dim"]).removeprefix("@")
        message = f"{own['heads']} heads of {own['head_dim']} features do not make up {inner}"
        v.refuse(key, message, allowed=f"{inner // own['heads']}, or another {str(row[wide])[1:]}")
    if own["heads"] % own.setdefault("groups", own["heads"]):
        key = str(row["groups"]).removeprefix("@")
        v.refuse(
            key, f"{own['groups']} groups do not divide {own['heads']} heads", allowed=f"a divisor of {own['heads']}"
        )
    recurrent, whole = without(kinds, FULL, MLP, EXPERTS), said["by"] != "blocks"
    alone = frozenset[int]() if whole and not said.get("bare") else without(kinds, MLP, EXPERTS)
    if ahead(v)[:1] == (RECURRENT,):
        recurrent |= modules(v, layers)
    own |= {"kind": LayerMixerKind(said["kind"]), "layers": recurrent, "alone": alone}
    return LayerMixer(**own, unmixed=without(kinds, FULL, RECURRENT))


def _kinds(v: ModelValues, by: str, layers: int, named: str) -> Sequence[str]:
    """The kind of each layer's first half, by the rule of a family. named: what it calls a recurrence."""
    if by == "all":
        return [RECURRENT] * layers
    if by == "convolved":
        return [RECURRENT if kind == "conv" else FULL for kind in short_kinds(v, layers)]
    older = _OLD if named == RECURRENT else {}
    given = layer_kinds(v, layers, (FULL, named), older) if "layer_types" in v.table else None
    if given is not None:
        return [RECURRENT if kind == named else kind for kind in given]
    if by == "indices":
        full = v.get("full_attn_idxs")
        assert full is None or isinstance(full, (list, tuple))
        return [FULL if full is None or i in full else RECURRENT for i in range(layers)]
    if by == "listed":
        full = v.get("attn_layer_indices") or ()
        assert isinstance(full, (list, tuple))
        return [FULL if i in full else RECURRENT for i in range(layers)]
    if by == "numbered":
        return _numbered(v, layers)
    every = v.size("layer_group_size") if by == "groups" else v.size_or("full_attention_interval", layers + 1)
    every = min(4, layers) if by == "fourth" else every  # the last, where there is no fourth
    return [RECURRENT if (i + 1) % every else FULL for i in range(layers)]


def short_kinds(v: ModelValues, layers: int) -> Sequence[str]:
    """LFM3's: every fourth layer sees all, every fourth but the first a window, others are convolutions."""
    given = layer_kinds(v, layers, (FULL, SLIDING, "conv"), {})
    own = ("conv", "conv", FULL, "conv", SLIDING, "conv", FULL, "conv")
    return given or [own[i if i < 4 else 4 + i % 4] for i in range(layers)]


def _numbered(v: ModelValues, layers: int) -> Sequence[str]:
    """Kimi's: two lists that count layers from 1; without them every fourth layer but the first attends."""
    full, recurrent = (v.get(key) for key in NUMBERED)
    if full is None or recurrent is None:
        return [FULL if i and i % 4 == 0 else RECURRENT for i in range(layers)]
    assert isinstance(full, (list, tuple)) and isinstance(recurrent, (list, tuple))
    if sorted((*full, *recurrent)) != list(range(1, layers + 1)):
        v.refuse(
            NUMBERED[1], "the two lists do not hold each layer once", allowed=f"1 to {layers}, each in one of them"
        )
    return [FULL if i + 1 in full else RECURRENT for i in range(layers)]
