"""A user's module into `model.json`: chunks, parameters, kernels and bytes, taken without values on one device.

    python -m executor.frontend.capture my_model.py:build --out model.json --seq-len 2048 --microbatch-size 1 --dtype
    bf16

`[model] graph = "model.json"` then plans and simulates it without torch; with `module = "my_model.py:build"` beside
it, `piper-sim run` trains it. FLOPs, shapes and what is kept for backward are those of torch's own calls, one by one.
Kernels are what a compiler makes of these (`executor.frontend.fuse`), and products of weight gradients add to their
sums, as training frameworks have it and a config's kernels are priced; with `--eager` they are the calls themselves.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from executor.frontend.aten import FORMATS
from executor.frontend.measure import PartMeasure, PassMeasure, survey, without_values
from executor.frontend.scores import ATTENTION
from executor.modules.base import TORCH, BuiltChunks, Model, TokenLoss
from executor.modules.user.divided.linears import ModelShard
from executor.modules.user.exported import tensors_of
from executor.modules.user.exports.shared_exports import RankExports, exports_shared
from executor.modules.user.model import UserModel
from executor.modules.user.reference import load_callable
from executor.parallel.inline import MessageAxis, RankAxis, RankRegion
from ir.core.errors import ErrorKind, PiperError, job_error, nearest
from ir.core.work import DType, Kernel, KernelKind, Message
from ir.workload.captured_file import FORMAT, VERSION, ModelMesh, read_captured
from ir.workload.part import CP_COMMS

Json = dict[str, Any]


def captured_shard(
    tp: int = 1,
    tp_plan: Mapping[str, str] | None = None,
    ep: int = 1,
    cp: int = 1,
    cp_comm: str = CP_COMMS[0],
    sequence_parallel: bool = False,
) -> ModelShard:
    """What the first of these ranks has; their messages are noted, in one list.

    Raises PiperError (job): nobody sends what `cp_comm` says.
    """
    if cp_comm not in CP_COMMS:
        message, allowed = f"no such communication, {cp_comm!r}", ", ".join(CP_COMMS)
        raise job_error("parallel.cp_comm", message, nearest(cp_comm, CP_COMMS), allowed)
    noted = list[Message]()
    linears, tokens = (MessageAxis(n, axis, noted) if n > 1 else RankAxis() for n, axis in ((tp, "tp"), (cp, "cp")))
    region = RankRegion(linears, tokens, sequence=sequence_parallel and tp > 1, heads=cp_comm == CP_COMMS[1])
    return ModelShard(region, tp_plan or {}, ep)


def capture(
    reference: str | nn.Module,
    *,
    batch: tuple[int, int],
    dtype: DType = DType.BF16,
    tags: Mapping[str, str] | None = None,
    compiled: bool = True,
    **axes: Unpack[ModelMesh],
) -> Json:
    """The module that `path/file.py:build` makes, as the object of a model.json. batch: sequences, tokens. tags: {"PP":
    "model.layers.*"}, where its layers are by module path; without them its code says so (`annotate`). compiled: its
    kernels as a compiler fuses them; else one by one. axes: over which ranks it is divided.
    """
    (size, length), divided = batch, captured_shard(**axes)
    with without_values() as call, exports_shared(RankExports()):
        if isinstance(reference, str):
            name = reference
            build: Callable[[], object] = partial(_built_without_values, call, load_callable(reference))
        else:
            name, build = type(reference).__name__, partial(_without_values, reference)
        before = torch.get_default_dtype()
        torch.set_default_dtype(TORCH[dtype])
        given = partial(UserModel, build, dtype=None, tags=tags, batch=batch)
        region, whole = divided.region, dict[str, PartMeasure]()
        axis = next((a for a in (region.tp, region.cp) if isinstance(a, MessageAxis)), None)
        try:
            model = given(shard=divided)
            found = describe(model, name, length, size, dtype, axis, compiled)
            if axis is not None:
                whole = survey(given(), size, length, backward=False)
        finally:
            torch.set_default_dtype(before)
    tp, cp, ep = region.tp.size, region.cp.size, divided.ep
    if ep > 1 and not model.routed:
        raise job_error("parallel.ep", "no module is tagged as experts", 'tags = { EP = "model.layers.*.mlp.experts" }')
    for unit, measured in whole.items():
        flops, (chunk, _, part) = _model_flops(measured.forward), unit.partition(".")
        entry = next(c for c in found["chunks"] if c["name"] == chunk)
        piece = next((p for p in entry.get("pieces", ()) if p["name"] == part), entry)
        found["parts"][piece["part"]]["model_flops"] = flops
    cut = {"tp": tp, "cut": model.dims, "partly": model.partly} if tp > 1 else {}
    cut |= {"sequence_parallel": True} if region.sequence else {}
    shared = {"cp": cp, "cp_heads": region.heads} if cp > 1 else {}
    return {**found, "tables": model.tables, **cut, **shared, **({"ep": ep} if ep > 1 else {})}


def _built_without_values(call: Callable[[Callable[[], object]], object], build: Any) -> object:
    """What `build` makes inside the fake mode; what it has read from files, too, is left without values, and what it
    has converted is in the format that tensors are made in now.
    """
    made = call(build)
    if not isinstance(made, nn.Module) or all(map(_usual, (*made.parameters(), *made.buffers()))):
        return made
    return _without_values(made)


def _usual(t: Tensor) -> bool:
    return isinstance(t, FakeTensor) and not (t.is_floating_point() and t.dtype != torch.get_default_dtype())


def _without_values(module: nn.Module) -> nn.Module:
    """A copy of a module that is there already, in the format that tensors are made in now; inside the fake mode."""

    def blank(t: Tensor) -> Tensor:
        made = torch.empty(t.shape, dtype=torch.get_default_dtype() if t.is_floating_point() else t.dtype)
        return nn.Parameter(made, t.requires_grad) if isinstance(t, nn.Parameter) else made

    return deepcopy(module, {id(t): blank(t) for t in tensors_of(module)})


def describe(
    model: Model,
    name: str,
    seq_len: int,
    microbatch_size: int,
    dtype: DType,
    axis: MessageAxis | None = None,
    compiled: bool = True,
) -> Json:
    """A model in chunks, measured; inside `without_values`. Raises PiperError for what the file cannot say.

    axis: notes what ranks exchange that share its work.
    """
    some = seq_len // (model.divides if isinstance(model, UserModel) else 1)
    found = survey(model, microbatch_size, seq_len, axis=axis)
    built = model.build(model.chunks)
    shapes = {**model.shapes, **(model.frozen if isinstance(model, UserModel) else {})}
    units = {c: [u for u in built.units if u.partition(".")[0] == c] for c in model.chunks}
    hidden = _width(name, [(u[-1], found[u[-1]]) for u in units.values()], (microbatch_size, some), TORCH[dtype])
    after = {a: found[units[b][0]].keeps[:1] for a, b in zip(model.chunks, model.chunks[1:], strict=False)}
    parts: dict[str, Json] = {}
    chunks: list[Json] = []
    for chunk, mine in units.items():
        pieces: list[Json] = []
        for unit in mine:
            last, alone = unit == mine[-1], len(mine) == 1
            read_next = after.get(chunk, ("",))[0] if last else ""
            numbers = _part(found[unit], read_next, inside=not alone, compiled=compiled)
            held = {id(p) for p in built.units[unit].parameters()}
            params, frozen = (
                [[n, list(shapes[n])] for n, p in each.items() if id(p) in held]
                for each in (built.params, built.frozen)
            )
            stem = "block" if chunk[1:].isdigit() else chunk
            named = _name(stem if alone else unit.rpartition(".")[2], numbers, parts)
            piece = {"name": unit.rpartition(".")[2], "part": named, "parameters": params}
            pieces.append(piece | ({"frozen": frozen} if frozen else {}))
        if len(mine) == 1:
            chunks.append({**pieces[0], "name": chunk})
        else:
            chunks.append({"name": chunk, "pieces": pieces, "experts": _experts(built, found, chunk)})
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": name,
        "microbatch_size": microbatch_size,
        "seq_len": seq_len,
        "dtype": str(dtype),
        **({"compiled": True} if compiled else {}),
        "hidden": hidden,
        "vocab": _vocabulary(model, built.units[units[model.chunks[0]][0]], hidden),
        "chunks": chunks,
        "parts": parts,
    }


def _experts(built: BuiltChunks, found: Mapping[str, PartMeasure], chunk: str) -> Json:
    """What passes between a layer's router and its experts."""
    router, experts = f"{chunk}.router", f"{chunk}.experts"
    outs, ports = found[router].outs, {p.rpartition(".")[2]: at for p, at in built.ports[router].items()}
    (counts,) = ports["counts"]
    add: Any = built.units[f"{chunk}.add"]
    add = add.inner if isinstance(add, TokenLoss) else add
    return {
        "count": found[router].shapes[counts][0][0],
        "top_k": add.top_k,
        "sent_bytes": sum(outs[k] for k in ports["rows"]),
        "back_bytes": sum(found[experts].outs),
        "past_bytes": sum(outs[k] for k in ports["tokens"]),
    }


