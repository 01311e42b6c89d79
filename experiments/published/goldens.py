"""What Megatron-LM's tests ran, where no column says it as a job does: pieces of `sets.golden`."""

from experiments.published.rows import Line, Table, ints


def fused(line: Line) -> bool:
    """Whether attention's scores are not stored.

    `auto` is flash or fused attention, but in the long-term container of 2025 under --deterministic-mode: those seven
    rows have, to 0.1 %, the peaks of the rows beside them that ask for unfused attention.
    """
    if line["transformer_impl"] == "local" or line["attention_backend"] == "unfused":
        return False
    old = line["environment"] == "lts" and line["recorded_on"] == "2025-10-21"
    return not (old and line["attention_backend"] == "auto" and line["deterministic"] == "1")


def peak(line: Line) -> float:
    """The peak that is scored, bytes: the one before checkpoints and evaluations.

    In fp16 the loss's scale starts at 2**32: the first steps update nothing and make no moments, and only the peak of
    the whole run has them. The two differ by 8 bytes for each parameter that the rank updates.
    """
    return float(line["mem_peak_final_bytes" if line["precision"] == "fp16" else "mem_peak_early_bytes"])


def layers(line: Line) -> list[int] | None:
    """Layers of each stage, where the first or the last one has a number of its own."""
    if not line["first_stage_layers"]:
        return None
    whole, pp, first, last = ints(line, "layers", "pp", "first_stage_layers", "last_stage_layers")
    return [first, *[(whole - first - last) // (pp - 2)] * (pp - 2), last]


def latent(line: Line) -> dict[str, int]:
    """Ranks and head sizes of latent attention, which has no groups of heads, as keys of the model."""
    named = {"mla_q_rank": "q_lora_rank", "mla_kv_rank": "kv_lora_rank", "mla_qk_dim": "qk_nope_head_dim"}
    named |= {"mla_rope_dim": "qk_rope_head_dim", "mla_v_dim": "v_head_dim"}
    return {key: int(line[column]) for column, key in named.items()} if line["mla_q_rank"] else {}


def is_deepseek(line: Line) -> bool:
    """Whether it is DeepSeek-V3 in small: latent attention and experts, gated, with rotary embeddings."""
    return bool(line["mla_q_rank"] and line["experts"]) and (line["position"], line["activation"]) == ("rope", "swiglu")


def deepseek(line: Line, job: Table) -> None:
    """Make the job's model one, with its prediction module, Megatron's layout of stages and its dispatcher."""
    named = {"layers": "num_hidden_layers", "hidden": "hidden_size", "ffn_hidden": "intermediate_size"}
    named |= {"heads": "num_attention_heads", "vocab_padded": "vocab_size", "seq_len": "seq_len"}
    named |= {
        "experts": "n_routed_experts",
        "experts_topk": "num_experts_per_tok",
        "mtp_layers": "num_nextn_predict_layers",
    }
    named |= {"moe_ffn_hidden": "moe_intermediate_size"}
    shared = int(line["shared_expert_hidden"]) // int(line["moe_ffn_hidden"])
    dense = int(line["moe_layer_freq"].partition("]*")[2].partition("+")[0])  # ([0]*3+[1]*11)
    more = {"n_shared_experts": shared, "first_k_dense_replace": dense, "n_group": 1, "topk_group": 1}
    own = {
        "config": "deepseek-v3",
        "num_key_value_heads": int(line["heads"]),
        "max_position_embeddings": int(line["seq_len"]),
    }
    sizes = {key: int(line[column]) for column, key in named.items()}
    job["model"] = {**own, **sizes, **more, **latent(line), "attention": "flash" if fused(line) else "unfused"}
    if line["pipeline_layout"]:
        del job["parallel"]["layers"]
        job["schedule"]["layout"] = line["pipeline_layout"]
    if dispatcher := line["moe_dispatcher"].partition(":")[2]:
        job["costs"]["dispatcher"] = dispatcher


def dealt(line: Line) -> bool:
    """Whether ranks own whole parameters, AdamW's too, dealt out by size: Muon's distributed optimizer before it had a
    layout of parameters (the one row of April 2026), and without. No job says that; the last rank has the embedding.
    """
    without = line["recorded_on"] < "2026-05" or "no-use-layer-wise-param-layout" in line["other_arguments"]
    return line["optimizer"] == "muon" and line["distributed_optimizer"] == "1" and without


def formats(line: Line, job: Table) -> None:
    """fp8 of whole tensors, with weights kept in it or not."""
    if line["fp8_format"]:
        job["precision"]["compute"] = "fp8"
        job.setdefault("cluster", {})["fp8_recipe"] = {"tensorwise": "tensor"}[line["fp8_recipe"]]
        if line["fp8_param_gather"] == "1":
            job["precision"]["params"] = "fp8"
