"""What `piper-sim run` does not execute yet, refused before any process starts. What is not in here, runs."""

import json
import os
import re
import shutil
import sysconfig
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from executor.data.tokens import check_sources
from executor.device.device import LAUNCHES
from executor.modules.choose import gathered_format
from executor.modules.decoder import refuse_model
from executor.modules.remade import REMADE
from executor.modules.user.annotate import model_error
from executor.parallel.inline import check_divided
from executor.runtime.given import Checksums
from ir.core.errors import ErrorKind, PiperError, job_error, nearest
from ir.core.work import DType
from ir.graph.sync import buckets
from ir.job.build import PreparedJob, blaming, precision_of
from ir.job.recompute import recompute_options
from ir.verify.queues import DeviceQueues, check_device
from ir.workload.config.keys import TYPES
from ir.workload.setting import shares_kv_heads

COMPUTE = (DType.BF16, DType.FP32, DType.FP64)  # the first is a fix of what is narrower


def refuse(prepared: PreparedJob, backend: str = "gloo", *, real: bool = True, here: int = 0) -> Checksums:
    """Raise PiperError for the first thing this executor cannot do. Returns what a module's build() draws, which ranks
    are told with the plan.

    real: with arithmetic, hence with a model. here: how many of the ranks are on this machine, if not all.
    """
    if backend == "nccl":
        _refuse_nccl(here or prepared.ranks, real, bound=bool(here and os.environ.get("CUDA_VISIBLE_DEVICES")))
        check_device(prepared.plan(), DeviceQueues(_connections()))
    with blaming(prepared.job):
        return _refuse_job(prepared, real)


def _refuse_job(prepared: PreparedJob, real: bool) -> Checksums:
    if prepared.config.mtp and prepared.layers[-1] == 0:
        message = "an MTP module on a stage without the last layer"
        raise _not_yet(message, "parallel.layers", "at least 1 layer on the last stage")
    drawn = _refuse_arithmetic(prepared) if real else {}
    _refuse_formats(prepared)
    return drawn


def _refuse_arithmetic(prepared: PreparedJob) -> Checksums:
    job = prepared.job
    check_divided(prepared.plan().graph)
    _refuse_patterns(prepared)
    if job.run.compile:
        _check_compiler()
    _refuse_recompute(prepared)
    _refuse_repeated(prepared)
    if any(e.chunk.name.startswith("skip") for e in prepared.base.entries):
        raise _not_yet("a stage without layers", "parallel.layers", "at least 1 layer per inner stage")
    if job.model.module is not None or job.model.graph is not None:
        _check_weights(prepared)
        drawn = refuse_module(prepared)
        check_sources(job, prepared.config.vocab)
        return drawn
    refuse_model(prepared.config)
    _check_weights(prepared)  # of a family that is not built no tensor would have the right name
    _refuse_stored(prepared)
    _refuse_balance(prepared)
    check_sources(job, prepared.config.vocab)
    return {}


def _check_weights(prepared: PreparedJob) -> None:
    if prepared.job.model.weights is not None:
        from executor.modules.choose import check_weights  # with torch, which a launcher needs for nothing else

        check_weights(prepared)


def _check_compiler() -> None:
    """Raise PiperError (missing_dependency): Inductor finds no C++ compiler here, or no headers of Python."""
    compiler = os.environ.get("CXX", "g++")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    missing = [compiler] if shutil.which(compiler) is None else [] if header.is_file() else [str(header)]
    if missing:
        message = f"torch's compiler needs {missing[0]}, which is not here"
        allowed = "a C++ compiler (g++, or the one that CXX names) and Python's headers"
        fix, kind = "apt-get install g++ python3-dev, or run.compile = false", ErrorKind.MISSING_DEPENDENCY
        raise PiperError(kind, message, key="run.compile", allowed=allowed, suggestion=fix)


