"""What a launch states, as a job: the framework's own rules fill in what follows from it."""

from collections.abc import Iterator, Mapping
from math import ceil, gcd
from typing import Any

from ir.core.errors import PiperError
from ir.job.load import job_from
from ir.job.model import read_model
from ir.job.schema import PARTS
from ir.schedules.registry import default_chunks, legal_chunks
from ir.workload.layout import format_layout, parse_layout
from piper_sim.frameworks.draft import Facts, JobDraft
from piper_sim.frameworks.table import facts as tables
from piper_sim.frameworks.to_model import model_of, trained

EVEN = {"megatron", "megatron-bridge", "nemo", "primus"}  # split layers evenly, and refuse where that leaves a rest

LAYER = ["mlp", "attention"]  # parts of a layer, which is then made again as a whole
MUON = {"momentum": 0.95, "nesterov": False, "ns_steps": 5, "tp_mode": "blockwise", "adjust_lr": "match_rms_adamw"}
SCALES = {"match_rms_adamw": 0.2, "original": 1.0}  # --muon-extra-scale-factor that makes its rates torch's
HYBRID = "hybrid"  # shards within a group, copies among groups: with 2, ZeRO-2's
SPREAD = "shards are spread over all replicas"
EXPERTS = {"config", "num_experts", "num_local_experts", "n_routed_experts"}  # keys of a model that may have some


def draft(framework: str, stated: Facts, hints: Mapping[str, str]) -> JobDraft:
    """The job of a launch. hints: words of the file that name what it does not state: "tokenizer", "gpu",
    "program".

    >>> draft("megatron", {"tp": 2, "layers": 4, "hidden": 64, "heads": 4, "seq_len": 8}, {}).job["parallel"]["tp"]
    2
    """
    d = JobDraft(framework)
    known = dict(tables()["defaults"].get(framework, {}))
    for fact, value in known.items():
        if fact not in stated and (key := tables()["keys"].get(fact)):
            d.filled[key] = (value, f"{framework}'s default")
    f: Facts = {**known, **{k: v for k, v in stated.items() if v is not None}}
    layers, _, ahead = str(f.get("pattern") or "").partition("/")
    d.expect(not ahead, "pattern", "prediction modules of several layers are not built: there is none")
    f |= _by_pattern(layers)
    pp = f.get("pp", 1)
    f = _lengths(d, f, hints)
    d.put("model", **model_of(d, f, stated, hints))
    stages = _schedule(d, f, pp)
    _parallel(d, f, stages)
    _cluster(d, f, hints)
    _copies(d, f)
    _batch(d, f)
    _recompute(d, f)
    _unsaid(d, f)
    _formats(d, f)
    d.filled = {k: v for k, v in d.filled.items() if d.job.get(k.split(".")[0], {}).get(k.split(".")[1]) == v[0]}
    return d


def _lengths(d: JobDraft, f: Facts, hints: Mapping[str, str]) -> Facts:
    """With the one length of a GPT, whichever way it is written; or with lengths and layers of both towers."""
    if trained(hints) != "t5":
        length = f.get("seq_len") or f.get("encoder_seq_len") or f.get("decoder_seq_len")
        d.expect(f.get("decoder_layers") in (None, f.get("layers")), "decoder_layers", "there is one tower: a GPT")
        return {**f, "seq_len": length} if length else f
    one = "seq_len" not in f or "decoder_seq_len" not in f
    d.expect(one, "seq_len", "two towers have lengths of their own")
    length = f.get("decoder_seq_len") or f.get("seq_len")
    more = {"encoder_seq_len": f.get("encoder_seq_len") or f.get("seq_len"), "encoder_layers": f.get("layers")}
    return {**f, "seq_len": length, **more, "layers": f.get("decoder_layers") or f.get("layers")}


