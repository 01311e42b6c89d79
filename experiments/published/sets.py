"""Lines of published tables as jobs: data/sets.toml says what each table is, here stands what its lines compute."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache, partial
from itertools import accumulate
from typing import Any

from experiments.published import goldens
from experiments.published.rows import DATA, FULLEST, GIB, MIB, DataSet, Line, Row, Table, ints
from ir.core.errors import ErrorKind
from ir.core.files import FileErrors, read_toml

FORM = FileErrors("the list of published tables", ErrorKind.IO, "sets.toml")
Facts = dict[str, Any]  # of a row: seconds, memory, failed; or why no job says the same


@cache
def facts() -> Mapping[str, Any]:
    """data/sets.toml."""
    return read_toml(DATA / "sets.toml", FORM)


def _fill(job: Table, line: Line, columns: Mapping[str, str]) -> None:
    """Put what a line's columns say at their keys; an empty cell says nothing."""
    for column, keys in columns.items():
        if value := line.get(column):
            for section, key in (k.split(".") for k in keys.split()):
                job.setdefault(section, {})[key] = int(value) if value.isdecimal() else value


def _told(name: str) -> dict[str, Any]:
    """What is said of a table, with what it takes over from another."""
    mine = facts()["sets"][name]
    base: Mapping[str, Any] = _told(mine["like"]) if "like" in mine else {"row": name, "job": {}}
    below, above = base["job"], mine.get("job", {})
    job = {section: {**below.get(section, {}), **above.get(section, {})} for section in {**below, **above}}
    return {**base, **mine, "row": name if name in _ROWS else base["row"], "job": job}


def _row(told: Mapping[str, Any], line: Line) -> Row:
    """One line: the table's job, what its columns say, what is computed of them."""
    job, name, gpu = deepcopy(told["job"]), line.get("case_id") or line["row_id"], line.get("gpu", "")
    if why := told.get("why"):
        return Row(name, why=why)
    for columns in (facts()["columns"], facts()["gpt"] if told.get("gpt") else {}, told.get("columns", {})):
        _fill(job, line, columns)
    if gpu in facts()["gpus"]:
        job.setdefault("cluster", {})["gpu"] = facts()["gpus"][gpu]
    if v := line.get("vpp"):
        job["schedule"]["name"] = "interleaved-1f1b" if int(v) > 1 else "1f1b"
    seconds = line.get("iter_time_s") or line.get("step_s_median")
    found: Facts = {"seconds": float(seconds)} if seconds else {}
    if told["row"] in _ROWS:
        found |= _ROWS[told["row"]](line, job)
    if "why" in found:
        return Row(name, why=found["why"])
    return Row(name, job, publisher=line.get("publisher") or told.get("publisher", ""), **found)


def zero_bubble(line: Line, job: Table) -> Facts:
    """Op times of Table 6 as stage times; samples per second of Table 4."""
    pp, v, mbs, mb = ints(line, "pp", "vpp", "microbatches", "micro_batch")
    names = {"1F1B": ("1f1b", 1), "1F1B-I": ("interleaved-1f1b", 3), "ZB-1p": ("zb1p", 1), "ZB-2p": ("zb2p", 1)}
    name, chunks = names[line["pp_schedule"]]
    job["schedule"] |= {"name": name, "stages_per_rank": chunks}
    between = pp * chunks - 2
    job["parallel"]["layers"] = [0, *[1] * between, 0] if v == 3 else [2, *[3] * between, 2]
    f, i, w, p2p = (float(line[k]) * 1e-3 for k in ("TF_ms", "TB_ms", "TW_ms", "Tcomm_ms"))
    job["costs"]["stage_times"] = {"F": f / chunks, "I": i / chunks, "W": w / chunks, "p2p": p2p}
    # Post-validation (section 4 of the paper): no rank waits for the norm of all gradients.
    job["optimizer"] = {"clip_norm": 0.0} if line["pp_schedule"].startswith("ZB") else {}
    seconds = mb * mbs / pp / float(line["samples_per_gpu_per_s"])
    return {"seconds": seconds, "memory": {FULLEST: float(line["peak_memory_gb"]) * 1e9}}


