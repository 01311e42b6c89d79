"""Llama-like and MoE models: SimuMax on B200; Ultra-Scale, DGX Cloud, torchtitan, llm-foundry, ModelZoo."""

from __future__ import annotations

from itertools import accumulate

from experiments.published.rows import GIB, MIB, DataSet, Line, Row, ints

_BUCKET = 160  # MiB; Megatron's and NeMo's gradient buckets are 40 M elements


def simumax(line: Line) -> Row:
    """Megatron on eight B200; the first of four DeepSeek-V2 layers is dense."""
    tp, pp, dp, ep, layers, mbs = ints(line, "tp", "pp", "dp", "ep", "layers", "microbatches")
    config = {"llama3-70b": "llama3-70b", "deepseekv2": "deepseek-v2"}[line["model"]]
    peaks = [float(x) * MIB for x in line["peak_MiB_by_pp_rank"].split()]
    return Row(
        line["case_id"],
        {
            "model": {"config": config, "num_hidden_layers": layers, "seq_len": int(line["seq_len"])},
            "cluster": {"gpu": "b200-sxm"},
            "parallel": {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "zero": 1, "layers": "even"},
            "schedule": {"name": "1f1b", "microbatches": mbs, "microbatch_size": int(line["micro_batch"])},
            "costs": {"software": "megatron-core"},
        },
        float(line["iter_time_ms"]) * 1e-3,
        dict(enumerate(peaks)),
    )


_NANOTRON = {"llama-1.34B": (16, 2048, 8192, True), "llama-8.86B": (32, 4096, 14336, False)}
_WORDS = 131072
# The playbook's own figure of its network: all-gather at 185 GB/s on two nodes (of 8 x 50), at 55 GB/s on sixteen.
_EFA = {"nic_efficiency": 0.46, "nic_congestion": 0.58}


def nanotron_layers(layers: int, hidden: int, ffn: int, pp: int) -> list[int]:
    """Decoder layers of each stage, as Nanotron cuts them: a stage ends behind the block that passes its share.

    Blocks cost their multiply-adds per token, the head among them, the embedding nothing. Where the head passes the
    last but one share, the loss is alone on the stage behind; here the head stands with it.

    >>> nanotron_layers(16, 2048, 8192, 4)
    [6, 5, 5, 0]
    """
    costs = [4 * hidden * hidden + 3 * hidden * ffn] * layers + [_WORDS * hidden]
    out, stage = [0] * pp, 0
    for i, total in enumerate(accumulate(costs)):
        out[stage] += i < layers
        if total > sum(costs) * (stage + 1) / pp and stage < pp - 1:
            stage += 1
    return out


