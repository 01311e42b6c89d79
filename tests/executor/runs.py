"""Helpers of the run tests: tiny jobs, the same training in one process, and how two of them are compared."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from executor.launch import run as cli
from executor.launch.forkserver import RankForkServer
from executor.modules.base import TORCH
from executor.modules.decoder import DecoderModel
from executor.parallel.router_guide import ExpertRouterGuide
from executor.runtime.batch import MicrobatchLoader
from ir.job import Job, load_job
from ir.job.build import PreparedJob, precision_of, prepare
from ir.job.routing.forced import ForcedExperts
from ir.job.run_options import CheckpointOptions, JobRunOptions
from ir.job.schema import JobOptimizer
from ir.plan.plan import Plan
from ir.trace.trace import Trace
from ir.verify import check_plan
from ir.workload import load_config
from piper_sim.pricing.prepare import hardware_of, prepare_priced
from tests.executor.reference import train
from tests.executor.threads import one_core

JOB = """
[model]
config = "tiny-llama"
num_hidden_layers = 4
seq_len = 8
[cluster]
gpu = "h100-sxm"
[parallel]
pp = 2
[schedule]
name = "1f1b"
microbatches = 4
[precision]
compute = "fp64"
"""
Arrays = dict[str, np.ndarray]


def job_file(folder: Path, *, text: str = JOB) -> Path:
    """The job as a file."""
    path = folder / "job.toml"
    path.write_text(text)
    return path


@dataclass(frozen=True)
class Ran:
    """One run: its JSON object, its trace, what each rank ended with, and the gradients of the first step."""

    sets: tuple[str, ...]
    plan: Plan
    object: Mapping[str, Any]
    trace: Trace
    grads: tuple[Arrays, ...]
    params: tuple[Arrays, ...]
    first: tuple[Arrays, ...] = ()


def run(*sets: str, steps: int = 2, **options: Any) -> Ran:
    """Judge and run the job with these overrides, in this process's fork server; no peak bytes unless `memory`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepared, plan = judged(folder, *sets)
        real = not options.keys() & {"emulate", "replay"}
        saving = options.pop("saving", CheckpointOptions())
        usual = {"watchdog_s": 60.0, "ranks": prepared.ranks, "dump": folder if real else None, "memory": False}
        asked = JobRunOptions(steps=steps, sets=sets, **usual | options)
        with one_core(RankForkServer.get().process.pid) if asked.backend == "local" else nullcontext():
            found, trace = cli.run(prepared, plan, asked, saving)
        ranks = range(prepared.ranks if real else 0)
        begin, end = ([load_file(folder / f"{name}-{r}.safetensors") for r in ranks] for name in ("first", "rank"))
        grads, params = (tuple(part_of(e, kind) for e in end) for kind in ("grad/", "param/"))
        first = tuple(part_of(b, "grad/") for b in begin)
    return Ran(sets, plan, found, trace, grads, params, first)


def two_steps(
    folder: Path, job: str, sets: Sequence[str], backend: str = "gloo"
) -> tuple[Mapping[str, Any], list[Arrays]]:
    """A run of a job that is only planned, not predicted: its JSON object, and what each rank ended with."""
    prepared = prepare(load_job(job, sets))
    options = JobRunOptions(prepared.ranks, steps=2, backend=backend, watchdog_s=20.0, dump=folder)
    found, _ = cli.run(prepared, prepared.plan(), options)
    return found, [load_file(folder / f"rank-{r}.safetensors") for r in range(prepared.ranks)]


def judged(folder: Path, *sets: str) -> tuple[PreparedJob, Plan]:
    """The job with these overrides and its checked plan, as `piper-sim` makes them; folder: where the job lies."""
    job = load_job(str(job_file(folder)), sets)
    prepared = prepare_priced(job, hardware_of(job))
    plan = prepared.plan()
    check_plan(plan)
    return prepared, plan


def part_of(file: Mapping[str, np.ndarray], prefix: str) -> Arrays:
    """The arrays of a rank's file whose names begin so."""
    return {n.removeprefix(prefix): file[n] for n in file if n.startswith(prefix)}


def same(a: Ran, b: Ran) -> bool:
    """Whether two runs end with the same gradients and parameters, to the bit."""
    pairs = zip((*a.grads, *a.params), (*b.grads, *b.params), strict=True)
    return all(x.keys() == y.keys() and all(np.array_equal(x[n], y[n], equal_nan=True) for n in x) for x, y in pairs)


