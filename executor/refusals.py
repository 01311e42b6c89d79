"""What `piper-sim run` does not execute yet, refused before any process starts. What is not in here, runs."""

from __future__ import annotations

from executor.spec import source_name
from executor.tokens import source_of
from ir.errors import ErrorKind, PiperError
from ir.job.build import Prepared, precision_of
from ir.model.config import ModelConfig
from ir.plan import Plan
from ir.sync import buckets
from ir.work import DType

AXES = ("tp", "cp", "dp", "ep", "etp")
RUNNABLE = ("llama", "mistral", "qwen2", "qwen3")
COMPUTE = (DType.FP64, DType.FP32, DType.BF16)


def refuse(prepared: Prepared, plan: Plan, backend: str) -> None:
    """Raise PiperError for the first thing this executor cannot do."""
    job = prepared.job
    if backend != "gloo":
        raise _not_yet(ErrorKind.USAGE, f"the {backend} backend", "--backend", "gloo")
    for axis in AXES:
        if (size := prepared.mesh.sizes[axis]) > 1:
            raise _not_yet(ErrorKind.JOB, f"{axis} = {size}", f"parallel.{axis}", "1")
    if job.schedule.recompute not in ("none", "full"):
        raise _not_yet(ErrorKind.JOB, f"recompute = {job.schedule.recompute!r}", "schedule.recompute", '"none", "full"')
    if any(e.chunk.name.startswith("skip") for e in prepared.base.entries):
        raise _not_yet(ErrorKind.JOB, "a stage without layers", "parallel.layers", "at least 1 layer per inner stage")
    if job.model.module is not None or job.model.graph is not None:
        key = "model.module" if job.model.module is not None else "model.graph"
        raise _not_yet(ErrorKind.JOB, "a model of your own", key, "[model] config alone")
    if job.model.attention != "flash":
        raise _not_yet(ErrorKind.JOB, f"{job.model.attention} attention", "model.attention", "flash")
    refuse_model(prepared.config)
    source_of(source_name(job), prepared.config.vocab, job.data.seed)
    _refuse_formats(prepared)
    if (zero := max((b.replica.zero for b in buckets(plan.graph)), default=0)) > 1:
        raise _not_yet(ErrorKind.JOB, f"ZeRO-{zero}", "parallel.zero", "0, 1")


def refuse_model(c: ModelConfig) -> None:
    """Raise PiperError for a model without a reference module."""
    if c.model_type not in RUNNABLE or c.moe or c.mla or c.mtp:
        raise PiperError(
            ErrorKind.MODEL,
            f"no reference module for model type {c.model_type!r} yet",
            file=c.source,
            key="model.config",
            allowed=RUNNABLE,
            suggestion="tiny-llama",
        )
    if c.attn_dropout or c.hidden_dropout or c.embed_dropout:
        raise PiperError(
            ErrorKind.MODEL,
            "dropout cannot be compared between plans, so `run` has none",
            file=c.source,
            suggestion="set model.attention_dropout=0",
        )


def _refuse_formats(prepared: Prepared) -> None:
    p, given = precision_of(prepared.job), prepared.job.precision
    if p.compute not in COMPUTE:
        raise _not_yet(ErrorKind.JOB, f"computing in {p.compute}", "precision.compute", ", ".join(COMPUTE))
    for key in ("params", "grads", "optimizer", "reduce"):
        if getattr(p, key) not in COMPUTE:
            raise _not_yet(ErrorKind.JOB, f"{key} in {getattr(p, key)}", f"precision.{key}", ", ".join(COMPUTE))
    if given.gather not in (None, p.params):
        message = f"gathering parameters in another format ({given.gather}) than they have ({p.params})"
        raise _not_yet(ErrorKind.JOB, message, "precision.gather", p.params)


def _not_yet(kind: ErrorKind, what: str, key: str, allowed: str) -> PiperError:
    message = f"{what} is planned and simulated, but not executed yet"
    return PiperError(kind, message, key=key, allowed=allowed, suggestion=f"{key} {allowed.split(',')[0]}")
