"""A launch's model: by Megatron's arguments, or as the Hugging Face type that has just the same layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ir.core.errors import PiperError
from ir.workload.config.keys import ROWS, TYPES, aliases
from ir.workload.config.load import config_from, raw_config
from ir.workload.config.spec import ModelConfig, NormLayerKind
from piper_sim.frameworks.table import facts as tables
from piper_sim.frameworks.to_job.draft import Facts, JobDraft

NO_MODEL = "llama3-8b"
FAMILIES = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "nemotron", "gpt2")  # of the Hub, that `run` has too
LATENT = ("q_rank", "kv_rank", "nope_dim", "rope_dim", "v_dim")  # sizes of latent attention
GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "gelu", "liglu": "gelu"}


def named(family: str | None, name: str | None) -> Mapping[str, Any] | None:
    """The preset and keys of a model on the Hub, or of a flavor of torchtitan's.

    >>> named("llama3", "70B")["preset"], named(None, "meta-llama/Llama-3.1-8B-Instruct")["preset"]
    ('llama3-70b', 'llama3-8b')
    """
    hub: Mapping[str, Mapping[str, Any]] = tables()["hub"]
    if name is None:
        return None
    if family is not None and f"{family}/{name}" in hub:
        return hub[f"{family}/{name}"]
    starts = [k for k in hub if name == k or (name.startswith(k) and name[len(k)] in "-_." and family is None)]
    return hub[max(starts, key=len)] if starts else None


def trained(hints: Mapping[str, str]) -> str:
    """What Megatron's program trains where it is no GPT: "bert", "t5", "other"; else "".

    >>> trained({"program": "pretrain_t5.py"}), trained({"program": "pretrain_gpt.py"})
    ('t5', '')
    """
    return str(tables()["programs"].get(hints.get("program", ""), ""))


def model_of(d: JobDraft, f: Facts, stated: Facts, hints: Mapping[str, str]) -> dict[str, Any]:
    """The job's `[model]`: sizes inline where the file states them, a preset where it names a model."""
    out: dict[str, Any] = {"seq_len": f.get("seq_len") or 4096}
    if not f.get("seq_len"):
        d.filled["model.seq_len"] = (4096, "the file states no length: the job's default")
    name = f.get("flavor") or f.get("hub")
    if "config" in f:  # a config.json beside the file
        return out | dict(f["config"])
    if (found := named(f.get("family") if f.get("flavor") else None, name)) is not None:
        return out | {"config": found["preset"]} | _named(d, f, stated, hints, found)
    if not all(f.get(k) for k in ("layers", "hidden", "heads")):
        why = f"{name} is no model that is known by name" if name else "the file does not state layers, width and heads"
        sizes = {f for f in stated if tables()["keys"].get(f, "").startswith("model.")} - {"seq_len", "attention"}
        d.doubts |= dict.fromkeys(sizes, f"not in the job: {why}")
        d.filled["model.config"] = (NO_MODEL, f"{why}: put yours here")
        return out | {"config": NO_MODEL}
    trains = trained(hints)
    if trains == "other":
        d.doubts["layers"] = f"{hints['program']} trains another model: a GPT of these sizes is presumed"
    if trains == "bert":
        return out | _masked(d, f, hints)
    if trains == "t5":
        out |= {"encoder_seq_len": f["encoder_seq_len"]} if f.get("encoder_seq_len") else {}
    return out | _sized(d, f, hints)


