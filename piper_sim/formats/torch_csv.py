"""A schedule as torch.distributed.pipelining's CSV: a row of op texts per rank, compute only."""

from ir.core.errors import job_error
from ir.directives.place import OrderDirective, PlaceDirective
from ir.job.build import PreparedJob


def order_csv(prepared: PreparedJob) -> str:
    """The order of every rank, which torch's `_PipelineScheduleRuntime._load_csv` reads; it puts in communication.

    Raises PiperError (job): stages that stand on two ranks, which torch's runtime does not have.
    """
    twice = any(isinstance(d, PlaceDirective) and "MB" in d.filter.json() for d in prepared.strategy)
    tables = [d.table for d in prepared.strategy if isinstance(d, OrderDirective)]
    rows = {group: order for table in tables for group, order in table}
    if twice:
        message = f"torch's runtime has each stage on one rank; {prepared.schedule} has two copies"
        raise job_error("schedule.name", message, "dualpipev", "one direction")
    return "".join(",".join(rows[rank].cells()) + "\n" for rank in sorted(rows))
