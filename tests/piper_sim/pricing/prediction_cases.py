"""What the tests of whole predictions share: jobs that draw from every option, and the sentences all of them obey."""

import random
from typing import Any

import pytest

from ir.core.errors import PiperError
from ir.job.build import blaming
from ir.job.load import job_from
from piper_sim.study.breakdown import KEYS
from piper_sim.study.predict import predict
from piper_sim.study.prediction import Prediction

Table = dict[str, dict[str, Any]]
Object = dict[str, Any]
SCHEDULES = (
    *("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb1p", "zb2p"),
    *("zbv", "v-half", "v-min", "dualpipe", "dualpipev"),
)
ORDERS = ("tp cp ep dp pp", "pp tp cp ep dp", "dp ep cp tp pp", "pp ep dp tp cp")
RICH: Table = {
    "model": {"config": "tiny-moe", "seq_len": 128, "tie_word_embeddings": True},
    "cluster": {
        "gpu": "h800-sxm",
        "gpus_per_node": 3,
        "leaf_nodes": 1,
        "oversubscription": 4.0,
        "speed": {"1": 0.5, "5": 1.25},
    },
    "parallel": {"tp": 2, "pp": 2, "dp": 4, "ep": 4, "zero": 3},
    "schedule": {"name": "dualpipe", "microbatches": 5, "recompute": ["norm"]},
    "routing": {"kind": "zipf", "strength": 1.5, "seed": 3},
    "costs": {"interference": "maxmin"},
}


def table(config: str = "tiny-moe", **sections: Any) -> Table:
    """A small job on two stages of two; sections: further keys."""
    out: Table = {
        "model": {"config": config, "seq_len": 128},
        "cluster": {"gpu": "h800-sxm"},
        "parallel": {"pp": 2, "dp": 2, "ep": 2 if config == "tiny-moe" else 1},
        "schedule": {"name": "1f1b", "microbatches": 4},
    }
    for section, keys in sections.items():
        out[section] = {**out.get(section, {}), **keys}
    return out


def asked(wanted: Table) -> tuple[Prediction, Object]:
    """The prediction of a job and its JSON object."""
    job = job_from(wanted, file="test")
    with blaming(job):
        found = predict(job)
        return found, found.to_dict()


def answer(config: str = "tiny-moe", **sections: Any) -> Object:
    return asked(table(config, **sections))[1]


def seconds(config: str = "tiny-moe", **sections: Any) -> float:
    return float(answer(config, **sections)["iteration_s"])


def drawn(seed: int, **sections: Any) -> Table:
    """Any combination of options; sections: what is not drawn. Some do not go together: `asked` refuses those."""
    rng = random.Random(seed)
    moe = rng.random() < 0.7
    tp, cp, pp, dp = rng.choice([1, 1, 2, 4]), rng.choice([1, 1, 2]), rng.choice([1, 2, 4]), rng.choice([1, 2, 3, 4])
    ranks = tp * cp * pp * dp
    some = rng.sample(range(ranks), min(ranks, rng.choice([0, 0, 1, 2])))
    out: Table = {
        "model": {
            "config": "tiny-moe" if moe else "tiny-llama",
            "seq_len": rng.choice([128, 512]),
            "num_hidden_layers": 8,
            "tie_word_embeddings": rng.random() < 0.2,
        },
        "cluster": {
            "gpu": rng.choice(["h800-sxm", "a100-sxm-80gb", "b200-sxm"]),
            "gpus_per_node": rng.choice([8, 8, 6, 7, 1, 4]),
            "speed": {str(r): rng.choice([0.5, 0.8, 1.25, 1.0]) for r in some},
        },
        "parallel": {
            **{"tp": tp, "cp": cp, "pp": pp, "dp": dp, "zero": rng.randrange(4), "order": rng.choice(ORDERS)},
            "ep": rng.choice([e for e in (1, 2, 4, 8) if tp * cp * dp % e == 0]) if moe else 1,
        },
        "schedule": {
            "name": rng.choice(SCHEDULES),
            "microbatches": rng.choice([1, 2, 3, 5, 8]),
            "recompute": rng.choice(["none", "full", "selective"]),
        },
        "costs": {
            "host_model": rng.choice(["ahead", "inline"]),
            "interference": rng.choice(["none", "pairwise", "maxmin"]),
        },
        "optimizer": {"clip_norm": rng.choice([0.0, 1.0])},
    }
    if rng.random() < 0.3:
        out["cluster"] |= {"leaf_nodes": rng.choice([1, 2]), "oversubscription": rng.choice([1.0, 2.0, 8.0])}
    if moe and rng.random() < 0.5:
        kind = rng.choice(["zipf", "hot"])
        out["routing"] = {"kind": kind, "strength": rng.choice([1.0, 1.5, 8.0]), "seed": rng.randrange(3)}
    for section, keys in sections.items():
        out[section] = {**out.get(section, {}), **keys}
    return out


def answered(wanted: Table) -> tuple[Prediction, Object] | None:
    """None where the options do not go together: an error of the job, never one of the plan."""
    try:
        return asked(wanted)
    except PiperError as e:
        assert e.kind.exit_code == 2 and e.key, e
        return None


def assert_told(wanted: Table, found: Object) -> None:
    """Every sentence that holds for any job: sums, signs, what an option rules out, the order of memory's numbers."""
    step, costs = found["iteration_s"], wanted.get("costs", {})
    sizes = {a: wanted["parallel"].get(a, 1) for a in ("tp", "cp", "ep", "pp")}
    for row in found["time_breakdown"].values():
        assert tuple(row) == KEYS
        assert sum(row.values()) == pytest.approx(step, rel=1e-9, abs=0)
        assert min(row.values()) >= -1e-15 and row["slowdown"] >= 0
        assert (row["compute"] > 0 and row["optimizer"] > 0) or 0 in wanted["parallel"].get("layers", ())
        if costs.get("interference") == "none":
            assert row["slowdown"] == 0
        if costs.get("host_model") == "inline" and sizes["ep"] == 1:  # else it waits to read counts
            assert row["host"] == 0
        if wanted["schedule"].get("recompute", "none") == "none":
            assert row["recompute"] == 0
        assert not [a for a, size in sizes.items() if size == 1 and row[f"exposed_{a}"]]
    memory = found["memory"]
    ranks = memory["peak_allocated_bytes"]
    assert list(ranks) == list(found["time_breakdown"])
    for r in ranks:
        low, high = memory["reserved_band_bytes"][r]
        assert ranks[r] <= low <= memory["peak_reserved_bytes"][r] <= high
    room = memory["capacity_bytes"] - memory["margin_bytes"]
    assert found["fits"] is (max(memory["device_peak_bytes"].values()) <= room)
    assert ("reason" in found) is not found["fits"]
    folded = found["folded"]
    assert 1 <= folded["replicas_simulated"] <= folded["replicas"]
    assert type(found["ops"]) is int and found["ops"] % folded["replicas_simulated"] == 0
