"""The configurations that a job's `[search]` spans, and each as a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import cast

from cost_models import DeviceHardware
from ir.core.errors import job_error
from ir.job import Job
from ir.job.build import DEFAULT_SCHEDULE, blaming, resolve
from ir.job.load import KEYS
from ir.job.model import read_model
from ir.job.schema import BUCKET_MIB
from ir.schedules.registry import NAMES, canonical, default_chunks, legal_chunks, order_depends_on_times
from ir.workload.config.spec import ModelConfig
from ir.workload.setting import shares_kv_heads

Changes = Mapping[str, object]
LONG = 8192  # tokens of a sequence that one rank of cp holds, by default
MOST_EP = 64
WITHOUT_GAIN = ("gpipe", "looped-bfs")  # 1f1b takes no longer and keeps less
CHEAP = ("norm", "up_projection", "activation")  # to recompute: no matrix product but latent attention's
NODE = "one node"  # holds all shards: as many copies of them as nodes
NO_LIMITS: Mapping[str, tuple[object, ...]] = {}


@dataclass(frozen=True)
class JobSpace:
    """Every combination of the values tried. own: the job with its sizes resolved; gpus, sequences: what all keep.

    schedules: name and stages per rank, where neither is listed or pinned. usual: keys whose values are the default's.
    per_node: GPUs of a node. bucket: MiB of the buckets in which gradients are reduced beside backward, once a
    step; None: as the job says.
    """

    job: Job
    own: Job
    gpus: int
    sequences: int
    values: Mapping[str, tuple[object, ...]]
    schedules: tuple[tuple[str, int], ...] | None
    usual: frozenset[str]
    per_node: int
    bucket: float | None = None

    @classmethod
    def of(cls, job: Job, hardware: DeviceHardware, says: Mapping[str, tuple[object, ...]] = NO_LIMITS) -> JobSpace:
        """Of a job. says: instead of default ranges, beside the job's own value.

        Raises PiperError (job): what cannot be searched, or is no job itself.
        """
        s = job.schedule
        if given := next((k for k in ("directives", "builder", "csv") if getattr(s, k) is not None), None):
            fix = f"schedule.name instead of schedule.{given}"
            raise job_error(f"schedule.{given}", f"search cannot divide anew what {given} places", fix, file=job.file)
        own = resolve(job, hardware.gpus_per_node)
        p, s = own.parallel, own.schedule
        gpus = p.tp * p.cp * p.pp * (p.dp or 1)
        name = canonical(s.name or DEFAULT_SCHEDULE)
        mbs = s.microbatches or 2 * p.pp
        s = replace(s, name=name, stages_per_rank=s.stages_per_rank or default_chunks(name), microbatches=mbs)
        own = replace(own, schedule=s, cluster=job.cluster)
        with blaming(job):
            config = read_model(job).config
        free = {k for k in KEYS if k not in job.search.pin} - {"dp"}
        per_node = job.cluster.gpus_per_node or hardware.gpus_per_node
        ranges = _defaults(own, config, gpus, per_node)
        ranges |= {k: tuple(dict.fromkeys((ranges[k][0], *says[k]))) for k in ranges if k in says}
        default = {k: v for k, v in ranges.items() if k in free}
        listed = {k: cast(tuple[object, ...], v) for k, v in job.search.overrides.items()}
        if s.layout is not None:  # it says how many stages there are
            default = {k: v for k, v in default.items() if k not in ("pp", "layers")}
        plan_free = s.layout is None and not {"name", "stages_per_rank"} & {*listed, *job.search.pin}
        schedules = _schedules((name, s.stages_per_rank or 1), says.get("name", NAMES)) if plan_free else None
        sequences, usual = (p.dp or 1) * mbs * s.microbatch_size, frozenset(default) - set(listed)
        whole = p.bucket_MiB is None and p.overlap_grad_reduce and not says and "bucket_MiB" in free - set(listed)
        bucket = BUCKET_MIB if whole else None
        return cls(job, own, gpus, sequences, default | listed, schedules, usual, per_node, bucket)

    def __iter__(self) -> Iterator[Changes]:
        """Each configuration as the keys that differ from the job's; first the job itself, if no list leaves it out;
        none twice."""
        seen: set[str] = set()
        if not self._left_out():
            yield {}
            seen.add(repr({}))
        keys = list(self.values)
        pairs: Sequence[tuple[str, int] | None] = self.schedules or (None,)
        for choice in product(*self.values.values()):
            for pair in pairs:
                found = self._changes(dict(zip(keys, choice, strict=True)), pair)
                if found is not None and (text := repr(found)) not in seen:
                    seen.add(text)
                    yield found

    def _left_out(self) -> bool:
        """Whether a list lacks what the job itself has there."""
        lists = {k: cast(tuple[object, ...], v) for k, v in self.job.search.overrides.items()}
        if "name" in lists:
            lists["name"] = tuple(canonical(str(n)) for n in lists["name"])
        return any(getattr(getattr(self.own, KEYS[k]), k) not in values for k, values in lists.items())

    def _changes(self, chosen: dict[str, object], pair: tuple[str, int] | None) -> Changes | None:
        """What differs; None where another configuration is the same job."""
        if pair is not None:
            chosen |= {"name": pair[0], "stages_per_rank": pair[1]}
        elif "name" in chosen and "stages_per_rank" not in chosen:
            name = str(chosen["name"])
            now = self.own.schedule.stages_per_rank or 1
            chosen["stages_per_rank"] = now if legal_chunks(name, now) else default_chunks(name)
        p, s = self.own.parallel, self.own.schedule
        size = {k: int(cast(int, chosen.get(k, getattr(p, k)))) for k in ("tp", "cp", "pp")}
        inner = size["tp"] * size["cp"] * size["pp"]
        if chosen.get("recompute", s.recompute) != s.recompute:
            chosen.setdefault("recompute_layers", None)  # the job's are of its own recompute
        if "dp" not in chosen and self.gpus % inner == 0:
            chosen["dp"] = self.gpus // inner
        if pair is not None and size["pp"] == 1 and pair != self._alone():
            return None  # without a pipeline a schedule decides but where reductions and gathers are cut
        if "zero" in self.usual and chosen["zero"] == 3 != p.zero and size["pp"] > 1:
            return None  # weights gathered for every microbatch: tried where asked for
        dp, each = (int(cast(int, chosen.get(k, v))) for k, v in (("dp", p.dp), ("microbatch_size", s.microbatch_size)))
        if self.bucket is not None and int(cast(int, chosen.get("zero", p.zero))) < 2 and dp * size["cp"] > 1:
            chosen["bucket_MiB"] = self.bucket
        if chosen.get("dp_replicate") == NODE:
            shards = self.per_node // (size["tp"] * size["cp"])
            if chosen.get("zero", p.zero) in (0, 1) or shards < 2 or shards >= dp or dp % shards:
                return None  # none lie across nodes, or they cannot all lie on one
            chosen["dp_replicate"] = dp // shards
        given = {(f, k): getattr(getattr(self.own, f), k) for k, f in KEYS.items()}
        if self.job.schedule.stages_per_rank is None:
            given["schedule", "stages_per_rank"] = default_chunks(str(chosen.get("name", s.name)))
        if self.job.schedule.global_batch is None and self.sequences % (dp * each) == 0:
            chosen["microbatches"] = self.sequences // dp // each
            given["schedule", "microbatches"] = self.job.schedule.microbatches or 2 * size["pp"]
        named = ((KEYS.get(k, "schedule"), k, v) for k, v in chosen.items())
        return {f"{section}.{k}": v for section, k, v in named if given[section, k] != v}

    def _alone(self) -> tuple[str, int]:
        """The one schedule that stands for all where pp is 1."""
        s = self.own.schedule
        return (s.name or "", s.stages_per_rank or 1) if self.own.parallel.pp == 1 else (DEFAULT_SCHEDULE, 1)

    def job_of(self, changes: Changes) -> Job:
        """A configuration as a job. Raises PiperError (job): it cannot have the job's GPUs or global batch."""
        job = replaced(self.job, changes)
        p, s = job.parallel, job.schedule
        inner, dp = p.tp * p.cp * p.pp, p.dp or self.gpus // (p.tp * p.cp * p.pp)
        if inner * dp != self.gpus:
            why = f"tp·cp·pp = {inner} does not divide" if self.gpus % inner else f"tp·cp·pp·dp = {inner * dp} is not"
            raise job_error("parallel.dp", f"{why} the {self.gpus} GPUs")
        if self.sequences % (dp * s.microbatch_size):
            each = dp * s.microbatch_size
            near = max(1, round(self.sequences / each)) * each
            message = f"dp · microbatch_size = {each} does not divide the global batch of {self.sequences} sequences"
            raise job_error("schedule.global_batch", message, f"global_batch = {near}")
        return job