def _refuse_patterns(prepared: PreparedJob) -> None:
    """A pattern that spares nothing is a typo."""
    names = {p.name for e in prepared.base.entries for p in (*e.part.params, *e.part.frozen)}
    for pattern in prepared.job.optimizer.no_decay:
        if not any(fnmatchcase(n, pattern) for n in names):
            message, last = f"no parameter is called {pattern!r}", sorted({n.rpartition(".")[2] for n in names})
            fix = nearest(pattern, [f"*{x}" for x in last])
            raise job_error("optimizer.no_decay", message, fix, f"patterns of names like {min(names)}")


def _refuse_stored(prepared: PreparedJob) -> None:
    """A quantised checkpoint's config does not say what it is trained in: the job has to."""
    if (stored := prepared.config.stored) and prepared.job.precision.params is None:
        said = f"its checkpoint is stored in {stored}, which `run` does not train"
        message, fix = f"{said}; say what its parameters are trained in", 'precision.params = "bf16"'
        allowed = f"precision.params = {', '.join(COMPUTE)} in the job"
        raise model_error(message, fix, allowed, "quantization_config").at(file=prepared.config.source)


def _refuse_balance(prepared: PreparedJob) -> None:
    """What a sequence sends to each expert is not known where no rank has all of it."""
    moe, sizes = prepared.config.moe, prepared.mesh.sizes
    if moe is not None and moe.balance and sizes["tp"] * sizes["cp"] > 1:
        keys = TYPES.get(prepared.config.model_type, {})
        key = "aux_loss_alpha" if "aux_loss_alpha" in keys else "router_aux_loss_coef"
        raise _not_yet("an auxiliary loss of sequences that several ranks share", f"model.{key}", "0")


def refuse_module(prepared: PreparedJob) -> Checksums:
    """Raise PiperError for a user's module without its graph, a graph without its module, or what cannot train. Returns
    what its build() draws.

    Runs the file that `[model] module` names.
    """
    m, precision = prepared.job.model, precision_of(prepared.job)
    if m.graph is None:
        command = f"python -m executor.frontend.capture {m.module} --out model.json --seq-len {m.seq_len}"
        message = f"{m.module} needs the graph captured from it, which its plan is made of"
        raise job_error("model.graph", message, command, "a model.json")
    if m.module is None:
        message, fix = f"{m.graph} says what a module does, not how", 'module = "my_model.py:build"'
        raise job_error("model.module", message, fix, "the captured module")
    if precision.params is not precision.compute:
        message = f"a module of your own computes in its parameters' format, {precision.params}"
        fix = f"precision.compute = {precision.params}"
        raise job_error("precision.compute", message, fix, str(precision.params))
    from executor.modules.choose import model_of
    from executor.modules.user.model import UserModel
    from executor.optim.optimizer import decay_of

    model, optimizer = model_of(prepared), prepared.job.optimizer
    assert isinstance(model, UserModel)
    idle = model.idle
    if decayed := [n for n in idle if decay_of(optimizer, n)]:
        message = f"{decayed[0]} would decay, though no gradient reaches it; torch leaves such a parameter as it is"
        said = [*optimizer.no_decay, *_patterns(decayed, prepared)]
        fix = f"no_decay = [{', '.join(map(json.dumps, said))}]"
        raise job_error("optimizer.no_decay", message, fix, "patterns that name all such")
    return model.drawn


def _patterns(names: Sequence[str], prepared: PreparedJob) -> list[str]:
    """Of these names and no other parameter: one for all layers where that is so, else the names themselves."""
    every = {p.name for e in prepared.base.entries for p in e.part.params}
    found: dict[str, None] = {}
    for name in names:
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        found[pattern if {n for n in every if fnmatchcase(n, pattern)} <= set(names) else name] = None
    return list(found)


