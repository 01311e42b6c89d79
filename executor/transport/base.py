"""What every transport can do. A stream is a queue: what one rank posts on it happens in the order of posting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from executor.device import clock
from ir.core.work import MessageKind

Channel = tuple[int, int]  # (source rank, destination rank): one direction, one stream


class TransportError(RuntimeError):
    """The other end is gone or the transport gave up: this rank is a witness of a failure, not its cause."""

    def __init__(self, message: str, peers: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.peers = tuple(peers)


class TransportHandle(Protocol):
    """Something posted and not yet known to be done. It keeps its tensors alive.

    Where a device has queues, a thing is done when it stands in one: `wait` makes the active lane go on behind it.
    """

    def done(self) -> bool:
        """Whether `wait` would return at once; never blocks."""

    def wait(self) -> None:
        """Block until it has ended; raises TransportError."""


class Transport(Protocol):
    """One rank's view. `send` and `recv` return at once; never wait for a send inline: it ends when the peer receives.

    Reductions are in place, and sums unless something else is asked for. Groups are named when the transport is built;
    their members stand in order of rank.
    """

    rank: int

    def send(self, dst: int, tensor: Tensor) -> TransportHandle:
        """Post a message on channel (rank, dst)."""

    def recv(self, src: int, into: Tensor) -> TransportHandle:
        """Post a receive on channel (src, rank), in advance of its use."""

    def all_reduce(self, group: str, tensor: Tensor, *, largest: bool = False) -> TransportHandle:
        """Sum over the group's members, or the largest of their values, element by element."""

    def reduce_scatter(self, group: str, into: Tensor, tensor: Tensor) -> TransportHandle:
        """Sum over the members; each keeps its own equal part of the flat tensor."""

    def all_gather(self, group: str, into: Tensor, tensor: Tensor) -> TransportHandle:
        """Everyone's part, one after the other."""

    def all_to_all(
        self, group: str, into: Tensor, tensor: Tensor, into_sizes: Sequence[int], sizes: Sequence[int]
    ) -> TransportHandle:
        """Rows `sizes[i]` of the tensor go to member i."""

    def barrier(self) -> None:
        """Wait until every rank is here (control traffic, on its own group)."""

    def close(self) -> None:
        """Normal end: every handle has been waited for."""


@dataclass(frozen=True, slots=True)
class TransportGroup:
    """Ranks that meet on a stream of their own, a channel's two among them.

    members: in order of rank. kinds: what they do there, sorted. crowd: the most such groups that one of them is in.
    """

    label: str
    members: tuple[int, ...]
    kinds: tuple[MessageKind, ...]
    crowd: int


@dataclass(frozen=True, slots=True)
class TransportTopology:
    """Which streams a run needs: channels and named groups, and what happens in each; the same value on every rank.

    >>> TransportTopology.of(4, channels=[(1, 0), (0, 1)], groups={"pair": (0, 3)}).channels
    ((0, 1), (1, 0))
    """

    world: int
    channels: tuple[Channel, ...]
    groups: tuple[tuple[str, tuple[int, ...]], ...]
    kinds: tuple[tuple[str, tuple[MessageKind, ...]], ...] = ()

    @classmethod
    def of(
        cls,
        world: int,
        channels: Iterable[Channel] = (),
        groups: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
        kinds: Mapping[str, Iterable[MessageKind]] = MappingProxyType({}),
    ) -> TransportTopology:
        """Sorted, so that it is one value on every rank. kinds: of groups; of channels they are known."""
        used = tuple(sorted((name, tuple(sorted(found))) for name, found in kinds.items()))
        return cls(world, tuple(sorted(set(channels))), tuple(sorted(groups.items())), used)

    def own(self, rank: int) -> list[TransportGroup]:
        """The groups of several ranks that this one is in, in the order to make them in: by turn.

        A group's turn is the first that none of its members has in a group before it, in the order of this value. To
        make one takes its members and nobody else, so no rank waits for ever: of all groups not made yet, take one of
        the lowest turn. All that its members have still to make comes later for them, as no two groups of a rank have
        one turn; so each of them stands at this group, or is on its way there, and it gets made. And so on. Nor does a
        chain of channels make ranks wait for one another down its length: all groups of a turn are made at once.

        >>> ring = TransportTopology.of(3, [(0, 1), (1, 2), (2, 0)], {"all": (0, 1, 2), "alone": (1,)})
        >>> [[g.label for g in ring.own(rank)] for rank in range(3)]
        [['0>1', '2>0', 'all'], ['0>1', '1>2', 'all'], ['1>2', '2>0', 'all']]
        """
        every = [(f"{a}>{b}", (a, b)) for a, b in self.channels] + list(self.groups)
        every = [(label, tuple(sorted(set(members)))) for label, members in every if len(set(members)) > 1]
        taken, mine = [0] * self.world, []  # taken: a rank's turns, as bits
        for label, members in every:
            held = 0
            for member in members:
                held |= taken[member]
            turn = ~held & (held + 1)  # the lowest bit that is not set
            for member in members:
                taken[member] |= turn
            if rank in members:
                mine.append((turn, label, members))
        kinds = {f"{a}>{b}": (MessageKind.P2P,) for a, b in self.channels} | dict(self.kinds)
        return [
            TransportGroup(label, members, kinds.get(label, ()), max(taken[m].bit_count() for m in members))
            for _, label, members in sorted(mine)
        ]


class LandingTransport:
    """A handle with something to do where it has ended, on the stream itself: before anybody sees it over."""

    def __init__(self, handle: TransportHandle, then: Callable[[], None]) -> None:
        self.handle, self._then = handle, [then]

    def done(self) -> bool:
        return self.handle.done()

    def wait(self) -> None:
        self.handle.wait()
        while self._then:
            self._then.pop()()


class JoinedTransport:
    """Several handles as one."""

    def __init__(self, handles: Sequence[TransportHandle]) -> None:
        self.handles = tuple(handles)

    def done(self) -> bool:
        return all(h.done() for h in self.handles)

    def wait(self) -> None:
        for h in self.handles:
            h.wait()


class DelayedTransport:
    """A handle that ends `seconds` after the one it wraps was first seen done (`--emulate-comm`)."""

    def __init__(self, handle: TransportHandle, seconds: float) -> None:
        self.handle, self.seconds = handle, seconds
        self.ready_s: float | None = None

    def done(self) -> bool:
        if self.ready_s is None and self.handle.done():
            self.ready_s = clock.now() + self.seconds
        return self.ready_s is not None and clock.now() >= self.ready_s

    def wait(self) -> None:
        self.handle.wait()  # though it may be known to be over: only who waits makes it let go of its tensors
        if self.ready_s is None:
            self.ready_s = clock.now() + self.seconds
        clock.sleep_until(self.ready_s)
