"""Small runs of real plans, compared with each other, with predictions, and with what must not happen."""

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from executor.launch.run import run
from executor.launch.verdict import RankFailed
from executor.measure.peak_bytes import peak_bytes
from ir.core.errors import ErrorKind, PiperError
from ir.job.build import PreparedJob, prepare
from ir.job.load import job_from
from ir.job.run_options import CheckpointOptions, JobRunOptions

STEPS = 3
JOB: dict[str, dict[str, object]] = {
    "model": {"config": "tiny-llama", "num_hidden_layers": 4, "seq_len": 16},
    "cluster": {"gpu": "h100-sxm", "nodes": 1, "gpus_per_node": 1},
    "parallel": {"pp": 1, "dp": 1},
    "schedule": {"name": "1f1b", "microbatches": 4},
}
# Same model, same global batch, other plans.
PLANS: dict[str, dict[str, dict[str, object]]] = {
    "one rank": {},
    "2 ranks, zb1p": {"parallel": {"pp": 2}, "schedule": {"name": "zb1p"}},
    "4 ranks, dualpipe, ZeRO-3": {
        "parallel": {"pp": 2, "dp": 2, "zero": 3},
        "schedule": {"name": "dualpipe", "microbatches": 2},
    },
}
TOLERANCE = {"fp64": 1e-12, "fp32": 2e-5, "bf16": 3e-2}
KILLED, WATCHDOG_S, REPORTED_S = 1, 10.0, 10.0


def prepared_of(plan: str, compute: str, seed: int = 0) -> PreparedJob:
    """The small job under one of the plans. seed: of the weights."""
    job = {s: dict(keys) for s, keys in JOB.items()}
    for section, keys in PLANS[plan].items():
        job[section] |= keys
    ranks = int(str(job["parallel"]["pp"])) * int(str(job["parallel"]["dp"]))
    job["cluster"]["gpus_per_node"] = ranks
    job["model"]["seed"] = seed
    job["precision"] = dict.fromkeys(("compute", "params", "grads", "optimizer"), compute)
    return prepare(job_from(job))


def curve(
    prepared: PreparedJob, backend: str, steps: int = STEPS, saving: CheckpointOptions = CheckpointOptions()
) -> list[float]:
    """Losses and gradient norms of a run."""
    found, _ = run(prepared, prepared.plan(), JobRunOptions(prepared.ranks, steps, backend), saving)
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
        whole = curve(two, "local", STEPS, CheckpointOptions(save=folder, every=1, keep=STEPS))
        rest = curve(four, "local", STEPS, CheckpointOptions(resume=str(Path(folder) / "step-000001")))
    want = [*whole[1:STEPS], *whole[STEPS + 1 :]]
    if (off := apart(want, rest)) > TOLERANCE["fp64"]:
        raise wrong(f"a resumed run is {off:.1e} from the whole one", f"at most {TOLERANCE['fp64']}")
    return {"off": off}


def failure() -> Mapping[str, object]:
    """A rank is killed: it is named, and soon. Raises PiperError: another, or nobody."""
    prepared = prepared_of("2 ranks, zb1p", "fp32")
    with tempfile.TemporaryDirectory(prefix="piper-doctor-") as folder:
        options = JobRunOptions(2, 10_000, watchdog_s=WATCHDOG_S, emulate=0.01, out=Path(folder))
        killed_at: list[float] = []
        assassin = threading.Thread(target=_kill, args=(Path(folder) / "ranks.json", killed_at), daemon=True)
        assassin.start()
        try:
            run(prepared, prepared.plan(), options)
        except RankFailed as error:
            took = time.monotonic() - (killed_at or [time.monotonic()])[0]
            if error.rank != KILLED or took > REPORTED_S:
                raise wrong(
                    f"rank {error.rank} blamed after {took:.0f} s", f"rank {KILLED}, {REPORTED_S:.0f} s"
                ) from error
            return {"rank": error.rank, "op": error.op, "seconds": took}
    raise wrong("a killed rank was not missed", f"rank {KILLED} named")


def _kill(ranks: Path, killed_at: list[float]) -> None:
    """Once all ranks are there."""
    while not ranks.exists():
        time.sleep(0.05)
    pid = json.loads(ranks.read_text())["ranks"][str(KILLED)]["pid"]
    time.sleep(0.5)  # into the first steps
    killed_at.append(time.monotonic())
    os.kill(pid, signal.SIGKILL)


def wrong(message: str, allowed: str) -> PiperError:
    """What must not be, as an error."""
    fix = "do not trust runs on this machine; send this object along with a report"
    return PiperError(ErrorKind.RANK_FAILED, message, allowed=allowed, suggestion=fix)
