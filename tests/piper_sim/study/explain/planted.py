"""Planted causes: drawn jobs with a slow rank, slow links, a hot expert, a late host or a bad split, alone or paired.

`python -m tests.piper_sim.study.explain.planted N` runs N of them and says how many were named first; with `wide`
behind it, jobs of any kind, which have causes of their own.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from math import inf
from typing import Any

from ir.core.errors import PiperError
from ir.job.load import job_from
from ir.schedules.registry import build, default_chunks
from piper_sim.study.explain import StepExplanation, explained
from piper_sim.study.predict import predict
from piper_sim.study.prediction import Prediction

CAUSES = ("straggler", "link", "expert_skew", "host", "split")
PAIRS = [(a,) for a in CAUSES] + [(a, b) for i, a in enumerate(CAUSES) for b in CAUSES[i + 1 :]]
MATTERS = 0.04  # of the step: what removing a planted cause must gain, else it was not planted well enough to be named
FORMS = {"1f1b": 1, "gpipe": 1, "zb1p": 1, "interleaved-1f1b": 2, "zbv": 2, "dualpipe": 1}
WIDE = ("1f1b", "gpipe", "interleaved-1f1b", "looped-bfs", "zb1p", "zbv", "dualpipe", "dualpipev")
DENSE = ("llama3-8b", "llama3-70b", "qwen3-8b", "gpt3-175b", "gemma2-9b", "llama2-13b")
SPARSE = ("mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3", "olmoe-1b-7b")
GPUS = ("a100-sxm-80gb", "h100-sxm", "h200-sxm", "b200-sxm", "h800-sxm")
SMALL = {"vocab_size": 8192, "seq_len": 4096}  # a head like a layer, or it would be a bad split by itself
Table = dict[str, dict[str, Any]]
Row = tuple[str, int, float]  # cause, rank, seconds


@dataclass(frozen=True)
class Case:
    """A job with causes planted: its sections without and with them; by cause, those without it and whose it is."""

    calm: Table
    table: Table
    without: Mapping[str, Table]
    rank: Mapping[str, set[int]]


def drawn_case(seed: int) -> Case:
    """The causes go round, everything else is drawn."""
    rng = random.Random(seed)
    causes = PAIRS[seed % len(PAIRS)]
    moe = "expert_skew" in causes
    name, pp = rng.choice(sorted(FORMS)), rng.choice([2, 4])
    stages, dp = pp * FORMS[name], 4 if moe else 1
    calm: Table = {
        "model": {"config": "mixtral-8x7b" if moe else "llama3-8b", "num_hidden_layers": 2 * stages} | SMALL,
        "cluster": {"gpu": rng.choice(["h100-sxm", "h800-sxm"]), "gpus_per_node": dp, "nodes": pp, "host_launch_us": 1},
        "parallel": {"pp": pp, "dp": dp, "ep": dp, "layers": [2] * stages},
        "schedule": {"name": name, "microbatches": rng.choice([2, 3]) * pp},
        "costs": {"interference": rng.choice(["none", "pairwise"])},
    }
    return _case(calm, {c: _planted(c, calm, rng) for c in causes})


@cache
def drawn_wide(seed: int) -> Case:
    """A job of any kind with milder causes. Drawn again: what is no job, or has nobody who could wait for the cause."""
    rng = random.Random(seed)
    causes = PAIRS[seed % len(PAIRS)]
    while True:
        calm = _any_job(rng, "expert_skew" in causes)
        with suppress(PiperError):
            p = predicted(calm)
            if (p.plan.programs if "split" in causes else p.prepared.ranks) == 1:
                continue
            return _case(calm, {c: _planted_mildly(c, calm, rng) for c in causes})


def _any_job(rng: random.Random, moe: bool) -> Table:
    moe = moe or rng.random() < 0.4
    name, pp, dp = rng.choice(WIDE), rng.choice([1, 2, 4, 4, 8]), rng.choice([2, 4, 8] if moe else [1, 2, 4])
    chunks = rng.choice([2, 3]) if name == "interleaved-1f1b" else default_chunks(name)
    each = rng.choice([2, 3, 4])
    return {
        "model": {
            "config": rng.choice(SPARSE if moe else DENSE),
            "num_hidden_layers": each * pp * chunks,
            "seq_len": rng.choice([2048, 4096, 8192]),
        },
        "cluster": {"gpu": rng.choice(GPUS), "gpus_per_node": rng.choice([1, 2, 4, 8])},
        "parallel": {
            **{"tp": rng.choice([1, 1, 2, 4]), "cp": rng.choice([1, 1, 1, 2]), "pp": pp, "dp": dp},
            **{"ep": rng.choice([e for e in (2, 4, 8) if e <= dp]) if moe else 1, "zero": rng.randrange(4)},
            "layers": [each] * (pp * chunks),
        },
        "schedule": {
            **{"name": name, "microbatches": rng.choice([(pp + 1) // 2, pp, 2 * pp, 3 * pp + 1, 4 * pp])},
            **{"microbatch_size": rng.choice([1, 1, 2, 4]), "recompute": rng.choice(["none", "selective", "full"])},
            "stages_per_rank": chunks,
        },
        "costs": {"interference": rng.choice(["none", "pairwise", "maxmin"])},
    }


def _case(calm: Table, bad: Mapping[str, Table]) -> Case:
    return Case(
        calm,
        merged(calm, *bad.values()),
        {c: merged(calm, *(t for other, t in bad.items() if other != c)) for c in bad},
        {c: _at_fault(c, merged(calm, bad[c])) for c in bad if c in ("straggler", "split")},
    )


def _at_fault(cause: str, table: Table) -> set[int]:
    if cause == "straggler":
        return {int(r) for r in table["cluster"]["speed"]}
    mesh, s, layers = job_from(table).parallel.mesh, table["schedule"], table["parallel"]["layers"]
    made = build(s["name"], table["parallel"]["pp"], s["microbatches"], s.get("stages_per_rank"))
    full = {p.rank_of_stage[layers.index(max(layers))] for p in made.placements}
    return {r for r in range(mesh.ranks) if mesh.coordinates(r)["pp"] in full}


def _planted(cause: str, calm: Table, rng: random.Random) -> Table:
    pp, layers = calm["parallel"]["pp"], list(calm["parallel"]["layers"])
    ranks = pp * calm["parallel"]["dp"]
    match cause:
        case "straggler":
            return {"cluster": {"speed": {str(rng.randrange(ranks)): rng.uniform(0.35, 0.6)}}}
        case "link":
            return {"cluster": {"nic_Gbps": rng.uniform(8.0, 20.0)}}
        case "expert_skew":
            return {"routing": {"kind": "hot", "strength": rng.uniform(8.0, 30.0), "seed": rng.randrange(9)}}
        case "host":
            return {"cluster": {"host_launch_us": rng.uniform(500.0, 1500.0)}}
        case _:
            full = rng.randrange(len(layers))
            layers = [1] * len(layers)
            layers[full] = sum(calm["parallel"]["layers"]) - len(layers) + 1
            return {"parallel": {"layers": layers}}


def _planted_mildly(cause: str, calm: Table, rng: random.Random) -> Table:
    layers = list(calm["parallel"]["layers"])
    match cause:
        case "straggler":
            slow = rng.randrange(job_from(calm).parallel.mesh.ranks)
            return {"cluster": {"speed": {str(slow): rng.uniform(0.5, 0.85)}}}
        case "link":
            tier = {"nic_Gbps": rng.uniform(10, 100)}, {"nvlink_GBps": rng.uniform(5, 60)}
            return {"cluster": rng.choice([*tier, {"leaf_nodes": 1, "oversubscription": rng.uniform(4, 16)}])}
        case "expert_skew":
            kind, strength = rng.choice([("hot", rng.uniform(3, 30)), ("zipf", rng.uniform(0.8, 2))])
            return {"routing": {"kind": kind, "strength": strength, "seed": rng.randrange(9)}}
        case "host":
            return {"cluster": {"host_launch_us": 10 ** rng.uniform(1.5, 3)}}
        case _:
            full, *fewer = rng.sample(range(len(layers)), rng.randint(min(2, len(layers)), len(layers)))
            for stage in fewer:
                layers[stage] -= 1
            layers[full] += len(fewer)
            return {"parallel": {"layers": layers}}


def merged(*tables: Table) -> Table:
    out: Table = {}
    for t in tables:
        for section, keys in t.items():
            out[section] = {**out.get(section, {}), **keys}
    return out


def predicted(table: Table) -> Prediction:
    """Kept for who explains the same job again, in another way."""
    return _predicted(json.dumps(table))


@lru_cache(maxsize=80)
def _predicted(table: str) -> Prediction:
    return predict(job_from(json.loads(table)))


def verdict(case: Case, beside: bool = False) -> tuple[bool | None, str]:
    """Whether what was planted is named first, all of it that matters; None where nothing does.

    Of two, one may hide the other: removing it alone then gains nothing, and it may be named or not. beside: what the
    calm job waits for is its own: causes count by what they are more than there.
    """
    found = explained(predicted(case.table))
    gains = {c: 1 - predicted(t).iteration_s / found.iteration_s for c, t in case.without.items()}
    strong = {c for c, gain in gains.items() if gain >= MATTERS}
    rows = [(c["cause"], c["rank"], c["seconds"]) for c in found.causes]
    if beside and strong:
        rows = _more(rows, explained(predicted(case.calm)))
    told = f"planted {gains}, named {[(cause, rank, round(s, 4)) for cause, rank, s in rows[:5]]}"
    if not strong:
        return None, told
    order = list(dict.fromkeys(cause for cause, _, _ in rows))
    first = {cause: rank for cause, rank, _ in reversed(rows)}
    right = order[:1] != [] and order[0] in gains and strong <= set(order[: len(gains)])
    return right and all(first[c] in case.rank[c] for c in strong & case.rank.keys()), told


def _more(rows: Iterable[Row], calm: StepExplanation) -> list[Row]:
    """What rows are more than a calm job's, by cause: replicas that are no longer equal are named one by one."""
    own = {(c["cause"], c["rank"]): c["seconds"] for c in calm.causes}
    more, whose = Counter[str](), dict[str, tuple[float, int]]()
    for cause, rank, seconds in rows:
        more[cause] += seconds
        whose[cause] = max(whose.get(cause, (-inf, rank)), (seconds - own.get((cause, rank), 0.0), rank))
    for (cause, _), seconds in own.items():
        more[cause] -= seconds
    return [(cause, whose[cause][1], seconds) for cause, seconds in more.most_common() if seconds > 0]


def campaign(count: int, first: int = 0, wide: bool = False) -> tuple[int, int]:
    """(named first, counted) of so many that count."""
    right = counted = 0
    seed = first
    while counted < count:
        case = (drawn_wide if wide else drawn_case)(seed)
        good, told = verdict(case, beside=wide)
        seed += 1
        if good is None:
            print(f"seed {seed - 1} {'+'.join(case.without)} does not count: {told}", file=sys.stderr)
            continue
        counted += 1
        right += good
        if not good:
            print(f"seed {seed - 1} {case.table['schedule']['name']} {case.rank}: {told}", file=sys.stderr)
    return right, counted


if __name__ == "__main__":
    good, of = campaign(int(sys.argv[1]), wide="wide" in sys.argv)
    print(f"{good} of {of} named first ({good / of:.1%})")