def _name(stem: str, numbers: Json, parts: dict[str, Json]) -> str:
    """Equal layers share a part: block, block2, …; embed and head have their own."""
    for k in range(1, len(parts) + 2):
        name = stem if k == 1 else f"{stem}{k}"
        if parts.setdefault(name, numbers) == numbers:
            return name
    raise AssertionError(stem)


def _width(name: str, found: Sequence[tuple[str, PartMeasure]], batch: tuple[int, int], dtype: torch.dtype) -> int:
    """Features per token of the tensor at every seam; it must be one and the same."""
    seams = {u: m.shapes for u, m in found[:-1]}
    first = next(iter(seams.values()), (((*batch, 1), dtype),))
    for unit, shapes in seams.items():
        ((shape, kind),) = shapes if len(shapes) == 1 else (((), None),)
        if len(shape) != 3 or shape[:2] != batch or kind != dtype or shapes != first:
            message = f"{name}: {unit} hands on {', '.join(f'{list(s)} {d}' for s, d in shapes)}"
            allowed = f"one tensor [{batch[0]}, {batch[1]}, width] {dtype}, of one width everywhere"
            raise PiperError(ErrorKind.MODEL, message, allowed=allowed, suggestion="move the seam, or cast before it")
    return first[0][0][-1]


def _vocabulary(model: Model, first: nn.Module, hidden: int) -> int:
    """Rows of the tables that the ids are looked up in, or of the first chunk's embedding, or of what looks like one,
    as far as there are logits of them; 1 where nothing does.
    """
    known = model.rows if isinstance(model, UserModel) else ()
    whole = model.module if isinstance(model, UserModel) else first  # what is exported has no modules
    held = {id(p) for p in first.parameters()}
    tables = [min(known)] if known else []
    tables += [m.num_embeddings for m in whole.modules() if isinstance(m, nn.Embedding) and id(m.weight) in held]
    tables += [p.shape[0] for p in first.parameters() if p.dim() == 2 and p.shape[1] == hidden]
    words = model.vocabulary if isinstance(model, UserModel) else None
    return min(tables[0], words or tables[0]) if tables else 1


