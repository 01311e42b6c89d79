"""What a launch states of ranks: schedule, parallelism, copies of shards, the cluster, the batch."""

from collections.abc import Iterator, Mapping
from math import ceil, gcd
from typing import Any

from ir.core.errors import PiperError
from ir.job.load import job_from
from ir.job.model import read_model
from ir.schedules.registry import default_chunks, legal_chunks
from ir.workload.layout import parse_layout
from piper_sim.frameworks.to_job.draft import Facts, JobDraft, element_bytes, has_experts

BY_LAYERS = {"deepspeed", "gpt-neox"}  # stages with as many layers each, where that leaves no rest
EVEN = {"megatron", "megatron-bridge", "nemo", "primus"}  # split layers evenly, and refuse where that leaves a rest
TORCH = {"torchtitan", "primus-torchtitan", "automodel"}
MEGATRON_FSDP = "megatron_fsdp"  # ZeRO-3 with weights of its own in fp32
HYBRID = "hybrid"  # shards within a group, copies among groups: with 2, ZeRO-2's
SPREAD = "shards are spread over all replicas"


def schedule(d: JobDraft, f: Facts, pp: int) -> int:
    """The schedule's name and stages per rank; how many stages there are."""
    if pp == 1:
        d.expect(not f.get("overlap_ep"), "overlap_ep", "all-to-all beside another microbatch takes a pipeline here")
        _one_rank(d, f)
        return 1
    chunks, layers = f.get("vp") or 1, _decoders(d)
    if per := f.get("chunk_layers"):
        titan = d.framework.endswith("torchtitan")  # counts embedding and head, and what is left makes a stage, too
        counted = (layers or 0) + (2 if titan else bool(f.get("count_embedding")) + bool(f.get("count_loss")))
        stages = ceil(counted / per) if titan else counted // per if counted % per == 0 else 0
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
    d.expect(f.get("vp") in (None, chunks), "vp", f"another argument makes {chunks} stages of each rank")
    if csv := f.get("csv"):
        d.put("schedule", csv=csv)
        return pp * chunks
    name = f.get("schedule") or ("interleaved-1f1b" if chunks > 1 else "1f1b")
    if f.get("overlap_ep"):
        name = f"{name}-overlap"
    if chunks == 1 and "vp" not in f:  # torch's multi-stage schedules have two stages a rank unless told otherwise
        looped = name == "zb1p" and d.framework in TORCH and not f.get("chunk_layers")
        chunks = 2 if looped else default_chunks(name)
        d.expect(chunks == 1 or not f.get("chunk_layers"), "chunk_layers", f"{name} has {chunks} stages a rank")
    if not legal_chunks(name, chunks):
        d.doubts["schedule"] = f"{name} does not take {chunks} stages per rank"
        name = "interleaved-1f1b" if chunks > 1 else "1f1b"
    d.put("schedule", name=name, stages_per_rank=chunks if chunks != 1 else None)
    return pp * chunks


def _one_rank(d: JobDraft, f: Facts) -> None:
    """Stages that are stated of one pipeline rank, at which Megatron stops."""
    if d.framework not in EVEN:
        return
    many = {"vp": (f.get("vp") or 1) > 1, "layout": len(str(f.get("layout")).split("|")) > 1}
    many["chunk_layers"] = f.get("chunk_layers") not in (None, _decoders(d))
    for fact in ("first_layers", "last_layers"):
        many[fact] = f.get(fact) not in (None, _decoders(d))
    for fact, some in many.items():
        d.expect(not some, fact, "there is one pipeline rank: its layers are one stage")


def parallel(d: JobDraft, f: Facts, stages: int) -> None:
    """Sizes of axes, ZeRO, buckets, layers of each stage."""
    tp, pp = f.get("tp", 1), f.get("pp", 1)
    experts = has_experts(d, f)
    etp = f.get("etp") or (tp if d.framework in EVEN and f.get("experts") else None)
    for fact in ("ep", "etp"):
        if f.get(fact, 1) > 1 and not experts:
            d.doubts[fact] = "the model has no experts"
    whole = etp in (None, 1, tp) or not d.framework.endswith("torchtitan")
    d.expect(whole, "etp", f"torchtitan divides experts as it divides all else, by {tp}, or not at all")
    d.put("parallel", **{k: f.get(k) for k in ("tp", "cp", "pp", "order") if f.get(k) not in (None, 1)})
    if f.get("ulysses", 1) > 1:
        d.put("parallel", cp=f["ulysses"], cp_comm="all_to_all")
    elif f.get("cp", 1) > 1 and f.get("cp_comm") == "all_to_all":
        d.put("parallel", cp_comm="all_to_all")
    d.put("parallel", ep=f.get("ep") if experts else None, etp=etp if experts and etp != 1 else None)
    d.put(
        "parallel", zero=zero_of(d.framework, f), sequence_parallel=bool(f.get("sequence_parallel")) if tp > 1 else None
    )
    if pipelined_fsdp(d):
        why = "weights are kept from the first microbatch on, where torch gathers them again after each forward"
        d.expect(f.get("reshard") != "always", "reshard", why)
    if elements := f.get("bucket_elements"):
        d.put("parallel", bucket_MiB=elements * element_bytes(f.get("reduce")) / 2**20)
    if pp > 1 and not f.get("layout") and d.framework in EVEN:
        d.put("parallel", layers=_layers(d, f, stages))
    elif pp > 1 and d.framework in TORCH and not f.get("csv"):
        d.expect(len(f.get("parts", [0] * stages)) == stages, "parts", f"there are {stages} stages")
        counts = spread(_decoders(d) or 0, stages, f.get("first_less", 0), f.get("last_less", 0))
        found = f["parts"] if len(f.get("parts", ())) == stages else counts
        d.put("parallel", layers="even" if found and len(set(found)) == 1 else found)
    elif pp > 1 and d.framework in {*BY_LAYERS, "accelerate"}:
        how, layers = f.get("partition", "layers"), _decoders(d) or 0
        d.expect(how in ("layers", "ends"), "partition", f"stages are not cut by {how}, but evened out in time")
        if how in ("layers", "ends") and (layers + 2 * (how == "ends")) % stages == 0:  # both ends count as layers
            d.put("parallel", layers="even")
        else:
            d.fill("parallel.layers", "balanced", f"{layers} layers do not divide by {stages} stages")


