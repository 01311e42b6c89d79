"""A job as facts that frameworks state: `to_job` backwards."""

from collections.abc import Mapping
from typing import Any

from ir.job.build import PreparedJob, precision_of
from ir.job.model import read_model
from ir.job.schema import Job
from ir.lower import ExpertOverlap
from ir.workload.config.mixers import ahead_of, pattern_of
from ir.workload.config.spec import LayerActivation, ModelConfig, NormLayerKind
from ir.workload.layout import format_layout
from piper_sim.frameworks.table import facts as tables
from piper_sim.frameworks.to_job.draft import Facts, element_bytes
from piper_sim.frameworks.to_job.model import named
from piper_sim.frameworks.to_job.ranks import spread
from piper_sim.frameworks.to_job.recipe import DEEPSPEED, MUON, SCALES, modules_of

MEGATRON = ("megatron", "megatron-bridge", "primus")
_UNGATED = {LayerActivation.SWIGLU: "silu", LayerActivation.GEGLU: "gelu"}  # a gated activation's own


def facts_of(prepared: PreparedJob, framework: str) -> Facts:
    """What a framework would have to state; the nodes and GPUs are the resolved job's."""
    job, mesh = prepared.job, prepared.mesh.sizes
    dp, size, mbs = mesh["dp"], job.schedule.microbatch_size, prepared.mbs
    f: Facts = {k: mesh[k] for k in ("tp", "cp", "pp", "ep") if mesh[k] > 1}
    f |= {"seq_len": job.model.seq_len, "lr": job.optimizer.lr, "clip": job.optimizer.clip_norm}
    f |= {"optimizer": job.optimizer.name, **_formats(job, framework)}
    if job.optimizer.name == "muon":
        f |= {k: getattr(job.optimizer, k) for k in MUON} | {"muon_scale": SCALES[job.optimizer.adjust_lr]}
    if framework in MEGATRON:
        f |= _sizes(prepared.config, job.model.seq_len) | _megatron(prepared, framework, dp, size, mbs)
        act = prepared.config.activation
        if framework == "megatron-bridge":
            gate = {"gated": act.ups == 2, "activation": _UNGATED.get(act, str(act))}
            return f | {"vocab": f.pop("vocab_padded"), **gate}
        return f | {"activation": None if framework == "megatron" and act is LayerActivation.GELU else str(act)}
    if framework in ("torchtitan", "automodel"):
        compiled = str(job.costs.software) if framework == "torchtitan" else ""
        f |= {"compiled": True} if compiled.startswith("torchtitan-compiled") else {}
        f |= {"components": ["model"]} if compiled == "torchtitan-compiled" else {}
        return f | _torch(prepared, framework, dp, size, mbs) | _name(job, framework)
    if framework == "accelerate":
        f["compute"] = f.pop("fp8", f["compute"])
    f |= {"microbatch_size": size, "global_batch": size * mbs * dp, "accumulation": mbs, "zero": job.parallel.zero}
    again = prepared.base.recompute
    f |= {"recompute": "full"} if again.options == {"full"} and again.layers is None else {}
    if framework == "deepspeed" and job.parallel.dp_replicate > 1 and job.parallel.zero == 3:  # MiCS
        f["shard_size"] = mesh["dp_shard"]
    f |= _bucket(job) if job.parallel.zero else {}
    if job.optimizer.offload and job.parallel.zero:
        f |= {"offloaded": "true", "offload": job.optimizer.offload}
    kind = DEEPSPEED if job.parallel.zero else 0
    return f | {"gpus": prepared.ranks, "nodes": job.cluster.nodes, "distributed_type": kind}


def ranges_of(job: Job, framework: str) -> dict[str, tuple[object, ...]]:
    """Values of keys that a framework's launch can say: what a search for it tries. Raises PiperError: no model."""
    megatron = framework in MEGATRON
    own = tables()["says"]["megatron" if megatron else "deepspeed" if framework == "accelerate" else framework]
    found = {k: tuple(tuple(x) if isinstance(x, list) else x for x in v) for k, v in own.items()}
    if megatron:
        config = read_model(job).config
        latent = [] if config.mla is None else ["up_projection"]
        cheap = ("norm", *latent, *(["activation"] if config.moe is not None else []))
        found["recompute"] = ("none", cheap, "full")
    return found