def megatron(line: Line, job: Table) -> Facts:
    """A run of Megatron-LM's early years: attention not fused, whole layers recomputed, gradients in fp32."""
    batch, dp = ints(line, "global_batch", "dp")
    job["schedule"]["microbatches"] = batch // dp // job["schedule"]["microbatch_size"]
    return {}


def sc21(line: Line, job: Table) -> Facts:
    """Without a pipeline torch's DDP reduces beside the backward pass, as the paper's run script says."""
    job["parallel"] |= {"overlap_grad_reduce": True, "bucket_MiB": 25} if line["pp"] == "1" else {}
    return megatron(line, job)


def korthikanti(line: Line, job: Table) -> Facts:
    """Table 5: full recompute, or sequence parallelism with selective recompute."""
    job["parallel"]["sequence_parallel"] = line["sequence_parallel"] == "1"
    job["schedule"]["recompute"] = "full" if line["recompute"] == "full" else "selective"
    return megatron(line, job)


def sc21_table2(line: Line, job: Table) -> Facts:
    """PTD-P rows; seconds by the paper's FLOP formula (recompute counted)."""
    layers, h, s, vocab, batch, gpus = ints(line, "layers", "hidden", "seq_len", "vocab", "global_batch", "gpus")
    flops = 96 * batch * s * layers * h * h * (1 + s / (6 * h) + vocab / (16 * layers * h))
    seconds = flops / gpus / float(line["tflops_per_gpu_incl_recompute"]) / 1e12
    return megatron(line, job) | {"seconds": seconds}