@dataclass(frozen=True)
class Alone:
    """The same training in one process, by torch's plain backward over the whole model."""

    losses: list[float]
    grad_norms: list[float]
    grads: Arrays
    params: Arrays
    first: Arrays


def alone(*sets: str, steps: int = 2) -> Alone:
    """Train on the same global batch without any plan. Done again only if what the numbers depend on is new."""
    with tempfile.TemporaryDirectory() as name:
        job = load_job(str(job_file(Path(name))), sets)
        forced = None
        if job.routing.forced:
            prepared, plan = judged(Path(name), *sets)
            forced = _Choice(ForcedExperts.of(prepared, plan.graph), prepared.mbs)
    mbs = (job.schedule.microbatches or 2 * job.parallel.pp) * (job.parallel.dp or 1)
    return _alone(_numbers(job, mbs, forced), steps)


@dataclass(frozen=True, eq=False)
class _Choice:
    """Where tokens are forced to go, for one process that trains on all replicas' microbatches, `mbs` of each."""

    forced: ForcedExperts
    mbs: int

    def __call__(self, layer: int, number: int) -> torch.Tensor:
        return torch.from_numpy(self.forced.experts(layer, *divmod(number, self.mbs), number))


@dataclass(frozen=True)
class _Numbers:
    config: str
    overrides: str
    seq_len: int
    mbs: int
    size: int
    formats: tuple[torch.dtype, ...]  # params, compute, grads, optimizer, stream
    optimizer: JobOptimizer
    forced: _Choice | None


def _numbers(job: Job, mbs: int, forced: _Choice | None) -> _Numbers:
    p = precision_of(job)
    return _Numbers(
        job.model.config,
        json.dumps(dict(job.model.overrides)),
        job.model.seq_len,
        mbs,
        job.schedule.microbatch_size,
        tuple(TORCH[d] for d in (p.params, p.compute, p.grads, p.optimizer, p.stream)),
        job.optimizer,
        forced,
    )


@lru_cache(maxsize=64)
def _alone(n: _Numbers, steps: int) -> Alone:
    config = load_config(n.config, json.loads(n.overrides))
    params, compute, grads, moments, stream = n.formats
    torch.set_num_threads(1)
    data = MicrobatchLoader("synthetic", vocab=config.vocab, length=n.seq_len, microbatches=n.mbs, size=n.size)
    guide = ExpertRouterGuide(n.forced, balance=config.moe.balance / data.sequences if config.moe else 0.0)
    model = DecoderModel(config, dtype=params, compute=compute, guide=guide, stream=stream)
    found = train(model, data, steps, optimizer=n.optimizer, grads=grads, moments=moments)
    return Alone(found.losses, found.grad_norms, *map(_arrays, (found.grads, found.params, found.first)))


def _arrays(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    return {n: t.detach().double().numpy() for n, t in tensors.items()}


def merged(parts: Sequence[Arrays]) -> Arrays:
    """The ranks' arrays as one set; NaN stands where a rank does not have a value. Copies must agree to the bit."""
    out: Arrays = {}
    for part in parts:
        for name, value in part.items():
            if name not in out:
                out[name] = value.copy()
                continue
            both = ~np.isnan(out[name]) & ~np.isnan(value)
            assert np.array_equal(out[name][both], value[both]), f"copies of {name} differ"
            np.copyto(out[name], value, where=np.isnan(out[name]))
    return out


def distance(got: Arrays, want: Arrays) -> float:
    """The largest difference, as a share of its tensor's largest value; 0.0 where all are equal, NaN if one is NaN."""
    assert got.keys() == want.keys()
    return float(np.max([np.abs(got[n] - want[n]).max() / (np.abs(want[n]).max() or 1.0) for n in want]))


def error(ran: Ran, one: Alone) -> float:
    """How far a run is from one process: gradients, parameters, losses and norms; NaN where something is missing."""
    numbers = np.array([*ran.object["losses"], *ran.object["grad_norms"]])
    wanted = np.array([*one.losses, *one.grad_norms])
    return float(
        np.max(
            [
                distance(merged(ran.grads), one.grads),
                distance(merged(ran.params), one.params),
                float(np.abs(numbers / wanted - 1).max()),
            ]
        )
    )


def far(*sets: str, steps: int, **options: Any) -> float:
    """How far a run is from one process: gradients of the first step and the last, parameters, losses, norms."""
    ran = run(*sets, steps=steps, watchdog_s=60.0, **options)
    one = alone(*sets, steps=steps)
    return float(np.max([error(ran, one), distance(merged(ran.first), one.first)]))  # NaN stays NaN, and fails