def _refuse_nccl(ranks: int, real: bool, bound: bool) -> None:
    """bound: a launcher may have given each rank a GPU of its own, which is all that it sees."""
    if not real:
        message = "nccl moves what a GPU computes, and ops of a given time compute nothing"
        raise PiperError(ErrorKind.USAGE, message, key="--backend", allowed="gloo, local", suggestion="gloo")
    import torch

    gpus = torch.cuda.device_count()
    if gpus < ranks and not (bound and gpus == 1):
        has = f"this machine has {gpus}" if gpus else "torch sees none here"
        message = f"nccl needs a CUDA GPU for each of {ranks} ranks, and {has}"
        fix = "--backend local, where all ranks share one" if gpus else "--backend gloo"
        raise PiperError(ErrorKind.USAGE, message, key="--backend", allowed="gloo, local", suggestion=fix)


def _connections() -> int:
    """Hardware queues that a rank's GPU will have. Raises PiperError (usage): no such number."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    text = os.environ.get(name, LAUNCHES[name])
    if not (text.isdecimal() and 1 <= int(text) <= 32):
        raise PiperError(ErrorKind.USAGE, f"{text!r} queues", key=name, allowed="1 to 32", suggestion="32")
    return int(text)


def _refuse_formats(prepared: PreparedJob) -> None:
    p, given = precision_of(prepared.job), prepared.job.precision
    for key in ("compute", "params", "grads", "optimizer", "reduce"):
        if (found := getattr(p, key)) not in COMPUTE:
            said = "computing" if key == "compute" else key
            raise _not_yet(f"{said} in {found}", f"precision.{key}", ", ".join(COMPUTE))
    if prepared.job.optimizer.name != "sgd" and p.optimizer.bytes < p.params.bytes:  # which has no moments
        raise _not_yet(f"moments in {p.optimizer} of weights in {p.params}", "precision.optimizer", str(p.params))
    read = {b.replica.zero for b in buckets(prepared.plan().graph)} - {0} == {3}  # gathered for who reads them alone
    allowed = {p.params, *(COMPUTE if read and gathered_format(prepared) is p.gather else ())}
    if given.gather not in (None, *allowed):
        message = f"gathering parameters in another format ({given.gather}) than they have ({p.params})"
        raise _not_yet(message, "precision.gather", ", ".join(sorted(allowed)))


def _refuse_recompute(prepared: PreparedJob) -> None:
    """What is not made again as the plan has it."""
    job, layouts, key = prepared.job, [e.layout for e in prepared.plan().graph.entries], "schedule.recompute"
    options = recompute_options(job)
    if (inner := sorted(options & REMADE)) and job.run.compile:
        raise _not_yet(f"recompute of {', '.join(inner)} inside of compiled code", key, '"none", "full"')
    latent = prepared.config.mla is not None
    read = options & {"operators", *({"up_projection"} if latent else {"norm"} if prepared.config.qk_norm else set())}
    if read and any(x.cp > 1 and x.cp_heads for x in layouts):
        raise _not_yet(f"recompute of {', '.join(sorted(read))} where cp ranks exchange heads", key, '"none", "full"')


def _refuse_repeated(prepared: PreparedJob) -> None:
    """Heads of keys and values that several ranks have. Modules say it."""
    if prepared.config.model_type == "captured":
        return
    c, layouts = prepared.config, [e.layout for e in prepared.plan().graph.entries]
    if most := max((x.tp for x in layouts if shares_kv_heads(c, x.tp)), default=0):
        message = f"{c.kv_heads} KV heads among tp = {most} ranks are planned and simulated, but not executed yet"
        raise job_error("parallel.tp", message, f"tp = {c.kv_heads}", f"divisors of {c.kv_heads}")
    kv = c.heads if c.mla else c.kv_heads
    if most := max((x.cp for x in layouts if x.cp_heads and kv // x.tp < x.cp), default=0):
        raise _not_yet(f"an exchange of {kv} KV heads among cp = {most} ranks", "parallel.cp_comm", '"all_gather"')


def _not_yet(what: str, key: str, allowed: str) -> PiperError:
    message = f"{what} is planned and simulated, but not executed yet"
    return job_error(key, message, f"{key} {allowed.split(',')[0]}", allowed)
