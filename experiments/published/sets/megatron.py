"""Tables that came when most constants stood: MLPerf, vTrain's ground truth, Megatron-LM's own functional tests."""

from __future__ import annotations

from experiments.published.rows import DataSet, Line, Row, gpt, ints
from experiments.published.sets.gpt import megatron

_GPUS = {
    "A100-80GB-SXM": "a100-sxm-80gb", "H100-80GB-SXM": "h100-sxm", "H200-141GB-SXM": "h200-sxm", "B200": "b200-sxm",
    "GB200": "gb200-nvl72", "GB300": "gb300-nvl72",
}  # fmt: skip


def mlperf(line: Line) -> Row:
    """NeMo with fp8 products; embedding and loss count as a layer each where the log says so."""
    if line["precision"] != "fp8":
        return Row(line["row_id"], why="fp8 or fp4: the log does not say")
    tp, pp, cp, v, mb, mbs = ints(line, "tp", "pp", "cp", "vpp", "micro_batch", "microbatches")
    layers = int(line["layers"])
    big = line["model"] != "gpt3-175b"
    stages = pp * v
    return Row(
        line["row_id"],
        {
            "model": {"config": "llama3-405b", "num_hidden_layers": layers, "vocab_size": 32768, "seq_len": 8192}
            if big
            else gpt(line, vocab_size=int(line["vocab"]), attn_pdrop=0.0, resid_pdrop=0.0),
            "cluster": {"gpu": _GPUS[line["gpu"]]},
            "parallel": {
                "tp": tp, "pp": pp, "cp": cp, "dp": int(line["dp"]), "zero": 1, "bucket_MiB": 160,
                "layers": [1, *[2] * (stages - 2), 1] if big else "even",
            },
            "schedule": {"name": "interleaved-1f1b", "stages_per_rank": v, "microbatches": mbs, "microbatch_size": mb},
            "costs": {"software": "nemo", "tp_overlap": line["tp_comm_overlap"] == "1"},
            "precision": {"compute": "fp8", "grads": "bf16", "reduce": "bf16"},
        },
        float(line["step_s_median"]),
    )  # fmt: skip


def vtrain(line: Line) -> Row:
    """Megatron-DeepSpeed on A100, attention not fused; between nodes a quarter of the usual network."""
    more: dict[str, dict[str, object]] = {
        "schedule": {"recompute": line["recompute"]},
        "costs": {"software": "megatron-deepspeed"},
    }
    if line["inter_node_Gbps_per_node"]:
        more["cluster"] = {"nic_Gbps": int(line["inter_node_Gbps_per_node"]) / 8}
    return megatron({**line, "vocab": line["vocab_padded"]}, **more)


_PLAIN = {  # columns of the goldens that a GPT of this kind has; where another stands, no job says the same
    "family": "gpt", "position": "learned_absolute", "qk_layernorm": "0", "activation": "gelu", "experts": "",
    "fsdp": "",
    "fp8_format": "", "optimizer_instances": "1", "optimizer": "adam", "cp": "1", "mla_q_rank": "", "mtp_layers": "0",
    "cuda_graph": "", "pipeline_layout": "", "first_stage_layers": "", "recompute_granularity": "",
}  # fmt: skip


def golden(line: Line) -> Row:
    """A GPT of Megatron-LM's tests: the peak of the last rank, and the time of the large ones."""
    odd = [c for c, v in _PLAIN.items() if line[c] != v]
    if odd or line["gpus"] != "8":
        return Row(line["row_id"], why="; ".join(odd[:1]) or "GPUs not stated or many")
    tp, pp, mb, batch = ints(line, "tp", "pp", "micro_batch", "global_batch")
    v, dp = int(line["vpp"] or 1), 8 // tp // pp
    pdrop = float(line["hidden_dropout"])
    unfused = line["attention_backend"] == "unfused" or line["transformer_impl"] == "local"
    return Row(
        line["row_id"],
        {
            "model": gpt(
                line,
                attention="unfused" if unfused else "flash",
                vocab_size=int(line["vocab_padded"]),
                tie_word_embeddings=line["untied"] == "0",
                n_inner=int(line["ffn_hidden"]),
                attn_pdrop=float(line["attention_dropout"]),
                resid_pdrop=pdrop,
            ),
            "cluster": {"gpu": _GPUS[line["gpu"]]},
            "parallel": {
                "tp": tp, "pp": pp, "dp": dp, "zero": int(line["distributed_optimizer"]), "layers": "even",
                "sequence_parallel": line["sequence_parallel"] == "1",
                **({"bucket_MiB": 160} if line["overlap_grad_reduce"] == "1" else {}),
            },
            "schedule": {
                "name": "interleaved-1f1b" if v > 1 else "1f1b", "stages_per_rank": v,
                "microbatches": batch // dp // mb, "microbatch_size": mb,
            },
            "costs": {"software": "megatron-core"},
            "precision": {"compute": line["precision"], "grads": line["main_grads_dtype"]},
        },
        float(line["step_s_median"]) if int(line["hidden"]) >= 4096 else None,
        {pp - 1: float(line["mem_peak_early_bytes"])},
    )  # fmt: skip


SETS = (
    DataSet(
        "mlperf_llm",
        "MLPerf Training, Llama-3.1-405B and GPT-3 in fp8",
        mlperf,
        "User buffers where the log says so; gradients in bf16; no recompute.",
        "time: median 6 %, p90 12 %",
    ),
    DataSet(
        "vtrain_multi_node",
        "vTrain, Megatron-DeepSpeed on 64 to 512 A100",
        vtrain,
        "As SC'21's table; 100 Gb/s per GPU.",
        "time: median 4 %, p90 15 %",
    ),
    DataSet(
        "vtrain_single_node",
        "vTrain, Megatron-DeepSpeed on one node of A100",
        vtrain,
        "As above, without recompute; most of these runs wait for their host.",
        "time: median 8 %, p90 20 %",
    ),
    DataSet(
        "megatron_goldens",
        "Megatron-LM's functional tests, GPT",
        golden,
        "Peaks of the last rank; attention flash unless unfused is asked for or the layers are local ones.",
        "memory: median 2 %, p90 8 %",
    ),
)
