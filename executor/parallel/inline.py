"""A rank's ends of the groups that meet inside compute ops, over tp, cp and etp: it blocks there.

The plan has these messages as `Node.inline`, with the op's own work, in the order they happen in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from executor.device import clock
from executor.device.progress import RankProgress
from executor.parallel.traced import traceable
from executor.transport.base import Transport, TransportHandle
from ir.core.errors import ErrorKind, PiperError
from ir.core.work import Message, MessageKind
from ir.graph.graph import Graph
from ir.graph.matrices import MuonOptimizer, shared_kinds
from ir.graph.sync import buckets
from ir.plan.places import RankPlacement
from ir.plan.plan import Plan
from ir.workload.part import PartLayout

AXES = ("tp", "cp", "etp")
PATIENCE_S = 2.0

Meeting = tuple[str, tuple[int, ...], frozenset[MessageKind]]  # a group's name, its ranks, what they do there


class RankAxis:
    """One mesh axis: `size` ranks, of which this one is the `index`-th. Calls return when their message is over.

    members: global ranks, in that order. Without a transport nothing moves: as if the others had sent the same, or 0.

    >>> wire = RankAxis(2, 1); wire.gather(torch.ones(2)).tolist(), wire.scatter(torch.tensor([[1.0], [2.0]])).tolist()
    ([[1.0, 1.0], [1.0, 1.0]], [2.0])
    """

    def __init__(
        self,
        size: int = 1,
        index: int = 0,
        axis: str = "",
        members: tuple[int, ...] = (),
        transport: Transport | None = None,
        progress: RankProgress | None = None,
    ) -> None:
        self.size, self.index, self.axis, self.members = size, index, axis, members
        self._transport, self._progress = transport, progress

    @property
    def group(self) -> str:
        return group_name(self.axis, self.members)

    def unconnected(self) -> RankAxis:
        """The same without the others: nothing moves."""
        return RankAxis(self.size, self.index, self.axis)

    @traceable
    def sum(self, x: Tensor) -> Tensor:
        """All-reduce, in place."""
        return self._reduce(x, largest=False)

    @traceable
    def largest(self, x: Tensor) -> Tensor:
        """The same, of the largest values."""
        return self._reduce(x, largest=True)

    @traceable
    def gather(self, x: Tensor) -> Tensor:
        """Everyone's x: (…) → (size, …)."""
        x = x.contiguous()
        into = x.new_empty(self.size, *x.shape)
        if self._alone(MessageKind.ALL_GATHER, into) or (t := self._transport) is None:
            return into.copy_(x)
        self._meet(MessageKind.ALL_GATHER, into, x, lambda: t.all_gather(self.group, into.view(-1), x.view(-1)))
        return into

    @traceable
    def scatter(self, x: Tensor) -> Tensor:
        """Reduce-scatter: everyone's x added up, of which the index-th row stays here: (size, …) → (…)."""
        x = x.contiguous()
        into = x.new_empty(x.shape[1:])
        if self._alone(MessageKind.REDUCE_SCATTER, x) or (t := self._transport) is None:
            return into.copy_(x[self.index])
        flat = x.view(-1)
        self._meet(MessageKind.REDUCE_SCATTER, x, into, lambda: t.reduce_scatter(self.group, into.view(-1), flat))
        return into

    @traceable
    def exchange(self, x: Tensor) -> Tensor:
        """All-to-all: row i goes to the i-th rank, whose row for this one comes instead: (size, …) → (size, …)."""
        x = x.contiguous()
        into = torch.empty_like(x)
        if self._alone(MessageKind.ALL_TO_ALL, x) or (t := self._transport) is None:
            return into.copy_(x)
        rows = [1] * self.size

        def post() -> TransportHandle:  # of views, so that whoever still holds them is seen to hold a storage
            return t.all_to_all(self.group, into.view(x.shape), x.view(x.shape), rows, rows)

        self._meet(MessageKind.ALL_TO_ALL, x, into, post)
        return into

    def _reduce(self, x: Tensor, *, largest: bool) -> Tensor:
        if not self._alone(MessageKind.ALL_REDUCE, x) and (t := self._transport) is not None:
            flat = x.view(-1)
            self._meet(MessageKind.ALL_REDUCE, x, flat, lambda: t.all_reduce(self.group, flat, largest=largest))
        return x

    def _alone(self, kind: MessageKind, whole: Tensor) -> bool:
        return self._transport is None

    def _meet(self, kind: MessageKind, whole: Tensor, part: Tensor, post: Callable[[], TransportHandle]) -> None:
        """Post, and wait for the end. kind, whole: what moves, as the plan's message has it."""
        held = [(x, holders(x)) for x in (whole, part)]
        with _disable_current_modes():  # what the transport takes for itself is not this rank's memory
            handle = post()
            if self._progress is not None:
                self._progress.wait(r for k, r in enumerate(self.members) if k != self.index)
            handle.wait()
            del handle
        if self._progress is not None:
            self._progress.go_on()
        let_go(held)


class MessageAxis(RankAxis):
    """An axis of a rank that is alone: nothing moves, and what would is noted, in a list that axes may share."""

    def __init__(self, size: int, axis: str, noted: list[Message] | None = None) -> None:
        super().__init__(size, 0, axis)
        self.noted: list[Message] = [] if noted is None else noted

    def take(self) -> tuple[Message, ...]:
        found = tuple(self.noted)
        self.noted.clear()
        return found

    def _alone(self, kind: MessageKind, whole: Tensor) -> bool:
        self.noted.append(Message(kind, whole.nbytes, (self.axis,)))
        return True


