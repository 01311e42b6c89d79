"""All-to-alls between two units of a stage: which rows a rank sends where, and what it gets.

A token's copies leave a rank as rows sorted by expert, so those for one rank stand together; what a rank gets comes
sorted by source, then by its own experts. First travel the numbers of rows, which each host reads: they size every
exchange of that layer and microbatch, in all passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from executor.device.device import Device, DeviceCopy
from executor.parallel.inline import holders, let_go
from executor.transport.base import TransportHandle
from ir.graph.expert_rows import CARRIES
from ir.graph.graph import COUNTS

Table = list[list[int]]


@dataclass(frozen=True)
class ExpertAllToAll:
    """One all-to-all of a layer."""

    reads: str  # what it carries in forward, by the name of a port
    ranks: int  # how many take part
    counts: str = ""  # the exchange that says how many rows go where, "" for that one itself
    back: bool = False  # in forward it carries rows back to where their tokens are


def exchanges(chunk: str, ranks: int) -> dict[str, ExpertAllToAll]:
    """Those of a chunk's layer, by the names the plan has for them, among units of `executor.modules.moe`."""
    counts = f"{chunk}.{COUNTS}"
    return {
        f"{chunk}.{name}": ExpertAllToAll(
            f"{chunk}.{carried}", ranks, "" if name == COUNTS else counts, back=name == "combine"
        )
        for name, carried in CARRIES.items()
    }


@dataclass(frozen=True)
class ExpertRoute:
    """How many rows of one layer and microbatch go where."""

    sent: Table  # [rank, its expert]: from here
    got: Table  # [rank, own expert]: from there

    @classmethod
    def read(cls, sent: Tensor, got: Tensor, ranks: int) -> ExpertRoute:
        """From the numbers of rows by expert.

        >>> import torch
        >>> ExpertRoute.read(torch.tensor([2, 0, 1, 3]), torch.tensor([2, 0, 5, 1]), 2)
        ExpertRoute(sent=[[2, 0], [1, 3]], got=[[2, 0], [5, 1]])
        """
        return cls(sent.view(ranks, -1).tolist(), got.view(ranks, -1).tolist())


@dataclass
class ExpertRowCounts:
    """Numbers of rows by expert, on the device; copy: on their way to the host."""

    sent: Tensor
    got: Tensor
    copy: DeviceCopy | None = None

    def fetch(self, device: Device) -> None:
        """They are there: the host is to have them, behind no other work of the device."""
        self.copy = device.fetch((self.sent, self.got))

    def route(self, ranks: int) -> ExpertRoute:
        """As the host reads them."""
        sent, got = (self.sent, self.got) if self.copy is None else self.copy.read()
        return ExpertRoute.read(sent, got, ranks)


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
    """The numbers of rows, as many to each rank."""
    each = [len(counts) // exchange.ranks] * exchange.ranks
    trade = ExpertTransfer.of([counts], each, each)
    return replace(trade, counts=ExpertRowCounts(trade.leaves[0], trade.arrives[0]))