def vocabulary(line: Line, job: Table) -> Facts:
    """1F1B and V-Half with the whole head on one stage."""
    if line["method"] != "Baseline":
        return {"why": f"{line['method']}: the head is sharded over the pipeline, which no job says"}
    pp, layers = ints(line, "pp", "layers")
    name, chunks = {"1F1B": ("1f1b", 1), "V-Half": ("v-half", 2)}[line["pp_schedule"]]
    job["schedule"] |= {"name": name, "stages_per_rank": chunks}
    job["parallel"]["layers"] = [layers // pp // chunks] * pp * chunks
    return {"memory": {FULLEST: float(line["peak_memory_gb"]) * GIB}}


def simumax(line: Line, job: Table) -> Facts:
    """Megatron on eight B200; the first of four DeepSeek-V2 layers is dense."""
    job["model"]["config"] = {"llama3-70b": "llama3-70b", "deepseekv2": "deepseek-v2"}[line["model"]]
    peaks = (float(x) * MIB for x in line["peak_MiB_by_pp_rank"].split())
    return {"seconds": float(line["iter_time_ms"]) * 1e-3, "memory": dict(enumerate(peaks))}


_NANOTRON = {"llama-1.34B": (16, 2048, 8192, True), "llama-8.86B": (32, 4096, 14336, False)}
_WORDS = 131072


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


def ultrascale(line: Line, job: Table) -> Facts:
    """Nanotron on H100; peak memory as the first rank logs it."""
    gpus, dp, pp, mb, mbs = ints(line, "gpus", "dp", "pp", "micro_batch", "grad_accum")
    layers, hidden, ffn, tied = _NANOTRON[line["model"]]
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn, "tie_word_embeddings": tied}
    job["model"] |= sizes
    job["cluster"]["nodes"] = -(-gpus // 8)
    job["parallel"]["layers"] = nanotron_layers(layers, hidden, ffn, pp)
    if "tokens_per_s" not in line:
        return {"failed": True}
    seconds = dp * mb * mbs * 4096 / float(line["tokens_per_s"])
    return {"seconds": seconds, "memory": {0: float(line["peak_memory_gb"]) * GIB}}


def llm_foundry(line: Line, job: Table) -> Facts:
    """MPT under FSDP, fp32 weights gathered in bf16."""
    batch, seq_len = ints(line, "global_batch", "seq_len")
    return {"seconds": batch * seq_len / float(line["tokens_per_s"])}


def dgxc(line: Line, job: Table) -> Facts:
    """NeMo on DGX H100: distributed optimizer, gradient buckets overlapped."""
    job["model"] = {"config": line["model"].replace("llama3.1", "llama3"), "seq_len": 8192}  # some lines say 8190
    job["cluster"]["nodes"] = int(line["gpus"]) // 8
    return {}


def modelzoo(line: Line, job: Table) -> Facts:
    """Qwen3-235B on 256 H100."""
    job["schedule"]["recompute"] = ["norm", "activation"]
    return {}


def torchtitan(line: Line, job: Table) -> Facts:
    """FSDP2 and tensor parallelism, every second layer or operator recomputed."""
    if line["async_tp"] == "1" or "rowwise" in line["precision"]:
        return {"why": "asynchronous tensor parallelism, or scales of rows"}
    if "HBM2e" in line["gpu"]:
        job["cluster"] = {"gpu": "h100-sxm", "hbm_GBps": 2400, "hbm_GiB": 95, "power_W": 500}
    kind = line["recompute"].partition(" (every")[0]  # the first of two layers is kept, the second made again
    some = {"recompute": "full", "recompute_layers": "1::2"} if kind == "selective layer" else {}
    job["schedule"] |= {"recompute": "operators"} if kind in ("selective op", "selective(op SAC)") else some
    job["costs"]["software"] = "torchtitan-compiled" if line["torch_compile"] == "1" else "torchtitan"
    if line["precision"] != "bf16":
        job["precision"]["compute"] = "fp8"
    tp, gpus, mb, seq_len = ints(line, "tp", "gpus", "local_batch", "seq_len")
    job["model"]["config"] = {"Llama-3.1-8B": "llama3-8b", "Llama-2-13B": "llama2-13b"}[line["model"]]
    job["cluster"]["nodes"] = gpus // 8
    return {"seconds": mb * seq_len / tp / float(line["tokens_per_s_per_gpu"])}


def mlperf(line: Line, job: Table) -> Facts:
    """NeMo with fp8 products; embedding and loss count as a layer each where the log says so."""
    if line["precision"] != "fp8":
        return {"why": "fp8 or fp4: the log does not say"}
    if big := line["model"] != "gpt3-175b":
        sizes = {"num_hidden_layers": int(line["layers"]), "vocab_size": 32768, "seq_len": 8192}
        job["model"] = {"config": "llama3-405b", **sizes}
    else:
        job["model"] |= {"config": "gpt3-175b", "attn_pdrop": 0.0, "resid_pdrop": 0.0}
        _fill(job, line, facts()["gpt"])
    job["parallel"]["layers"] = [1, *[2] * (int(line["pp"]) * int(line["vpp"]) - 2), 1] if big else "even"
    job["schedule"]["name"] = "interleaved-1f1b"
    job["costs"]["tp_overlap"] = line["tp_comm_overlap"] == "1"
    return {}


def vtrain(line: Line, job: Table) -> Facts:
    """Megatron-DeepSpeed on A100."""
    if line["inter_node_Gbps_per_node"]:
        job["cluster"]["nic_Gbps"] = int(line["inter_node_Gbps_per_node"]) / 8
    return megatron(line, job)


_TOWERS = ("bert", "t5")
_DEEPSEEK = ("pipeline_layout",)  # columns that a job of its family says


def golden(line: Line, job: Table) -> Facts:
    """A model of Megatron-LM's tests: the peak of the last rank, and the time of the large decoders."""
    deepseek = goldens.is_deepseek(line)
    odd = [c for c, v in facts()["plain"].items() if line[c] != v and not (deepseek and c in _DEEPSEEK)]
    odd += ["activations on the host"] if "activation-offloading=True" in line["other_arguments"] else []
    odd += ["weights in fp8 that FSDP shards"] if line["fsdp"] and line["fp8_format"] else []
    odd += ["whole parameters of AdamW on one rank"] if goldens.dealt(line) else []
    odd = ["family", *odd] if line["family"] not in ("gpt", "moe", "mixtral", "hybrid", *_TOWERS) else odd
    if odd or not line["gpus"]:
        return {"why": "; ".join(odd[:1]) or "GPUs not stated"}
    gpus = int(line["gpus"])
    job.setdefault("cluster", {}).update(nodes=max(1, gpus // 8), gpus_per_node=min(8, gpus))
    tp, pp, cp, mb, batch = ints(line, "tp", "pp", "cp", "micro_batch", "global_batch")
    dp = gpus // tp // pp // cp
    act, gated = facts()["activations"][line["activation"]]
    job["model"] |= {"hidden_act": act, "gated_linear_unit": gated, "qk_layernorm": line["qk_layernorm"] == "1"}
    norm, bias = line["normalization"].removesuffix("-1p"), line["linear_bias"] == "1"
    job["model"] |= {"normalization": norm, "add_bias_linear": bias}
    job["model"] |= {"attention": "flash" if goldens.fused(line) else "unfused", **goldens.latent(line)}
    job["model"] |= {"tie_word_embeddings": line["untied"] == "0"}
    job["model"] |= {k: float(line[k]) for k in ("attention_dropout", "hidden_dropout")}
    job["costs"] |= {"deterministic": line["deterministic"] == "1", "grouped_gemm": line["moe_grouped_gemm"] != "0"}
    job["costs"] |= {"tp_overlap": True} if line["tp_comm_overlap"] == "1" else {}
    job["optimizer"] = {"name": "muon"} if line["optimizer"] == "muon" else {}
    goldens.formats(line, job)
    job["parallel"] |= {"dp": dp, "sequence_parallel": line["sequence_parallel"] == "1"}
    job["parallel"] |= {"zero": 3} if line["fsdp"] else {}
    job["parallel"] |= {"layers": per} if (per := goldens.layers(line)) else {}
    job["parallel"] |= {"bucket_MiB": 160} if line["overlap_grad_reduce"] == "1" else {"overlap_grad_reduce": False}
    job["schedule"]["microbatches"] = batch // dp // mb
    job["schedule"] |= {"recompute": line["recompute_granularity"]} if line["recompute_granularity"] else {}
    job["schedule"] |= {} if line["vpp"] else {"name": "1f1b", "stages_per_rank": 1}
    if line["family"] == "bert":
        named = {"num_layers": "num_hidden_layers", "ffn_hidden_size": "intermediate_size"}
        kept = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "seq_len", "attention")
        sizes = {named.get(k, k): job["model"][k] for k in (*kept, "vocab_size", "max_position_embeddings")}
        job["model"] = {"model_type": "megatron-bert", **sizes}
    if deepseek:
        goldens.deepseek(line, job)
    elif line["mtp_layers"] != "0":
        job["model"] |= {"num_nextn_predict_layers": int(line["mtp_layers"])}
    if line["family"] == "t5":
        job["model"] |= {"max_position_embeddings": int(line["encoder_seq_len"])}
    large = int(line["hidden"]) >= 4096 and line["family"] not in _TOWERS
    return {"memory": {pp - 1: goldens.peak(line)}} | ({} if large else {"seconds": None})


def cards(line: Line, job: Table) -> Facts:
    """A mixture of experts: layers per stage, experts' messages overlapped or not, an NVLink domain as a node."""
    built = line["needs"] in ("", "mamba layers")
    if not built or not line["dispatcher"]:
        return {"why": line["needs"] or "the recipe's settings are not stated"}
    words = {column: found[line[column]] for column, found in facts()["cards"].items()}
    node, counts = int(line["nvlink_domain_gpus"]), (x.split("*") for x in line["layers_per_stage"].split())
    job["cluster"] = {"gpu": job["cluster"]["gpu"], "gpus_per_node": node, "nodes": -(-int(line["gpus"]) // node)}
    job["parallel"]["layers"] = [int(a) for a, times in counts for _ in range(int(times))] or "even"
    job["costs"] = {**job.get("costs", {}), **{k: words[k] for k in ("dispatcher", "cuda_graphs")}}
    job["precision"] = {"compute": words["precision"], **job.get("precision", {})}
    _overlap_experts(line, job)
    return {}


def _overlap_experts(line: Line, job: Table) -> None:
    """Messages of experts beside another microbatch's passes, their SMs, fused products, where a line says so."""
    if line.get("fused") == "1":
        job["costs"]["fused_experts"] = True
    if sms := line.get("sms"):
        job["cluster"]["comm_sms"] = {"all_to_all": int(sms)}
    if line.get("ep_overlap") == "1":
        job["schedule"] |= {"name": f"{job['schedule'].get('name', '1f1b')}-overlap", "merge": "template"}
        job["schedule"]["delay_wgrad"] = line["delay_wgrad"] == "1"


def one_gpu(line: Line, job: Table) -> Facts:
    """A model of transformers on one GPU."""
    if line["precision"] == "autocast":  # of weights in fp32: whatever no product reads stays so
        job["precision"] = dict.fromkeys(("params", "grads", "optimizer", "residual"), "fp32")
    if line["torch_compile"] == "1":  # layers and loss by Inductor, as torchtitan's; attention is the newer PyTorch's
        job["costs"] |= {"software": "transformers-compiled"}
    job["model"].update(facts()["models"][line["model"]])
    return {"memory": {FULLEST: float(line["peak_allocated_bytes"])}}


def unseen(line: Line, job: Table) -> Facts:
    """A run of a source that came when all constants stood: its GPU, model and framework by name."""
    if line["needs"]:
        return {"why": line["needs"]}
    if "+" in line["recompute"]:
        job["schedule"]["recompute"] = line["recompute"].split("+")
    told = facts()["unseen"]
    gpus, dp, mbs, mb, seq_len = ints(line, "gpus", "dp", "micro_batch", "microbatches", "seq_len")
    cluster = told["gpus"][line["gpu"]]
    whole = 64 if line["gpu"].startswith("GB") else cluster.get("gpus_per_node", 8)  # racks of 72 have 64 in use
    job["cluster"] = {**cluster, "gpus_per_node": (node := min(gpus, whole)), "nodes": gpus // node}
    model = told["models"].get(line["model"], {"config": line["model"]})
    job |= {"model": {**model, **job["model"]}}
    if "mpt" in line["model"]:
        job["model"]["max_seq_len"] = seq_len
    for section, keys in told["stacks"][line["stack"]].items():
        job[section] = {**job.get(section, {}), **keys}
    _overlap_experts(line, job)
    if line.get("tp_overlap") == "1":
        job["costs"]["tp_overlap"] = True
    if line.get("overlap_grad_reduce") == "0":
        job["parallel"]["overlap_grad_reduce"] = False
    if counts := line.get("layers_per_stage"):
        job["parallel"]["layers"] = [int(a) for a, n in (x.split("*") for x in counts.split()) for _ in range(int(n))]
    rate, peak = line.get("tokens_per_s_per_gpu"), line.get("peak_GiB")
    memory = {"memory": {FULLEST: float(peak) * GIB}} if peak else {}
    return ({"seconds": dp * mbs * mb * seq_len / gpus / float(rate)} if rate else {}) | memory


_ROWS: Mapping[str, Callable[[Line, Table], Facts]] = {
    "zero_bubble": zero_bubble,
    "korthikanti": korthikanti,
    "megatron_sc21": sc21,
    "megatron_sc21_table2": sc21_table2,
    "vocabulary": vocabulary,
    "simumax": simumax,
    "ultrascale": ultrascale,
    "llm_foundry": llm_foundry,
    "dgxc": dgxc,
    "modelzoo": modelzoo,
    "torchtitan": torchtitan,
    "mlperf_llm": mlperf,
    "vtrain_multi_node": vtrain,
    "megatron_goldens": golden,
    "automodel": cards,
    "one_gpu": one_gpu,
    "unseen": unseen,
}


def _sets() -> dict[str, DataSet]:
    out = {}
    for name, said in facts()["sets"].items():
        told = _told(name)
        words = (told["title"], partial(_row, told), told.get("assumed", ""), said.get("bars", ""))
        out[name] = DataSet(name, *words, never_fitted=said.get("never_fitted", False))
    return out


NAMED: Mapping[str, DataSet] = _sets()
SETS: tuple[DataSet, ...] = tuple(NAMED.values())


def chosen(names: str) -> tuple[DataSet, ...]:
    """Those named, separated by commas; all where none is.

    >>> [s.name for s in chosen("dgxc")]
    ['dgxc']
    """
    return tuple(NAMED[n] for n in names.split(",")) if names else SETS
