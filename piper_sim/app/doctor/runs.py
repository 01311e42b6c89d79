"""Small runs of real plans, compared with each other, with predictions, and with what must not happen."""

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from executor.launch.launch import launch
from executor.launch.run import check, run
from executor.launch.watch.verdict import RankFailed
from executor.measure.peak_bytes import peak_bytes
from executor.runtime.target import Target
from ir.core.errors import ErrorKind, PiperError
from ir.job.build import PreparedJob, prepare
from ir.job.load import job_from
from ir.job.routing.forced import ForcedExperts
from ir.job.run_options import CheckpointOptions, JobRunOptions
from ir.job.schema import Job
from ir.plan.plan import Plan
from ir.schedules.registry import NAMES
from ir.trace.trace import Trace

STEPS, COLD_STEPS = 3, 2
Sections = Mapping[str, Mapping[str, object]]
JOB: dict[str, dict[str, object]] = {
    "model": {"config": "tiny-llama", "num_hidden_layers": 4, "seq_len": 16},
    "cluster": {"gpu": "h100-sxm", "nodes": 1, "gpus_per_node": 1},
    "parallel": {"pp": 1, "dp": 1},
    "schedule": {"name": "1f1b", "microbatches": 4},
}
# Same model, same global batch, other plans.
PLANS: dict[str, Sections] = {
    "one rank": {},
    "2 ranks, zb1p": {"parallel": {"pp": 2}, "schedule": {"name": "zb1p"}},
    "4 ranks, dualpipe, ZeRO-3": {
        "parallel": {"pp": 2, "dp": 2, "zero": 3},
        "schedule": {"name": "dualpipe", "microbatches": 2},
    },
}
TOLERANCE = {"fp64": 1e-12, "fp32": 2e-5, "bf16": 3e-2}
EXPERTS: Sections = {"model": {"config": "tiny-moe"}, "parallel": {"dp": 2, "ep": 2}, "schedule": {"microbatches": 2}}
FULL: Sections = {"routing": {"kind": "zipf", "strength": 99.0, "forced": True}}
TOUCHED, WATCHDOG_S, REPORTED_S = 1, 5.0, 10.0


def job_of(sections: Sections, compute: str, seed: int = 0) -> Job:
    """The small job with other keys. seed: of the weights."""
    job = {s: {**JOB.get(s, {}), **sections.get(s, {})} for s in {**JOB, **sections}}
    job["cluster"]["gpus_per_node"] = int(str(job["parallel"]["pp"])) * int(str(job["parallel"]["dp"]))
    job["model"]["seed"] = seed
    job["precision"] = dict.fromkeys(("compute", "params", "grads", "optimizer"), compute)
    return job_from(job)