def _part(m: PartMeasure, read_next: str, *, inside: bool, compiled: bool) -> Json:
    """One part's numbers. Its output is counted as saved only where the next chunk does not keep it as long.

    inside: it is one of a layer's several, whose inputs that backward reads again are counted as its own.
    """
    own = dict.fromkeys("IW", 0)
    if inside:
        for size, until in zip(m.ins, m.keeps, strict=True):
            if until:
                own[until] += size
    for size, until in zip(m.outs, m.keeps_outs, strict=True):
        if until > read_next:
            own[until] += size
    floating = m.keeps[0] if m.keeps and not inside else ""
    return {
        "output_bytes": sum(m.outs),
        "reads_input_again": floating,
        "saved_bytes": {
            "until_I": sum(m.until_i) + own["I"],
            "until_W": sum(m.until_w) + own["W"],
            "constants": m.constants,
        },
        "stash_bytes": sum(m.stash),
        "passes": {n: _pass(p, compiled) for n, p in zip("FIW", (m.forward, m.input_grad, m.weight_grad), strict=True)},
        **({"model_flops": _model_flops(m.forward)} if m.forward.hidden else {}),
        **({"written_out": True} if compiled and any(k.label == ATTENTION for k in m.forward.compiled) else {}),
    }


def _model_flops(p: PassMeasure) -> int:
    return sum(k.flops * k.count for k in p.compiled) - p.hidden


