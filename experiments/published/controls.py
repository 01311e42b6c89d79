"""Changes to every job that must cost accuracy: no software file, another GPU's file, one efficiency for all."""

from collections.abc import Mapping

from experiments.published.score import Change, Table

_SWAP = {"h100-sxm": "a100-sxm-80gb"}  # all others as H100
_ONE_TILE = [[1, 1, 1.0]]


def plain(job: Table) -> Table:
    """Without a software file."""
    job.get("costs", {}).pop("software", None)
    return job


def swapped(job: Table) -> Table:
    """H100 as A100, all others as H100; the cluster's own network stays."""
    return {**job, "cluster": {**job["cluster"], "gpu": _SWAP.get(job["cluster"]["gpu"], "h100-sxm")}}


def constant(job: Table) -> Table:
    """One share of the peak for every product, whatever its shape, and no cost for anything else: Megatron's MFU rule.

    0.55 is the middle of what tuned runs on A100 and H100 report.
    """
    share = {d: 0.55 for d in ("fp64", "fp32", "bf16", "fp16", "fp8")}
    gemm = {
        "efficiency": share,
        "unhidden_memory": dict.fromkeys(share, 0.0),
        "ramp_bytes": 0,
        "tiles": _ONE_TILE,
        "sustained": dict.fromkeys(share, 1.0),
        "burst": None,
    }
    attention = {"forward_efficiency": 0.55, "backward_efficiency": 0.55, "ramp_tokens": 0, "head_exponent": 0}
    free = {"memory_efficiency": 1.0, "memory_ramp_KiB": 0, "kernel_launch_us": 0}
    more = {"gemm": {**gemm, "grouped_efficiency": 1.0}, "attention": {**attention, "portable": 1.0}, **free}
    return plain({**job, "cluster": {**job["cluster"], **more}})


CONTROLS: Mapping[str, Change] = {"plain": plain, "swapped": swapped, "constant": constant}
