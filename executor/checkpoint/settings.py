"""What is asked of checkpoints, checked before any rank starts: flags, the folder to save to, the one to resume; and
whether a job goes on with the training that a checkpoint is of, else the first difference and the nearest fix.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from executor.checkpoint.folder import check_free, check_room, complete, newest
from executor.checkpoint.manifest import (
    BUFFERS,
    CheckpointManifest,
    CheckpointTraining,
    check_files,
    read_manifest,
    verify,
)
from executor.checkpoint.tensors import MANIFEST, saving_to
from executor.data.files import digest_of_tokens
from executor.data.tokens import FileTokens, source_name, source_of
from executor.modules.base import TORCH
from executor.modules.choose import weights_of
from executor.modules.hub_weights import biases
from executor.optim.optimizer import WEIGHT, slots_of
from ir.core.errors import ErrorKind, PiperError
from ir.core.files import named_path
from ir.core.work import DType
from ir.job import Job
from ir.job.build import PreparedJob, precision_of
from ir.job.run_options import KEPT, CheckpointOptions
from ir.job.table import table_of
from ir.workload.config.load import presets, raw_config
from ir.workload.config.spec import NEWER

UNUSED = ("source", "init_std", "max_positions")  # of a model's config: a checkpoint does not depend on them
CUT = ("layers", "moe", "hidden", "head_dim", "ffn")  # of a captured module: what follows from its tags, a plan's
CAPTURED = ("graph", "tags", "tp_plan")  # keys of a plan, too, where a module is captured for it
BESIDE = (BUFFERS, "routers' corrections")  # what weights' files have that is no parameter
SEED = "the seed of frozen parameters"
Difference = tuple[str, str, str, str | None]  # what differs, key, what it may be, the fix


def training_of(prepared: PreparedJob) -> CheckpointTraining:
    """What a job trains, whatever its plan."""
    job, precision = prepared.job, precision_of(prepared.job)
    source = source_of(source_name(job), prepared.config.vocab, job.data.seed)
    return CheckpointTraining(
        shapes={p.name: p.shape for e in prepared.base.entries for p in e.part.params},
        format=_widest(precision.params, precision.optimizer),
        optimizer=job.optimizer.name,
        slots=(WEIGHT, *dict.fromkeys(s for m in (False, True) for s in slots_of(job.optimizer, matrix=m))),
        sequences=prepared.mesh.sizes["dp"] * prepared.mbs * job.schedule.microbatch_size,
        length=job.model.seq_len,
        tokens=len(source.tokens) if isinstance(source, FileTokens) else 0,
        seed=job.data.seed,
        data=digest_of_tokens(source.tokens) if isinstance(source, FileTokens) else "",
        model=_model_of(prepared) | _beside(prepared),
    )


def _model_of(prepared: PreparedJob) -> dict[str, Any]:
    """What a model's config says; what is newer than checkpoints may be is told only where a model has it."""
    table, newer = _plain(prepared.config), {**NEWER, "padding": None}
    return {k: v for k, v in table.items() if k not in UNUSED and not (k in newer and v == newer[k])}


def _beside(prepared: PreparedJob) -> dict[str, str]:
    """What routers, a user's buffers and frozen parameters were given, which no checkpoint of ours has: a digest, or
    the seed they were drawn by, so that they are given again."""
    shapes = {p.name: p.shape for e in prepared.base.entries for p in e.part.params}
    moe, given = prepared.config.moe, weights_of(prepared.job)
    if given is None:
        frozen = any(e.part.frozen for e in prepared.base.entries)
        return {SEED: str(prepared.job.model.seed)} if frozen else {}
    own = prepared.job.model.module is not None
    names = given.beside(shapes) if own else [*biases(shapes, moe.scoring if moe else None)]
    return {BESIDE[not own]: given.digest(names)} if names else {}


def check_same(manifest: CheckpointManifest, prepared: PreparedJob, folder: Path) -> None:
    """Raise PiperError (job) for the first thing that the job trains otherwise than the checkpoint's did."""
    for message, key, allowed, fix in _differences(manifest, prepared):
        message = f"not what {folder.name} was saved by: {message}"
        fix = fix or f"the job it was saved by is in {folder / MANIFEST}"
        raise PiperError(ErrorKind.JOB, message, file=prepared.job.file, key=key, allowed=allowed, suggestion=fix)