def replaced(job: Job, changes: Changes) -> Job:
    """A job with some keys changed; keys as `section.key`, None: left out."""
    for section in dict.fromkeys(KEYS.values()):
        mine = {k.split(".", 1)[1]: v for k, v in changes.items() if k.startswith(f"{section}.")}
        if mine:
            job = replace(job, **{section: replace(getattr(job, section), **mine)})
    return job


def _schedules(own: tuple[str, int], names: Sequence[object]) -> tuple[tuple[str, int], ...]:
    fixed = [n for n in NAMES if n in names and not order_depends_on_times(n) and n not in WITHOUT_GAIN]
    several = {n: (2, 4) for n in fixed if legal_chunks(n, 4) and default_chunks(n) == 2}
    return tuple(dict.fromkeys([own, *((n, v) for n in fixed for v in several.get(n, (default_chunks(n),)))]))


def _defaults(job: Job, config: ModelConfig, gpus: int, per_node: int) -> dict[str, tuple[object, ...]]:
    """What is tried where `[search]` says nothing: powers of two, the job's own value first.

    Several ranks to a KV head are tried where they are listed: of what runs a plan, only Megatron-Core has them.
    """
    p, s, m = job.parallel, job.schedule, job.model
    experts = config.moe.experts if config.moe is not None else 1
    most_ep = min(MOST_EP, experts, gpus)
    cheap = CHEAP if config.mla is not None else tuple(x for x in CHEAP if x != "up_projection")
    recompute = [s.recompute, "none", cheap, "full", *(["selective"] if m.attention == "unfused" else [])]
    found: dict[str, Sequence[object]] = {
        "tp": [p.tp, *(n for n in _powers(gpus, per_node) if not shares_kv_heads(config, n))],
        "cp": [p.cp, *_powers(gpus, max(1, m.seq_len // LONG))],
        "pp": [p.pp, *_powers(gpus, min(config.layers, gpus))],
        "ep": [p.ep, *(n for n in _powers(gpus, most_ep) if experts % n == 0 and n * 8 >= most_ep)],
        "zero": [p.zero, 1, 3],
        "dp_replicate": [p.dp_replicate, NODE],
        "layers": [p.layers, "balanced"],
        "microbatch_size": [s.microbatch_size, 1, 2, 4],
        "recompute": recompute,
    }
    return {k: tuple(dict.fromkeys(v)) for k, v in found.items()}


def _powers(gpus: int, most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most and gpus % 2**i == 0]
