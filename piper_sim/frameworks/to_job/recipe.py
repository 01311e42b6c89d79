"""What a launch states of how a step is done: recomputation, number formats, the optimizer, what runs how."""

from collections.abc import Mapping

from ir.job.schema import PARTS
from piper_sim.frameworks.table import facts as tables
from piper_sim.frameworks.to_job.draft import Facts, JobDraft, element_bytes, has_experts
from piper_sim.frameworks.to_job.ranks import BY_LAYERS, EVEN, pipelined_fsdp, shards, zero_of

DEEPSPEED, FSDP = 2, 3  # accelerate's `distributed_type`, and the stage that it then takes
KNOWN_AS = {"dist_muon": "muon", "fused_adamw": "adamw"}  # optimizers that differ in what they keep, and in how
LAYER = ["mlp", "attention"]  # parts of a layer, which is then made again as a whole
MUON = {"momentum": 0.95, "nesterov": False, "ns_steps": 5, "tp_mode": "blockwise", "adjust_lr": "match_rms_adamw"}
SCALES = {"match_rms_adamw": 0.2, "original": 1.0}  # --muon-extra-scale-factor that makes its rates torch's


def modules_of(experts: bool) -> Mapping[str, str]:
    """Megatron's modules to recompute, of a model with experts or without: word -> part."""
    return dict(tables()["modules"]["experts" if experts else "dense"])