def _differences(manifest: CheckpointManifest, prepared: PreparedJob) -> Iterator[Difference]:
    job, was, now = prepared.job, manifest.training, training_of(prepared)
    shapes = [{n: " x ".join(map(str, s)) for n, s in t.shapes.items()} for t in (now, was)]
    cut = CUT if prepared.config.model_type == "captured" else ()
    models = [{k: v for k, v in t.model.items() if k not in cut} for t in (now, was)]
    for ours, theirs in (shapes, models):
        for k in {**ours, **theirs}:
            if (mine := ours.get(k, "missing")) != (other := theirs.get(k, "missing")):
                key, fix = "model.weights" if k in BESIDE else "model.config", _model(manifest, job)
                if k == SEED and "missing" not in (mine, other):
                    key, fix = "model.seed", f"--set model.seed={other}"
                yield f"{k} is {mine} here, {other} there", key, f"{k}: {other}", fix
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
    given = {k for k in {*was, *now} if was.get(k) != now.get(k)} - {"seed", "attention", "seq_len", *CAPTURED}
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
    """A job's keys as JSON has them, with weights by a path that holds wherever it is read."""
    table = _plain(table_of(job))
    if job.model.weights is not None:
        table["model"]["weights"] = str(Path(named_path(job.file, job.model.weights)).resolve())
    return table


def config_file(job: Job) -> dict[str, Any]:
    """The keys of the config.json that the job names by its path; none of a preset, or of a file that is gone."""
    if (name := job.model.config) is None or (path := named_path(job.file, name, presets())) in presets():
        return {}
    with suppress(PiperError):
        return _plain(raw_config(path))
    return {}


def _plain(value: object) -> dict[str, Any]:
    out: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value, enc_hook=dict, order="deterministic"))
    return out


PRESENT = "if-present"  # what `--resume` may say instead of a folder


def settled(wanted: CheckpointOptions, prepared: PreparedJob, steps: int, *, real: bool) -> CheckpointOptions:
    """What is wanted, with the checkpoint that `resume` means found and compared with the job.

    steps: that the run ends behind, counted from its very first; by `if-present` all may be done, which `first` says.
    Raises PiperError: flags out of range, no checkpoint, one of something else, a folder that is taken.
    """
    _check_flags(wanted, real)
    present = wanted.resume == PRESENT
    if present:  # for restarts by whoever does not look: of what is saved to, if anything is there
        wanted = replace(wanted, resume=wanted.save if complete(Path(wanted.save or "")) else None)
    found = wanted
    if wanted.resume is not None:
        folder = newest(Path(wanted.resume)).resolve()
        with saving_to(wanted.save):
            manifest = read_manifest(folder)
            check_files(folder, manifest)
        check_same(manifest, prepared, folder)
        if manifest.step > steps or (manifest.step == steps and not present):
            message = f"{steps} in all, and {folder.name} has done {manifest.step}"
            more, fix = f"more than {manifest.step}", f"--steps {manifest.step + 1}"
            raise PiperError(ErrorKind.USAGE, message, key="--steps", allowed=more, suggestion=fix)
        run = manifest.run if wanted.save is not None and folder.parent == Path(wanted.save).resolve() else None
        found = replace(found, resume=str(folder), first=manifest.step, run=run)
    if wanted.save is not None:
        save = Path(wanted.save).resolve()
        check_room(save, None if found.resume is None else Path(found.resume), force=wanted.force)
        check_free(save)
        found = replace(found, save=str(save))
    return found


def _check_flags(s: CheckpointOptions, real: bool) -> None:
    for flag, value, usual in (("--every", s.every, 1), ("--keep", s.keep, KEPT)):
        if value is not None and s.save is None:
            message = "says how to save, and nothing is saved"
            raise PiperError(ErrorKind.USAGE, message, key=flag, suggestion=f"--save DIR {flag} {max(1, value)}")
        if value is not None and value < 1:
            unit = "steps between two checkpoints" if flag == "--every" else "checkpoints"
            fix = f"{flag} {usual}"
            raise PiperError(ErrorKind.USAGE, f"{value} {unit}", key=flag, allowed="1 or more", suggestion=fix)
    if s.resume == PRESENT and s.save is None:
        message, fix = "of what is saved to, if anything is there", "--save DIR --resume if-present"
        raise PiperError(ErrorKind.USAGE, message, key="--resume", suggestion=fix)
    if not real and (s.save or s.resume):
        flag = "--save" if s.save else "--resume"
        message = "ops of a given time compute nothing, so there is nothing to save or to resume"
        raise PiperError(ErrorKind.USAGE, message, key=flag, suggestion=f"leave out {flag}, or --emulate and --replay")


def verified(saving: CheckpointOptions) -> CheckpointOptions:
    """The same, with all files of what is resumed read in full. Raises PiperError (io): one is damaged."""
    if saving.resume is None:
        return saving
    with saving_to(saving.save):
        manifest = read_manifest(Path(saving.resume))
        verify(Path(saving.resume), manifest, manifest.files)
    return replace(saving, verified=True)
