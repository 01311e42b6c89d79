"""A launch's model: the Hugging Face type whose layers it has, and that type's keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ir.workload.config.keys import TYPES
from ir.workload.config.load import raw_config
from piper_sim.frameworks.draft import Facts, JobDraft
from piper_sim.frameworks.table import facts as tables

NO_MODEL = "llama3-8b"


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


def model_of(d: JobDraft, f: Facts, stated: Facts, hints: Mapping[str, str]) -> dict[str, Any]:
    """The job's `[model]`: sizes inline where the file states them, a preset where it names a model."""
    out: dict[str, Any] = {"seq_len": f["seq_len"]} if f.get("seq_len") else {}
    if "seq_len" not in out:
        d.filled["model.seq_len"] = (4096, "the file states no length: the job's default")
    name = f.get("flavor") or f.get("hub")
    if "config" in f:  # a config.json beside the file
        return out | dict(f["config"])
    if (found := named(f.get("family") if f.get("flavor") else None, name)) is not None:
        kind = TYPES[str(raw_config(found["preset"])["model_type"])]
        keys = tables()["config"]
        own = {keys[k]: v for k, v in stated.items() if k in keys and v is not None and keys[k] in kind}
        own |= {"vocab_size": stated["vocab"]} if stated.get("vocab") else {}
        return out | {"config": found["preset"], **{k: v for k, v in found.items() if k != "preset"}, **own}
    if not all(f.get(k) for k in ("layers", "hidden", "heads")):
        why = f"{name} is no model that is known by name" if name else "the file does not state layers, width and heads"
        sizes = {f for f in stated if tables()["keys"].get(f, "").startswith("model.")} - {"seq_len", "attention"}
        d.doubts |= dict.fromkeys(sizes, f"not in the job: {why}")
        d.filled["model.config"] = (NO_MODEL, f"{why}: put yours here")
        return out | {"config": NO_MODEL}
    return out | _sized(d, f, hints)


def _sized(d: JobDraft, f: Facts, hints: Mapping[str, str]) -> dict[str, Any]:
    kind = _type(d, f)
    table = TYPES[kind]
    names = tables()["config_gpt2" if kind == "gpt2" else "config"]
    values = dict(f)
    if not f.get("grouped", True):
        values.pop("kv_heads", None)
    if kind == "nemotron" and "norm_eps" in values:
        names = {**names, "norm_eps": "norm_eps"}
    values["positions"] = values.get("positions") or f.get("seq_len") or 4096
    values.setdefault("kv_heads", f["heads"])
    out = {"model_type": kind} | {k: values[n] for n, k in names.items() if values.get(n) is not None and k in table}
    ffn = _ffn(d, f)
    dense = "n_inner" if kind == "gpt2" else "intermediate_size"
    out[dense] = f.get("moe_ffn") or ffn if kind == "mixtral" else ffn
    out["vocab_size"] = _vocabulary(d, f, hints)
    out["tie_word_embeddings"] = not f.get("untied", False)
    if f.get("bias") and kind != "gpt2":
        said = [k for k in ("attention_bias", "mlp_bias") if k in table and not table[k].only]
        if "attention_bias" not in said:
            d.doubts["bias"] = f"{kind}'s linears have no biases"
        out |= dict.fromkeys(said, True)
    return out | (_experts(d, kind, f, ffn) if kind in tables()["config_experts"] else {})


