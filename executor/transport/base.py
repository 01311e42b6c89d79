"""What every transport can do. A stream is a queue: what one rank posts on it happens in the order of posting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from executor.device import clock

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
class TransportTopology:
    """Which streams a run needs: channels and named groups; the same value on every rank.

    >>> TransportTopology.of(4, channels=[(1, 0), (0, 1)], groups={"pair": (0, 3)}).channels
    ((0, 1), (1, 0))
    """

    world: int
    channels: tuple[Channel, ...]
    groups: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(
        cls, world: int, channels: Iterable[Channel] = (), groups: dict[str, tuple[int, ...]] | None = None
    ) -> TransportTopology:
        """Sorted, so that every rank builds its process groups in one order."""
        return cls(world, tuple(sorted(set(channels))), tuple(sorted((groups or {}).items())))


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
