"""What the ranks of an allocation are asked together. Rank 0 asks, gets the figures and speaks; the others follow."""

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from executor.launch.watch.sights import host
from executor.launch.watch.verdict import RankFailed
from executor.launch.watch.watchdog import FAILED
from ir.core.errors import ErrorKind, PiperError
from ir.job.build import PreparedJob, prepare
from ir.job.run_options import JobRunOptions
from ir.job.schema import Job
from piper_sim.app.doctor import machine, runs
from piper_sim.app.doctor.checks import Question
from piper_sim.app.doctor.collectives import collectives
from piper_sim.app.doctor.forecast import forecast
from piper_sim.app.doctor.ranks import FAULTS, AllocationRanks, numbered

STEPS, LONG = 2, 10_000
NOT_TOGETHER = (
    "races, where the host waits, peak memory: of plans and software, not of an allocation; piper-sim doctor on a "
    "machine by itself asks for them"
)


def follow() -> int:
    """Of every rank but 0; returns the exit code. Raises PiperError: somebody is not there."""
    return AllocationRanks.meet().follow()


def asked(job: Job | None, shared: str | None) -> Iterator[tuple[str, Question]]:
    """Of rank 0; closed, it tells the others that nothing more comes. shared: a folder that all machines see."""
    there: list[AllocationRanks] = []

    def meet() -> Mapping[str, object]:
        there.append(AllocationRanks.meet())
        return {"ranks": there[0].ranks, "of_a_machine": there[0].node}

    yield "all ranks are there", meet
    code = FAILED
    try:
        yield from _asked(there[0], job, shared)
        code = 0
    finally:
        there[0].over(code)


def _asked(ranks: AllocationRanks, job: Job | None, shared: str | None) -> Iterator[tuple[str, Question]]:
    yield "versions", lambda: alike(ranks.everywhere(machine.versions))
    yield "files", lambda: ranks.everywhere(machine.files)[0]
    yield "clock", lambda: ranks.everywhere(machine.clock)[0]
    yield "devices", lambda: devices(ranks)
    yield "equal to one rank", lambda: equality(ranks)
    yield "every collective by size", lambda: collectives(ranks, job)
    yield "every schedule from a cold start", lambda: in_pairs(ranks, runs.schedules)
    yield "uneven and empty exchanges", lambda: in_pairs(ranks, runs.exchanges)
    yield "saved and resumed under another plan", lambda: restart(ranks, shared)
    for kind in FAULTS:
        yield f"a rank that is {kind} is named", partial(failure, ranks, kind)
    yield "predicted as measured", lambda: in_pairs(ranks, forecast)


def alike(found: list[dict[str, str]]) -> Mapping[str, object]:
    """Ranks have the same versions; the variables may differ. Raises PiperError: they have not."""
    for name in ("python", *machine.PACKAGES):
        have: dict[str, list[int]] = defaultdict(list)
        for rank, one in enumerate(found):
            have[one[name]].append(rank)
        if len(have) > 1:
            message = f"{name} is " + ", ".join(f"{v} on {numbered(ranks)}" for v, ranks in have.items())
            fix = "the same environment on every machine"
            raise PiperError(ErrorKind.MISSING_DEPENDENCY, message, key=name, allowed="one version", suggestion=fix)
    return found[0]


def devices(ranks: AllocationRanks) -> Mapping[str, object]:
    """Those of rank 0. Where each rank has GPUs, what follows runs on nccl."""
    found = ranks.everywhere(machine.devices)
    ranks.backend = "nccl" if all(one["gpus"] for one in found) else "gloo"
    return {**found[0], "backend": ranks.backend}


def in_pairs(ranks: AllocationRanks, ask: Question) -> Mapping[str, object]:
    """Of a pipeline of two."""
    return {"undecided": f"{ranks.ranks} ranks are no pairs"} if ranks.ranks % 2 else ask(ranks)


