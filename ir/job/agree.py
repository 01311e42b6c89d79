"""Where a strategy file and its job meet: what they must agree on, what one fills in for the other."""

from dataclasses import replace

from ir.core.errors import PiperError, directive_error, job_error
from ir.core.filters import parse_filter
from ir.directives import ReplicateDirective, ShardDirective, SplitDirective
from ir.directives.load import DirectiveFile
from ir.graph.graph import Graph
from ir.graph.sync import buckets
from ir.job.schema import Job
from ir.workload.captured import CapturedModelWork
from ir.workload.part import CP_COMMS


def agree(job: Job, made: DirectiveFile) -> Job:
    """The job, where its sizes are the strategy's; ep is the strategy's where the job leaves it out."""
    p, mbs = job.parallel, job.schedule.microbatches
    if made.groups != p.pp:
        raise _other(
            "parallel.pp", f"the strategy is for {made.groups} pipeline ranks, not {p.pp}", f"pp = {made.groups}"
        )
    if made.replicas is not None and made.replicas != (p.dp or 1):
        raise _other("parallel.dp", f"the strategy has {made.replicas} replicas, dp is {p.dp}", f"dp = {made.replicas}")
    if made.mbs is not None and mbs not in (None, made.mbs):
        raise _other("schedule.microbatches", f"the strategy splits into {made.mbs}", f"microbatches = {made.mbs}")
    per_rank = made.stages // p.pp
    if job.schedule.stages_per_rank not in (None, per_rank):
        raise _other("schedule.stages_per_rank", f"the strategy has {per_rank}", f"stages_per_rank = {per_rank}")
    if made.experts is not None and p.ep == 1:
        p = replace(p, ep=made.experts)
    if made.experts is not None and p.ep * p.etp != made.experts:
        message = f"the strategy shards experts over {made.experts} devices, etp·ep is {p.ep * p.etp}"
        raise _other("parallel.ep", message, f"ep = {made.experts}")
    copied = {d.dp_replicate for d in made.directives if isinstance(d, ReplicateDirective)} - {1}
    if p.dp_replicate == 1 and len(copied) == 1:
        p = replace(p, dp_replicate=copied.pop())
    elif p.dp_replicate > 1 and not copied:
        message = f"dp_replicate = {p.dp_replicate}, and the strategy copies no shards"
        raise _other("parallel.dp_replicate", message, "dp_replicate = 1")
    axes = {d.axis for d in made.directives if isinstance(d, ShardDirective)}
    for axis, size in (("tp", p.tp), ("cp", p.cp), ("ep", p.ep * p.etp)):
        if size > 1 and axis not in axes:
            raise _other(f"parallel.{axis}", f"{axis} = {size}, but the strategy shards nothing over it", f"{axis} = 1")
    return replace(job, parallel=p)


def _other(key: str, message: str, fix: str) -> PiperError:
    return job_error(key, message, fix, "what the strategy says")


def check_replicated(graph: Graph) -> None:
    """Copies of parameters that nothing keeps in step would train apart, without a word.

    Raises PiperError (directive): parameters have copies that no `replicate` names.
    """
    for b in buckets(graph):
        if not b.alone and not b.replicated:
            raise directive_error(
                f"parameters of stage {b.stage} ({b.name}) are on {b.ranks} ranks, and no replicate names them",
                "a replicate for every part that has copies",
                'add {"op": "replicate", "filter": {}}',
            )


def check_as_captured(graph: Graph) -> None:
    """The numbers of a captured module are those of one division, which a strategy cannot change part by part.

    Raises PiperError (directive): it divides some part otherwise.
    """
    if not isinstance(graph.source, CapturedModelWork):
        return
    f, every = graph.source.model.found, 'a filter that matches all: {}, of ep {"EP": "*"}'
    for e in graph.entries:
        x, heads = e.layout, f.cp > 1 and f.cp_heads
        both = f"parallel.sequence_parallel = {str(x.sequence_parallel).lower()}"
        for what, given, wanted, fix in (
            ("tp", x.tp, f.tp, every),
            ("cp", x.cp, f.cp, every),
            ("ep", x.ep, f.ep if e.part.name == "experts" else 1, every),
            ("sequence_parallel", x.sequence_parallel, f.sequence_parallel, both),
            ("heads", x.cp_heads, heads, f'parallel.cp_comm = "{CP_COMMS[x.cp_heads]}"'),
        ):
            if given != wanted:
                message = f"{what} is {given:d} of {e.name} in the strategy, and it was captured with {wanted:d}"
                raise directive_error(message, "as it was captured", fix)


def with_split(made: DirectiveFile, mbs: int | None) -> DirectiveFile:
    """UW's base files leave the split to whoever runs them."""
    if made.mbs is not None or mbs is None:
        return made
    return replace(made, directives=(SplitDirective(parse_filter({}), "MB", mbs), *made.directives), mbs=mbs)
