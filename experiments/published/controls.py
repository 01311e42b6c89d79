"""Changes to every job that must cost accuracy: without software files, another GPU's file, one efficiency for all."""

from __future__ import annotations

from experiments.published.score import Table


def plain(job: Table) -> Table:
    """Without a software file."""
    job.get("costs", {}).pop("software", None)
    return job