def sections(world: int) -> runs.Sections:
    """A job for so many ranks with every kind of message there is: point to point, all-to-alls, gathers, reductions.

    >>> sections(6)["parallel"]
    {'pp': 2, 'dp': 3, 'ep': 1, 'zero': 3}
    """
    pp = 1 if world % 2 else 2
    dp = world // pp
    ep = next(n for n in (4, 2, 1) if dp % n == 0)
    schedule = {"name": "zb1p" if pp > 1 else "1f1b", "microbatches": 4}
    return {**runs.EXPERTS, "parallel": {"pp": pp, "dp": dp, "ep": ep, "zero": 3}, "schedule": schedule}


def equality(ranks: AllocationRanks) -> Mapping[str, object]:
    """Together they train what one rank trains by itself. Raises PiperError: they do not."""
    several = ranks.prepared(sections(ranks.ranks), "fp64")
    whole = {"microbatches": several.mbs * several.mesh.sizes["dp"]}
    one = prepare(runs.job_of({"model": runs.EXPERTS["model"], "schedule": whole}, "fp64"))
    found, _ = ranks.run(several, several.plan(), JobRunOptions(ranks.ranks, STEPS, ranks.backend))
    off = runs.apart(runs.curve(one, "local", STEPS), [*found["losses"], *found["grad_norms"]])
    if not off <= runs.TOLERANCE["fp64"]:
        message = f"{ranks.ranks} ranks on {ranks.backend} are {off:.1e} from one process"
        raise runs.wrong(message, f"at most {runs.TOLERANCE['fp64']}")
    return {"off": off} | {k: found[k] for k in ("connect_s", "iteration_s")}


def restart(ranks: AllocationRanks, shared: str | None) -> Mapping[str, object]:
    """See `runs.resumed`, in a folder that all ranks see. Raises PiperError (io): they do not."""
    one_machine = len(set(ranks.everywhere(host))) == 1
    if shared is None and not one_machine:
        return {"undecided": "no folder is known that all machines see: --shared DIR"}
    with tempfile.TemporaryDirectory(prefix="piper-doctor-", dir=shared) as folder:
        ranks.everywhere(machine.sees, folder)
        dp = ranks.ranks
        under = {"parallel": {"dp": dp, "zero": 3}, "schedule": {"microbatches": 2}}
        return runs.resumed(
            ranks.prepared({**under, "parallel": {"dp": dp}}, "fp64") if dp % 2 else pairs(ranks, "fp64"),
            ranks.prepared(under, "fp64"),
            str(Path(folder) / "saved"),
            ranks,
        )


def pairs(ranks: AllocationRanks, compute: str) -> PreparedJob:
    """ZB1P over two stages."""
    return ranks.prepared({"parallel": {"pp": 2, "dp": ranks.ranks // 2}, "schedule": {"name": "zb1p"}}, compute)


def failure(ranks: AllocationRanks, kind: str) -> Mapping[str, object]:
    """Something befalls the last rank in its second step: it is named. Of connections that end, either end is.

    Raises PiperError: another, or nobody.
    """
    if kind == "cut off" and ranks.backend == "nccl":
        return {"undecided": "nccl's connections are no sockets of a process that could be shut"}
    prepared, last = ranks.prepared({"parallel": {"dp": ranks.ranks}}, "fp32"), ranks.ranks - 1
    options = JobRunOptions(ranks.ranks, LONG, ranks.backend, watchdog_s=runs.WATCHDOG_S, emulate=0.01)
    try:
        ranks.run(prepared, prepared.plan(), options, fault={"kind": kind, "rank": last})
    except RankFailed as error:
        if error.rank != last and not (kind == "cut off" and "connection" in error.reason):
            raise runs.wrong(f"rank {error.rank} blamed: {error.reason}", f"rank {last}, {kind}") from error
        return {"rank": error.rank, "op": error.op}
    raise runs.wrong(f"a rank that is {kind} was not missed", f"rank {last} named")