def ultrascale(line: Line) -> Row:
    """Nanotron on H100; peak memory as the first rank logs it."""
    gpus, dp, pp, tp, zero, mb, mbs = ints(line, "gpus", "dp", "pp", "tp", "zero_stage", "micro_batch", "grad_accum")
    layers, hidden, ffn, tied = _NANOTRON[line["model"]]
    return Row(
        line["case_id"],
        {
            "model": {
                "config": "llama3-8b",
                "num_hidden_layers": layers,
                "hidden_size": hidden,
                "intermediate_size": ffn,
                "tie_word_embeddings": tied,
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
                "vocab_size": _WORDS,
                "seq_len": 4096,
            },
            "cluster": {"gpu": "h100-sxm", "nodes": -(-gpus // 8), **_EFA},
            "parallel": {
                "tp": tp,
                "pp": pp,
                "dp": dp,
                "zero": zero,
                "order": "tp cp ep dp pp",
                "layers": nanotron_layers(layers, hidden, ffn, pp),
            },
            "schedule": {"name": "1f1b", "microbatches": mbs, "microbatch_size": mb},
            "costs": {"software": "nanotron"},
        },
        dp * mb * mbs * 4096 / float(line["tokens_per_s"]) if "tokens_per_s" in line else None,
        {0: float(line["peak_memory_gb"]) * GIB} if "peak_memory_gb" in line else {},
        failed="tokens_per_s" not in line,
    )


def dgxc(line: Line) -> Row:
    """NeMo on DGX H100: distributed optimizer, gradient buckets overlapped."""
    gpus, tp, pp, cp, v, mb, mbs = ints(line, "gpus", "tp", "pp", "cp", "vpp", "micro_batch", "grad_accum")
    return Row(
        line["case_id"],
        {
            "model": {"config": line["model"].replace("llama3.1", "llama3"), "seq_len": 8192},
            "cluster": {"gpu": "h100-sxm", "nodes": gpus // 8},
            "parallel": {"tp": tp, "pp": pp, "cp": cp, "zero": 1, "bucket_MiB": _BUCKET, "layers": "even"},
            "schedule": {
                "name": "interleaved-1f1b" if v > 1 else "1f1b",
                "stages_per_rank": v,
                "microbatches": mbs,
                "microbatch_size": mb,
            },
            "costs": {"software": "nemo"},
            "precision": {"grads": "bf16", "reduce": "bf16"},
        },
        float(line["iter_time_s"]),
    )


def llm_foundry(line: Line) -> Row:
    """MPT under FSDP, fp32 weights gathered in bf16; on A100 four 200 Gb/s ports serve eight GPUs."""
    gpus, mb, mbs, seq_len, batch = ints(line, "gpus", "micro_batch", "grad_accum", "seq_len", "global_batch")
    return Row(
        line["case_id"],
        {
            "model": {"config": line["model"], "seq_len": seq_len, "max_seq_len": seq_len},
            "cluster": {"gpu": "h100-sxm"} if "h100" in line["gpu"] else {"gpu": "a100-sxm-80gb"},
            "parallel": {"dp": gpus, "zero": 3},
            "schedule": {"microbatches": mbs, "microbatch_size": mb, "recompute": line["recompute"]},
            "costs": {"software": "llm-foundry"},
            "precision": {"params": "fp32", "gather": "bf16"},
        },
        batch * seq_len / float(line["tokens_per_s"]),
    )


def torchtitan(line: Line) -> Row:
    """FSDP2 and tensor parallelism; "Memory" there is reserved, and not scored."""
    fsdp, tp, gpus, mb, seq_len = ints(line, "fsdp", "tp", "gpus", "local_batch", "seq_len")
    config = {"Llama-3.1-8B": "llama3-8b", "Llama-2-13B": "llama2-13b"}[line["model"]]
    if line["recompute"] != "none":
        return Row(line["case_id"], why="recompute of single operators or of every second layer")
    return Row(
        line["case_id"],
        {
            "model": {"config": config, "seq_len": seq_len},
            "cluster": {"gpu": "a100-sxm-80gb", "nodes": gpus // 8},
            "parallel": {"dp": fsdp, "tp": tp, "zero": 3},
            "schedule": {"microbatches": 1, "microbatch_size": mb},
            "precision": {"params": "fp32", "gather": "bf16"},
        },
        mb * seq_len / tp / float(line["tokens_per_s_per_gpu"]),
    )


def modelzoo(line: Line) -> Row:
    """Qwen3-235B on 256 H100 with DeepEP."""
    tp, pp, ep, dp, v, mb, mbs = ints(line, "tp", "pp", "ep", "dp", "vpp", "micro_batch", "grad_accum")
    return Row(
        line["case_id"],
        {
            "model": {"config": "qwen3-235b-a22b", "seq_len": int(line["seq_len"])},
            "cluster": {"gpu": "h100-sxm"},
            "parallel": {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "zero": 1, "bucket_MiB": _BUCKET, "layers": "even"},
            "schedule": {
                "name": "interleaved-1f1b",
                "stages_per_rank": v,
                "microbatches": mbs,
                "microbatch_size": mb,
                "recompute": ["norm", "activation"],
            },
            "costs": {"software": "megatron-core"},
        },
        float(line["iter_time_s"]),
    )


SETS = (
    DataSet(
        "simumax",
        "SimuMax, Megatron on 8 B200",
        simumax,
        "Balanced routing; gradients fp32; nothing overlapped.",
        "memory: median 3 %",
    ),
    DataSet("simumax_moe", "SimuMax, DeepSeek-V2", simumax, "As above.", "time: median 20 %; memory: median 3 %"),
    DataSet(
        "ultrascale",
        "Ultra-Scale Playbook, Nanotron on H100, quality A and B",
        ultrascale,
        "Layers as Nanotron's rule cuts them; one network, by the playbook's own figure of all-gathers; peaks read as "
        "the first stage's: where a step has one microbatch, they are far below what the last stage holds.",
        "time: median 10 %, p90 25 %",
    ),
    DataSet(
        "ultrascale_failed",
        "Ultra-Scale Playbook, runs that failed, every fourth",
        ultrascale,
        "As above; whether memory, time or something else ended them is not known.",
    ),
    DataSet(
        "llm_foundry",
        "llm-foundry, FSDP, MPT",
        llm_foundry,
        "Weights fp32, gathered in bf16, reduced in fp32; flash attention.",
        "time: median 10 %, p90 25 %",
    ),
    DataSet(
        "dgxc",
        "DGX Cloud, NeMo, Llama 3.1 on H100",
        dgxc,
        "No recompute (not stated), distributed optimizer, buckets of 160 MiB; gradients in bf16, as NVIDIA's launcher "
        "scripts for these models set them (grad_sync_dtype).",
        "time: median 10 %, p90 25 %",
    ),
    DataSet(
        "modelzoo",
        "Megatron MoE ModelZoo, Qwen3-235B on H100",
        modelzoo,
        "Balanced routing; embedding and head count as a layer each.",
        "time: 20 %",
    ),
    DataSet("torchtitan", "torchtitan", torchtitan, "One microbatch; no software file."),
)
