"""Which model a job runs: the reference decoder of its config, or the user's module its graph was captured from."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from executor.device.device import HostDevice
from executor.modules.base import TORCH, Model
from executor.modules.decoder import DecoderModel
from executor.modules.hub_weights import HubCheckpoint, biases
from executor.modules.remade import REMADE
from executor.modules.user.annotate import model_error
from executor.modules.user.divided.linears import ModelShard
from executor.modules.user.model import UserModel
from executor.modules.user.reference import UserModelBuild, load_callable
from executor.parallel.expert_all_to_all import ExpertGroup
from executor.parallel.inline import RankRegion
from executor.parallel.router_guide import ExpertRouterGuide
from executor.parallel.shares import ParamShard
from ir.core.files import named_path
from ir.core.work import DType
from ir.graph.classes import recomputed as again
from ir.job import Job
from ir.job.build import PreparedJob, precision_of
from ir.job.recompute import recompute_options
from ir.workload.part import PlacedPart, before_training


def model_of(
    prepared: PreparedJob,
    held: Mapping[str, ParamShard] | None = None,
    region: RankRegion | None = None,
    spread: Mapping[str, ExpertGroup] | None = None,
    guide: ExpertRouterGuide | None = None,
    where: torch.device = HostDevice.torch,
) -> Model:
    """The job's model in the model graph's parts, with the values every rank would give it.

    held: what a rank holds of the parameters (`executor.parallel.shares`); all of each without it. region: whom it
    meets inside parts. spread: over which ranks a chunk's experts are. guide: the routers'.
    where: who draws first values; modules are built on the host all the same.
    """
    job, precision = prepared.job, precision_of(prepared.job)
    dtype, compute = TORCH[precision.params], TORCH[precision.compute]
    if job.model.module is not None:
        return _users(prepared, job.model.module, region, held or {})
    selective = recompute_options(job) & {"scores", "operators"}  # which flash attention does anyway
    return DecoderModel(
        prepared.config,
        job.model.seed,
        dtype,
        compute,
        parts=True,
        attention="remade" if selective and job.model.attention == "unfused" else job.model.attention,
        shares=held or {},
        region=region or RankRegion(),
        spread=spread or {},
        guide=guide or ExpertRouterGuide(),
        weights=weights_of(job),
        where=where,
        stream=TORCH[precision.stream],
    )


def weights_of(job: Job) -> HubCheckpoint | None:
    """The checkpoint that `[model] weights` names, if any. Its path starts at the job's folder."""
    if job.model.weights is None:
        return None
    return HubCheckpoint(Path(named_path(job.file, job.model.weights)), job.model.drawn)


def check_weights(prepared: PreparedJob) -> None:
    """Raise PiperError (io): `[model] weights` are not those of the job's model. A user's module checks its own."""
    job, moe = prepared.job, prepared.config.moe
    if (found := weights_of(job)) is None or job.model.module is not None:
        return
    shapes = {p.name: p.shape for e in prepared.base.entries for p in e.part.params}
    found.check(shapes, biases(shapes, moe.scoring if moe else None))


def gathered_format(prepared: PreparedJob) -> DType:
    """In which format weights travel that are gathered where they are read. Code that was compiled, or captured, for
    their own takes no other.
    """
    p, job = precision_of(prepared.job), prepared.job
    return p.params if job.run.compile or job.model.module is not None else p.gather


def recomputed(prepared: PreparedJob) -> frozenset[str]:
    """The units that the job's recompute options run again, as the model graph has it."""
    return frozenset(name for _, name in again(prepared.base))


def without_backward(entries: Sequence[PlacedPart]) -> tuple[frozenset[str], frozenset[str]]:
    """The units that have no backward, and those that read them from another chunk."""
    chunks = {e.chunk.name: e.chunk for e in entries}
    still = before_training(chunks.values())
    first = next(name for name in chunks if name not in still)
    edge = {e.name for e in entries if still and e.chunk.name == first and "" in e.part.inputs}
    return frozenset(e.name for e in entries if e.chunk.name in still), frozenset(edge)