def _pass(p: PassMeasure, compiled: bool) -> Json:
    """Equal kernels as one row with a count, in order of their first appearance."""
    counted: dict[Kernel, int] = {}
    for kernel in p.compiled if compiled else p.work:
        counted[kernel] = counted.get(kernel, 0) + kernel.count
    rows = [
        {
            "op": k.label,
            "kind": str(k.kind),
            "flops": k.flops,
            "bytes": k.bytes,
            "dtype": str(k.dtype),
            "shape": list(k.shape),
            "count": n,
        }
        for k, n in counted.items()
    ]
    axes = [{} if m.axes == ("tp",) else {"axis": m.axes[0]} for m in p.messages]
    messages = [{"kind": str(m.kind), "bytes": m.bytes, **a} for m, a in zip(p.messages, axes, strict=True)]
    return {"workspace_bytes": p.workspace, "kernels": rows, **({"messages": messages} if messages else {})}


def text(value: object, indent: str = "") -> str:
    """JSON in which whatever fits on a line stands on one.

    >>> print(text({"a": [1, 2], "b": {"c": []}}))
    {"a": [1, 2], "b": {"c": []}}
    """
    line = json.dumps(value)
    if len(indent + line) <= 120 or not isinstance(value, (dict, list)):
        return line
    inner = indent + " "
    if isinstance(value, dict):
        rows = [f"{inner}{json.dumps(k)}: {text(v, inner)}" for k, v in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + text(v, inner) for v in value) + f"\n{indent}]"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line.

    Raises PiperError (io): the file to write exists.
    """
    prog, about = "python -m executor.frontend.capture", str(__doc__).split("\n", 1)[0]
    parser = argparse.ArgumentParser(prog=prog, description=about)
    parser.add_argument("module", help="my_model.py:build")
    parser.add_argument("--out", required=True, type=Path, help="the file to write, model.json")
    parser.add_argument("--seq-len", required=True, type=int)
    parser.add_argument("--microbatch-size", type=int, default=1)
    parser.add_argument("--dtype", default="bf16", choices=[str(d) for d in FORMATS.values()])
    parser.add_argument("--pp", metavar="PATTERN", help='module paths of the layers, "model.layers.*"')
    parser.add_argument("--tp", type=int, default=1, help="ranks that share its linears, as its own tp_plan has it")
    parser.add_argument("--sequence-parallel", action="store_true", help="they share tokens, too, between linears")
    parser.add_argument("--cp", type=int, default=1, help="ranks that share the tokens of each sequence")
    parser.add_argument("--cp-heads", action="store_true", help="they share attention's heads, too: an all-to-all each")
    parser.add_argument("--experts", metavar="PATTERN", help='module paths of experts, "model.layers.*.mlp.experts"')
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts of a layer")
    parser.add_argument("--eager", action="store_true", help="kernels one by one, not as a compiler fuses them")
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    args = parser.parse_args(argv)
    try:
        if args.out.exists() and not args.force:
            raise PiperError(ErrorKind.IO, "the file exists", file=str(args.out), key="--out", suggestion="--force")
        found = capture(
            args.module,
            batch=(args.microbatch_size, args.seq_len),
            dtype=DType(args.dtype),
            tags={t: p for t, p in (("PP", args.pp), ("EP", args.experts)) if p} or None,
            tp=args.tp,
            ep=args.ep,
            cp=args.cp,
            cp_comm=CP_COMMS[args.cp_heads],
            sequence_parallel=args.sequence_parallel,
            compiled=not args.eager,
        )
        args.out.write_text(text(found) + "\n", encoding="utf-8")
        read, _ = read_captured(args.out)
    except PiperError as error:
        print(error, file=sys.stderr)
        return 2
    names = {n for c in read.chunks for n, _ in c.parameters}
    products = sum(k.kind is not KernelKind.MEMORY for p in read.parts.values() for k in p.passes.F.kernels)
    print(f"{args.out}: {len(read.chunks)} chunks, {len(names)} parameters, {products} kinds of products in forward")
    return 0


if __name__ == "__main__":
    sys.exit(main())
