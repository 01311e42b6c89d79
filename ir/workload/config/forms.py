"""How a row of `forms.toml` and a config's keys become a `ModelConfig`: one reader for all families that have a row."""

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any

from ir.workload.config.families import Row, balance_of, check_groups, stored_format, worked
from ir.workload.config.keys import ModelKeyType, fits
from ir.workload.config.mixers import EXPERTS, MLP, ahead, blocks, modules, read_mixer, short_kinds, without
from ir.workload.config.recurrence import LayerMixer
from ir.workload.config.rope import OF_ANY_KIND, TABLES, read_rope
from ir.workload.config.spec import (
    AttentionNormKind,
    AttentionRopeScaling,
    AttentionRopeScalingKind,
    ExpertConfig,
    LayerActivation,
    LayerForm,
    LayerNormPlace,
    ModelConfig,
    NormLayerKind,
)
from ir.workload.config.values import FULL, SLIDING, ModelValues, layer_kinds

GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")
_KINDS = {"norm": NormLayerKind, "norms": LayerNormPlace, "qk_over": AttentionNormKind}
_KINDS |= {"recurrent_norms": LayerNormPlace}
_MODEL, _FORM, _MOE = ({f.name for f in fields(c)} for c in (ModelConfig, LayerForm, ExpertConfig))
CHUNKED = "chunked_attention"
# Kinds of rotary scaling whose angles depend on the sequence, or are those of more features: no prediction depends on
# the angles.
_ANGLES = {
    AttentionRopeScalingKind.LONGROPE: "short_factor long_factor short_mscale long_mscale",
    AttentionRopeScalingKind.DYNAMIC: "alpha beta_fast beta_slow mscale mscale_all_dim",
    AttentionRopeScalingKind.PROPORTIONAL: "",
}
_OF_ANGLES = "type rope_type factor original_max_position_embeddings attention_factor"


def read_form(v: ModelValues) -> ModelConfig:
    """The model of a config whose type has a row.

    Raises PiperError (model): an impossible value, or one that is not built.
    """
    row = worked(v)
    said = {k: found for k, x in row.items() if (found := _value(v, x)) is not None}
    if "biases" in said:
        said |= dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), said["biases"])
    said |= (
        _sizes(v, row, said) | _activation(v, row, said) | {k: kind(said[k]) for k, kind in _KINDS.items() if k in said}
    )
    windows = _windows(v, row, said)
    one = len(set(windows)) == 1
    said |= {"window": windows[0] if one else 0, "windows": () if one else windows} | _grouped(v, row, said, windows)
    said["no_rope"] = _without_rope(v, row, said, windows)
    said["parallel"] = said.get("parallel_norms", 1) if said.get("parallel") else 0
    said["multipliers"] = _multipliers(v, row, said)
    form = LayerForm(**{k: x for k, x in said.items() if k in _FORM})
    own = {k: x for k, x in said.items() if k in _MODEL and k not in ("moe", "mixer")}
    moe = _experts(v, row["moe"], said["layers"]) if "moe" in row else None
    own |= {"moe": moe, "mixer": _mixer(v, row, said), "stored": stored_format(v)}
    base = ModelConfig(source=v.source, model_type=str(v.get("model_type")), **own)
    if not any(map(base.is_moe, range(base.layers + base.mtp))):  # cut down to its dense layers, it has none
        base = replace(base, moe=None)
    if form.parallel and ((form.parallel > 1 and moe is not None) or form.norms is not LayerNormPlace.BEFORE):
        v.refuse("model_type", "layers in parallel with experts of their own norm, or norms behind, are not built")
    return _rotated(v, row, replace(base, form=form))


def _value(v: ModelValues, said: object) -> Any:
    """What a row's value stands for; None where the type has no such key."""
    if not (isinstance(said, str) and said.startswith("@")):
        return said
    found = v.plain(said[1:]) if said[1:] in v.table else None
    if isinstance(found, list) and found and all(x == found[0] for x in found):
        return found[0]
    if isinstance(found, list):
        v.refuse(said[1:], "layers that differ are not built", allowed="one number")
    return found


