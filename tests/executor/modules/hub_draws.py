"""Configs drawn at random as a config.json would have them, and whether each is to be refused."""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Raw = dict[str, Any]
THETAS = (10000, 500000.0, 100.0, 1e6, 20)
_FILE = json.loads((Path(__file__).parents[2] / "data" / "drawn_configs.json").read_text())
INERT: Mapping[str, Any] = _FILE["inert"]


@dataclass(frozen=True)
class Drawn:
    """A config. refused: the part of its error's key that is to be there, "" where both are to train the same."""

    raw: Mapping[str, Any]
    refused: str = ""


def draw(seed: int) -> Drawn:
    """The config of a seed. One in six has something that is to be refused.

    >>> draw(3) == draw(3), len({str(draw(i).raw) for i in range(50)})
    (True, 50)
    """
    r = random.Random(seed)
    kind = sorted(DRAWS)[seed % len(DRAWS)]
    raw = {"model_type": kind, **DRAWS[kind](r), **{k: v for k, v in INERT.items() if r.random() < 0.3}}
    if r.random() < 1 / 6:
        broken = r.choice([b for b in BROKEN if not b["types"] or kind in b["types"]])
        return Drawn({**raw, **broken["keys"]}, broken["refused"])
    return Drawn(raw)


def _some(r: random.Random, **values: tuple[Any, ...]) -> Raw:
    """Each key with one of its values, or, one time in four, left out."""
    return {k: r.choice(v) for k, v in values.items() if r.random() < 0.75}


