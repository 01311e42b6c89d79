"""Where several tensors cross from one chunk to the next, they cross as one."""

import operator
from collections.abc import Mapping, Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from executor.modules.user.annotate import SEAM, At, chunk_of, made_again, model_error

Shapes = tuple[tuple[int, ...], ...]


def pack(values: Sequence[Tensor], batch: tuple[int, int], width: int) -> Tensor:
    """(sequences, tokens, width) that holds the values.

    >>> a, b = torch.ones(1, 2, 3), torch.zeros(5)
    >>> [t.tolist() for t in unpack(pack([a, b], (1, 2), 6), ((1, 2, 3), (5,)))] == [a.tolist(), b.tolist()]
    True
    """
    flat = torch.cat([v.reshape(-1) for v in values])
    return F.pad(flat, (0, prod(batch) * width - len(flat))).view(*batch, width)


def unpack(packed: Tensor, shapes: Shapes) -> tuple[Tensor, ...]:
    """The values that `pack` was given."""
    sizes = [prod(s) for s in shapes]
    parts = packed.reshape(-1).split([*sizes, packed.numel() - sum(sizes)])
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=False))


def pack_seams(module: nn.Module, graph: fx.Graph, at: At, batch: tuple[int, int]) -> None:
    """Where several tensors cross a seam, or tensors of other shapes than elsewhere, let them cross as one.

    Raises PiperError (model): one of them is not of floating point, or not of the format of the others.
    """
    chunks, again = chunk_of(graph, at), made_again(module, graph)
    order = list(dict.fromkeys(chunks[n] for n in graph.nodes if n in chunks and n not in again))
    rank = {name: i for i, name in enumerate(order)}
    work = {n: rank[chunks[n]] for n in graph.nodes if n in chunks and n not in again}
    seams = [_alive(work, i) for i in range(len(order) - 1)]
    if groups := [n for alive in seams for n in alive if not isinstance(n.meta["val"], Tensor)]:
        message = f"{groups[0].name} crosses a seam, which is several tensors that are made at once"
        raise model_error(message, "call it in a module below the tag's", "single tensors", "model.module")
    totals = [sum(n.meta["val"].numel() for n in alive) for alive in seams]
    width = max((-(-total // prod(batch)) for total in totals), default=0)
    kinds = {n.meta["val"].dtype for alive in seams for n in alive}
    numbers = all(kind.is_floating_point for kind in kinds)
    if numbers and all(len(alive) == 1 and alive[0].meta["val"].shape == (*batch, width) for alive in seams):
        return
    if len(kinds) != 1 or not numbers:
        named = {n.name: str(n.meta["val"].dtype) for alive in seams for n in alive}
        message = f"what crosses seams is of several formats, of integers, or complex: {named}"
        fix = "move the seam, or cast before it (torch.view_as_real)"
        raise model_error(message, fix, "floating point, of one format", "model.module")
    for node, name in chunks.items():  # a pack is to stand with its chunk, whatever made-again nodes stand around it
        at[node] = ((SEAM, int(name[1:])),) if name[1:].isdigit() and node not in again else ()
    for i in range(len(seams)):
        _one(graph, at, work, i, batch, width)


def _alive(work: Mapping[fx.Node, int], i: int) -> list[fx.Node]:
    """What chunks up to i make, and later ones read."""
    return [n for n, k in work.items() if k <= i and any(u.op == "output" or work.get(u, -1) > i for u in n.users)]


def _one(graph: fx.Graph, at: At, work: dict[fx.Node, int], i: int, batch: tuple[int, int], width: int) -> None:
    alive = _alive(work, i)
    here, there = (next(n for n, k in work.items() if k == j) for j in (i, i + 1))
    with graph.inserting_before(there):
        packed = graph.call_function(pack, (alive, batch, width))
        found = graph.call_function(unpack, (packed, tuple(tuple(n.meta["val"].shape) for n in alive)))
        parts = [graph.call_function(operator.getitem, (found, k)) for k in range(len(alive))]
    at[packed], work[packed] = at[here], i
    for node in (found, *parts):
        at[node], work[node] = at[there], i + 1
    for value, part in zip(alive, parts, strict=True):
        part.meta["val"] = value.meta["val"]
        for user in list(value.users):
            if user is not packed and (user.op == "output" or work.get(user, -1) > i):
                user.replace_input_with(value, part)
