"""Strategy files as UW's Piper ships them, written anew from their grammar; and jobs that take them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ir.job.build import PreparedJob, prepare
from ir.job.load import job_from
from ir.plan.plan import OpKind, Plan
from ir.verify import check_plan

Fields = dict[str, Any]
A, B = [0, 2], [1, 3]
SPLIT: Fields = {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 4}


def place(pp: object, devices: list[int], stream: str | None = "pp_stream") -> Fields:
    return {"op": "place", "filter": {"PP": pp}, "devices": devices} | ({"stream": stream} if stream else {})


def replicate(pp: int, devices: list[int], **keys: object) -> Fields:
    streams = {"reduce_stream": "dp_stream", "gather_stream": "dp_stream"}
    return {"op": "replicate", "filter": {"PP": pp}, "devices": devices, **streams, **keys}


def shard(pp: int, devices: list[int], stream: str = "ep_stream") -> Fields:
    return {"op": "shard", "filter": {"PP": pp, "EP": "*"}, "devices": devices, "stream": stream}


def order(*groups: list[Fields]) -> Fields:
    return {"op": "order", "filters": list(groups)}


def act(pp: int, mb: int, kind: str) -> Fields:
    return {"PP": pp, "MB": mb, "PASS": kind}


def base(homes: list[list[int]], stream: str = "ep_stream", **keys: object) -> list[Fields]:
    """place, replicate, shard for each stage."""
    stages = list(enumerate(homes))
    places = [place(s, d) for s, d in stages]
    return places + [replicate(s, d, **keys) for s, d in stages] + [shard(s, d, stream) for s, d in stages]


def one_f_one_b(rank: int, ranks: int, mbs: int) -> Fields:
    fill = min(ranks - 1 - rank, mbs)
    steady = [k for m in range(mbs - fill) for k in (act(rank, m + fill, "F"), act(rank, m, "B"))]
    ends = [act(rank, m, "F") for m in range(fill)], [act(rank, m, "B") for m in range(mbs - fill, mbs)]
    return order(*([a] for a in [*ends[0], *steady, *ends[1]]))


SHIPPED: Mapping[str, list[Fields]] = {
    "dp2": [place(0, [0, 1]), replicate(0, [0, 1])],
    "pp2_dp2_ep2": base([A, B]),
    "pp2_dp2_ep2_bucket100": base([A, B], bucket_size=100),
    "pp2_dp2_ep2_zero2": base([A, B], "dp_stream", shard_grads=True),
    "pp2_dp2_ep2_zero3": base([A, B], "dp_stream", shard_params=True),
    "pp2_dp2_ep2_custom_order": [
        *base([A, B]),
        SPLIT | {"num_microbatches": 2},
        order([act(0, 0, "F")], [act(0, 1, "F")], [act(0, 0, "B")], [act(0, 1, "B")]),
        order([act(1, 0, "F")], [act(1, 0, "B"), act(1, 1, "F")], [act(1, 1, "B")]),
    ],
    "pp4_dp2_ep2_interleaved": base([A, B, A, B]),
    "pp4_dp2_ep2_v_placement": base([A, B, B, A]),
}


def write(tmp_path: Path, value: object) -> str:
    path = tmp_path / "strategy.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return str(path)


def prepared(
    path: str, model: str = "tiny-moe", pp: int = 2, dp: int = 2, ep: int = 2, **schedule: object
) -> PreparedJob:
    table = {
        "model": {"config": model, "seq_len": 128},
        "parallel": {"pp": pp, "dp": dp, "ep": ep},
        "schedule": {"directives": path} | {k: v for k, v in schedule.items() if v is not None},
    }
    return prepare(job_from(table))


def planned(*args: Any, **keys: Any) -> Plan:
    plan = prepared(*args, **keys).plan()
    check_plan(plan)
    return plan


def compute(plan: Plan, program: int) -> list[str]:
    rows = range(int(plan.bounds[program]), int(plan.bounds[program + 1]))
    return [plan.text(i) for i in rows if plan.kind[i] == OpKind.COMPUTE]
