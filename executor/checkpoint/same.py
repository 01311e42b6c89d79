"""Whether a job goes on with the training that a checkpoint is of; if not, the first difference and the nearest fix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from executor.checkpoint.manifest import CheckpointManifest, CheckpointTraining
from executor.checkpoint.tensors import MANIFEST
from executor.data.files import digest_of_tokens
from executor.data.tokens import FileTokens, source_name, source_of
from executor.modules.base import TORCH
from executor.modules.choose import weights_of
from executor.modules.hub_weights import biases
from executor.optim.optimizer import slots_of
from ir.core.errors import ErrorKind, PiperError
from ir.core.work import DType
from ir.job import Job
from ir.job.build import PreparedJob, precision_of
from ir.job.table import table_of

WEIGHT = "weight"
UNUSED = ("source", "init_std", "max_positions")  # of a model's config: a checkpoint does not depend on them
Difference = tuple[str, str, str, str | None]  # what differs, key, what it may be, the fix


def training_of(prepared: PreparedJob) -> CheckpointTraining:
    """What a job trains, whatever its plan."""
    job, precision = prepared.job, precision_of(prepared.job)
    source = source_of(source_name(job), prepared.config.vocab, job.data.seed)
    return CheckpointTraining(
        shapes={p.name: p.shape for e in prepared.base.entries for p in e.part.params},
        format=_widest(precision.params, precision.optimizer),
        optimizer=job.optimizer.name,
        slots=(WEIGHT, *slots_of(job.optimizer)),
        sequences=prepared.mesh.sizes["dp"] * prepared.mbs * job.schedule.microbatch_size,
        length=job.model.seq_len,
        tokens=len(source.tokens) if isinstance(source, FileTokens) else 0,
        seed=job.data.seed,
        data=digest_of_tokens(source.tokens) if isinstance(source, FileTokens) else "",
        model={k: v for k, v in _plain(prepared.config).items() if k not in UNUSED} | _corrections(prepared),
    )


def _corrections(prepared: PreparedJob) -> dict[str, str]:
    """What routers were given beside weights, which no file of ours has: a digest, so that it is given again."""
    shapes = {p.name: p.shape for e in prepared.base.entries for p in e.part.params}
    moe, given = prepared.config.moe, weights_of(prepared.job)
    names = biases(shapes, moe.scoring if moe and given else None)
    return {"routers' corrections": given.digest(names)} if names and given else {}


def check_same(manifest: CheckpointManifest, prepared: PreparedJob, folder: Path) -> None:
    """Raise PiperError (job) for the first thing that the job trains otherwise than the checkpoint's did."""
    for message, key, allowed, fix in _differences(manifest, prepared):
        message = f"not what {folder.name} was saved by: {message}"
        fix = fix or f"the job it was saved by is in {folder / MANIFEST}"
        raise PiperError(ErrorKind.JOB, message, file=prepared.job.file, key=key, allowed=allowed, suggestion=fix)


def _differences(manifest: CheckpointManifest, prepared: PreparedJob) -> Iterator[Difference]:
    job, was, now = prepared.job, manifest.training, training_of(prepared)
    shapes = [{n: " x ".join(map(str, s)) for n, s in t.shapes.items()} for t in (now, was)]
    for ours, theirs in (shapes, (now.model, was.model)):
        for k in {**ours, **theirs}:
            if (mine := ours.get(k, "missing")) != (other := theirs.get(k, "missing")):
                yield f"{k} is {mine} here, {other} there", "model.config", f"{k}: {other}", _model(manifest, job)
    if (a := now.length) != (b := was.length):
        yield f"{a} tokens in a sequence here, {b} there", "model.seq_len", str(b), f"--set model.seq_len={b}"
    if (a := now.sequences) != (b := was.sequences):
        allowed, fix = f"dp · microbatches · microbatch_size = {b}", _microbatches(b, prepared)
        yield f"{a} sequences in the global batch here, {b} there", "schedule.microbatches", allowed, fix
    if now.tokens != was.tokens:
        here, there = (f"{t.tokens} tokens" if t.tokens else "synthetic" for t in (now, was))
        source = manifest.job.get("data", {}).get("source")
        yield f"{here} here, {there} there", "data.source", there, source and f"--set data.source={source}"
    elif now.data != was.data:
        message = "other tokens here than there, or they are read in another order"
        yield message, "data.source", "the file it was saved by, of this version", None
    if (a := now.seed) != (b := was.seed):
        yield f"data drawn by seed {a} here, {b} there", "data.seed", str(b), f"--set data.seed={b}"
    if now.optimizer != (there := was.optimizer):
        yield f"{now.optimizer} here, {there} there", "optimizer.name", there, f"--set optimizer.name={there}"
    if now.format != was.format:
        message = f"weights and moments are updated in {now.format} here, in {was.format} there"
        yield message, "precision.optimizer", str(was.format), _formats(was.format, precision_of(job).params)


def _model(manifest: CheckpointManifest, job: Job) -> str | None:
    """The overrides that give `[model]` back the keys it had; None where some key cannot be set back so."""
    was, now = manifest.job.get("model", {}), plain_table(job)["model"]
    given = {k for k in {*was, *now} if was.get(k) != now.get(k)} - {"seed", "attention", "seq_len"}
    if not given or "config" in given or any(k not in was for k in given):
        return None
    return " ".join(f"--set model.{k}={_toml(was[k])}" for k in sorted(given))


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _microbatches(sequences: int, prepared: PreparedJob) -> str:
    each = prepared.mesh.sizes["dp"] * prepared.job.schedule.microbatch_size
    if sequences % each == 0:
        return f"--set schedule.microbatches={sequences // each}"
    return f"--set parallel.dp=1 --set schedule.microbatch_size=1 --set schedule.microbatches={sequences}"


def _formats(wanted: DType, params: DType) -> str:
    """The overrides after which values are updated in that format; parameters may stay narrower."""
    more = "" if _widest(wanted, params) is wanted else f" --set precision.params={wanted}"
    return f"--set precision.optimizer={wanted}{more}"


def _widest(a: DType, b: DType) -> DType:
    """The format that holds the values of both, as the optimizer picks it."""
    wide = torch.promote_types(TORCH[a], TORCH[b])
    return next(d for d, t in TORCH.items() if t == wide)


def plain_table(job: Job) -> dict[str, dict[str, Any]]:
    """A job's keys as JSON has them."""
    return _plain(table_of(job))


def _plain(value: object) -> dict[str, Any]:
    out: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value, enc_hook=dict, order="deterministic"))
    return out