def holders(x: Tensor) -> int:
    """How many tensors, of whatever thread, hold a tensor's storage."""
    return int(torch._C._storage_Use_Count(x.untyped_storage()._cdata))


def let_go(held: Sequence[tuple[Tensor, int]]) -> None:
    """Wait until no more tensors hold each storage than did before a message that has ended.

    A transport's thread lets go of its tensors a moment later; what is alive when must not depend on that.
    """
    limit_s = clock.now() + PATIENCE_S
    while any(holders(x) > n for x, n in held if not x.is_cuda) and clock.now() < limit_s:
        time.sleep(1e-5)


@dataclass(frozen=True)
class RankRegion:
    """Where a rank stands among those that share its parts' work."""

    tp: RankAxis = field(default_factory=RankAxis)  # to ranks with other heads, columns, words
    cp: RankAxis = field(default_factory=RankAxis)  # to ranks with other tokens of each sequence
    etp: RankAxis = field(default_factory=RankAxis)  # to ranks with other columns of the same experts
    sequence: bool = False  # sequence parallelism: tp's ranks have other tokens between the regions that tp divides
    heads: bool = False  # inside of attention cp's ranks have other heads, of whole sequences

    @property
    def divides(self) -> int:
        """Among how many ranks the tokens of a sequence are shared out, between regions."""
        return self.cp.size * (self.tp.size if self.sequence else 1)

    @property
    def axes(self) -> dict[str, RankAxis]:
        return dict(zip(AXES, (self.tp, self.cp, self.etp), strict=True))

    def inner(self, t: Tensor) -> Tensor:
        """What this rank's regions see of the last dim, the tokens of whole sequences."""
        return stretches(t, self.cp.size, self.cp.index)

    def stream(self, t: Tensor) -> Tensor:
        """The same of what stands between regions."""
        t = self.inner(t)
        return t.chunk(self.tp.size, -1)[self.tp.index] if self.sequence else t

    @classmethod
    def of(
        cls, plan: Plan, rank: int, transport: Transport | None = None, progress: RankProgress | None = None
    ) -> RankRegion:
        """As a plan divides its parts. Without a transport nothing moves. Raises PiperError: as `check_divided`."""
        check_divided(plan.graph)
        places, layout = RankPlacement.of(plan), next((e.layout for e in plan.graph.entries), PartLayout())
        columns = max((e.layout.etp for e in plan.graph.entries), default=1)  # parts without experts have none
        program = places.program(rank)
        wires = []
        for axis, size in zip(AXES, (layout.tp, layout.cp, columns), strict=True):
            members = places.group(rank, (axis,), (program,))
            wires.append(
                RankAxis(size, members.index(rank), axis, members, transport, progress) if size > 1 else RankAxis()
            )
        tp, cp, etp = wires
        return cls(tp, cp, etp, layout.sequence_parallel and tp.size > 1, layout.cp_heads)


def check_divided(graph: Graph) -> None:
    """Raise PiperError where parts are divided over tp or cp otherwise than all alike, over all of the mesh."""
    sizes = (1, 1) if graph.mesh is None else tuple(graph.mesh.sizes[a] for a in ("tp", "cp"))
    found = {(e.layout.tp, e.layout.cp, e.layout.sequence_parallel, e.layout.cp_heads) for e in graph.entries}
    if len(found) > 1 or any(layout[:2] != sizes for layout in found):
        divided = ", ".join(f"{tp}·{cp}" for tp, cp, *_ in sorted(found))
        raise PiperError(
            ErrorKind.DIRECTIVE,
            f"parts divided over {divided} ranks of tp·cp = {sizes[0]}·{sizes[1]} are simulated, but not executed",
            allowed="all parts divided alike",
            suggestion="shard with the filter {}, which matches everything",
        )


def stretches(t: Tensor, size: int, index: int, dim: int = -1) -> Tensor:
    """One rank's part of a dim, tokens: of 2 · size stretches the index-th from either end, so that under a
    causal mask all ranks have as many keys to see.

    >>> [stretches(torch.arange(8), 2, i).tolist() for i in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    if size == 1:
        return t
    parts = t.chunk(2 * size, dim)
    return torch.cat((parts[index], parts[-1 - index]), dim)


def group_name(axis: str, members: tuple[int, ...]) -> str:
    """`tp:0,1`."""
    return f"{axis}:{','.join(map(str, members))}"


def meetings(
    places: RankPlacement, stream: str, axes: Iterable[str], programs: Sequence[int], kinds: Iterable[MessageKind]
) -> Iterator[Meeting]:
    """All groups over these axes of the programs' ranks."""
    left = dict.fromkeys(places.table[programs[0]])  # each group has some of any of the programs
    while left:
        members = places.group(next(iter(left)), axes, programs)
        for rank in members:
            left.pop(rank, None)
        yield group_name(stream, members), members, frozenset(kinds)


def inline_groups(plan: Plan, places: RankPlacement) -> list[Meeting]:
    """Every group that meets inside compute ops."""
    kinds: dict[tuple[str, int], set[MessageKind]] = {}
    for node in plan.graph.nodes:
        for message in node.inline:
            for axis, program in product(message.axes, node.groups):
                if axis in AXES:
                    kinds.setdefault((axis, program), set()).add(message.kind)
    for b in buckets(plan.graph):  # whichever rank has which of Muon's matrices
        for axis, used in shared_kinds(b.matrices, plan.graph.muon or MuonOptimizer()).items():
            for program in b.owners if used else ():
                kinds.setdefault((axis, program), set()).update(used)
    return [m for (axis, p), used in kinds.items() for m in meetings(places, axis, (axis,), (p,), used)]