class MachineRanks:
    """Ranks that runs have here, each a process of this machine. node: how many share a machine."""

    def __init__(self, ranks: int = 2, node: int | None = None, backend: str = "gloo") -> None:
        self.ranks, self.node, self.backend = ranks, node or ranks, backend

    def run(
        self, prepared: PreparedJob, plan: Plan, options: JobRunOptions, saving: CheckpointOptions = CheckpointOptions()
    ) -> tuple[dict[str, Any], Trace]:
        """See `executor.launch.run.run`."""
        return run(prepared, plan, options, saving)

    def check(self, prepared: PreparedJob, plan: Plan, options: JobRunOptions) -> None:
        """See `executor.launch.run.check`."""
        check(prepared, plan, options)

    def call(self, fn: Target, args: Mapping[str, object]) -> list[tuple[Any, float]]:
        """What a function returns on every rank, and by how many seconds its clock is ahead."""
        return [(found, 0.0) for found in launch(fn, self.ranks, args)]

    def prepared(self, sections: Sections, compute: str) -> PreparedJob:
        """The small job with other keys, on machines of this size."""
        job = job_of(sections, compute)
        cluster = replace(job.cluster, nodes=-(-self.ranks // self.node), gpus_per_node=self.node)
        return prepare(replace(job, cluster=cluster))


def prepared_of(plan: str, compute: str, seed: int = 0) -> PreparedJob:
    """The small job under one of the plans."""
    return prepare(job_of(PLANS[plan], compute, seed))


def curve(
    prepared: PreparedJob,
    backend: str,
    steps: int = STEPS,
    saving: CheckpointOptions = CheckpointOptions(),
    at: MachineRanks = MachineRanks(),
) -> list[float]:
    """Losses and gradient norms of a run."""
    found, _ = at.run(prepared, prepared.plan(), JobRunOptions(prepared.ranks, steps, backend), saving)
    return [*found["losses"], *found["grad_norms"]]


def apart(a: Iterable[float], b: Iterable[float]) -> float:
    """The largest relative difference."""
    return max(abs(x - y) / max(abs(x), abs(y), 1e-300) for x, y in zip(a, b, strict=True))


def equality() -> Mapping[str, object]:
    """Every plan trains what one rank trains; other weights are told apart. Raises PiperError: one does not."""
    found: dict[str, object] = {}
    for compute, tolerance in TOLERANCE.items():
        alone = curve(prepared_of("one rank", compute), "local")
        for plan in list(PLANS)[1:]:
            off = apart(alone, curve(prepared_of(plan, compute), "local"))
            found[f"{compute}, {plan}"] = off
            if not off <= tolerance:
                raise wrong(f"{plan} in {compute} on local: {off:.1e} from one rank", f"at most {tolerance}")
        off = apart(alone, curve(prepared_of("one rank", compute, seed=1), "local"))
        if off <= tolerance:
            raise wrong(f"two seeds train the same in {compute}: the comparison sees nothing", f"over {tolerance}")
    return found


def processes(backend: str) -> Mapping[str, object]:
    """Two processes that send to each other train what one does, to the bit of the same plan in one process."""
    prepared = prepared_of("2 ranks, zb1p", "fp64")
    off = apart(curve(prepared, "local"), curve(prepared, backend))
    if off > TOLERANCE["fp64"]:
        raise wrong(f"two processes on {backend} are {off:.1e} from two threads", f"at most {TOLERANCE['fp64']}")
    return {"backend": backend, "off": off}


def memory() -> Mapping[str, object]:
    """Peak bytes of every rank are what is predicted, to the byte. Raises PiperError: they are not."""
    prepared = prepared_of("2 ranks, zb1p", "fp32")
    plan = prepared.plan()
    predicted = peak_bytes(prepared, plan)
    found, _ = run(prepared, plan, JobRunOptions(prepared.ranks, 2))
    measured = tuple(found["memory"]["peak_allocated_bytes"].values())
    if predicted != measured:
        raise wrong(f"peak bytes {measured}", f"{predicted}, as predicted")
    return {"peak_bytes": list(measured)}


def restart() -> Mapping[str, object]:
    """Saved by two ranks, taken up by four under another plan: the same losses. Raises PiperError: others."""
    two, four = prepared_of("2 ranks, zb1p", "fp64"), prepared_of("4 ranks, dualpipe, ZeRO-3", "fp64")
    with tempfile.TemporaryDirectory(prefix="piper-doctor-") as folder:
        return resumed(two, four, folder, MachineRanks(backend="local"))


def resumed(one: PreparedJob, other: PreparedJob, folder: str, at: MachineRanks) -> Mapping[str, object]:
    """Saved under one plan, taken up under another: the same losses. Raises PiperError: others."""
    whole = curve(one, at.backend, STEPS, CheckpointOptions(save=folder, every=1, keep=STEPS), at)
    rest = curve(other, at.backend, STEPS, CheckpointOptions(resume=str(Path(folder) / "step-000001")), at)
    want = [*whole[1:STEPS], *whole[STEPS + 1 :]]
    if (off := apart(want, rest)) > TOLERANCE["fp64"]:
        raise wrong(f"a resumed run is {off:.1e} from the whole one", f"at most {TOLERANCE['fp64']}")
    return {"off": off}


def schedules(at: MachineRanks) -> Mapping[str, object]:
    """Each trains what one rank trains, on processes that connect for it. Raises PiperError: one does not."""
    dp, worst = at.ranks // 2, 0.0
    one = job_of({"schedule": {"microbatches": 4 * dp}}, "fp64")
    alone = curve(prepare(one), "local", COLD_STEPS)
    for name in NAMES:
        prepared = at.prepared({"parallel": {"pp": 2, "dp": dp}, "schedule": {"name": name}}, "fp64")
        if not (off := apart(alone, curve(prepared, at.backend, COLD_STEPS, at=at))) <= TOLERANCE["fp64"]:
            raise wrong(f"{name} on {at.backend} is {off:.1e} from one rank", f"at most {TOLERANCE['fp64']}")
        worst = max(worst, off)
    return {"backend": at.backend, "schedules": len(NAMES), "off": worst}


def exchanges(at: MachineRanks) -> Mapping[str, object]:
    """Ranks that exchange uneven numbers of rows, and none, train what one does. Raises PiperError: they do not, or
    no exchange was empty."""
    ep = next(n for n in (4, 2) if at.ranks % n == 0)
    several = at.prepared({**EXPERTS, **FULL, "parallel": {"dp": at.ranks, "ep": ep}}, "fp64")
    forced = ForcedExperts.of(several, several.plan().graph)
    rows = np.stack([forced.counts.tokens(x.number, 0) for x in forced.layers])  # [layer, from, expert]
    sent = rows.reshape(*rows.shape[:2], ep, -1).sum(axis=3)  # [layer, from, to]
    if rows.min() or sent.min() or sent.min() == sent.max():
        raise wrong(f"rows from rank to rank {sent.tolist()}: none uneven or empty", "one empty, and others not")
    whole = {"microbatches": several.mbs * at.ranks}
    one = prepare(job_of({"model": EXPERTS["model"], **FULL, "schedule": whole}, "fp64"))
    if not (off := apart(curve(one, "local"), curve(several, at.backend, at=at))) <= TOLERANCE["fp64"]:
        raise wrong(f"uneven exchanges on {at.backend}: {off:.1e} from one rank", f"at most {TOLERANCE['fp64']}")
    return {"backend": at.backend, "least": int(sent.min()), "most": int(sent.max()), "off": off}


def failure(sign: signal.Signals) -> Mapping[str, object]:
    """A rank is killed, or stopped: it is named, and soon. Raises PiperError: another, or nobody."""
    prepared = prepared_of("2 ranks, zb1p", "fp32")
    limit_s = REPORTED_S + (WATCHDOG_S if sign is signal.SIGSTOP else 0.0)
    with tempfile.TemporaryDirectory(prefix="piper-doctor-") as folder:
        options = JobRunOptions(2, 10_000, watchdog_s=WATCHDOG_S, emulate=0.01, out=Path(folder))
        touched_at: list[float] = []
        touch = threading.Thread(target=_touch, args=(sign, TOUCHED, Path(folder), touched_at), daemon=True)
        touch.start()
        try:
            run(prepared, prepared.plan(), options)
        except RankFailed as error:
            took = time.monotonic() - (touched_at or [time.monotonic()])[0]
            if error.rank != TOUCHED or took > limit_s:
                message = f"rank {error.rank} blamed after {took:.0f} s"
                raise wrong(message, f"rank {TOUCHED}, {limit_s:.0f} s") from error
            return {"rank": error.rank, "op": error.op, "seconds": took}
    raise wrong(f"a rank was not missed after {sign.name}", f"rank {TOUCHED} named")


def _touch(sign: signal.Signals, rank: int, out: Path, touched_at: list[float]) -> None:
    """Once all ranks are there."""
    while not (out / "ranks.json").exists():
        time.sleep(0.05)
    pid = json.loads((out / "ranks.json").read_text())["ranks"][str(rank)]["pid"]
    time.sleep(0.5)  # into the first steps
    touched_at.append(time.monotonic())
    os.kill(pid, sign)


def wrong(
    message: str, allowed: str, fix: str = "do not trust runs on this machine; send this object along with a report"
) -> PiperError:
    """What must not be, as an error."""
    return PiperError(ErrorKind.RANK_FAILED, message, allowed=allowed, suggestion=fix)
