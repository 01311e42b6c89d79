"""Virtual ranks in one process: threads of one device that exchange tensors by copying.

A send ends when its receive is posted, as gloo's does. Reductions add the members' tensors in rank order, so they
repeat bit for bit. Who comes last copies, on its own lane, behind what the others had queued when they came; who waits
is made to go on behind the copy. So on a GPU nothing blocks the host but waiting for the other end to be posted.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from executor.device.device import Device, HostDevice, StreamEvent
from executor.transport.base import Channel, TransportError, TransportTopology


class LocalTransportHandle:
    """One end of something. ready: what stood before it on its lane; copied: where the exchange ends.

    Each has its own lock to wait at: at a condition of the hub's all would wake whenever anything ends.
    """

    def __init__(self, hub: LocalTransportHub, peers: Sequence[int]) -> None:
        self.hub, self.peers = hub, tuple(peers)
        self.ready = hub.device.mark()
        self.copied: StreamEvent | None = None
        self._open = threading.Lock()
        self._open.acquire()

    def done(self) -> bool:
        return self.copied is not None

    def wait(self) -> None:
        """Block until all ends have come, or some rank has failed; the active lane goes on behind the copy."""
        with self._open:
            pass
        if self.copied is None:
            raise TransportError(f"rank {self.hub.failed} has failed", [self.hub.failed or 0])
        self.hub.device.follow(self.copied)

    def end(self, copied: StreamEvent | None = None) -> None:
        """Let whoever waits go on; without a mark, to fail. Under the hub's lock."""
        self.copied = copied
        self._open.release()


class LocalTransportHub:
    """What the virtual ranks share."""

    def __init__(self, topology: TransportTopology, device: Device | None = None) -> None:
        self.topology, self.device = topology, device or HostDevice()
        self.members = {"world": tuple(range(topology.world)), **{n: tuple(sorted(m)) for n, m in topology.groups}}
        self.lock = threading.Lock()
        self.failed: int | None = None
        self._waiting: set[LocalTransportHandle] = set()
        self._sends: dict[Channel, deque[tuple[Tensor, LocalTransportHandle]]] = defaultdict(deque)
        self._recvs: dict[Channel, deque[tuple[Tensor, LocalTransportHandle]]] = defaultdict(deque)
        self._joined: dict[tuple[str, int], dict[int, tuple[Sequence[Tensor], LocalTransportHandle]]] = defaultdict(
            dict
        )

    def post(self, channel: Channel, tensor: Tensor, *, send: bool) -> LocalTransportHandle:
        """One end of a message; the second end to come moves it."""
        if channel not in self.topology.channels:
            raise KeyError(f"no channel {channel[0]}>{channel[1]}")
        handle = LocalTransportHandle(self, [channel[1] if send else channel[0]])
        with self.lock:
            if not self._begun(handle):
                return handle
            (self._sends if send else self._recvs)[channel].append((tensor, handle))
            while self._sends[channel] and self._recvs[channel]:
                (source, a), (into, b) = self._sends[channel].popleft(), self._recvs[channel].popleft()
                self._move([a, b], lambda: into.copy_(source))  # noqa: B023  (called at once)
        return handle

    def join(
        self, rank: int, group: str, turn: int, tensors: Sequence[Tensor], act: Callable[[list[Sequence[Tensor]]], None]
    ) -> LocalTransportHandle:
        """One member of a collective; the last to come carries it out."""
        members = self.members[group]
        if rank not in members:
            raise KeyError(f"rank {rank} is not in group {group!r}")
        handle = LocalTransportHandle(self, [m for m in members if m != rank])
        with self.lock:
            if not self._begun(handle):
                return handle
            here = self._joined[group, turn]
            here[rank] = (tensors, handle)
            if len(here) == len(members):
                self._move([h for _, h in here.values()], lambda: act([here[m][0] for m in members]))
                del self._joined[group, turn]
        return handle

    def fail(self, rank: int) -> None:
        with self.lock:
            if self.failed is not None:
                return
            self.failed = rank
            while self._waiting:
                self._waiting.pop().end()

    def _begun(self, handle: LocalTransportHandle) -> bool:
        """Whether the others may still come. It waits for them, or ends at once."""
        if self.failed is None:
            self._waiting.add(handle)
        else:
            handle.end()
        return self.failed is None

    def _move(self, ends: Sequence[LocalTransportHandle], copy: Callable[[], object]) -> None:
        """Copy behind all ends; unseen by whoever follows this thread's tensors, as they are not this rank's alone."""
        for end in ends:
            self.device.follow(end.ready)
        with self.device.unseen(), torch.no_grad():
            copy()
        copied = self.device.mark()
        for end in ends:
            self._waiting.remove(end)
            end.end(copied)


class LocalTransport:
    """One virtual rank's view of the hub."""

    def __init__(self, hub: LocalTransportHub, rank: int) -> None:
        self.hub, self.rank = hub, rank
        self._turns: dict[str, int] = defaultdict(int)

    def send(self, dst: int, tensor: Tensor) -> LocalTransportHandle:
        return self.hub.post((self.rank, dst), tensor, send=True)

    def recv(self, src: int, into: Tensor) -> LocalTransportHandle:
        return self.hub.post((src, self.rank), into, send=False)

    def all_reduce(self, group: str, tensor: Tensor, *, largest: bool = False) -> LocalTransportHandle:
        def act(all_: list[Sequence[Tensor]]) -> None:
            total = torch.stack([t[0] for t in all_]).amax(0) if largest else _sum([t[0] for t in all_])
            for t in all_:
                t[0].copy_(total)

        return self._join(group, [tensor], act)

    def reduce_scatter(self, group: str, into: Tensor, tensor: Tensor) -> LocalTransportHandle:
        def act(all_: list[Sequence[Tensor]]) -> None:
            for part, t in zip(_sum([t[1] for t in all_]).chunk(len(all_)), all_, strict=True):
                t[0].copy_(part)

        return self._join(group, [into, tensor], act)

    def all_gather(self, group: str, into: Tensor, tensor: Tensor) -> LocalTransportHandle:
        def act(all_: list[Sequence[Tensor]]) -> None:
            whole = torch.cat([t[1] for t in all_])
            for t in all_:
                t[0].copy_(whole)

        return self._join(group, [into, tensor], act)

    def all_to_all(
        self, group: str, into: Tensor, tensor: Tensor, into_sizes: Sequence[int], sizes: Sequence[int]
    ) -> LocalTransportHandle:
        pieces = torch.split(tensor, list(sizes))
        places = torch.split(into, list(into_sizes))

        def act(all_: list[Sequence[Tensor]]) -> None:
            n = len(all_)
            for i, t in enumerate(all_):
                for j in range(n):
                    t[j].copy_(all_[j][n + i])

        return self._join(group, [*places, *pieces], act)

    def barrier(self) -> None:
        self._join("world", [], lambda _: None).wait()

    def close(self) -> None:
        self.barrier()

    def _join(
        self, group: str, tensors: Sequence[Tensor], act: Callable[[list[Sequence[Tensor]]], None]
    ) -> LocalTransportHandle:
        self._turns[group] += 1
        return self.hub.join(self.rank, group, self._turns[group], tensors, act)


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for t in tensors[1:]:
        total += t
    return total