def spread(layers: int, stages: int, first: int, last: int) -> list[int] | None:
    """Layers of each stage as torchtitan and Automodel count them, None where there are too few. first, last: layers
    that the embedding and the head stand for.

    >>> spread(32, 4, 1, 1)
    [8, 9, 8, 7]
    """
    each, over = divmod(layers + first + last, stages)
    found = [each + (i < over) for i in range(stages)]
    found[0], found[-1] = found[0] - first, found[-1] - last
    return found if min(found) >= 0 else None


def copies_of_shards(d: JobDraft, f: Facts) -> None:
    """Copies of what ZeRO shards, once it is known how many replicas there are."""
    p, c, dp, stated = d.job.get("parallel", {}), d.job["cluster"], _replicas(d), f.get("dp_replicate", 1)
    for fact, said in (("dp_shard", f.get("dp_shard", 0) * stated), ("dp", f.get("dp", 0))):
        d.expect(said <= 0 or said == dp, fact, f"{said} replicas are not the {dp} that the GPUs make")
    if stated > 1 and shards(d, f) == p.get("cp", 1) == 1 and p.get("zero"):  # torchtitan's FSDP of one replica is DDP
        d.put("parallel", zero=0)
        return
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


def _replicas(d: JobDraft) -> int:
    """Replicas: what is left of the cluster's GPUs."""
    p, c = d.job.get("parallel", {}), d.job["cluster"]
    inner: int = p.get("tp", 1) * p.get("cp", 1) * p.get("pp", 1)
    return max(1, int(c["nodes"]) * int(c["gpus_per_node"]) // inner)


def shards(d: JobDraft, f: Facts) -> int:
    """Replicas that torchtitan's FSDP shards over: as stated, or those that are no copies; 0 if nobody says."""
    if not d.framework.endswith("torchtitan") or f.get("dp_shard", 0) > 0:
        return int(f.get("dp_shard", 0))
    return 0 if "cluster.nodes" in d.filled else _replicas(d) // max(1, f.get("dp_replicate", 1))


def pipelined_fsdp(d: JobDraft) -> bool:
    """Whether torch's pipelining runs torchtitan's FSDP: whole weights and gradients in a step, sharded states."""
    p = d.job.get("parallel", {})
    return d.framework.endswith("torchtitan") and p.get("pp", 1) > 1 and p.get("zero") == 1


def zero_of(framework: str, f: Facts) -> int | None:
    """ZeRO's stage."""
    if f.get("zero") == MEGATRON_FSDP:
        f = f | {"zero": 3}
    if str(said := f.get("zero")).startswith(HYBRID):
        return 2 if said == f"{HYBRID}2" else 3
    if f.get("fsdp"):
        return int(f.get("sharding", 0))
    if f.get("distributed_optimizer") or f.get("optimizer") == "dist_muon":
        return max(1, int(f.get("zero", 0)))
    if f.get("distributed_optimizer") is False and framework in EVEN and f.get("zero", 0) < 2:  # else torch's FSDP2
        return 0
    if (how := f.get("reshard")) and f.get("zero", 3) == 3:
        if f.get("dp_shard") == 1 and f.get("cp", 1) == 1:
            return 0
        if f.get("pp", 1) > 1 and framework.endswith("torchtitan"):
            return 1  # torch's pipelining keeps whole gradients, and reduces them once a step (REDUCE_GRAD)
        return 3 if how == "always" or (how == "default" and f.get("pp", 1) == 1) else 2
    kind = f.get("distributed_type")  # accelerate's; Megatron's shards are an argument of its own
    found = f.get("zero", 0 if kind == "megatron" else kind)
    return None if found is None else int(found)


def _layers(d: JobDraft, f: Facts, stages: int) -> object:
    """Decoder layers of each stage as Megatron counts them."""
    layers, pp = _decoders(d) or 0, f["pp"]
    first, last, chunks = f.get("first_layers"), f.get("last_layers"), stages // f["pp"]
    if first or last:
        for fact in ("count_embedding", "count_loss"):
            d.expect(not f.get(fact), fact, "the first or last stage has the layers that are stated")
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


def cluster(d: JobDraft, f: Facts, hints: Mapping[str, str]) -> None:
    """GPUs: as stated, or the fewest that will do."""
    p = d.job.get("parallel", {})
    inner = p.get("tp", 1) * p.get("cp", 1) * p.get("pp", 1)
    why = "named by the file's path" if hints.get("gpu") else "the file names no GPU: put yours here"
    d.fill("cluster.gpu", hints.get("gpu") or "h100-sxm", why)
    nodes, per, gpus = f.get("nodes"), f.get("per_node") or f.get("node_tasks"), f.get("gpus")
    if slots := f.get("slots"):
        nodes, per, gpus = len(slots), slots[0], sum(slots)
        d.expect(set(slots) == {per}, "slots", f"{gpus} devices of {nodes} hosts, with as many on each")
    gpus = gpus if gpus or (nodes and per) else f.get("tasks")  # a task may start a launcher of its own
    if gpus and not (nodes and per and nodes * per == gpus):
        usual = not nodes and not per and gpus > 8
        nodes = nodes if nodes and gpus % nodes == 0 else max(1, gpus // (per or 8))
        per = gpus // nodes if gpus % nodes == 0 else None
        if usual and per:
            d.fill("cluster.gpus_per_node", per, "as many as a node usually has")
    if nodes and not per and nodes * 8 % inner == 0:
        per = 8
        d.fill("cluster.gpus_per_node", per, "as many as a node usually has")
    if nodes and per:
        if nodes * per % inner == 0:
            d.put("cluster", nodes=nodes, gpus_per_node=per)
            return
        why = f"tp·cp·pp = {inner} does not divide the file's {nodes * per} GPUs"
        d.doubts |= {k: why for k in ("nodes", "per_node", "gpus") if k in f}
    dp = next(_candidates(f, p, inner, per or 8))
    total = inner * dp
    per = per if per and total % per == 0 else 8 if total % 8 == 0 else total
    why = f"the {total} GPUs that hold tp, cp, pp, ep and the batch are no nodes of {f.get('per_node')}"
    d.expect(f.get("per_node") in (None, per), "per_node", why)
    d.fill("cluster.nodes", total // per, f"the fewest GPUs that hold tp, cp, pp, ep and the batch: {total}")
    if f.get("per_node") == per:
        d.put("cluster", gpus_per_node=per)
    else:
        d.fill("cluster.gpus_per_node", per, "as many as a node usually has")


def _candidates(f: Facts, p: Mapping[str, Any], inner: int, per: int) -> Iterator[int]:
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
    part = not f.get("per_node")  # a node that is stated is used whole
    yield from (n for n in counts if inner * n % per == 0 or (part and inner * n < per))
    yield least


def batch(d: JobDraft, f: Facts) -> None:
    """Sequences of a microbatch, microbatches of a replica."""
    p, dp = d.job.get("parallel", {}), _replicas(d)
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
        if total and (total != size * count * dp or total % (max(1, local) * dp)):
            d.doubts["global_batch"] = f"{total} sequences do not divide by {local} on {dp} replicas"
        passes, over = divmod(size * count, max(1, local))
        if passes > 1 and not over and f.get("pp", 1) > 1 and not f.get("csv"):  # accumulated: each runs empty
            d.put("schedule", flushes=passes)
    elif size is None and total and (count or d.framework in {*BY_LAYERS, "accelerate"}):
        count = count or 1  # DeepSpeed accumulates nothing where nobody asks for it
        size = max(1, total // (count * dp))
        d.expect(
            total == size * count * dp, "global_batch", f"{total} sequences are not {size} · {count} on {dp} replicas"
        )
    elif total and not count:
        if total % ((size or 1) * dp):
            d.doubts["global_batch"] = f"{total} sequences do not divide by {size or 1} on {dp} replicas: rounded"
        count = max(1, ceil(total / ((size or 1) * dp)))
    elif total and count:
        why = f"{total} sequences are not {size} · {count} on {dp} replicas"
        d.expect(total == (size or 1) * count * dp, "global_batch", why)
    if count is None:
        one = d.framework == "megatron" and size is not None  # --global-batch-size is then --micro-batch-size times dp
        why = "megatron's default: one microbatch on each replica" if one else "the file states no batch"
        d.fill("schedule.microbatches", 2 * p["pp"] if p.get("pp", 1) > 1 and not one else 1, why)
    d.put("schedule", microbatch_size=size, microbatches=count)


def _decoders(d: JobDraft) -> int | None:
    """Decoder layers: as the job says them, or the config that it names; None where that is no model."""
    m = d.job["model"]
    if found := m.get("num_hidden_layers") or m.get("n_layer"):
        return int(found)
    try:
        return read_model(job_from({"model": m})).config.layers
    except PiperError:
        return None
