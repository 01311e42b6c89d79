"""What several keys of a config say together, by model type: of models whose layers are of several kinds."""

from collections.abc import Callable, Mapping
from typing import Any

from ir.workload.config.mixers import EXPERTS, ahead, blocks, short_kinds
from ir.workload.config.values import FULL, SLIDING, ModelValues

Row = Mapping[str, Any]


def _hybrid(v: ModelValues, row: Row) -> Row:
    """NVIDIA's Nemotron-H: a pattern says what each layer is, experts among them or not."""
    kinds, routed = blocks(v), EXPERTS in (*blocks(v), *ahead(v))
    return {**{k: x for k, x in row.items() if k != "moe" or routed}, "layers": len(kinds)}


def _granite_hybrid(v: ModelValues, row: Row) -> Row:
    """Granite 4: where there are no experts, the shared one is the layer's MLP."""
    place = v.get("position_embedding_type")
    if place is not None:
        v.one_of("position_embedding_type", ("rope", "nope"))
    if v.size("num_local_experts"):
        return {**row, "rope": place == "rope"}
    dense = {"ffn": "@shared_intermediate_size", "rope": place == "rope"}
    return {**{k: x for k, x in row.items() if k != "moe"}, **dense}


def _lfm2(v: ModelValues, row: Row) -> Row:
    """LFM2: its MLPs have two thirds of the width that is said, times a number, up to a multiple."""
    if not v.flag("block_auto_adjust_ff_dim"):
        return row
    times, multiple = v.number("block_ffn_dim_multiplier"), v.size("block_multiple_of")
    ffn = multiple * -(-int(times * int(2 * v.size("intermediate_size") / 3)) // multiple)
    if not ffn:
        v.refuse("intermediate_size", f"{times:g} of two thirds of it are no feature", allowed="a larger number")
    return {**row, "ffn": ffn}


def _lfm3(v: ModelValues, row: Row) -> Row:
    if SLIDING in short_kinds(v, v.size("num_hidden_layers")) and not v.get("sliding_window"):
        v.refuse("sliding_window", f"none, but layers of {SLIDING}", allowed="a positive integer")
    return {**row, "norms": "both" if v.flag("use_sandwich_norm") else "before"}


def _olmo_hybrid(v: ModelValues, row: Row) -> Row:
    """OLMo Hybrid: sizes of its recurrence that are left out follow from attention's. A base of null is no angles."""
    heads, hidden = v.size("num_attention_heads"), v.size("hidden_size")
    groups, values = (v.size_or(f"linear_num_{x}_heads", heads) for x in ("key", "value"))
    dim = v.size_or("linear_key_head_dim", int(0.75 * hidden / groups))
    if values % groups or not dim:
        message = f"{groups} heads of keys, of {dim} features, for {values} of values"
        v.refuse("linear_num_key_heads", message, allowed=f"a divisor of {values}, up to three quarters of {hidden}")
    kinds, layers = v.get("layer_types"), v.size("num_hidden_layers")
    if (len(set(kinds)) if isinstance(kinds, (list, tuple)) else layers) < 2:
        v.refuse("layer_types", "transformers' class wants both kinds of layers", allowed=f"{FULL}, linear_attention")
    sizes = {"heads": values, "groups": groups, "state": dim, "head_dim": v.size_or("linear_value_head_dim", 2 * dim)}
    table = v.get("rope_parameters") or {}
    assert isinstance(table, Mapping)
    turned = table.get("rope_theta", v.get("rope_theta")) is not None
    return {**row, "mixer": {**row["mixer"], **sizes}, "rope": turned}


def _mimo(v: ModelValues, row: Row) -> Row:
    """MiMo-V2: layers with a window have twice as many KV heads. What its authors' keys say beside, its class has."""
    layers, heads, kv = (v.size(f"num_{x}") for x in ("hidden_layers", "attention_heads", "key_value_heads"))
    full, dense = [i == 0 or (i + 1) % 6 == 0 for i in range(layers)], [i == 0 for i in range(layers)]
    own = {
        "swa_num_attention_heads": heads,
        "swa_num_key_value_heads": 2 * kv,
        "swa_head_dim": v.size("head_dim"),
        "swa_v_head_dim": v.size("v_head_dim"),
        "hybrid_layer_pattern": _marked(v, "layer_types", FULL, full),
        "moe_layer_freq": _marked(v, "mlp_layer_types", "dense", dense),
    }
    for key, said in own.items():
        if v.get(key) not in (None, said):
            v.refuse(key, f"{v.get(key)}, but transformers' class has {said}", allowed=f"{said} or null")
    ahead = v.size_or("sliding_window_size", 0)  # tokens before the query's own
    return {**row, "window_kv_heads": 2 * kv, **({"window": ahead + 1} if ahead else {})}


def _marked(v: ModelValues, key: str, kind: str, left_out: list[bool]) -> list[int]:
    """0 for layers of a kind, by a list of kinds or as they are where it is left out, 1 for others."""
    given = v.get(key)
    assert given is None or isinstance(given, (list, tuple))
    return [int(not of) for of in (left_out if given is None else [k == kind for k in given])]


def _selective(v: ModelValues, row: Row) -> Row:
    """Mamba-1: its step sizes come through a sixteenth of the features, if nothing else is said."""
    said, hidden = v.get("time_step_rank"), v.size("hidden_size")
    if isinstance(said, str):
        v.one_of("time_step_rank", ("auto",))
    return {**row, "mixer": {**row["mixer"], "steps": -(-hidden // 16) if isinstance(said, str) else said}}


BY_KIND: Mapping[str, Callable[[ModelValues, Row], Row]] = {
    "nemotron_h": _hybrid,
    "granitemoehybrid": _granite_hybrid,
    **dict.fromkeys(("mamba", "falcon_mamba"), _selective),
    "lfm2": _lfm2,
    "lfm3": _lfm3,
    "olmo_hybrid": _olmo_hybrid,
    "mimo_v2_flash": _mimo,
}