def unsaid(d: JobDraft, f: Facts) -> None:
    """What predictions presume, and Megatron does only when told to."""
    p, c = d.job.get("parallel", {}), d.job["cluster"]
    moved = p.get("ep", 1) > 1
    kind = f.get("dispatcher_type") if moved else None
    d.expect(kind != "allgather", "dispatcher_type", "tokens go by all-to-all to the ranks that have their experts")
    copies = c["nodes"] * c["gpus_per_node"] // (p.get("tp", 1) * p.get("pp", 1))
    reduces = f.get("overlapped_reduce", False if d.framework == "megatron" or pipelined_fsdp(d) else None)
    if pipelined_fsdp(d) and copies > 1:
        d.unsaid.append("FSDP's gathers are waited for once a step, where most are under the first forward")
        if d.job.get("schedule", {}).get("flushes", 1) > 1:
            d.unsaid.append("gathers and reductions are once a step, where FSDP has them in each accumulated pass")
    if copies > 1 and p.get("zero", 0) < 2:
        d.put("parallel", overlap_grad_reduce=reduces)
        if reduces and "bucket_MiB" not in p:
            mib = max(40, copies // p.get("cp", 1)) * 1e6 * element_bytes(f.get("reduce")) / 2**20
            d.fill("parallel.bucket_MiB", mib, "megatron's default: 40 million gradients, or one for each replica")
    gathers, alone = copies > 1 and p.get("zero", 0) > 0, d.job.get("schedule", {}).get("stages_per_rank", 1) == 1
    waited = gathers and alone and p["zero"] < 3  # ZeRO-3's are in each pass
    if waited and f.get("overlapped_gather"):
        d.doubts["overlapped_gather"] = "gathers are waited for: a rank has one stage"
    holds = {"overlapped_gather": gathers and not waited}
    holds |= {"dispatcher_type": moved and not f.get("dispatcher")}
    each = f.get("grouped_gemm", d.framework != "megatron")  # which Megatron does only when told to
    d.put("costs", grouped_gemm=False if has_experts(d, f) and not each else None)
    if d.framework == "megatron":
        d.unsaid += [why for fact, why in tables()["unsaid"].items() if fact not in f and holds[fact]]


def recompute(d: JobDraft, f: Facts) -> None:
    """What backward makes again."""
    kind, parts = f.get("recompute"), None
    if kind in (None, "none"):
        return
    if kind == "selective" and (modules := f.get("recompute_modules")):
        known = modules_of(has_experts(d, f))
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


def formats(d: JobDraft, f: Facts) -> None:
    """Number formats, the optimizer, the constants of the framework."""
    compute = "fp8" if f.get("fp8") == "fp8" else _unmixed(d, f) or f.get("compute")
    params, grads = f.get("params"), f.get("grads")
    if pipelined_fsdp(d):  # whole are the weights as gathered; the fp32 ones are the shards that the optimizer updates
        params = None if params == "fp32" and compute != "fp32" else params
        grads = grads or f.get("reduce")  # microbatches are summed in the format that is reduced
    own = params if params != "fp32" and by_torch(d.framework, f) else None  # of all that torch makes of them
    grads = grads or (None if f.get("pp", 1) > 1 and d.job["parallel"].get("zero") else own)  # whole ones are in reduce
    residual = _stream(d, f) if compute in ("bf16", "fp16", "fp8") else None
    d.put("precision", compute=compute, params=params, grads=grads, reduce=f.get("reduce"), residual=residual)
    moments = f.get("optimizer_dtype") or own
    # FSDP gathers what it computes in, whatever its shards have; a job's weights that are kept whole come as they are.
    cast = compute if params == "fp32" and d.job.get("parallel", {}).get("zero") in (1, 2) else None
    d.put("precision", optimizer=moments, gather=f.get("gather") if compute == "fp8" else cast)
    if compute == "fp8":
        d.put("precision", attention=f.get("attention_format"), head=f.get("head_format"))
    d.expect(f.get("second_moment", "fp32") == (moments or "fp32"), "second_moment", "both moments have one format")
    wide = {"output"} <= set(f.get("wide", ["output"])) <= {"output", "router.gate"}
    d.expect(compute != "fp8" or wide, "wide", "the head and routers' gates alone are not in fp8")
    name = f.get("optimizer")
    d.put("optimizer", name=KNOWN_AS.get(str(name), name), lr=f.get("lr"), clip_norm=f.get("clip"))
    if name in ("muon", "dist_muon"):
        _muon(d, f)
    if f.get("offloaded") in (True, "true"):
        d.put("optimizer", offload=f.get("offload", 1.0))
    d.put("model", attention=f.get("attention"))
    beside = f.get("expert_all_to_all") == "shared"
    d.put("schedule", delay_wgrad=f.get("delay_wgrad") or None, expert_all_to_all="shared" if beside else None)
    if f.get("dispatcher_type", "flex") == "flex" and f.get("dispatcher") != "nccl":
        d.put("costs", dispatcher=f.get("dispatcher"))
        sms = f.get("dispatch_sms") if f.get("dispatcher") else None
        d.put("cluster", comm_sms=None if sms is None else {"all_to_all": sms})
    _costs(d, f)


def by_torch(framework: str, f: Facts) -> bool:
    """Whether torch's own optimizer updates the weights as they are, in whose format its moments then are.

    >>> by_torch("automodel", {"optimizer": "adamw", "zero": 3}), by_torch("automodel", {"optimizer": "fused_adamw"})
    (True, False)
    """
    own = framework == "automodel" and f.get("optimizer") in ("adamw", "sgd") and f.get("zero") == FSDP
    return own or framework.endswith("torchtitan")


def _unmixed(d: JobDraft, f: Facts) -> str | None:
    """The format of weights, in which torchtitan computes where it divides a model and shards nothing."""
    own, said = str(f.get("params")), f.get("compute")
    if not d.framework.endswith("torchtitan") or not (_divided(d) and _whole(d, f)) or own == said:
        return None
    why = f"torchtitan computes in training.dtype where FSDP has nothing to shard: {own}, not {said}"
    d.doubts["compute"] = why
    d.fill("precision.compute", own, why)
    return own


def _divided(d: JobDraft) -> bool:
    p = d.job.get("parallel", {})
    return bool(p.get("tp", 1) * p.get("pp", 1) > 1)


def _whole(d: JobDraft, f: Facts) -> bool:
    """Whether each replica keeps all weights of its parts."""
    return bool(shards(d, f) == d.job.get("parallel", {}).get("cp", 1) == 1)


def _stream(d: JobDraft, f: Facts) -> object:
    """The format of the residual stream, where it is not that of products: under autocast it is the embeddings'."""
    amp = d.framework.endswith("torchtitan") and f.get("params") == "fp32" and _whole(d, f) and not _divided(d)
    return "fp32" if amp else f.get("residual")


def storage(d: JobDraft, f: Facts) -> Facts:
    """Formats of weights, and those that gradients are kept and reduced in: as stated, or as they follow."""
    params, grads, reduce, kind = f.get("params"), f.get("grads"), f.get("reduce"), f.get("compute")
    framework, residual = d.framework, f.get("residual")
    if framework == "megatron" and reduce == "bf16" and not f.get("fsdp"):  # --grad-reduce-in-bf16: the last word there
        grads, reduce = ("bf16", "bf16") if kind == "bf16" else (grads, None)
        d.expect(reduce, "reduce", f"megatron takes it with bf16 alone: gradients are {grads or kind}'s")
    if framework in EVEN and not f.get("fsdp"):  # one buffer, whose format goes over the wire
        own = "fp16" if framework == "megatron" and kind == "fp16" and grads is None else None
        if framework in ("megatron", "primus") and kind == grads == "bf16":  # else that buffer is in fp32
            own = grads
        reduce = reduce or own
        grads = grads or reduce
    elif (framework in BY_LAYERS or f.get("distributed_type") == DEEPSPEED) and kind in ("bf16", "fp16"):
        reduce = reduce or kind
        grads = grads or ("fp32" if kind == "bf16" and not zero_of(framework, f) else kind)
    elif framework == "accelerate" and f.get("distributed_type") in (FSDP, 0) and kind in ("bf16", "fp16"):
        params = params or "fp32"  # as they are, under autocast; FSDP raises them, and casts what it gathers
        reduce = reduce or (kind if f["distributed_type"] == FSDP else None)
        residual = None if f["distributed_type"] == FSDP else "fp32"  # embeddings', which autocast leaves as they are
    return {"params": params, "grads": grads, "reduce": reduce, "residual": residual}


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
    d.put("costs", loss_parallel=False if f.get("whole_logits") and f.get("tp", 1) > 1 else None)
    graphs, scope = f.get("cuda_graphs"), [x for x in f.get("graph_scope") or () if x != "full_iteration"]
    if graphs not in (None, "none"):
        d.expect(not scope, "graph_scope", f"graphs cover whole passes, not {', '.join(map(str, scope))} alone")
        whole = "full_iteration" in (f.get("graph_scope") or ())
        d.put("costs", cuda_graphs="step" if whole else graphs)
    if software := tables()["software"].get(d.framework):
        d.fill("costs.software", software + _compiled(d, f), "the framework whose kernels and buffers are priced")


def _compiled(d: JobDraft, f: Facts) -> str:
    """What torchtitan compiles, as its software files end: layers, and since 2025 the loss unless told otherwise."""
    parts = ["model"] if f.get("compiled_layers") else []
    parts = f.get("components", ["model", "loss"]) if f.get("compiled") else parts
    d.expect("model" in parts or not parts, "components", "layers are not compiled: nothing is presumed to be")
    return "" if "model" not in parts else "-compiled-loss" if "loss" in parts else "-compiled"
