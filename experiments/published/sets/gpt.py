"""GPT models of Megatron-LM on A100: Zero Bubble, Korthikanti, SC'21, MegaScale, vocabulary parallelism."""

from __future__ import annotations

from experiments.published.rows import FULLEST, GIB, DataSet, Line, Row, gpt, ints

_A100: dict[str, object] = {"gpu": "a100-sxm-80gb"}
_HALF: dict[str, object] = {"compute": "fp16", "grads": "fp16", "reduce": "fp16"}  # 16 bytes per parameter
_FP16: dict[str, object] = {"compute": "fp16"}
_MEGATRON: dict[str, object] = {"software": "megatron"}


def zero_bubble(line: Line) -> Row:
    """Op times of Table 6 as stage times; samples per second of Table 4."""
    pp, v, mbs, mb = ints(line, "pp", "vpp", "microbatches", "micro_batch")
    name, chunks = {
        "1F1B": ("1f1b", 1),
        "1F1B-I": ("interleaved-1f1b", 3),
        "ZB-1p": ("zb1p", 1),
        "ZB-2p": ("zb2p", 1),
    }[line["pp_schedule"]]
    stages = pp * chunks
    layers = [0, *[1] * (stages - 2), 0] if v == 3 else [2, *[3] * (stages - 2), 2]
    f, i, w, p2p = (float(line[k]) * 1e-3 for k in ("TF_ms", "TB_ms", "TW_ms", "Tcomm_ms"))
    times = {"F": f / chunks, "I": i / chunks, "W": w / chunks, "p2p": p2p}
    return Row(
        line["case_id"],
        {
            "model": gpt(line, attention="unfused", vocab_size=50304, tie_word_embeddings=False),
            "cluster": _A100,
            "parallel": {"pp": pp, "dp": 1, "layers": layers},
            "schedule": {
                "name": name,
                "stages_per_rank": chunks,
                "microbatches": mbs,
                "microbatch_size": mb,
            },
            "costs": _MEGATRON | {"stage_times": times},
            # Post-validation (section 4 of the paper): no rank waits for the norm of all gradients.
            "optimizer": {"clip_norm": 0.0} if line["pp_schedule"].startswith("ZB") else {},
            "precision": _HALF,
        },
        mb * mbs / pp / float(line["samples_per_gpu_per_s"]),
        {FULLEST: float(line["peak_memory_gb"]) * 1e9},
    )


def megatron(line: Line, **job: dict[str, object]) -> Row:
    """A run of Megatron-LM's early years: attention not fused, whole layers recomputed, gradients in fp32."""
    tp, pp, dp, v, mb, batch = ints(line, "tp", "pp", "dp", "vpp", "micro_batch", "global_batch")
    made: dict[str, dict[str, object]] = {
        "model": gpt(line, attention="unfused", vocab_size=int(line["vocab"])),
        "cluster": _A100,
        "parallel": {"tp": tp, "pp": pp, "dp": dp, "zero": 0, "sequence_parallel": False, "layers": "even"},
        "schedule": {
            "name": "interleaved-1f1b" if v > 1 else "1f1b",
            "stages_per_rank": v,
            "microbatches": batch // dp // mb,
            "microbatch_size": mb,
            "recompute": "full",
        },
        "costs": _MEGATRON,
        "precision": _FP16,
    }
    for section, keys in job.items():
        made[section] = {**made[section], **keys}
    return Row(line["case_id"], made, float(line["iter_time_s"]))


def korthikanti(line: Line) -> Row:
    """Table 5: full recompute, or sequence parallelism with selective recompute."""
    sequence = line["sequence_parallel"] == "1"
    recompute = "full" if line["recompute"] == "full" else "selective"
    return megatron(line, parallel={"sequence_parallel": sequence}, schedule={"recompute": recompute})


def sc21_table2(line: Line) -> Row:
    """PTD-P rows; seconds by the paper's FLOP formula (recompute counted)."""
    layers, h, s, vocab, batch, gpus = ints(line, "layers", "hidden", "seq_len", "vocab", "global_batch", "gpus")
    flops = 96 * batch * s * layers * h * h * (1 + s / (6 * h) + vocab / (16 * layers * h))
    seconds = flops / gpus / float(line["tflops_per_gpu_incl_recompute"]) / 1e12
    return megatron({**line, "vpp": "1", "iter_time_s": str(seconds)})


def megascale(line: Line) -> Row:
    """Megatron-LM rows of MegaScale: microbatches of one sequence, selective recompute, distributed optimizer."""
    row = megatron(
        {**line, "micro_batch": "1"},
        parallel={"sequence_parallel": True, "zero": 1, "bucket_MiB": 160},
        schedule={"recompute": "none"},
        model={"attention": "flash"},
        precision={"compute": "bf16"},
    )
    return row


def vocabulary(line: Line) -> Row:
    """1F1B and V-Half with the whole head on one stage."""
    if line["method"] != "Baseline":
        return Row(line["case_id"], why=f"{line['method']}: the head is sharded over the pipeline, which no job says")
    pp, layers, mbs, mb = ints(line, "pp", "layers", "microbatches", "micro_batch")
    name, chunks = {"1F1B": ("1f1b", 1), "V-Half": ("v-half", 2)}[line["pp_schedule"]]
    return Row(
        line["case_id"],
        {
            "model": gpt(line, vocab_size=int(line["vocab"]), tie_word_embeddings=False),
            "cluster": _A100,
            "parallel": {"pp": pp, "dp": 1, "layers": [layers // pp // chunks] * pp * chunks},
            "schedule": {"name": name, "stages_per_rank": chunks, "microbatches": mbs, "microbatch_size": mb},
            "costs": _MEGATRON,
            "precision": _HALF,
        },
        float(line["iter_time_s"]),
        {FULLEST: float(line["peak_memory_gb"]) * GIB},
    )


def unstated(line: Line) -> Row:
    """Megatron-Core's weak scaling on H100."""
    return Row(line["case_id"], why="microbatch size, interleaving and recompute are not stated")


SETS = (
    DataSet(
        "zero_bubble",
        "Zero Bubble, op times given",
        zero_bubble,
        "Table 6's times for every stage; vocabulary 50,304, untied; fp16 gradients; ZB's optimizer does not wait "
        "for the norm of all ranks (the paper's post-validation); GB read as 10⁹ bytes.",
        "time: worst 6 %; memory: 8 %",
    ),
    DataSet(
        "korthikanti",
        "Korthikanti et al., A100",
        korthikanti,
        "Scores stored (attention not fused), one microbatch of 4 for 22B.",
        "time: 5 % each",
    ),
    DataSet(
        "megatron_sc21",
        "Megatron-LM SC'21 Table 1, A100",
        megatron,
        "Whole layers recomputed; fp32 gradients, all-reduced once, after the last backward pass.",
        "time: median 5 %, worst 10 %",
    ),
    DataSet(
        "megatron_sc21_table2",
        "Megatron-LM SC'21 Table 2 (PTD-P), A100",
        sc21_table2,
        "No interleaving (the source does not say); seconds from its FLOP formula.",
    ),
    DataSet(
        "megascale",
        "Megatron-LM in MegaScale, A100",
        megascale,
        "Flash attention, microbatches of one sequence, no recompute of whole layers, buckets of 160 MiB.",
    ),
    DataSet(
        "vocabulary",
        "Vocabulary parallelism, Baseline, A100",
        vocabulary,
        "Fused attention; untied; fp16 gradients; GB read as GiB; times derived from the paper's MFU.",
        "memory: 8 %",
    ),
    DataSet("megatron_core", "Megatron-Core weak scaling, H100", unstated, ""),
)
