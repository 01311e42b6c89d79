"""Changes to every job that must cost accuracy: no software file, another GPU's file, one efficiency for all."""

from collections.abc import Mapping
from copy import deepcopy

from experiments.published.score import Change, Table
from experiments.published.sets import facts

_SWAP = {"h100-sxm": "a100-sxm-80gb"}  # all others as H100


def plain(job: Table) -> Table:
    """Without a software file."""
    job.get("costs", {}).pop("software", None)
    return job


def swapped(job: Table) -> Table:
    """H100 as A100, all others as H100; the cluster's own network stays."""
    return {**job, "cluster": {**job["cluster"], "gpu": _SWAP.get(job["cluster"]["gpu"], "h100-sxm")}}


def constant(job: Table) -> Table:
    """One share of the peak for every product of any shape, and no cost for anything else: Megatron's MFU rule."""
    rule = deepcopy(facts()["constant"])
    rule["gemm"]["burst"] = None
    return plain({**job, "cluster": {**job["cluster"], **rule}})


CONTROLS: Mapping[str, Change] = {"plain": plain, "swapped": swapped, "constant": constant}
