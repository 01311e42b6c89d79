"""A job: model, cluster, parallelism, schedule, costs. Read from TOML, refused with a fix, turned into a plan."""

from ir.job.load import load_job
from ir.job.schema import Job

__all__ = ["Job", "load_job"]
