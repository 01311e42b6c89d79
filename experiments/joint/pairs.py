"""Matched runs with expert communication overlapped or not, predicted: ratios of seconds per step.

    python -m experiments.joint pairs

Megatron-LM pull request 6429 (DeepSeek-V3 cut to 14 layers, 64 H100) and Megatron-Bridge pull request 3862
(Qwen3-30B-A3B, 16 H100): data/moe_overlap_ab.csv. All jobs run on the same hardware file with the software of imports
of Megatron (`megatron-core`) and `dispatcher = "nccl"`; nothing is set per row but what the row says.
"""

from pathlib import Path
from typing import Any

from experiments.published.rows import lines
from ir.job.load import job_from
from piper_sim.study.predict import predict
from piper_sim.study.prediction import Prediction

PLAIN = {"accumulate": "1f1b", "interleaved-1f1b": "interleaved-1f1b"}
CONFIG: dict[str, dict[str, Any]] = {
    "deepseek-v3-14-layers": {"config": "deepseek-v3", "num_hidden_layers": 14},
    "qwen3-30b-a3b": {"config": "qwen3-30b-a3b"},
}
PAIRS = (("ab01", "ab02"), ("ab08", "ab09"), ("ab08", "ab10"))  # ab03's device was full


def table() -> dict[str, dict[str, str]]:
    """Rows by case."""
    return {row["case_id"]: row for row in lines(Path(__file__).parent / "data" / "moe_overlap_ab.csv")}


def job_of(row: dict[str, str], **costs: object) -> dict[str, Any]:
    """A row as a job."""
    schedule: dict[str, Any] = {"name": PLAIN[row["schedule"]], "microbatches": int(row["microbatches"])}
    schedule["recompute"] = row["recompute"]
    if row["ep_overlap"] == "1":
        schedule |= {"name": f"{schedule['name']}-overlap", "merge": "template"}
        schedule["delay_wgrad"] = row["delay_wgrad"] == "1"
    if "layout " in row["note"]:
        schedule["layout"] = row["note"].split("layout ")[1].split(":")[0]
    parallel = {k: int(row[k]) for k in ("tp", "cp", "pp", "dp", "ep", "etp")}
    return {
        "model": CONFIG[row["model"]] | {"seq_len": int(row["seq_len"])},
        "cluster": {"gpu": "h100-sxm", "gpus_per_node": 8},
        "parallel": parallel | {"zero": 1},
        "schedule": schedule,
        "costs": {"software": "megatron-core", "dispatcher": "nccl"} | costs,
    }


def predicted(row: dict[str, str], **costs: object) -> Prediction:
    """A row's prediction."""
    return predict(job_from(job_of(row, **costs)))


def rows() -> list[tuple[str, float, float]]:
    """(pair, measured ratio, ours), and each arm's seconds."""
    found = table()
    ours = {k: predicted(found[k]).iteration_s for k in sorted({c for pair in PAIRS for c in pair})}
    took = {k: float(found[k]["iter_time_s"]) for k in ours}
    out = [(f"{b} / {a}, {found[a]['model']}", took[b] / took[a], ours[b] / ours[a]) for a, b in PAIRS]
    return out + [(f"{k}, s", took[k], ours[k]) for k in ours]