def _by_pattern(pattern: str) -> Facts:
    """What a pattern of layers says beside their kinds: how many there are, and where stages end.

    >>> _by_pattern("M-|M*-")
    {'pattern': 'M-M*-', 'layers': 5, 'layout': 'Ett|t*3L'}
    """
    if not pattern:
        return {}
    stages = ["t" * len(stage) for stage in pattern.split("|")]
    said: Facts = {"pattern": pattern.replace("|", ""), "layers": len(pattern.replace("|", ""))}
    return said | ({"layout": format_layout(("E" + "|".join(stages) + "L").split("|"))} if len(stages) > 1 else {})


def _decoders(d: JobDraft) -> int | None:
    """Decoder layers: as the job says them, or the config that it names; None where that is no model."""
    m = d.job["model"]
    if found := m.get("num_hidden_layers") or m.get("n_layer"):
        return int(found)
    try:
        return read_model(job_from({"model": m})).config.layers
    except PiperError:
        return None


def _schedule(d: JobDraft, f: Facts, pp: int) -> int:
    """The schedule's name and stages per rank; how many stages there are."""
    if pp == 1:
        d.expect(not f.get("overlap_ep"), "overlap_ep", "all-to-all beside another microbatch takes a pipeline here")
        return 1
    chunks, layers = f.get("vp") or 1, _decoders(d)
    if per := f.get("chunk_layers"):
        titan = d.framework.endswith("torchtitan")  # counts embedding and head, and what is left makes a stage, too
        stages = ceil(((layers or 0) + 2) / per) if titan else layers // per if layers and layers % per == 0 else 0
        if layers and stages and stages % pp == 0:
            chunks = stages // pp
        elif layers and (way := f.get("round_stages")):
            chunks = max(1, (ceil if way == "up" else int)(ceil(layers / per) / pp))
        elif layers:
            chunks = max(1, round(layers / (pp * per)))
            d.doubts["chunk_layers"] = f"{layers} layers are no multiple of {per} on {pp} ranks"
    if layout := f.get("layout"):
        try:
            count = len(parse_layout(layout))
            chunks = count // pp if count % pp == 0 else chunks
            d.put("schedule", layout=layout)
        except PiperError as e:
            d.doubts["layout"] = e.message
    if csv := f.get("csv"):
        d.put("schedule", csv=csv)
        return pp * chunks
    name = f.get("schedule") or ("interleaved-1f1b" if chunks > 1 else "1f1b")
    if f.get("overlap_ep"):
        name = f"{name}-overlap"
    if chunks == 1 and "vp" not in f:  # torch's multi-stage schedules have two stages a rank unless told otherwise
        looped = name == "zb1p" and "dp_shard" in f and not f.get("chunk_layers")
        chunks = 2 if looped else default_chunks(name)
    if not legal_chunks(name, chunks):
        d.doubts["schedule"] = f"{name} does not take {chunks} stages per rank"
        name = "interleaved-1f1b" if chunks > 1 else "1f1b"
    d.put("schedule", name=name, stages_per_rank=chunks if chunks != 1 else None)
    return pp * chunks


def _parallel(d: JobDraft, f: Facts, stages: int) -> None:
    tp, pp = f.get("tp", 1), f.get("pp", 1)
    experts = _experts(d, f)
    etp = f.get("etp") or (tp if d.framework in EVEN and f.get("experts") else None)
    for fact in ("ep", "etp"):
        if f.get(fact, 1) > 1 and not experts:
            d.doubts[fact] = "the model has no experts"
    d.put("parallel", **{k: f.get(k) for k in ("tp", "cp", "pp", "order") if f.get(k) not in (None, 1)})
    if f.get("ulysses", 1) > 1:
        d.put("parallel", cp=f["ulysses"], cp_comm="all_to_all")
    elif f.get("cp", 1) > 1 and f.get("cp_comm") == "all_to_all":
        d.put("parallel", cp_comm="all_to_all")
    d.put("parallel", ep=f.get("ep") if experts else None, etp=etp if experts and etp != 1 else None)
    d.put(
        "parallel", zero=_zero(d.framework, f), sequence_parallel=bool(f.get("sequence_parallel")) if tp > 1 else None
    )
    if elements := f.get("bucket_elements"):
        d.put("parallel", bucket_MiB=elements * (2 if f.get("reduce") == "bf16" else 4) / 2**20)
    if pp > 1 and not f.get("layout") and d.framework in EVEN:
        d.put("parallel", layers=_layers(d, f, stages))