def _type(d: JobDraft, f: Facts) -> str:
    """The closest type; what it has otherwise is said."""
    gated, rope = f.get("activation") == "swiglu", f.get("position") == "rope"
    if f.get("mla"):
        return "deepseek_v3" if f.get("scoring") == "sigmoid" or f.get("mtp") else "deepseek_v2"
    d.expect(not f.get("mtp"), "mtp", "prediction modules are built for DeepSeek's type alone: there is none")
    if f.get("experts"):
        alone = "shared experts are built beside latent attention alone: there are none"
        d.expect(not f.get("shared_ffn"), "shared_ffn", alone)
        d.expect(gated, "activation", "experts are SwiGLU ones")
        d.expect(rope, "position", "positions are rotary ones")
        dense = isinstance(f.get("moe_freq"), list) and 0 in f["moe_freq"]
        every = not dense and (f.get("moe_freq") in (None, 1) or isinstance(f["moe_freq"], list))
        return "mixtral" if every and not f.get("qk_norm") else "qwen3_moe"
    if gated:
        d.expect(rope, "position", "positions are rotary ones")
        d.expect(f.get("norm") == "rms", "norm", "norms are RMS norms")
        return "qwen3" if f.get("qk_norm") else "qwen2" if f.get("qkv_bias") and not f.get("bias") else "llama"
    grouped = f.get("grouped") and f.get("kv_heads", f["heads"]) != f["heads"]
    odd = (
        grouped or f["hidden"] % f["heads"] or f.get("head_dim", f["hidden"] // f["heads"]) != f["hidden"] // f["heads"]
    )
    if rope or odd or f.get("activation") == "relu2":
        d.expect(f.get("activation") == "relu2", "activation", "priced as squared ReLU, whose matrices are the same")
        d.expect(rope, "position", "positions are rotary ones")
        return "nemotron"
    d.expect(f.get("norm") == "layer", "norm", "norms are layer norms")
    d.expect(f.get("bias", True), "bias", "GPT-2's linears have biases")
    if f.get("position") != "learned" or f.get("no_positions"):
        d.doubts["position"] = d.doubts["no_positions"] = "positions are learned ones"
    return "gpt2"


def _ffn(d: JobDraft, f: Facts) -> int:
    if own := f.get("neox_ffn"):
        own, multiple = int(own), int(f.get("mlp_multiple", 1))
        return -(-(own // 3 if f.get("activation") == "swiglu" else own) // multiple) * multiple
    if own := f.get("ffn"):
        return int(own)
    if ratio := f.get("expansion"):
        return int(ratio) * int(f["hidden"])
    gated = f.get("activation") == "swiglu"
    found = 4 * f["hidden"] * 2 // 3 // 64 * 64 if gated else 4 * f["hidden"]
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
        why = ""
    padding = (
        (f.get("vocab_multiple") or 128) * f.get("tp", 1) if f.get("should_pad_vocab", "vocab_multiple" in f) else 1
    )
    padded = -(-found // padding) * padding
    if why:
        d.filled["model.vocab_size"] = (padded, why)
    return int(padded)


def _experts(d: JobDraft, kind: str, f: Facts, ffn: int) -> dict[str, Any]:
    layers, freq = f["layers"], f.get("moe_freq")
    count = f.get("experts") or 1
    out: dict[str, Any] = {
        tables()["config_experts"][kind]: count,
        "num_experts_per_tok": min(f.get("top_k", 2), count),
    }
    if kind == "mixtral":
        return out
    out["moe_intermediate_size"] = f.get("moe_ffn") or ffn
    sparse = (
        [i % freq == 0 for i in range(layers)] if isinstance(freq, int) else [bool(x) for x in freq or [1] * layers]
    )
    sparse = [*sparse, *[True] * layers][:layers] if f.get("experts") else [False] * layers
    if kind == "qwen3_moe":
        dense = [i for i, x in enumerate(sparse) if not x]
        return out | {"norm_topk_prob": True} | ({"mlp_only_layers": dense} if dense else {})
    first = sparse.index(True) if True in sparse else layers
    d.expect(all(sparse[first:]), "moe_freq", "dense layers are the first ones")
    out["first_k_dense_replace"] = first
    shared = f.get("shared_ffn") or 0
    if shared % out["moe_intermediate_size"]:
        d.doubts["shared_ffn"] = "shared experts are as wide as a whole number of experts"
    out["n_shared_experts"] = round(shared / out["moe_intermediate_size"])
    if not out["n_shared_experts"]:
        out.pop("n_shared_experts")
    if not f.get("groups"):
        out |= {"n_group": 1, "topk_group": 1}
    return out
