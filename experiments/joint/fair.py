"""DeepSeek-V3 on 2,048 H800 as it is, and as 64 uniform layers: every schedule with the overlap it can have.

    python -m experiments.joint fair [--microbatches 120] [--wire 1,0.001]

Uniform: 64 MoE layers, no multi-token prediction, a vocabulary of 256, so that no stage is dearer than another. wire:
seconds of all-to-alls over the modelled ones (as links of that much less; 0.001 is free for all that matters).
Overlap schedules and DualPipe merge by `template`; DualPipe by `alternate`, too. What does not fit stays in the table.
"""

import tomllib
from collections.abc import Iterator
from typing import Any

from ir.core.errors import PiperError
from ir.job.load import job_from
from piper_sim.app.commands.demo import JOB
from piper_sim.study.predict import predict

UNIFORM = {"num_hidden_layers": 64, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0, "vocab_size": 256}
LAYOUT = "Et*3|(tt|)*29,m|L"  # Megatron-Bridge's recipe of DeepSeek-V3 on 16 x 2 stages
# Of which every one has all the overlap that it can have.
SCHEDULES = ("1f1b", "interleaved-1f1b", "zbv", "1f1b-overlap", "interleaved-1f1b-overlap", "dualpipe", "dualpipev")
# schedule, merge, weight gradients delayed
ARMS = (
    ("1f1b", "alternate", False),
    ("interleaved-1f1b", "alternate", False),
    ("zb1p", "alternate", False),
    ("zbv", "alternate", False),
    ("1f1b-overlap", "template", False),
    ("1f1b-overlap", "template", True),
    ("interleaved-1f1b-overlap", "template", False),
    ("interleaved-1f1b-overlap", "template", True),
    ("interleaved-1f1b-overlap layout", "template", True),
    ("dualpipe", "alternate", False),
    ("dualpipe", "template", True),
    ("dualpipev", "template", True),
)


def usual(name: str) -> tuple[str, int]:
    """A schedule's merge with the overlap that it can have, and its stages per rank."""
    overlaps = name.startswith("dualpipe") or name.endswith("overlap")
    two = name.startswith("interleaved") or name in ("zbv", "dualpipev")
    return "template" if overlaps else "alternate", 2 if two else 1


def job(
    name: str, merge: str, delay: bool, *, uniform: bool, microbatches: int = 120, wire: float = 1.0
) -> dict[str, Any]:
    """One arm as a job."""
    table = tomllib.loads(JOB)
    name, _, layout = name.partition(" ")
    table["schedule"] |= {"layout": LAYOUT} if layout else {}
    table["schedule"] |= {"name": name, "merge": merge, "delay_wgrad": delay, "microbatches": microbatches}
    table["schedule"]["stages_per_rank"] = usual(name)[1]
    if uniform:
        table["model"] |= UNIFORM
    if wire != 1.0:
        found = {"dispatch_nvlink_efficiency": 0.65, "dispatch_nic_efficiency": 0.89}
        table["cluster"] |= {"nvlink_GBps": 200 / wire, "nic_Gbps": 400 / wire} | found
    return table


def rows(microbatches: int = 120, wire: float = 1.0) -> Iterator[tuple[str, dict[str, object]]]:
    """(model and arm, figures): seconds of a step, what is exposed of all-to-alls, the fullest rank's GiB."""
    for uniform in (True, False):
        for name, merge, delay in ARMS:
            if uniform and name.endswith("layout"):
                continue
            label = f"{'uniform' if uniform else 'real'} {name} {merge}{' delayed' if delay else ''}"
            table = job(name, merge, delay, uniform=uniform, microbatches=microbatches, wire=wire)
            try:
                found = predict(job_from(table)).to_dict()
            except PiperError as e:
                yield label, {"reason": e.message}
                continue
            ranks = found["time_breakdown"].values()
            yield (
                label,
                {
                    "iteration_s": found["iteration_s"],
                    "exposed_ep_s": sum(r["exposed_ep"] for r in ranks) / len(ranks),
                    "peak_GiB": max(found["memory"]["device_peak_bytes"].values()) / 2**30,
                    "fits": found["fits"],
                },
            )
