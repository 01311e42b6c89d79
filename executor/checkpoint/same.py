"""Whether a job goes on with the training that a checkpoint is of; if not, the first difference and the nearest fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from executor.checkpoint.manifest import MANIFEST, Manifest, Training, plain
from executor.data.tokens import FileTokens, source_name, source_of
from executor.modules.base import TORCH
from executor.optim.optimizer import OptimizerConfig, slots_of
from ir.core.errors import ErrorKind, PiperError
from ir.core.work import DType
from ir.job import Job
from ir.job.build import Prepared, precision_of
from ir.job.table import table_of

WEIGHT = "weight"
UNUSED = ("source", "init_std", "max_positions")  # of a model's config: a checkpoint does not depend on them


def training_of(prepared: Prepared) -> Training:
    """What a job trains, whatever its plan."""
    job, precision = prepared.job, precision_of(prepared.job)
    source = source_of(source_name(job), prepared.config.vocab, job.data.seed)
    return Training(
        shapes={p.name: p.shape for e in prepared.base.entries for p in e.part.params},
        format=str(_widest(precision.params, precision.optimizer)),
        optimizer=job.optimizer.name,
        slots=(WEIGHT, *slots_of(OptimizerConfig(job.optimizer.name))),
        sequences=prepared.mesh.sizes["dp"] * prepared.mbs * job.schedule.microbatch_size,
        length=job.model.seq_len,
        tokens=len(source.tokens) if isinstance(source, FileTokens) else 0,
        seed=job.data.seed,
        model={k: v for k, v in plain(prepared.config).items() if k not in UNUSED},
    )


def check_same(manifest: Manifest, prepared: Prepared, folder: Path) -> None:
    """Raise PiperError for the first thing that the job trains otherwise than the checkpoint's did."""
    job, was, now = prepared.job, manifest.training, training_of(prepared)

    def differ(message: str, key: str, allowed: object, fix: str | None) -> PiperError:
        where = f"the job it was saved by is in {folder / MANIFEST}"
        message = f"not what {folder.name} was saved by: {message}"
        return PiperError(ErrorKind.JOB, message, file=job.file, key=key, allowed=str(allowed), suggestion=fix or where)

    if was.shapes != now.shapes:
        name = next((n for n in {**now.shapes, **was.shapes} if now.shapes.get(n) != was.shapes.get(n)), "their order")
        here, there = (_shape(t.shapes.get(name)) for t in (now, was))
        raise differ(f"{name} is {here} here, {there} there", "model.config", f"{name}: {there}", _model(manifest, job))
    if odd := next((k for k in {**now.model, **was.model} if now.model.get(k) != was.model.get(k)), None):
        here, there = str(now.model.get(odd)), str(was.model.get(odd))
        raise differ(f"{odd} is {here} here, {there} there", "model.config", f"{odd} {there}", _model(manifest, job))
    if now.length != was.length:
        fix = f"--set model.seq_len={was.length}"
        raise differ(f"{now.length} tokens in a sequence here, {was.length} there", "model.seq_len", was.length, fix)
    if now.sequences != was.sequences:
        message = f"{now.sequences} sequences in the global batch here, {was.sequences} there"
        allowed = f"dp · microbatches · microbatch_size = {was.sequences}"
        raise differ(message, "schedule.microbatches", allowed, _microbatches(was.sequences, prepared))
    if now.tokens != was.tokens:
        here, there = (f"{t.tokens} tokens" if t.tokens else "synthetic" for t in (now, was))
        fix = f"--set data.source={manifest.job['data']['source']}"
        raise differ(f"{here} here, {there} there", "data.source", there, fix)
    if now.seed != was.seed:
        message = f"data drawn by seed {now.seed} here, {was.seed} there"
        raise differ(message, "data.seed", was.seed, f"--set data.seed={was.seed}")
    if now.optimizer != was.optimizer:
        fix = f"--set optimizer.name={was.optimizer}"
        raise differ(f"{now.optimizer} here, {was.optimizer} there", "optimizer.name", was.optimizer, fix)
    if now.format != was.format:
        message = f"weights and moments are updated in {now.format} here, in {was.format} there"
        raise differ(message, "precision.optimizer", was.format, _formats(DType(was.format), precision_of(job).params))


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else " x ".join(map(str, shape))


def _model(manifest: Manifest, job: Job) -> str | None:
    """The overrides that give `[model]` back the keys it had; None where some key cannot be set back so."""
    was, now = manifest.job["model"], plain_table(job)["model"]
    given = {k for k in {*was, *now} if was.get(k) != now.get(k)} - {"seed", "attention", "seq_len"}
    if not given or "config" in given or any(k not in was for k in given):
        return None
    return " ".join(f"--set {k}" for k in sorted(f"model.{k}={_toml(was[k])}" for k in given))


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def plain_table(job: Job) -> dict[str, dict[str, Any]]:
    """A job's keys as JSON has them."""
    return plain(table_of(job))


def _microbatches(sequences: int, prepared: Prepared) -> str:
    each = prepared.mesh.sizes["dp"] * prepared.job.schedule.microbatch_size
    if sequences % each == 0:
        return f"--set schedule.microbatches={sequences // each}"
    return f"--set parallel.dp=1 --set schedule.microbatch_size=1 --set schedule.microbatches={sequences}"


def _widest(a: DType, b: DType) -> DType:
    """The format that holds the values of both, as the optimizer picks it."""
    wide = torch.promote_types(TORCH[a], TORCH[b])
    return next(d for d, t in TORCH.items() if t == wide)


def _formats(wanted: DType, params: DType) -> str:
    """The overrides after which values are updated in that format; parameters may stay narrower."""
    more = "" if _widest(wanted, params) is wanted else f" --set precision.params={wanted}"
    return f"--set precision.optimizer={wanted}{more}"