def _decoder(r: random.Random) -> Raw:
    """llama's keys, and what all its descendants read."""
    heads = r.choice((2, 4))
    return {
        "vocab_size": r.choice((32, 61)),
        "hidden_size": 16,
        "intermediate_size": r.choice((24, 36)),
        "num_hidden_layers": r.choice((2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": r.choice([n for n in (1, 2, 4) if heads % n == 0]),
        "max_position_embeddings": r.choice((16, 64, 4096)),
        "head_dim": r.choice((4, 8, 10)),
        **_some(r, tie_word_embeddings=(True, False), rms_norm_eps=(1e-6, 1e-5, 1e-2), hidden_act=("silu",)),
        **_some(r, initializer_range=(0.02, 0.1), attention_dropout=(0.0,)),
        **_rope(r),
    }


def _rope(r: random.Random, latent: bool = False) -> Raw:
    """theta and scaling in one of the spellings of the Hub."""
    theta, spelling = r.choice(THETAS), r.choice(("beside", "inside", "left out"))
    table = _scaling(r, latent)
    named: Raw = {}
    if table:
        named = {r.choice(("rope_type", "type")): table.pop("kind")}
    key = r.choice(("rope_parameters", "rope_scaling"))
    if spelling == "inside":
        return {key: {"rope_theta": theta, **named, **table}}
    beside = {"rope_theta": theta} if spelling == "beside" else {}
    return {**beside, key: {**named, **table} or None} if table or r.random() < 0.3 else beside


def _scaling(r: random.Random, latent: bool) -> Raw:
    kind = r.choice(("default", "linear", "llama3", "yarn", "yarn" if latent else "none", "none"))
    if kind == "none":
        return {}
    if kind == "default":
        return {"kind": kind}
    table: Raw = {"kind": kind, "factor": r.choice((2, 4.0, 40.0, 1.0))}
    if kind == "llama3":
        return {
            **table,
            "low_freq_factor": r.choice((0.5, 1.0)),
            "high_freq_factor": r.choice((2, 4.0)),
            "original_max_position_embeddings": r.choice((8, 32, 256)),
        }
    if kind == "yarn":
        table |= _some(r, original_max_position_embeddings=(8, 16, 256), truncate=(True, False), beta_fast=(32, 4))
        table |= _some(r, beta_slow=(1, 0.5))
        if r.random() < 0.5:
            table |= {"mscale": r.choice((1.0, 0.707)), "mscale_all_dim": r.choice((1.0, 0.707, 0.3))}
        elif r.random() < 0.3:
            table["attention_factor"] = 1.25
    return table


def _qwen(r: random.Random) -> Raw:
    raw = _decoder(r)
    raw |= _some(r, sliding_window=(1, 3, 5, 64), max_window_layers=(0, 1, 2))
    raw["use_sliding_window"] = r.random() < 0.7
    if r.random() < 0.4:
        kinds = ["full_attention", *(["sliding_attention"] if raw["use_sliding_window"] else [])]
        raw["layer_types"] = [r.choice(kinds) for _ in range(raw["num_hidden_layers"])]
    return raw


def _llama(r: random.Random) -> Raw:
    return {**_decoder(r), **_some(r, attention_bias=(True, False), mlp_bias=(True, False), pretraining_tp=(1,))}


def _mistral(r: random.Random) -> Raw:
    return {**_decoder(r), **_some(r, sliding_window=(None, 1, 3, 64))}


def _mixtral(r: random.Random) -> Raw:
    raw = {**_mistral(r), "num_local_experts": r.choice((3, 4)), "num_experts_per_tok": r.choice((1, 2, 3))}
    return {**raw, **_some(r, router_jitter_noise=(0.0,), router_aux_loss_coef=(0.02,), output_router_logits=(False,))}


def _nemotron(r: random.Random) -> Raw:
    raw = {k: v for k, v in _decoder(r).items() if k not in ("rms_norm_eps", "hidden_act")}
    raw |= {"head_dim": 8, **_some(r, norm_eps=(1e-5, 1e-2), attention_bias=(True, False), mlp_bias=(True, False))}
    share = {"partial_rotary_factor": r.choice((0.25, 0.5, 1.0))} if r.random() < 0.7 else {}
    table = raw.get("rope_parameters")
    if share and table and "rope_theta" in table:
        return {**raw, "rope_parameters": {**table, **share}}
    return {**raw, **share}


def _qwen3_moe(r: random.Random) -> Raw:
    raw = {k: v for k, v in _qwen(r).items() if k != "layer_types"}
    raw |= {"moe_intermediate_size": 8, "num_experts": r.choice((3, 6)), "num_experts_per_tok": r.choice((1, 2))}
    raw |= _some(r, norm_topk_prob=(True, False), decoder_sparse_step=(1, 2), mlp_only_layers=([], [0]))
    return {**raw, **_some(r, attention_bias=(True, False), router_aux_loss_coef=(0.001,))}


def _deepseek(r: random.Random) -> Raw:
    raw = {
        k: v for k, v in _decoder(r).items() if k not in ("head_dim", "rope_theta", "rope_parameters", "rope_scaling")
    }
    raw |= _rope(r, latent=True)
    raw["num_key_value_heads"] = raw["num_attention_heads"]
    raw |= {"kv_lora_rank": 6, "qk_nope_head_dim": r.choice((4, 6)), "qk_rope_head_dim": r.choice((4, 8))}
    raw |= {"v_head_dim": r.choice((4, 8)), "q_lora_rank": r.choice((None, 6)), "moe_intermediate_size": 8}
    raw |= {"n_routed_experts": r.choice((4, 8)), "n_shared_experts": r.choice((1, 2))}
    raw |= {"num_experts_per_tok": r.choice((1, 2)), "first_k_dense_replace": r.choice((0, 1))}
    raw |= _some(r, attention_bias=(True, False), routed_scaling_factor=(1.0, 2.5), moe_layer_freq=(1, 1, 2))
    return {**raw, **_some(r, aux_loss_alpha=(0.001,), seq_aux=(True,), ep_size=(1,), n_group=(1, 2))}


def _deepseek_v2(r: random.Random) -> Raw:
    raw = {**_deepseek(r), **_some(r, norm_topk_prob=(False,), scoring_func=("softmax",), mlp_bias=(True, False))}
    if r.random() < 0.6:
        groups = r.choice((2, 4))
        raw |= {"topk_method": "group_limited_greedy", "n_group": groups, "topk_group": r.choice((2, groups))}
    return raw


def _deepseek_v3(r: random.Random) -> Raw:
    raw = _deepseek(r)
    groups = r.choice((1, 2))
    raw |= {"n_group": groups, "topk_group": r.choice((1, groups)), "num_nextn_predict_layers": r.choice((0, 0, 1))}
    raw |= _some(r, norm_topk_prob=(True, False), scoring_func=("sigmoid",), topk_method=("noaux_tc",))
    return {**raw, **_some(r, rope_interleave=(True, False))}


def _glm4_moe_lite(r: random.Random) -> Raw:
    raw = {k: v for k, v in _deepseek(r).items() if k not in ("first_k_dense_replace", "moe_layer_freq")}
    layers, groups = raw["num_hidden_layers"], r.choice((1, 2))
    raw |= {"n_group": groups, "topk_group": r.choice((1, groups)), "num_nextn_predict_layers": r.choice((0, 1))}
    raw |= _some(
        r, mlp_layer_types=([r.choice(("dense", "sparse")) for _ in range(layers)],), topk_method=("noaux_tc",)
    )
    return {**raw, **_some(r, norm_topk_prob=(True, False), rope_interleave=(True, False))}


def _gpt2(r: random.Random) -> Raw:
    raw: Raw = {"vocab_size": 61, "n_embd": 16, "n_layer": r.choice((1, 3)), "n_head": r.choice((2, 4))}
    raw |= {"n_positions": r.choice((12, 32)), "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    raw |= _some(r, n_inner=(None, 24), activation_function=("gelu_new", "gelu", "relu", "gelu_pytorch_tanh"))
    raw |= _some(r, scale_attn_weights=(True, False), scale_attn_by_inverse_layer_idx=(True, False), n_ctx=(7,))
    return {**raw, **_some(r, tie_word_embeddings=(True, False), layer_norm_epsilon=(1e-5, 1e-2))}


def _mpt(r: random.Random) -> Raw:
    raw: Raw = {"vocab_size": 61, "d_model": 16, "n_layers": r.choice((1, 3)), "n_heads": r.choice((2, 4))}
    raw |= {"max_seq_len": 16, "attn_config": {"alibi": False, **_some(r, attn_pdrop=(0,), attn_impl=("torch",))}}
    raw |= _some(r, expansion_ratio=(4,), no_bias=(True, False), learned_pos_emb=(True,), logit_scale=(None,))
    return {**raw, **_some(r, layer_norm_epsilon=(1e-5, 1e-2), tie_word_embeddings=(True,))}


DRAWS: Mapping[str, Callable[[random.Random], Raw]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe_lite": _glm4_moe_lite,
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "mpt": _mpt,
    "nemotron": _nemotron,
    "qwen2": _qwen,
    "qwen3": lambda r: {**_qwen(r), **_some(r, attention_bias=(True, False))},
    "qwen3_moe": _qwen3_moe,
}
# What makes another model that is not built, the key it is refused by, and the types it belongs to (all where none).
BROKEN: list[Raw] = _FILE["broken"]
