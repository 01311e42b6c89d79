"""Jobs as the command line takes them: a module without a graph is captured first, as this alone sees the executor."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from ir.core.errors import ErrorKind, PiperError
from ir.core.files import named_path
from ir.core.work import DType
from ir.job import Job
from ir.job.build import precision_of
from ir.job.load import load_job as read_job
from ir.workload.captured_file import ModelMesh

if TYPE_CHECKING:
    from torch import Tensor, nn

CAPTURED = (DType.FP64, DType.FP32, DType.BF16, DType.FP16)


def load_job(path: str, sets: Sequence[str] = ()) -> Job:
    """A job, as `with_graph` has it. Raises PiperError: as `ir.job.load.load_job` does, and as that."""
    return with_graph(read_job(path, sets))


def with_graph(job: Job) -> Job:
    """A job that names a module and neither a config nor a graph, with the graph captured from the module.

    Raises PiperError (model): torch cannot export it; (missing_dependency): no torch; (io): the folder for graphs
    belongs to somebody else.
    """
    if job.model.module is None or job.model.graph is not None or job.model.config:
        return job
    file, _, name = job.model.module.rpartition(":")
    reference = f"{named_path(job.file, file)}:{name}" if file else job.model.module
    size, dtype = job.schedule.microbatch_size, precision_of(job).params
    p, shape = job.parallel, (job.model.seq_len, size, dtype)
    axes = ModelMesh(
        tp=p.tp,
        ep=p.ep,
        tp_plan=job.model.tp_plan,
        cp=p.cp,
        cp_comm=p.cp_comm,
        sequence_parallel=p.sequence_parallel,
    )
    text = _captured(reference, shape, job.model.tags, **axes)
    folder = Path(tempfile.gettempdir()) / f"piper-sim-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():  # the folder for temporary files is everybody's
        fix = "remove it, or set TMPDIR"
        raise PiperError(ErrorKind.IO, "another user's folder", file=str(folder), key="TMPDIR", suggestion=fix)
    graph = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"  # named by what is in it, so never another
    if not graph.exists():
        part = graph.with_suffix(f".{os.getpid()}")
        part.write_text(text, encoding="utf-8")
        part.replace(graph)
    return replace(job, model=replace(job.model, graph=str(graph)))


def capture(
    model: str | nn.Module,
    example: Tensor,
    *,
    tags: Mapping[str, str] | None = None,
    dtype: str = "bf16",
    out: str | Path | None = None,
    **axes: Unpack[ModelMesh],
) -> str:
    """The text of a model.json: what a module computes and keeps, for `[model] graph`.

    model: the module, or "my_model.py:build". example: token ids (sequences, tokens) of one microbatch. tags: as
    {"PP": "model.layers.*"}, by module path, where its code has no `annotate`. dtype: what it is trained in. out: a
    file that gets it, too. axes: tp, tp_plan, ep, cp, cp_comm, sequence_parallel, as `ModelMesh` has
    them; without them one rank's.

    Raises PiperError (model): torch cannot export it; (job): tokens do not divide; (missing_dependency): there is no
    torch.
    """
    if DType(dtype) not in CAPTURED:
        raise PiperError(ErrorKind.MODEL, f"captured in {dtype}", key="dtype", allowed=", ".join(CAPTURED))
    size, length = example.shape
    text = _captured(model, (int(length), int(size), DType(dtype)), tags or {}, **axes)
    if out is not None:
        Path(out).write_text(text, encoding="utf-8")
    return text


def _captured(
    reference: str | nn.Module, shape: tuple[int, int, DType], tags: Mapping[str, str], **axes: Unpack[ModelMesh]
) -> str:
    """shape: tokens, sequences, format."""
    try:
        from executor.frontend.capture import capture as taken
        from executor.frontend.capture import text
    except ModuleNotFoundError as error:
        message, fix = f"{reference} is captured by torch, which is not installed", "pip install 'piper-sim[exec]'"
        raise PiperError(ErrorKind.MISSING_DEPENDENCY, message, key="model.module", suggestion=fix) from error
    length, size, dtype = shape
    found = taken(reference, batch=(size, length), dtype=dtype, tags=tags, **axes)
    return text(found) + "\n"
