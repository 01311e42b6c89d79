"""Where several tensors cross from one chunk to the next, they cross as one."""

import operator
from collections.abc import Mapping, Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from executor.modules.user.annotate import SEAM, At, chunk_of, made_again, model_error

Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def pack(values: Sequence[Tensor], kind: torch.dtype, batch: tuple[int, int], width: int) -> Tensor:
    """(sequences, tokens, width) that holds the values: those of `kind`, through which gradients go, and the bits of
    integers and flags.

    >>> a, b = torch.ones(1, 2, 3), torch.tensor([3, 1, 2], dtype=torch.int32)
    >>> shapes = ((1, 2, 3), torch.float32), ((3,), torch.int32)
    >>> [t.tolist() for t in unpack(pack([a, b], torch.float32, (1, 2), 6), shapes)] == [a.tolist(), b.tolist()]
    True
    """
    flat = torch.cat([v.reshape(-1) if v.dtype is kind else _bits(v, kind) for v in values])
    return F.pad(flat, (0, prod(batch) * width - len(flat))).view(*batch, width)


def unpack(packed: Tensor, shapes: Shapes) -> tuple[Tensor, ...]:
    """The values that `pack` was given, of these shapes and formats."""
    sizes = [_room(shape, kind, packed.dtype) for shape, kind in shapes]
    parts = packed.reshape(-1).split([*sizes, packed.numel() - sum(sizes)])
    return tuple(
        part.view(shape) if kind is packed.dtype else _of_bits(part, shape, kind)
        for part, (shape, kind) in zip(parts, shapes, strict=False)
    )


def _room(shape: tuple[int, ...], kind: torch.dtype, packed: torch.dtype) -> int:
    """How many elements of the pack's format hold a value."""
    return -(-prod(shape) * kind.itemsize // packed.itemsize)


def _bits(value: Tensor, kind: torch.dtype) -> Tensor:
    raw = value.detach().contiguous().view(-1).view(torch.uint8)
    return F.pad(raw, (0, -len(raw) % kind.itemsize)).view(kind)


def _of_bits(part: Tensor, shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
    raw = part.detach().clone().view(torch.uint8)  # a copy begins where any format may
    return raw[: prod(shape) * kind.itemsize].view(kind).view(shape)


def pack_seams(module: nn.Module, graph: fx.Graph, at: At, batch: tuple[int, int]) -> None:
    """Where several tensors cross a seam, or tensors of other shapes than elsewhere, let them cross as one.

    Raises PiperError (model): some are complex, or of several formats of floating point.
    """
    chunks, again = chunk_of(graph, at), made_again(module, graph)
    order = list(dict.fromkeys(chunks[n] for n in graph.nodes if n in chunks and n not in again))
    rank = {name: i for i, name in enumerate(order)}
    work = {n: rank[chunks[n]] for n in graph.nodes if n in chunks and n not in again}
    seams = [_alive(work, i) for i in range(len(order) - 1)]
    if groups := [n for alive in seams for n in alive if not isinstance(n.meta["val"], Tensor)]:
        message = f"{groups[0].name} crosses a seam, which is several tensors that are made at once"
        raise model_error(message, "call it in a module below the tag's", "single tensors", "model.module")
    if not seams:
        return
    kind = _format(seams)
    totals = [sum(_room(tuple(n.meta["val"].shape), n.meta["val"].dtype, kind) for n in alive) for alive in seams]
    width = max((-(-total // prod(batch)) for total in totals), default=0)
    if all(len(alive) == 1 and alive[0].meta["val"].shape == (*batch, width) for alive in seams):
        return
    for node, name in chunks.items():  # a pack is to stand with its chunk, whatever made-again nodes stand around it
        at[node] = ((SEAM, int(name[1:])),) if name[1:].isdigit() and node not in again else ()
    for i in range(len(seams)):
        _one(graph, at, work, i, kind, batch, width)


def _format(seams: Sequence[Sequence[fx.Node]]) -> torch.dtype:
    """Of what crosses seams and has gradients; each seam has such a tensor, and all are of one format."""
    of: dict[str, torch.dtype] = {n.name: n.meta["val"].dtype for alive in seams for n in alive}
    real = {kind for kind in of.values() if kind.is_floating_point}
    empty = any(not any(of[n.name].is_floating_point for n in alive) for alive in seams)
    if len(real) == 1 and not empty and not any(kind.is_complex for kind in of.values()):
        return real.pop()
    named = {name: str(kind) for name, kind in of.items()}
    message = f"what crosses seams is of several formats of floating point, complex, or of integers alone: {named}"
    fix = "move the seam, or cast before it (torch.view_as_real)"
    raise model_error(message, fix, "floating point of one format, beside integers and flags", "model.module")


def _alive(work: Mapping[fx.Node, int], i: int) -> list[fx.Node]:
    """What chunks up to i make, and later ones read."""
    return [n for n, k in work.items() if k <= i and any(u.op == "output" or work.get(u, -1) > i for u in n.users)]


def _one(
    graph: fx.Graph,
    at: At,
    work: dict[fx.Node, int],
    i: int,
    kind: torch.dtype,
    batch: tuple[int, int],
    width: int,
) -> None:
    alive = _alive(work, i)
    here, there = (next(n for n, k in work.items() if k == j) for j in (i, i + 1))
    with graph.inserting_before(there):
        packed = graph.call_function(pack, (alive, kind, batch, width))
        shapes = tuple((tuple(n.meta["val"].shape), n.meta["val"].dtype) for n in alive)
        found = graph.call_function(unpack, (packed, shapes))
        parts = [graph.call_function(operator.getitem, (found, k)) for k in range(len(alive))]
    at[packed], work[packed] = at[here], i
    for node in (found, *parts):
        at[node], work[node] = at[there], i + 1
    for value, part in zip(alive, parts, strict=True):
        part.meta["val"] = value.meta["val"]
        for user in list(value.users):
            if user is not packed and (user.op == "output" or work.get(user, -1) > i):
                user.replace_input_with(value, part)
