"""What a launch states, as a job: the framework's own rules fill in what follows from it."""

from collections.abc import Iterator, Mapping
from typing import Any

from ir.core.errors import ErrorKind, PiperError
from ir.job.build import PreparedJob, prepare
from ir.job.load import job_from
from ir.workload.layout import format_layout
from ir.workload.setting import shares_kv_heads
from piper_sim.frameworks.table import facts as tables
from piper_sim.frameworks.to_job.draft import Facts, JobDraft
from piper_sim.frameworks.to_job.model import model_of, trained
from piper_sim.frameworks.to_job.ranks import EVEN, batch, cluster, copies_of_shards, parallel, schedule
from piper_sim.frameworks.to_job.recipe import formats, recompute, storage, unsaid


def draft(framework: str, stated: Facts, hints: Mapping[str, str]) -> JobDraft:
    """The job of a launch. hints: words of the file that name what it does not state: "tokenizer", "gpu",
    "program", "fsdp".

    >>> draft("megatron", {"tp": 2, "layers": 4, "hidden": 64, "heads": 4, "seq_len": 8}, {}).job["parallel"]["tp"]
    2
    """
    d = JobDraft(framework)
    known = dict(tables()["defaults"].get(framework, {}))
    if framework == "llm-foundry" and not hints.get("fsdp"):
        known["zero"] = 0  # DDP
    for fact, value in known.items():
        if fact not in stated and (key := tables()["keys"].get(fact)):
            d.filled[key] = (value, f"{framework}'s default")
    f: Facts = {**known, **{k: v for k, v in stated.items() if v is not None}}
    f |= _by_pattern(str(f.get("pattern") or ""))
    pp = f.get("pp", 1)
    f = _lengths(d, f, hints)
    f |= storage(d, f)
    d.put("model", **model_of(d, f, stated, hints))
    stages = schedule(d, f, pp)
    parallel(d, f, stages)
    cluster(d, f, hints)
    copies_of_shards(d, f)
    batch(d, f)
    recompute(d, f)
    unsaid(d, f)
    formats(d, f)
    d.filled = {k: v for k, v in d.filled.items() if d.job.get(k.split(".")[0], {}).get(k.split(".")[1]) == v[0]}
    return d


def _lengths(d: JobDraft, f: Facts, hints: Mapping[str, str]) -> Facts:
    """With the one length of a GPT, whichever way it is written; or with lengths and layers of both towers."""
    if trained(hints) != "t5":
        length = f.get("packed") or f.get("seq_len") or f.get("encoder_seq_len") or f.get("decoder_seq_len")
        d.expect(f.get("decoder_layers") in (None, f.get("layers")), "decoder_layers", "there is one tower: a GPT")
        return {**f, "seq_len": length} if length else f
    one = "seq_len" not in f or "decoder_seq_len" not in f
    d.expect(one, "seq_len", "two towers have lengths of their own")
    length = f.get("decoder_seq_len") or f.get("seq_len")
    more = {"encoder_seq_len": f.get("encoder_seq_len") or f.get("seq_len"), "encoder_layers": f.get("layers")}
    return {**f, "seq_len": length, **more, "layers": f.get("decoder_layers") or f.get("layers")}


def _by_pattern(pattern: str) -> Facts:
    """What a pattern of layers says beside their kinds: how many there are, where stages end, what predicts ahead.

    >>> _by_pattern("M-|M*-")
    {'pattern': 'M-M*-', 'layers': 5, 'layout': 'Ett|t*3L'}
    >>> _by_pattern("ME/*E/*E")
    {'pattern': 'ME', 'layers': 2, 'mtp': 2, 'mtp_pattern': '*E'}
    >>> _by_pattern("ME/")
    {'pattern': 'ME', 'layers': 2}
    """
    if not pattern:
        return {}
    own, *behind = pattern.split("/")
    ahead = [x for x in behind if x]  # Megatron takes a last `/` for none
    said: Facts = {"pattern": own.replace("|", ""), "layers": len(own.replace("|", ""))}
    said |= {"mtp": len(ahead), "mtp_pattern": ahead[0]} if ahead else {}
    stages = ["t" * len(stage) for stage in own.split("|")]
    last = "m" * len(ahead) + "L"
    return said | ({"layout": format_layout(("E" + "|".join(stages) + last).split("|"))} if len(stages) > 1 else {})


SHARED = "only Megatron-Core gives several ranks one KV head"


def troubles(framework: str, job: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Keys for which a job as imported would not load, or its framework would stop; each with why."""
    try:
        prepared = prepare(job_from(job))
    except PiperError as e:
        if e.kind is not ErrorKind.IO:  # a file lies beside where the job will
            yield e.key or "", f"the job does not load: {e.message}"
        return
    if framework in EVEN:
        yield from ((key, f"{framework} stops here: {why}") for key, _, why in not_started(prepared))
    elif shares_kv_heads(prepared.config, prepared.mesh.sizes["tp"]):
        yield "parallel.tp", f"{framework} stops here: {SHARED}"


def not_started(p: PreparedJob) -> Iterator[tuple[str, object, str]]:
    """What Megatron has arguments for, and stops at: keys, their values, and why."""
    pp, name = p.mesh.sizes["pp"], p.schedule
    if pp > 1 and name == "1f1b-overlap":
        yield "schedule.name", name, "all-to-alls overlap where a rank has two stages or more"
    if pp > 1 and name.endswith("-overlap") and "full" in p.base.recompute.options:
        yield "schedule.recompute", p.job.schedule.recompute, "not whole where all-to-alls overlap"
    if p.stages > pp > 1 and p.mbs % pp:
        yield "schedule.microbatches", p.mbs, f"interleaved stages take rounds of {pp} microbatches"
