"""Changes to every job that must cost accuracy: no software file, a wrong one, another GPU's, one efficiency for all,
messages of tensor parallelism that nothing hides."""

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


def foreign(job: Table) -> Table:
    """Another framework's software file: Nanotron's for Megatron's relatives, Megatron-Core's for the others."""
    named = job.get("costs", {}).get("software")
    other = "nanotron" if str(named).startswith(("megatron", "nemo", "deepspeed")) else "megatron-core"
    return {**job, "costs": {**job["costs"], "software": other}} if named else job


def in_turn(job: Table) -> Table:
    """No message of tensor parallelism under a product."""
    return {**job, "costs": {**job.get("costs", {}), "tp_overlap": False}}


CONTROLS: Mapping[str, Change] = {
    "plain": plain,
    "foreign": foreign,
    "in turn": in_turn,
    "swapped": swapped,
    "constant": constant,
}
