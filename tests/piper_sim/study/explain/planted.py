"""Planted causes: drawn jobs with a slow rank, slow links, a hot expert, a late host or a bad split, alone or paired.

`python -m tests.piper_sim.study.explain.planted N` runs N of them and says how many were named first.
"""

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ir.job import Job
from ir.job.load import job_from
from piper_sim.study.explain import StepExplanation, explained
from piper_sim.study.predict import predict

CAUSES = ("straggler", "link", "expert_skew", "host", "split")
PAIRS = [(a,) for a in CAUSES] + [(a, b) for i, a in enumerate(CAUSES) for b in CAUSES[i + 1 :]]
MATTERS = 0.04  # of the step: what removing a planted cause must gain, else it was not planted well enough to be named
FORMS = {"1f1b": 1, "gpipe": 1, "zb1p": 1, "interleaved-1f1b": 2, "zbv": 2, "dualpipe": 1}
SMALL = {"vocab_size": 8192, "seq_len": 4096}  # a head like a layer, or it would be a bad split by itself
Table = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A job with causes planted: its sections; by cause, those without it and the pipeline ranks that have it."""

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
    bad, rank = {c: _planted(c, calm, rng) for c in causes}, {}
    for c in causes:
        if c == "straggler":
            rank[c] = {int(next(iter(bad[c]["cluster"]["speed"]))) // dp}
        if c == "split":
            layers = bad[c]["parallel"]["layers"]
            rank[c] = _homes(layers.index(max(layers)), pp, name)
    return Case(
        merged(calm, *bad.values()),
        {c: merged(calm, *(t for other, t in bad.items() if other != c)) for c in causes},
        rank,
    )


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


def _homes(stage: int, pp: int, name: str) -> set[int]:
    if name == "dualpipe":
        return {stage, pp - 1 - stage}
    return {2 * pp - 1 - stage if name == "zbv" and stage >= pp else stage % pp}


def merged(*tables: Table) -> Table:
    out: Table = {}
    for t in tables:
        for section, keys in t.items():
            out[section] = {**out.get(section, {}), **keys}
    return out


def asked(table: Table) -> tuple[Job, StepExplanation]:
    job = job_from(table)
    return job, explained(predict(job))


def verdict(case: Case) -> tuple[bool | None, str]:
    """Whether what was planted is named first, all of it that matters; None where nothing does.

    Of two, one may hide the other: removing it alone then gains nothing, and it may be named or not.
    """
    _, found = asked(case.table)
    gains = {c: 1 - predict(job_from(t)).iteration_s / found.iteration_s for c, t in case.without.items()}
    order = list(dict.fromkeys(c["cause"] for c in found.causes))
    told = f"planted {gains}, named {[(c['cause'], c['rank'], round(c['seconds'], 4)) for c in found.causes[:5]]}"
    strong = {c for c, gain in gains.items() if gain >= MATTERS}
    if not strong:
        return None, told
    dp = case.table["parallel"]["dp"]
    first = {c["cause"]: c["rank"] // dp for c in reversed(found.causes)}
    right = order[0] in gains and strong <= set(order[: len(gains)])
    return right and all(first[c] in case.rank[c] for c in strong & case.rank.keys()), told


def campaign(count: int, first: int = 0) -> tuple[int, int]:
    """(named first, counted) of so many that count."""
    right = counted = 0
    seed = first
    while counted < count:
        case = drawn_case(seed)
        good, told = verdict(case)
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
    good, of = campaign(int(sys.argv[1]))
    print(f"{good} of {of} named first ({good / of:.1%})")