def _sizes(v: ModelValues, row: Row, said: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = said["heads"], said["hidden"]
    key = str(row["heads"])[1:]
    if not said.get("head_dim"):
        v.divides(key, hidden, str(row["hidden"])[1:])
    kv = said.get("kv_heads") or heads
    if heads % kv:
        v.divides(str(row["kv_heads"]).removeprefix("@"), heads, key)
    if "word_embed_proj_dim" in v.table and v.size_or("word_embed_proj_dim", hidden) != hidden:
        v.refuse("word_embed_proj_dim", "embeddings of another width are not built", allowed=f"{hidden} or null")
    out = {"kv_heads": kv, "head_dim": said.get("head_dim") or hidden // heads, "ffn": said.get("ffn") or 4 * hidden}
    if (word := said.get("padding")) is not None:
        out["padding"] = word % said["vocab"] if -said["vocab"] <= word < said["vocab"] else None
    return out | ({"positions": said["positions"] + said.get("position_offset", 0)} if "positions" in said else {})


def _activation(v: ModelValues, row: Row, said: Mapping[str, Any]) -> dict[str, Any]:
    act, gated = row.get("acts", {}).get(said["act"], said["act"]), said["gated"]
    if takes := row.get("takes"):
        v.one_of(str(row["act"])[1:], tuple(takes))
    gates = {"silu": LayerActivation.SWIGLU, "swish": LayerActivation.SWIGLU, "swiglu": LayerActivation.SWIGLU}
    plain = {"relu2": LayerActivation.RELU2, "xielu": LayerActivation.XIELU}
    known = gates if gated else plain
    if act in known:
        return {"activation": known[act], "act": ""}
    allowed = (*known, *(n for n in GELU if not gated or n != "relu"))
    if act not in allowed:
        v.one_of(str(row["act"]).removeprefix("@"), allowed)
    return {"activation": LayerActivation.GEGLU if gated else LayerActivation.GELU, "act": act}


def _windows(v: ModelValues, row: Row, said: Mapping[str, Any]) -> tuple[int, ...]:
    """The window of every layer, 0 for none."""
    n, mode = said["layers"], row.get("windows")
    size = (said.get("window") or 0) if said.get("windowed", True) else 0
    other = CHUNKED if said.get("chunked") else SLIDING
    match mode if size else None:
        case "every":
            pattern = said["every"]
            every = len(pattern) if isinstance(pattern, str) else pattern
            if not every:
                v.refuse(str(row["every"])[1:], "a pattern of no layers", allowed="a positive integer, or LLLG")
            slides = [bool((i + 1) % every) for i in range(n)]
        case "prefixed":  # dense layers first, in a pattern of their own
            dense = v.size("first_k_dense_replace")
            ahead = [(i + 1) % v.size("prefix_dense_sliding_window_pattern") > 0 for i in range(dense)]
            slides = [*ahead, *((i + 1) % said["every"] > 0 for i in range(n))][:n]
        case "fourth":
            slides = [i % 4 != 0 for i in range(n)]
        case "sixth":
            slides = [i > 0 and (i + 1) % 6 != 0 for i in range(n)]
        case "convolved":
            slides = [kind == SLIDING for kind in short_kinds(v, n)]
        case "first":
            slides = [i >= v.size("max_window_layers") for i in range(n)]
        case "local":
            slides = [kind == "local" for kind in _pairs(v, n)]
        case "listed":  # by layer_types alone
            slides = [False] * n
        case "rotary":
            slides = [i not in _listed(v, n) for i in range(n)]
        case _:
            slides = [bool(size)] * n
    said_of_layers = (
        not {"mixer", "compressed"} & row.keys() and "layer_types" in v.table and v.table["layer_types"].is_read
    )
    given = layer_kinds(v, n, (FULL, other)) if said_of_layers else None
    if given is not None:
        read = mode not in (None, "all", "local")
        if not read and (odd := [k for k, s in zip(given, slides, strict=True) if (k != FULL) is not s]):
            own = other if slides[0] else FULL
            message = f"{odd[0]}, but transformers' {v.get('model_type')} has {own} in every layer"
            v.refuse("layer_types", message, allowed=own)
        if other in given and not size:
            switch = f"{row['windowed'][1:]} = true and " if "windowed" in row else ""
            allowed = f"{switch}a {str(row.get('window', '@none'))[1:]}"
            v.refuse("layer_types", f"{other}, but no window", allowed=allowed)
        slides = [k != FULL for k in given]
    return tuple(size if s else 0 for s in slides)


def _grouped(v: ModelValues, row: Row, said: Mapping[str, Any], windows: tuple[int, ...]) -> dict[str, int]:
    """KV heads, where layers with a window have a number of their own."""
    far, near = said["kv_heads"], said.get("window_kv_heads", 0)
    if not near or not any(windows):
        return {"kv_heads": far, "window_kv_heads": 0}
    if said["heads"] % near:
        message = f"{near} KV heads of layers with a window do not divide {said['heads']} heads"
        v.refuse(str(row["kv_heads"])[1:], message, allowed=f"half a divisor of {said['heads']}")
    return {"kv_heads": near, "window_kv_heads": 0} if all(windows) else {"kv_heads": far, "window_kv_heads": near}


def _pairs(v: ModelValues, layers: int) -> list[str]:
    """GPT-Neo's `attention_layers`, or `attention_types`, [[["global", "local"], 12]], written out."""
    key, allowed = "attention_layers", 'a list of "global" and "local"'
    if (given := v.get(key)) is None or ("attention_types" in v.inline and key not in v.inline):
        key, allowed, given = "attention_types", '[[["global", "local"], layers / 2]]', v.get("attention_types")
    assert isinstance(given, (list, tuple))
    pairs = [(given, 1)] if key == "attention_layers" else given
    try:
        kinds = [str(kind) for group, times in pairs for _ in range(min(times, layers + 1)) for kind in group]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != layers or set(kinds) - {"global", "local"}:
        v.refuse(key, f"{given!r} is no kind for each layer", allowed=allowed)
    return kinds


def _listed(v: ModelValues, layers: int) -> frozenset[int]:
    """Layers without rotary embedding, by `no_rope_layers` (1 for layers with one) or every n-th."""
    given, step = v.get("no_rope_layers"), v.size("no_rope_layer_interval")
    if not given:
        return frozenset(i for i in range(layers) if (i + 1) % step == 0)
    assert isinstance(given, (list, tuple))
    if len(given) != layers or set(given) - {0, 1}:
        v.refuse("no_rope_layers", f"{len(given)} numbers for {layers} layers", allowed=f"{layers} of 0 and 1")
    return frozenset(i for i, rope in enumerate(given) if not rope)


def _without_theta(v: ModelValues, layers: int) -> frozenset[int]:
    """Layers whose own base of angles is 0 (`layer_rope_theta`)."""
    given = v.get("layer_rope_theta") or ()
    assert isinstance(given, (list, tuple))
    if given and len(given) != layers:
        v.refuse("layer_rope_theta", f"{len(given)} numbers for {layers} layers", allowed=f"{layers} of them")
    return frozenset(i for i, theta in enumerate(given) if not theta)


def _without_rope(v: ModelValues, row: Row, said: Mapping[str, Any], windows: tuple[int, ...]) -> frozenset[int]:
    full = frozenset(i for i, w in enumerate(windows) if not w)
    match row.get("nope"):
        case "listed":
            return _listed(v, said["layers"])
        case "full":
            return full
        case "prefixed":  # full layers, but dense ones where none of these has a window
            turned = (
                _dense(v, "kinds", said["layers"], "") if v.size("prefix_dense_sliding_window_pattern") == 1 else ()
            )
            return full.difference(turned)
        case "thetas":
            return _without_theta(v, said["layers"])
        case "windowed":  # the class knows whether its config has windows, not whether a layer of it has
            return full if v.get("sliding_window") else frozenset()
        case _:
            return frozenset()


def _multipliers(v: ModelValues, row: Row, said: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    found = {k: said["hidden"] ** 0.5 if x == "root" else _value(v, x) for k, x in row.get("multipliers", {}).items()}
    return tuple((k, float(x)) for k, x in found.items() if x is not None and x != 1)


def _experts(v: ModelValues, row: Row, layers: int) -> ExpertConfig:
    said = {k: found for k, x in row.items() if (found := _value(v, x)) is not None}
    if said["top_k"] > said["experts"]:
        message = f"{said['top_k']} experts per token, but there are {said['experts']}"
        v.refuse(str(row["top_k"])[1:], message, allowed=f"1 to {said['experts']}", fix=str(said["experts"]))
    groups = said.pop("groups", 1)
    top = said.pop("top_groups", groups) if groups > 1 else 0
    shared = said.get("shared_ffn", said.get("shared", 0) * said["ffn"])
    own = {k: x for k, x in said.items() if k in _MOE}
    moe = ExpertConfig(**{**own, "shared_ffn": shared, "groups": groups if top else 0, "top_groups": top})
    if "n_group" in v.table:
        check_groups(v, moe, str(v.get("topk_method")) if row.get("by_method") else "noaux_tc")
    if "num_expert_group" in v.table:
        check_groups(v, moe, "noaux_tc", "num_expert_group")
    dense = _dense(v, str(said["sparse"]), layers, said.get("first", "first_k_dense_replace"))
    if layers - 1 in dense if said["sparse"] == "step" else MLP in (ahead(v) if said["sparse"] == "blocks" else ()):
        dense |= modules(v, layers)  # a module is as its pattern says, or as Megatron's last layer
    return replace(moe, dense_layers=dense, balance=balance_of(v))


def _mixer(v: ModelValues, row: Row, said: Mapping[str, Any]) -> LayerMixer | None:
    if "mixer" not in row:
        return None
    own = {k: found for k, x in row["mixer"].items() if (found := _value(v, x)) is not None}
    return read_mixer(v, row["mixer"], {**own, "hidden": said["hidden"]}, said["layers"])


def _dense(v: ModelValues, rule: str, layers: int, dense: str) -> frozenset[int]:
    """Layers without experts. dense: the key of how many come first."""
    match rule:
        case "first":
            # transformers' classes leave moe_layer_freq out: all published models have 1. DeepSeek's own code has it.
            first, every = v.size(dense), v.size_or("moe_layer_freq", 1)
            return frozenset(i for i in range(layers) if i < first or i % every)
        case "kinds":
            given = v.get("mlp_layer_types")
            assert given is None or isinstance(given, (list, tuple))
            first = v.size_or("first_k_dense_replace", 0)
            kinds = list(given or ["dense"] * min(first, layers) + ["sparse"] * (layers - first))
            if len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
                message = f"{len(kinds)} kinds for {layers} layers, of {', '.join(map(repr, sorted(set(kinds))))}"
                v.refuse("mlp_layer_types", message, allowed=f'{layers} of "dense" and "sparse"')
            return frozenset(i for i, kind in enumerate(kinds) if kind == "dense")
        case "step":  # a layer is sparse unless listed, where (layer + 1) % step == 0
            only, step = v.get("mlp_only_layers") or (), v.size("decoder_sparse_step")
            assert isinstance(only, (list, tuple))
            return frozenset(i for i in range(layers) if i in only or (i + 1) % step)
        case "listed":
            given, step = v.get("moe_layers"), v.size("interleave_moe_layer_step")
            assert given is None or isinstance(given, (list, tuple))
            sparse = range(step - 1, layers, step) if given is None else given
            return frozenset(range(layers)) - frozenset(sparse)
        case "between":
            first, last = v.size("moe_layer_start_index"), v.size("moe_layer_end_index")
            last, step = layers - 1 if last == -1 else last, v.size("moe_layer_interval")
            return frozenset(i for i in range(layers) if (i + 1) % step or not first <= i <= last)
        case "blocks":
            return without(blocks(v), EXPERTS)
        case _:
            return frozenset()


def _rotated(v: ModelValues, row: Row, base: ModelConfig) -> ModelConfig:
    """With the rotary embedding, where there is one."""
    if not base.rope or base.positions:
        return replace(base, rope=False)
    if base.compressed:
        return base
    if row["run"] or base.indexer:  # which turns by these angles
        dim = base.mla.rope_dim if base.mla else base.head_dim
        rope = read_rope(v, dim, partial=bool(row.get("partial")), latent=base.mla is not None)
        turned = replace(base, rope_theta=rope.theta, rope_scaling=rope.scaling, rope_share=rope.share)
        return replace(turned, score_scale=rope.score_scale)
    turned = _value(v, row.get("rotary"))
    if "rope_theta" not in v.table:  # GPT-J's: so many features, at angles of 10,000
        return replace(base, rope_share=(turned or base.head_dim) / base.head_dim)
    v, more = _one_table(v, base, row.get("axes", ()))
    said = (v.given, *(t for t in map(v.get, TABLES) if isinstance(t, Mapping)))
    if turned and not any(OF_ANY_KIND[1] in t for t in said):
        v = replace(v, given={**v.given, OF_ANY_KIND[1]: turned / base.head_dim})
    v, angles = _by_length(v)
    share = v.table[OF_ANY_KIND[1]].default if OF_ANY_KIND[1] in v.table else 1.0
    rope = read_rope(v, base.head_dim, partial=bool(row.get("partial")) or share != 1.0)
    found = {**dict(base.form.multipliers), **more}
    kept = tuple((k, x) for k, x in found.items() if (k, x) != ("local_theta", rope.theta))
    form = replace(base.form, multipliers=kept)
    scaling = angles or rope.scaling
    return replace(base, rope_theta=rope.theta, rope_share=rope.share, rope_scaling=scaling, form=form)


def _one_table(v: ModelValues, base: ModelConfig, axes: Collection[str]) -> tuple[ModelValues, Mapping[str, float]]:
    """The table of layers that see all, where those with windows have their own; and what that one says otherwise.

    axes: keys of it that share angles out among a picture's axes.
    """
    before, more = dict(base.form.multipliers), dict[str, float]()
    given, default = dict(v.given), v.get(TABLES[0])
    if "attn_config.rope_theta" in v.table:  # DBRX's; transformers' class turns by 10,000 whatever it says
        given = {**{k: x for k, x in given.items() if k not in TABLES}, "rope_theta": v.get("attn_config.rope_theta")}
    elif not any(given.get(name) for name in TABLES) and default:
        given[TABLES[0]] = default
    for name in TABLES:
        table = given.get(name)
        if isinstance(table, Mapping) and isinstance(table.get(FULL), Mapping):
            local = table.get(SLIDING) or {}
            if odd := sorted({*table} - {FULL, SLIDING}):
                v.refuse(f"{name}.{odd[0]}", "beside tables by kind of layer", allowed=f"{FULL}, {SLIDING}")
            share = OF_ANY_KIND[1]
            if local.get("rope_type", "default") != "default" or set(local) - {"rope_type", "rope_theta", share}:
                v.refuse(f"{name}.{SLIDING}", "scaled angles in windows are not built", allowed="rope_theta")
            turned = table[FULL].get(share, v.get(share) if share in v.table else 1.0)
            if local.get(share, turned) != turned:
                message = f"{local[share]}, but {turned} in layers that see all: one share of features is built"
                v.refuse(f"{name}.{SLIDING}.{share}", message, allowed=str(turned))
            more["local_theta"] = float(local.get("rope_theta", before.get("local_theta", v.number("rope_theta"))))
            table = table[FULL]
        if isinstance(table, Mapping):
            beta = {k: table[k] for k in ("llama_4_scaling_beta",) if table.get(k) is not None}
            more |= {k: float(x) for k, x in beta.items()}
            left = {**beta, "max_position_embeddings": 0, **dict.fromkeys(axes)}
            given[name] = {k: x for k, x in table.items() if k not in left}
    positions = replace(v.table["vocab_size"], default=base.max_positions, required=False)
    return replace(v, given=given, table={**v.table, "max_position_embeddings": positions}), more


def _by_length(v: ModelValues) -> tuple[ModelValues, AttentionRopeScaling | None]:
    """A scaling whose angles depend on the sequence, taken out of its table."""
    for name in TABLES:
        table = v.given.get(name)
        if not isinstance(table, Mapping):
            continue
        kind = table.get("rope_type", table.get("type"))
        kind = AttentionRopeScalingKind.LONGROPE if kind == "su" else kind
        if kind not in _ANGLES:
            continue
        known = (*_ANGLES[AttentionRopeScalingKind(kind)].split(), *_OF_ANGLES.split(), *OF_ANY_KIND)
        if odd := [k for k in table if k not in known]:
            v.refuse(
                f"{name}.{odd[0]}", f"rotary embeddings of type {kind!r} have no such key", allowed=", ".join(known)
            )
        factor = table.get("factor")
        if factor is not None and not fits(ModelKeyType.RATIO, factor):
            v.refuse(f"{name}.factor", f"{factor!r} is not {ModelKeyType.RATIO}", allowed=ModelKeyType.RATIO)
        partial = () if kind == AttentionRopeScalingKind.PROPORTIONAL else OF_ANY_KIND  # others of its angles are 0
        plain = {k: x for k, x in table.items() if k in (OF_ANY_KIND[0], *partial)}
        scaling = AttentionRopeScaling(AttentionRopeScalingKind(kind), float(factor) if factor else 1.0)
        return replace(v, given={**v.given, name: plain}), scaling
    return v, None
