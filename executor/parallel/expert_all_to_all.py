"""All-to-alls between two units of a stage: which rows a rank sends where, and what it gets.

A token's copies leave a rank as rows sorted by expert, so those for one rank stand together; what a rank gets comes
sorted by source, then by its own experts. First travel the numbers of rows, which each host reads: they size every
exchange of that layer and microbatch, in all passes. Ranks that hold other columns of the same experts (etp) are told,
too, for they will want each other's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from executor.device.device import Device, DeviceCopy
from executor.parallel.inline import holders, let_go
from executor.transport.base import TransportHandle
from ir.graph.expert_rows import CARRIES
from ir.graph.graph import COUNTS
from ir.plan.places import RankPlacement

Table = list[list[int]]


@dataclass(frozen=True)
class ExpertGroup:
    """The ranks that hold a layer's experts, as one of them sees them; each has some experts, and columns of them."""

    experts: tuple[int, ...]  # by member: which it has, as a coordinate on ep
    columns: tuple[int, ...]  # by member: the same on etp
    own: int = 0  # this rank's columns

    @property
    def spread(self) -> int:
        """Among how many ranks the rows are shared out."""
        return max(self.experts) + 1

    @classmethod
    def among(cls, ranks: int) -> ExpertGroup:
        """Of whole experts."""
        return cls(tuple(range(ranks)), (0,) * ranks)

    @classmethod
    def of(cls, places: RankPlacement, rank: int) -> ExpertGroup:
        """As a plan's mesh has them, in the order of `RankPlacement.group`."""
        at = [places.mesh.coordinates(r) for r in places.expert_group(rank)]
        own = places.mesh.coordinates(rank)["etp"]
        return cls(tuple(a["ep"] for a in at), tuple(a["etp"] for a in at), own)

    def by_columns(self, rows: Table) -> list[Table]:
        """The rows [member] of each of those that have the same columns.

        >>> ExpertGroup((0, 0, 1, 1), (0, 1, 0, 1)).by_columns([[1], [2], [3], [4]])
        [[[1], [3]], [[2], [4]]]
        """
        pairs = list(zip(self.columns, rows, strict=True))
        return [[row for c, row in pairs if c == columns] for columns in range(max(self.columns) + 1)]


@dataclass(frozen=True)
class ExpertAllToAll:
    """One all-to-all of a layer."""

    reads: str  # what it carries in forward, by the name of a port
    group: ExpertGroup
    counts: str = ""  # the exchange that says how many rows go where, "" for that one itself
    back: bool = False  # in forward it carries rows back to where their tokens are


def exchanges(chunk: str, group: ExpertGroup) -> dict[str, ExpertAllToAll]:
    """Those of a chunk's layer, by the names the plan has for them, among units of `executor.modules.moe`."""
    counts = f"{chunk}.{COUNTS}"
    return {
        f"{chunk}.{name}": ExpertAllToAll(
            f"{chunk}.{carried}", group, "" if name == COUNTS else counts, back=name == "combine"
        )
        for name, carried in CARRIES.items()
    }


@dataclass(frozen=True)
class ExpertRoute:
    """How many rows of one layer and microbatch go where."""

    group: ExpertGroup
    sent: Table  # [rank, its expert]: from here
    tables: list[Table]  # by columns, [rank, own expert]: what each rank that has columns of these experts gets

    @property
    def got(self) -> Table:
        """[rank, own expert]: from there."""
        return self.tables[self.group.own]

    @classmethod
    def read(cls, sent: Tensor, got: Tensor, group: ExpertGroup) -> ExpertRoute:
        """From the numbers of rows by member and expert.

        >>> import torch
        >>> route = ExpertRoute.read(torch.tensor([2, 0, 1, 3]), torch.tensor([2, 0, 5, 1]), ExpertGroup.among(2))
        >>> route.sent, route.got
        ([[2, 0], [1, 3]], [[2, 0], [5, 1]])
        """
        away, here = (t.view(len(group.experts), -1).tolist() for t in (sent, got))
        return cls(group, group.by_columns(away)[group.own], group.by_columns(here))


@dataclass
class ExpertRowCounts:
    """Numbers of rows by expert, on the device; copy: on their way to the host."""

    sent: Tensor
    got: Tensor
    copy: DeviceCopy | None = None

    def fetch(self, device: Device) -> None:
        """They are there: the host is to have them, behind no other work of the device."""
        self.copy = device.fetch((self.sent, self.got))

    def route(self, group: ExpertGroup) -> ExpertRoute:
        """As the host reads them."""
        sent, got = (self.sent, self.got) if self.copy is None else self.copy.read()
        return ExpertRoute.read(sent, got, group)


@dataclass(frozen=True, eq=False)
class ExpertTransfer:
    """What a rank puts into an all-to-all, and what for. counts: if that is what it carries."""

    pieces: tuple[tuple[Tensor, Tensor], ...]  # (place, tensor) pairs that travel alike
    into_rows: tuple[int, ...]  # of every tensor, from each rank
    rows: tuple[int, ...]  # of every tensor, to each rank
    held: tuple[int, ...]  # how many tensors had the storage of each before
    counts: ExpertRowCounts | None = None

    @classmethod
    def of(cls, tensors: Sequence[Tensor], rows: Sequence[int], into_rows: Sequence[int]) -> ExpertTransfer:
        """With room for what arrives.

        >>> import torch
        >>> trade = ExpertTransfer.of([torch.zeros(3, 8)], [1, 2], [2, 4]); trade.arrives[0].shape
        torch.Size([6, 8])
        """
        total = sum(into_rows)
        pairs = [(t.new_empty(total, *t.shape[1:]), t.contiguous()) for t in tensors]
        return cls(tuple(pairs), tuple(into_rows), tuple(rows), tuple(holders(t) for pair in pairs for t in pair))

    def post(self, move: Callable[..., TransportHandle]) -> list[TransportHandle]:
        """Give all of it to a transport. What that takes for itself is not this rank's memory."""
        with _disable_current_modes():
            # Views, whose holders can be told from those of the tensors themselves.
            return [move(into.detach(), rows.detach(), self.into_rows, self.rows) for into, rows in self.pieces]

    def end(self) -> None:
        """It has ended, and this rank alone holds its tensors."""
        let_go(list(zip((t for pair in self.pieces for t in pair), self.held, strict=True)))

    @property
    def arrives(self) -> tuple[Tensor, ...]:
        """Where the others' rows will be."""
        return tuple(into for into, _ in self.pieces)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What is sent, which must stay until it has gone."""
        return tuple(tensor for _, tensor in self.pieces)


def travel(
    exchange: ExpertAllToAll, route: ExpertRoute, tensors: Sequence[Tensor], *, gradients: bool
) -> ExpertTransfer:
    """Rows towards experts or back. gradients: of what it carries in forward, hence the other way round."""
    sent, got = [sum(r) for r in route.sent], [sum(r) for r in route.got]
    if exchange.back == gradients:
        return ExpertTransfer.of(tensors, sent, got)
    return ExpertTransfer.of(tensors, got, sent)


def even(exchange: ExpertAllToAll, counts: Tensor) -> ExpertTransfer:
    """The numbers of rows by expert: to each rank those of its experts."""
    members = exchange.group.experts
    each = [len(counts) // exchange.group.spread] * len(members)
    if len(members) > exchange.group.spread:
        owners = counts.view(exchange.group.spread, -1)
        counts = torch.cat([owners[m] for m in members])
    trade = ExpertTransfer.of([counts], each, each)
    return replace(trade, counts=ExpertRowCounts(trade.leaves[0], trade.arrives[0]))