def _copies(d: JobDraft, f: Facts) -> None:
    """Copies of what ZeRO shards, once it is known how many replicas there are."""
    p, c, dp, stated = d.job.get("parallel", {}), d.job["cluster"], _dp(d), f.get("dp_replicate", 1)
    edp = dp * p.get("tp", 1) * p.get("cp", 1) // (p.get("ep", 1) * p.get("etp", 1))
    by_node = str(f.get("zero")).startswith(HYBRID)
    size = c["gpus_per_node"] if by_node else f.get("shard_size", 0)  # ranks of one set of shards
    given = stated > 1 or size < 1
    copies = stated if given else dp // size
    fits = given or (dp % size == 0 and (not by_node or dp == c["nodes"] * size))
    if (fits and copies <= 1) or (not p.get("zero") and f.get("dp_shard") == 1):  # torch's DDP
        return
    good = fits and p.get("zero") and dp % copies == edp % copies == 0
    d.expect(good, "dp_replicate" if stated > 1 else "zero" if by_node else "shard_size", SPREAD)
    d.put("parallel", dp_replicate=copies if good else None)


def _dp(d: JobDraft) -> int:
    """Replicas: what is left of the cluster's GPUs."""
    p, c = d.job.get("parallel", {}), d.job["cluster"]
    inner: int = p.get("tp", 1) * p.get("cp", 1) * p.get("pp", 1)
    return max(1, int(c["nodes"]) * int(c["gpus_per_node"]) // inner)


def _zero(framework: str, f: Facts) -> int | None:
    """ZeRO's stage."""
    if str(said := f.get("zero")).startswith(HYBRID):
        return 2 if said == f"{HYBRID}2" else 3
    if f.get("fsdp"):
        return int(f.get("sharding", 3))
    if f.get("distributed_optimizer") or f.get("optimizer") == "dist_muon":
        return max(1, int(f.get("zero", 0)))
    if f.get("distributed_optimizer") is False and framework in EVEN:
        return 0
    if (how := f.get("reshard")) and f.get("zero", 3) == 3:
        if f.get("dp_shard") == 1 and f.get("cp", 1) == 1:
            return 0
        return 3 if how == "always" or (how == "default" and f.get("pp", 1) == 1) else 2
    kind = f.get("distributed_type")
    found = f.get("zero", kind if isinstance(kind, int) else None)
    return None if found is None else int(found)


def _layers(d: JobDraft, f: Facts, stages: int) -> object:
    """Decoder layers of each stage as Megatron counts them."""
    layers, pp = _decoders(d) or 0, f["pp"]
    first, last, chunks = f.get("first_layers"), f.get("last_layers"), stages // f["pp"]
    if first or last:
        rest, ranks = layers - (first or 0) - (last or 0), pp - bool(first) - bool(last)
        if ranks > 0 and rest % ranks == 0 and rest >= 0:
            each = [first or rest // ranks, *[rest // ranks] * (pp - 2), last or rest // ranks]
            if all(n % chunks == 0 for n in each):
                return [n // chunks for _ in range(chunks) for n in each]
        d.doubts["first_layers"] = d.doubts["last_layers"] = f"{rest} layers do not divide among {ranks} ranks"
        return None
    counted = layers + bool(f.get("count_embedding")) + bool(f.get("count_loss"))
    if counted % stages == 0 and counted in (layers, layers + 2):
        return "even"
    d.fill("parallel.layers", "balanced", f"{layers} layers do not divide by {stages} stages")
    return "balanced"


def _cluster(d: JobDraft, f: Facts, hints: Mapping[str, str]) -> None:
    p = d.job.get("parallel", {})
    inner = p.get("tp", 1) * p.get("cp", 1) * p.get("pp", 1)
    why = "named by the file's path" if hints.get("gpu") else "the file names no GPU: put yours here"
    d.fill("cluster.gpu", hints.get("gpu") or "h100-sxm", why)
    nodes, per, gpus = f.get("nodes"), f.get("per_node"), f.get("gpus")
    if gpus and not (nodes and per and nodes * per == gpus):
        nodes = nodes if nodes and gpus % nodes == 0 else max(1, gpus // (per or 8))
        per = gpus // nodes if gpus % nodes == 0 else None
    if nodes and not per and nodes * 8 % inner == 0:
        per = 8
        d.fill("cluster.gpus_per_node", per, "as many as a node usually has")
    if nodes and per:
        if nodes * per % inner == 0:
            d.put("cluster", nodes=nodes, gpus_per_node=per)
            return
        why = f"tp·cp·pp = {inner} does not divide the file's {nodes * per} GPUs"
        d.doubts |= {k: why for k in ("nodes", "per_node", "gpus") if k in f}
    dp = next(_replicas(f, p, inner, per or 8))
    total = inner * dp
    per = per if per and total % per == 0 else 8 if total % 8 == 0 else total
    d.fill("cluster.nodes", total // per, f"the fewest GPUs that hold tp, cp, pp, ep and the batch: {total}")
    d.fill("cluster.gpus_per_node", per, "as many as a node usually has")


def _replicas(f: Facts, p: Mapping[str, Any], inner: int, per: int) -> Iterator[int]:
    """Numbers of replicas that may be: those that hold the experts, divide the batch and fill nodes come first."""
    world, experts = inner // p.get("pp", 1), p.get("ep", 1) * p.get("etp", 1)
    copies = max(1, f.get("dp_replicate", 1))
    least = experts // gcd(world, experts)
    least *= copies if p.get("zero") else copies // gcd(least, copies)
    least *= (size := max(1, f.get("shard_size", 1))) // gcd(least, size)
    batch, accumulated = f.get("global_batch"), f.get("accumulation", 0) * f.get("microbatch_size", 0)
    if f.get("dp_shard", 0) > 0:
        yield f["dp_shard"] * f.get("dp_replicate", 1)
    if f.get("dp", 0) > 0:
        yield f["dp"]
    if batch and accumulated and batch % accumulated == 0:
        yield batch // accumulated
    counts = [least * n for n in range(1, 257)]
    if batch:
        counts = [n for n in counts if batch % (n * f.get("microbatch_size", 1)) == 0] or counts
    yield from (n for n in counts if inner * n % per == 0 or inner * n < per)
    yield least


def _batch(d: JobDraft, f: Facts) -> None:
    """Sequences of a microbatch, microbatches of a replica."""
    p, dp = d.job.get("parallel", {}), _dp(d)
    seq = f.get("seq_len") or 4096
    local = max(1, f["tokens_per_pass"] // seq) if f.get("tokens_per_pass") else f.get("local_batch")
    size, count = f.get("microbatch_size"), f.get("microbatches") or f.get("accumulation")
    total = f.get("global_batch") or (f["tokens_per_step"] // seq if f.get("tokens_per_step", -1) > 0 else None)
    total = total if total and total > 0 else None
    if local is not None:  # torch's runtime cuts what a replica reads at once
        size = f.get("pp_microbatch_size", 1) if f.get("pp", 1) > 1 else local
        size = max(1, local // count) if count and f.get("pp", 1) > 1 else size
        if size < 1:
            d.doubts["local_batch"] = f"{size} sequences at once are none: taken as 1"
            size = 1
        count = (total // (size * dp) if total and total % (size * dp) == 0 else None) or max(1, local // size)
        if total and total != size * count * dp:
            d.doubts["global_batch"] = f"{total} sequences do not divide by {size} on {dp} replicas"
        passes, over = divmod(size * count, max(1, local))
        if passes > 1 and not over and f.get("pp", 1) > 1 and not f.get("csv"):  # accumulated: each runs empty
            d.put("schedule", flushes=passes)
    elif size is None and total and count:
        size = max(1, total // (count * dp))
    elif total and not count:
        if total % ((size or 1) * dp):
            d.doubts["global_batch"] = f"{total} sequences do not divide by {size or 1} on {dp} replicas: rounded"
        count = max(1, ceil(total / ((size or 1) * dp)))
    if count is None:
        d.fill("schedule.microbatches", 2 * p["pp"] if p.get("pp", 1) > 1 else 1, "the file states no batch")
    d.put("schedule", microbatch_size=size, microbatches=count)


def modules_of(experts: bool) -> Mapping[str, str]:
    """Megatron's modules to recompute, of a model with experts or without: word -> part."""
    return dict(tables()["modules"]["experts" if experts else "dense"])


def _experts(d: JobDraft, f: Facts) -> bool:
    return bool(f.get("experts")) or bool(EXPERTS & set(d.job["model"]))


def _unsaid(d: JobDraft, f: Facts) -> None:
    """What predictions presume, and Megatron does only when told to."""
    p, c = d.job.get("parallel", {}), d.job["cluster"]
    moved = p.get("ep", 1) > 1
    kind = f.get("dispatcher_type") if moved else None
    d.expect(kind != "allgather", "dispatcher_type", "tokens go by all-to-all to the ranks that have their experts")
    copies = c["nodes"] * c["gpus_per_node"] // (p.get("tp", 1) * p.get("pp", 1))
    reduces = f.get("overlapped_reduce", False if d.framework == "megatron" else None)
    if copies > 1 and p.get("zero", 0) < 2:
        d.put("parallel", overlap_grad_reduce=reduces)
        if reduces and "bucket_MiB" not in p:
            mib = max(40, copies // p.get("cp", 1)) * 1e6 * (2 if f.get("reduce") == "bf16" else 4) / 2**20
            d.fill("parallel.bucket_MiB", mib, "megatron's default: 40 million gradients, or one for each replica")
    holds = {"overlapped_gather": copies > 1 and p.get("zero", 0) > 0}
    holds |= {"dispatcher_type": moved and not f.get("dispatcher")}
    each = f.get("grouped_gemm", d.framework != "megatron")  # which Megatron does only when told to
    d.put("costs", grouped_gemm=False if _experts(d, f) and not each else None)
    if d.framework == "megatron":
        d.unsaid += [why for fact, why in tables()["unsaid"].items() if fact not in f and holds[fact]]


def _recompute(d: JobDraft, f: Facts) -> None:
    kind, parts = f.get("recompute"), None
    if kind in (None, "none"):
        return
    if kind == "selective" and (modules := f.get("recompute_modules")):
        known = modules_of(_experts(d, f))
        parts = sorted({known[m] for m in modules if m in known}, key=PARTS.index)
        if odd := [m for m in modules if m not in known]:
            d.doubts["recompute_modules"] = f"{', '.join(odd)} is kept, not recomputed"
        if not parts:
            return
        kind = "selective" if parts == ["scores"] else parts
    some = f.get("recompute_layers")
    if kind == "full" and some is not None and f.get("recompute_method") == "block":
        d.put("schedule", recompute_layers=some)
    elif kind == "full" and (some or 1) > 1 and f.get("recompute_method") == "uniform":
        d.doubts["recompute_layers"] = f"each layer is recomputed from its input, not {some} at once"
    if isinstance(kind, str) and kind not in ("selective", "full"):
        d.doubts["recompute"] = f"recompute = {kind!r} is not built: none is presumed"
        return
    if kind == "selective" and d.framework.endswith("torchtitan"):
        kind, which = _chosen(d, str(f.get("recompute_choice")))
        d.put("schedule", recompute_layers=which)
    d.put("schedule", recompute=kind)


def _chosen(d: JobDraft, choice: str) -> tuple[str | list[str], str | None]:
    """torchtitan's choices: every second operator of each layer, or every n-th layer, the n-th the first."""
    if choice.isdigit() and 0 < int(choice) < 1000:
        return LAYER, f"{int(choice) - 1}::{choice}" if int(choice) > 1 else None
    if choice != "op":
        d.doubts["recompute_choice"] = "every second operator is presumed"
    return ["operators"], None


def _formats(d: JobDraft, f: Facts) -> None:
    """Number formats, the optimizer, the constants of the framework."""
    compute = "fp8" if f.get("fp8") == "fp8" else f.get("compute")
    d.put("precision", compute=compute, params=f.get("params"), grads=f.get("grads"), reduce=f.get("reduce"))
    moments = f.get("optimizer_dtype")
    d.put("precision", optimizer=moments, gather=f.get("gather") if compute == "fp8" else None)
    d.expect(f.get("second_moment", "fp32") == (moments or "fp32"), "second_moment", "both moments have one format")
    wide = {"output"} <= set(f.get("wide", ["output"])) <= {"output", "router.gate"}
    d.expect(compute != "fp8" or wide, "wide", "the head and routers' gates alone are not in fp8")
    name = f.get("optimizer")
    d.put("optimizer", name="muon" if name == "dist_muon" else name, lr=f.get("lr"), clip_norm=f.get("clip"))
    if name in ("muon", "dist_muon"):
        _muon(d, f)
    if f.get("offloaded") in (True, "true"):
        d.put("optimizer", offload=f.get("offload", 1.0))
    d.put("model", attention=f.get("attention"))
    d.put("schedule", delay_wgrad=f.get("delay_wgrad") or None)
    if f.get("dispatcher_type", "flex") == "flex" and f.get("dispatcher") != "nccl":
        d.put("costs", dispatcher=f.get("dispatcher"))
    _costs(d, f)


def _muon(d: JobDraft, f: Facts) -> None:
    """How matrices are orthogonalised, in Megatron's own way where nothing is said."""
    for key, usual in MUON.items():
        if f.get(key) is None:
            d.fill(f"optimizer.{key}", usual, "megatron's default")
        else:
            d.put("optimizer", **{key: f[key]})
    if d.job["optimizer"]["adjust_lr"] not in SCALES:
        d.put("optimizer", adjust_lr=MUON["adjust_lr"])
        d.doubts["adjust_lr"] = "rates are by the larger side of a matrix; a step costs the same"
    scale = SCALES[d.job["optimizer"]["adjust_lr"]]
    d.expect(f.get("muon_scale", scale) == scale, "muon_scale", f"updates are times {scale:g}; a step costs the same")


def _costs(d: JobDraft, f: Facts) -> None:
    """What runs how: softmaxes, messages under products, CUDA graphs; the constants of the framework."""
    fused = f.get("attention") != "unfused"
    d.expect(fused or not f.get("softmax_fp32"), "softmax_fp32", "unfused softmaxes are in the compute format")
    d.put("costs", tp_overlap=f.get("tp_overlap") if f.get("tp", 1) > 1 else None)
    d.put("costs", deterministic=f.get("deterministic"))
    graphs, scope = f.get("cuda_graphs"), [x for x in f.get("graph_scope") or () if x != "full_iteration"]
    if graphs not in (None, "none"):
        d.expect(not scope, "graph_scope", f"graphs cover whole passes, not {', '.join(map(str, scope))} alone")
        whole = "full_iteration" in (f.get("graph_scope") or ())
        d.put("costs", cuda_graphs="step" if whole else graphs)
    if software := tables()["software"].get(d.framework):
        software += "-compiled" if f.get("compiled") else ""
        d.fill("costs.software", software, "the framework whose kernels and buffers are priced")


def refusal(job: Mapping[str, Mapping[str, Any]]) -> PiperError | None:
    """Why a job as imported would not load, if it would not."""
    try:
        read_model(job_from(job))
    except PiperError as e:
        return e
    return None