def remade_values(prepared: PreparedJob) -> dict[str, frozenset[str]]:
    """By unit, the job's recompute options of values inside of it."""
    base, mla = prepared.base, prepared.config.mla
    # torchtitan's choice: what is no product, and every second product, which are latent attention's ways up.
    operators = {"norm", "activation"} | ({"up_projection"} if mla and mla.q_rank else set())
    found = {e.name: base.recompute.of(e.chunk) & REMADE for e in base.entries}
    return {name: o | operators if "operators" in o else o for name, o in found.items() if o}


def _users(
    prepared: PreparedJob, reference: str, region: RankRegion | None, held: Mapping[str, ParamShard]
) -> UserModel:
    """The user's module, which must be the one that was captured. Its path starts at the job's folder."""
    job, entries = prepared.job, prepared.base.entries
    path, _, name = reference.rpartition(":")
    divided = region or RankRegion.of(prepared.plan(), 0)
    build = UserModelBuild(load_callable(f"{named_path(job.file, path)}:{name}" if path else reference, job.model.seed))
    parts = {e.chunk.name: e.part.name for e in entries}
    experts = [p.name for e in entries for p in (*e.part.params, *e.part.frozen) if p.expert and p.name in held]
    cuts = [c for name in experts for c in held[name].cuts]
    files = weights_of(job)
    model = UserModel(
        build,
        seed=job.model.seed,
        dtype=TORCH[precision_of(job).params],
        parts=parts,
        tags=job.model.tags,
        batch=(job.schedule.microbatch_size, job.model.seq_len),
        shard=ModelShard(divided, job.model.tp_plan, *next(((c.count, c.index) for c in cuts), (1, 0))),
        values=files,
    )
    from_build = {n for n in model.read if files is None or (n in model.shapes and files.lacks(n, model.shapes[n]))}
    model.drawn = {n: value for n, value in build.drawn.items() if n in from_build}
    model.refuse_training()
    _refuse_another(job.model.graph or "", reference, model, entries)
    if region is None:  # once, before any rank starts
        model.check_values()
        model.refuse_impure(job.schedule.microbatch_size, job.model.seq_len)
        model.refuse_unlike(prepared.config.vocab, prepared.mesh.sizes["ep"])
    last = prepared.stages - 1
    if far := [e.chunk.name for e in entries if e.chunk.name in model.reads_tokens and e.stage not in (0, last)]:
        message = f"chunk {far[0]} reads the token ids, which only the first and the last stage are given"
        fix = (
            "parallel.layers, or a pp, by which it is on one of these; or carry it in the tensor that crosses the seams"
        )
        raise model_error(message, fix, "chunks behind the first that read the ids' shape alone", "model.module")
    return model


def _refuse_another(file: str, reference: str, model: UserModel, entries: Sequence[PlacedPart]) -> None:
    """Raise PiperError (model) where a module is not what `file` was captured from, with the first difference.

    How tp divides it is compared, too: a plan's norm counts what each rank holds, and another tp_plan, or another
    version of the module's package, has each rank hold something else.
    """
    params = [p for e in entries for p in e.part.params]
    tp = {p.name: dim for p in params for axis, dim in zip(p.sharded, p.dims, strict=True) if axis == "tp"}
    held = {p.name: _held(p.shape, tp.get(p.name), p.by_heads) for p in params}
    has = {n: _held(shape, model.dims.get(n), n in model.partly) for n, shape in model.shapes.items()}
    held |= {p.name: f"{p.shape}, frozen" for e in entries for p in e.part.frozen}
    has |= {n: f"{shape}, frozen" for n, shape in model.frozen.items()}
    chunks = tuple(dict.fromkeys(e.chunk.name for e in entries))
    if model.chunks == chunks and has == held:
        return
    mine, theirs = dict.fromkeys(model.chunks, "a chunk") | has, dict.fromkeys(chunks, "a chunk") | held
    name = next((n for n in {**mine, **theirs} if mine.get(n) != theirs.get(n)), "their order")
    message = f"{reference} has {name}: {mine.get(name)}, but {file} has {theirs.get(name)}"
    raise model_error(message, "capture the module again", key="model.graph")


def _held(shape: tuple[int, ...], cut: int | None, partly: bool) -> str:
    """What a rank has of a parameter, in words."""
    divided = "" if cut is None else f", divided over tp along dim {cut}"
    return f"{shape}{divided}{', its gradient a sum over tp' if partly else ''}"