def nodes_of(prepared: PreparedJob) -> tuple[int, int]:
    """Nodes, and GPUs that are used of each: fewer than it has, where the job has fewer ranks than one node."""
    nodes = prepared.job.cluster.nodes or 1
    return (nodes, prepared.ranks // nodes) if prepared.ranks % nodes == 0 else (prepared.ranks, 1)


def _formats(job: Job, framework: str) -> Facts:
    p, whole = job.precision, precision_of(job)
    f: Facts = {"compute": "bf16", "fp8": "fp8"} if p.compute == "fp8" else {"compute": p.compute}
    named_ = {"params": p.params, "grads": p.grads, "reduce": p.reduce, "optimizer_dtype": p.optimizer}
    named_ |= {"gather": p.gather, "residual": whole.residual and str(whole.residual)}
    named_ |= {"attention_format": whole.attention and "fp8", "head_format": whole.head and "fp8"}
    if framework == "automodel" and p.params not in (None, "fp32"):
        if whole.optimizer == whole.params:  # torch's, which has no word for it
            del named_["optimizer_dtype"]
        else:
            f["optimizer"] = "fused_adamw"
    if framework == "deepspeed":  # whose own ones are not the job's
        named_ |= {"grads": str(whole.grads), "reduce": str(whole.reduce)}
    elif framework in MEGATRON and job.parallel.zero < 2 and whole.grads == whole.reduce:  # one buffer, by one argument
        wide = framework == "megatron" and p.compute == "fp16" and whole.grads == "fp32"
        half = "bf16" if whole.reduce == "bf16" else None
        named_ |= {"grads": "fp32" if wide else None, "reduce": half}
    return f | {k: v for k, v in named_.items() if v is not None}


def _bucket(job: Job) -> Facts:
    size = job.parallel.bucket_MiB
    return {} if size is None else {"bucket_elements": round(size * 2**20 / element_bytes(job.precision.reduce))}


def _sizes(m: ModelConfig, seq_len: int) -> Facts:
    f: Facts = {"layers": m.layers, "hidden": m.hidden, "heads": m.heads, "vocab_padded": m.vocab}
    f |= {"ffn": m.ffn, "untied": not m.tied, "norm_eps": m.norm_eps}
    place = "rope" if m.rope else "learned" if m.positions else "none"
    most = m.max_positions if place == "learned" else max(m.max_positions, seq_len)  # with fewer it does not start
    f |= {"position": place, "positions": most, "init_std": m.init_std, "bias": m.mlp_bias or m.out_bias}
    f |= {"norm": "rms" if m.norm is NormLayerKind.RMS else "layer"}
    f |= {"attention_dropout": m.attn_dropout, "hidden_dropout": m.hidden_dropout}
    if m.rope:
        f |= {"rope_theta": m.rope_theta, "rope_share": m.rope_share if m.rope_share != 1.0 else None}
    if m.mla is not None:
        f |= {"mla": True, "q_rank": m.mla.q_rank or None, "kv_rank": m.mla.kv_rank, "nope_dim": m.mla.nope_dim}
        f |= {"rope_dim": m.mla.rope_dim, "v_dim": m.mla.v_dim}
        if (x := m.indexer) is not None:
            f |= {"variant": "dsa", "index_heads": x.heads, "index_dim": x.dim, "index_top_k": x.top_k}
    else:
        f |= {"grouped": True, "kv_heads": m.kv_heads} if m.kv_heads != m.heads else {}
        f |= {"head_dim": m.head_dim, "qk_norm": m.qk_norm or None, "qkv_bias": (m.qkv_bias and not m.out_bias) or None}
    if m.mtp:
        f |= {"mtp": m.mtp, "mtp_repeated": m.mtp_repeated or None}
    f |= _pattern(m)
    if (moe := m.moe) is not None:
        f |= {"experts": moe.experts, "top_k": moe.top_k, "moe_ffn": moe.ffn, "shared_ffn": moe.shared_ffn or None}
        listed = moe.dense_layers and "pattern" not in f
        f |= {"moe_freq": [int(i not in moe.dense_layers) for i in range(m.layers)]} if listed else {}
        f |= {"groups": moe.groups, "top_groups": moe.top_groups} if moe.groups else {}
        f |= {"pre_softmax": True} if not moe.normalised and moe.scoring == "softmax" else {}
        f |= {"scoring": moe.scoring, "routed_scale": moe.scale, "latent": moe.latent or None}
    return f


def _pattern(m: ModelConfig) -> Facts:
    """A sign for each layer, where each is one thing, and the state spaces among them."""
    if m.mixer is None or not (pattern := pattern_of(m)):
        return {}
    sizes = {"mamba_heads": m.mixer.heads, "mamba_head_dim": m.mixer.head_dim, "mamba_groups": m.mixer.groups}
    ahead = {"pattern": pattern + f"/{ahead_of(m)}" * m.mtp, "mtp": None} if m.mtp else {"pattern": pattern}
    return {**ahead, **sizes, "mamba_state": m.mixer.state}


def _presumed(prepared: PreparedJob) -> Facts:
    """What predictions presume, and Megatron does only when told to; how FSDP saves."""
    copies, zero = prepared.mesh.sizes["dp"] * prepared.mesh.sizes["cp"] > 1, prepared.job.parallel.zero
    f: Facts = {"overlapped_reduce": prepared.job.parallel.overlap_grad_reduce} if copies else {}
    f |= {"overlapped_gather": True} if copies and zero else {}
    f |= {"ckpt_format": "fsdp_dtensor"} if zero > 1 else {}
    experts = {"grouped_gemm": prepared.job.costs.grouped_gemm, "dispatcher_type": "alltoall"}
    return f | (experts if prepared.config.moe is not None else {})


def _megatron(prepared: PreparedJob, framework: str, dp: int, size: int, mbs: int) -> Facts:
    job, pp = prepared.job, prepared.mesh.sizes["pp"]
    p, s, chunks = job.parallel, job.schedule, prepared.stages // pp
    f: Facts = {"microbatch_size": size, "global_batch": size * mbs * dp}
    f |= {"sequence_parallel": p.sequence_parallel} if p.tp > 1 else {}
    f |= {"etp": p.etp} if prepared.config.moe is not None else {}
    f |= {"order": p.order} if p.order != "tp cp ep dp pp" else {}
    f |= {"cp_comm": p.cp_comm} if p.cp > 1 and p.cp_comm != "all_gather" else {}
    f |= {"distributed_optimizer": p.zero == 1} if p.zero < 2 else {"fsdp": True, "sharding": p.zero}
    f |= {"dp_replicate": p.dp_replicate} if p.dp_replicate > 1 else {}
    f |= _bucket(job)
    f |= _presumed(prepared)
    f |= {"expert_all_to_all": "shared"} if prepared.policy.experts is ExpertOverlap.SHARED else {}
    if pp > 1:
        f |= {"vp": chunks} if chunks > 1 else {}
        f |= {"overlap_ep": True} if prepared.schedule.endswith("-overlap") else {}
        f |= {"delay_wgrad": True} if s.delay_wgrad else {}
        f |= _stages(prepared, chunks)
        if "layout" in f and framework != "megatron-bridge":  # Megatron takes one of the two
            f.pop("vp", None)
    if s.recompute != "none":
        f |= {"recompute": s.recompute if isinstance(s.recompute, str) else "selective"}
        if not isinstance(s.recompute, str):
            words = {part: word for word, part in modules_of(prepared.config.moe is not None).items()}
            f |= {"recompute_modules": [words[x] for x in s.recompute if x in words]}
        f |= {"recompute_method": "uniform", "recompute_layers": 1} if s.recompute == "full" else {}
        if s.recompute == "full" and isinstance(s.recompute_layers, int):
            f |= {"recompute_method": "block", "recompute_layers": s.recompute_layers}
    f |= {"attention": job.model.attention} if job.model.attention != "flash" else {}
    f |= {"tp_overlap": job.costs.tp_overlap} if job.costs.tp_overlap is not None else {}
    f |= {"cuda_graphs": job.costs.cuda_graphs} if job.costs.cuda_graphs != "none" else {}
    f |= {"deterministic": True} if job.costs.deterministic else {}
    if job.costs.dispatcher not in (None, "nccl"):
        f |= {"dispatcher_type": "flex", "dispatcher": job.costs.dispatcher}
        held = job.cluster.overrides.get("comm_sms")
        f |= {"dispatch_sms": held.get("all_to_all")} if isinstance(held, Mapping) else {}
    return f


def _stages(prepared: PreparedJob, chunks: int) -> Facts:
    """Which layers stand where: nothing where they divide evenly, else the layout string."""
    layers, text = prepared.layers, format_layout(prepared.layout)
    if prepared.job.schedule.layout is not None:
        return {"layout": prepared.job.schedule.layout}
    usual = not prepared.config.mtp and prepared.layout[0][:1] == "E" and prepared.layout[-1][-1:] == "L"
    if usual and len(set(layers)) == 1:
        return {}
    if usual and prepared.job.parallel.layers == "even":
        return {"count_embedding": True, "count_loss": True}
    ranks = [n * chunks for n in layers[: len(layers) // chunks]]
    same = layers == tuple(ranks[i % len(ranks)] // chunks for i in range(len(layers)))
    if usual and same and len(ranks) > 2 and len(set(ranks[1:-1])) == 1:
        return {"first_layers": ranks[0] if ranks[0] != ranks[1] else None, "last_layers": ranks[-1]}
    return {"layout": text}


def _torch(prepared: PreparedJob, framework: str, dp: int, size: int, mbs: int) -> Facts:
    """torchtitan's and Automodel's: a replica reads all its microbatches at once."""
    job, pp = prepared.job, prepared.mesh.sizes["pp"]
    p, s = job.parallel, job.schedule
    zero = "always" if p.zero == 3 else "never"
    f: Facts = {"local_batch": size * mbs // s.flushes if pp > 1 else size, "global_batch": size * mbs * dp}
    f |= _again(prepared, framework)
    if pp > 1:
        f |= {"pp_microbatch_size": size, "schedule": prepared.schedule}
        f |= _chunk_layers(prepared, framework)
        ends = int(framework == "torchtitan")
        usual = prepared.layout[0][:1] == "E" and prepared.layout[-1][-1:] == "L"
        own = spread(prepared.config.layers, prepared.stages, ends, ends)
        f |= {"parts": list(prepared.layers)} if usual and list(prepared.layers) != own else {}
    f |= {"sequence_parallel": p.sequence_parallel} if p.tp > 1 else {}
    if framework == "torchtitan":
        f["sequence_parallel"] = False if p.tp > 1 and not p.sequence_parallel else None  # older ones have no such key
        copies = p.dp_replicate if p.zero else dp
        shard = {"dp_shard": dp // copies, "dp_replicate": copies}
        f |= {"whole_logits": True} if job.costs.loss_parallel is False and p.tp > 1 else {}
        if dp == copies and p.cp == 1 and p.tp * pp > 1:  # it then computes in the format of weights
            f["params"] = str(precision_of(job).activations)
        f |= {"etp": p.etp, "reshard": zero, **shard} if p.etp > 1 else {"reshard": zero, **shard}
    else:
        f |= {"dp": dp, "zero": {0: 0, 3: 3}.get(p.zero), **({"reshard": zero} if p.zero else {})}
        f |= {"dp_replicate": p.dp_replicate} if p.dp_replicate > 1 else {}
    return f


def _chunk_layers(prepared: PreparedJob, framework: str) -> Facts:
    """Layers of a stage, where the number of stages does not follow from the schedule."""
    layers, stages = prepared.config.layers, prepared.stages
    if framework == "automodel":
        return {"chunk_layers": layers // stages} if layers % stages == 0 else {}
    if stages == prepared.mesh.sizes["pp"] * (1 if prepared.schedule in ("1f1b", "gpipe") else 2):
        return {}
    per = next((n for n in range(1, layers + 3) if -(-(layers + 2) // n) == stages), None)
    return {"chunk_layers": per} if per is not None else {}


def _again(prepared: PreparedJob, framework: str) -> Facts:
    """What is recomputed: all layers, every n-th, every second operator."""
    again, count = prepared.base.recompute, prepared.config.layers
    whole = "full" in again.options
    if whole and again.layers is None:
        return {"recompute": "full"}
    if framework == "torchtitan" and whole:
        every = next((n for n in range(2, count + 1) if again.layers == frozenset(range(count)[n - 1 :: n])), None)
        return {"recompute": "selective", "recompute_choice": None if every is None else str(every)}
    if framework == "torchtitan" and again.options == {"operators"}:
        return {"recompute": "selective", "recompute_choice": "op"}
    return {"recompute": "selective" if again.options else "none"}


def _name(job: Job, framework: str) -> dict[str, Any]:
    """The model by name, where the framework has it: torchtitan's flavor, the Hub's repository."""
    own = dict(job.model.overrides)
    for name, found in tables()["hub"].items():
        family, _, flavor = name.partition("/")
        keys = {k: v for k, v in found.items() if k != "preset"}
        if found["preset"] == job.model.config and keys == own and named(family, flavor) is found:
            titan = framework == "torchtitan"
            if titan and family.islower() and "-" not in family:
                return {"family": family, "flavor": flavor}
            if not titan and not keys and ("-" in family or family[0].isupper()):
                return {"hub": name}
    return {} if framework == "torchtitan" else {"hub": "config.json"}