def _named(d: JobDraft, f: Facts, stated: Facts, hints: Mapping[str, str], found: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a model by name: what the launch says instead of it. What no key says is in doubt."""
    raw = raw_config(found["preset"])
    table, said = TYPES[str(raw["model_type"])], {k: v for k, v in stated.items() if v is not None}
    keys = {k: [name] for k, name in tables()["config"].items()} | tables()["spelled"]
    first = {k: next((n for n in names if n in table and not table[n].why), None) for k, names in keys.items()}
    out = {k: v for k, v in found.items() if k != "preset"}
    out |= {name: said[k] for k, name in first.items() if name is not None and k in said}
    if {"vocab", "vocab_padded"} & {*said}:
        out["vocab_size"] = _vocabulary(d, f, hints)
    if "untied" in said and "tie_word_embeddings" in table:
        out["tie_word_embeddings"] = not said["untied"]
    try:
        if "moe_freq" in said and "first_k_dense_replace" in table:
            sparse = _sparse(said | {"layers": config_from(raw | out, "").layers})
            out["first_k_dense_replace"] = sparse.index(True) if True in sparse else len(sparse)
        config = config_from(raw | out, "")
    except PiperError:  # told where the job is loaded
        return out
    for fact, value in _of_layers(config, said).items():
        d.expect(said.get(fact) in (None, value), fact, f"{found['preset']} has its own")
    return out


def _of_layers(m: ModelConfig, said: Facts) -> Facts:
    """What the layers of a model have, as facts that a launch may state otherwise."""
    found: Facts = {"norm": "rms" if m.norm is NormLayerKind.RMS else "layer", "untied": not m.tied}
    found |= {"bias": m.mlp_bias or m.out_bias, "qk_norm": m.qk_norm, "gated": m.activation.ups == 2}
    if (moe := m.moe) is None:
        return {**found, "ffn": m.ffn, "experts": None, "moe_ffn": None}
    sparse = [i not in moe.dense_layers for i in range(m.layers)]
    same = sparse == _sparse(said | {"layers": m.layers})
    return {**found, "experts": moe.experts, "moe_ffn": moe.ffn, "shared_ffn": moe.shared_ffn} | (
        {} if same else {"moe_freq": sparse}
    )


def _masked(d: JobDraft, f: Facts, hints: Mapping[str, str]) -> dict[str, Any]:
    """Megatron's BERT."""
    act, gated = _activation(d, f)
    d.expect(not gated, "activation", "BERT's MLP has no gate")
    d.expect(f.get("norm") != "rms", "norm", "BERT's norms are LayerNorms")
    d.expect(not f.get("untied"), "untied", "BERT's head is its table of words")
    drops = {"hidden_dropout_prob": f.get("hidden_dropout"), "attention_probs_dropout_prob": f.get("attention_dropout")}
    return {
        "model_type": "megatron-bert",
        "vocab_size": _vocabulary(d, f, hints),
        "hidden_size": f["hidden"],
        "num_hidden_layers": f["layers"],
        "num_attention_heads": f["heads"],
        "intermediate_size": _ffn(d, f, gated),
        "max_position_embeddings": f.get("positions") or f.get("seq_len") or 512,
        "hidden_act": act,
        **{k: v for k, v in drops.items() if v is not None},
    }


def _sized(d: JobDraft, f: Facts, hints: Mapping[str, str]) -> dict[str, Any]:
    """Of DeepSeek's type where attention is latent, else of Megatron's, or the Hub's that has just the same layers."""
    latent = "deepseek_v3" if f.get("scoring") == "sigmoid" or f.get("mtp") else "deepseek_v2"
    if f.get("variant") == "dsa":
        latent = _picking(d, f)
    kind = latent if f.get("mla") else "megatron"
    usual = tables()["latent"].get(d.framework, {}) if f.get("mla") else {}
    d.filled |= {tables()["keys"][k]: (v, f"{d.framework}'s default") for k, v in usual.items() if k not in f}
    values = {**usual, **f, "kv_heads": _kv_heads(d, f), "positions": f.get("positions") or f.get("seq_len") or 4096}
    listed = f.get("moe_freq") if f.get("experts") else None
    fits = not isinstance(listed, list) or len(listed) == f["layers"]
    d.expect(fits, "moe_freq", f"a list of another length than {f['layers']} layers: those behind it have experts")
    idle = () if f.get("experts") else ("top_k", "groups", "top_groups", "routed_scale")
    for fact in (*idle, *(("head_dim",) if f.get("mla") else LATENT)):  # a log has them in any case
        values.pop(fact, None)
    names = {n: aliases(kind).get(k, k) for n, k in tables()["config"].items()}
    out = {"model_type": kind} | {
        k: values[n] for n, k in names.items() if values.get(n) is not None and k in TYPES[kind]
    }
    act, gated = _activation(d, f)
    out["intermediate_size"] = ffn = _ffn(d, f, gated)
    out |= {"vocab_size": _vocabulary(d, f, hints), "tie_word_embeddings": not f.get("untied", False)}
    if f.get("mla"):
        d.expect(not f.get("bias"), "bias", f"{kind}'s linears have no biases")
        return {"q_lora_rank": 0} | out | _latent_experts(d, f, ffn)  # none unless the file says one
    plain = bool(f.get("experts") and f.get("pre_softmax"))
    out = _family(out | {"hidden_act": act, "gated_linear_unit": gated} | _layers(d, f, ffn), plain)
    odd = plain and out["model_type"] == "megatron"
    d.expect(not odd, "pre_softmax", "a token's weights add up to 1; a step costs the same")
    return out


def _picking(d: JobDraft, f: Facts) -> str:
    """DeepSeek-V3.2's type, for attention to keys that an indexer picks."""
    kind, sizes = "deepseek_v32", ("index_heads", "index_dim", "index_top_k")
    d.expect(bool(f.get("mla")), "variant", "keys are picked of latent attention alone: it reads all")
    said = not f.get("experts") or f.get("scoring") == "sigmoid"
    d.expect(said, "scoring", "a token's weights are sigmoids where keys are picked; a step costs the same")
    usual = {n: TYPES[kind][tables()["config"][n]].default for n in sizes if f.get("mla") and n not in f}
    d.filled |= {tables()["keys"][n]: (v, "DeepSeek-V3.2's") for n, v in usual.items()}
    return kind


def _kv_heads(d: JobDraft, f: Facts) -> int:
    """Groups of queries, where the framework groups any."""
    grouped, heads, said = f.get("grouped", True), int(f["heads"]), int(f.get("kv_heads") or f["heads"])
    alone = d.framework == "megatron" and grouped and not f.get("kv_heads")  # its --num-query-groups is 1
    if grouped == "one" or alone:  # multi-query attention
        d.filled["model.num_key_value_heads"] = (1, f"{d.framework}'s default")
        return 1
    d.expect(grouped or said == heads, "kv_heads", f"queries are not grouped: there are {heads} heads of keys")
    return said if grouped else heads


def _activation(d: JobDraft, f: Facts) -> tuple[str, bool]:
    """Megatron's `hidden_act`, and whether it has a gate."""
    said = f.get("activation") or "gelu"
    gated = bool(f.get("gated", said in ("silu", *GATED)))
    act = GATED.get(said, said)
    d.expect(said not in ("reglu", "liglu"), "activation", f"priced as GEGLU, whose matrices are {said}'s")
    d.expect(gated or act != "silu", "activation", "ungated, priced as GELU")
    d.expect(not gated or act != "relu2", "gated", "squared ReLU has no gate here")
    return ("gelu" if act == "silu" and not gated else act), gated and act != "relu2"


def _layers(d: JobDraft, f: Facts, ffn: int) -> dict[str, Any]:
    """What a layer has, in Megatron's words: flags where they are on."""
    place = f.get("position") or "learned"
    d.expect(place not in ("alibi", "relative"), "position", "biases of attention scores are not built: there are none")
    place = "none" if f.get("no_positions") and place == "learned" else place
    word = {"learned": "learned_absolute", "rope": "rope"}.get(place, "none")
    flags = {"add_bias_linear": "bias", "add_qkv_bias": "qkv_bias", "qk_layernorm": "qk_norm"}
    out: dict[str, Any] = {"position_embedding_type": word} | {k: bool(f[n]) for k, n in flags.items() if n in f}
    out["normalization"] = "RMSNorm" if f.get("norm") == "rms" else "LayerNorm"
    if not (count := f.get("experts")):
        return out
    out |= {"num_experts": count, "num_experts_per_tok": min(f.get("top_k", 2), count)}
    more = {"moe_intermediate_size": f.get("moe_ffn") or ffn, "scoring_func": f.get("scoring")}
    more["shared_expert_intermediate_size"] = f.get("shared_ffn")
    more["mlp_only_layers"] = [i for i, sparse in enumerate(_sparse(f)) if not sparse and not f.get("pattern")]
    return out | {k: v for k, v in more.items() if v}


def _family(said: dict[str, Any], plain: bool) -> dict[str, Any]:
    """A model of Megatron's type as the first type of the Hub that has just the same layers, or as it is.

    plain: a token's weights are its softmax as it is.
    """
    try:
        mine = config_from(said, "")
    except PiperError:  # told where the job is loaded
        return said
    if plain and mine.moe is not None:
        mine = replace(mine, moe=replace(mine.moe, normalised=False))
    rows = ((n, str(k)) for kind in ("gpt2", "llama") for n, k in ROWS[kind].items())
    values = {k[1:]: getattr(mine, n) for n, k in rows if k.startswith("@") and hasattr(mine, n)}
    values |= {"num_key_value_heads": mine.kv_heads, "head_dim": mine.head_dim, "hidden_act": said["hidden_act"]}
    values |= {"n_inner": mine.ffn, "activation_function": mine.act, "norm_eps": mine.norm_eps}
    values |= {"rope_theta": mine.rope_theta, "partial_rotary_factor": mine.rope_share}
    values |= {"num_local_experts": said.get("num_experts"), "norm_topk_prob": not plain}
    for kind in FAMILIES:
        table, own = TYPES[kind], {aliases(kind).get(k, k) for k in said} | {"resid_pdrop"}
        keys = {k: v for k, v in (said | values | {"model_type": kind}).items() if k in table and not table[k].why}
        keys = {k: v for k, v in keys.items() if v is not None and (k in own or v != table[k].default)}
        try:
            theirs = config_from(keys, "")
        except PiperError:
            continue
        if replace(theirs, model_type=mine.model_type) == mine:
            return keys
    return said


def _ffn(d: JobDraft, f: Facts, gated: bool) -> int:
    if own := f.get("neox_ffn") or (gated and d.framework == "gpt-neox" and 4 * f["hidden"]):
        own, multiple = int(own), int(f.get("mlp_multiple", 1))
        return -(-(own // 3 if gated else own) // multiple) * multiple
    if own := f.get("ffn"):
        return int(own)
    if ratio := f.get("expansion"):
        return int(ratio * f["hidden"])
    less = f.get("activation") == "swiglu" and d.framework not in ("megatron-bridge", "nemo")  # of the scripts' flag
    found = 4 * f["hidden"] * 2 // 3 // 64 * 64 if less else 4 * f["hidden"]
    d.filled["model.n_inner" if not gated else "model.intermediate_size"] = (found, f"{d.framework}'s default")
    return int(found)


def _vocabulary(d: JobDraft, f: Facts, hints: Mapping[str, str]) -> int:
    """Entries, padded as the framework pads them."""
    if padded := f.get("vocab_padded"):
        return int(padded)
    found = f.get("vocab")
    if not found:
        known = tables()["vocabularies"]
        word = next((w for w in sorted(known, key=len, reverse=True) if w in hints.get("tokenizer", "")), None)
        found = int(known[word]) if word else 50257
        why = f"the vocabulary of {word}" if word else "the file states no vocabulary: GPT-2's"
    else:
        found += d.framework == "megatron" and "NullTokenizer" in hints.get("tokenizer", "")  # and an end of documents
        why = ""
    padding = (
        (f.get("vocab_multiple") or 128) * f.get("tp", 1) if f.get("should_pad_vocab", "vocab_multiple" in f) else 1
    )
    padded = -(-found // padding) * padding
    if why:
        d.filled["model.vocab_size"] = (padded, why)
    return int(padded)


def _sparse(f: Facts) -> list[bool]:
    """Which layers have experts."""
    layers, freq = f["layers"], f.get("moe_freq")
    if every := f.get("moe_interval"):
        return [(i + 1) % every == 0 for i in range(layers)]
    if isinstance(freq, int):
        return [i % freq == 0 for i in range(layers)]
    return [*map(bool, freq or ()), *[True] * layers][:layers]


def _latent_experts(d: JobDraft, f: Facts, ffn: int) -> dict[str, Any]:
    """Experts in the words of DeepSeek's types, which have some."""
    layers, count, width = f["layers"], f.get("experts") or 1, f.get("moe_ffn") or ffn
    sparse = _sparse(f) if f.get("experts") else [False] * layers
    first = sparse.index(True) if True in sparse else layers
    d.expect(all(sparse[first:]), "moe_freq", "dense layers are the first ones")
    shared = f.get("shared_ffn") or 0
    d.expect(shared % width == 0, "shared_ffn", "shared experts are as wide as a whole number of experts")
    out: dict[str, Any] = {"n_routed_experts": count, "num_experts_per_tok": min(f.get("top_k", 2), count)}
    out |= {"moe_intermediate_size": width, "first_k_dense_replace": first}
    out["n_shared_experts"] = round(shared / width)
    return out | ({} if f.get("groups") else {"n_group": 1, "topk_group": 1})
