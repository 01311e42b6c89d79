"""Gloo on CPU: one process group per channel and per named group, so that no stream waits behind another."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from executor.transport.base import Topology, TransportError


class GlooHandle:
    """A `Work` and the tensors it reads or writes."""

    __slots__ = ("finish", "keep", "peers", "work")

    def __init__(
        self, work: Any, keep: tuple[Tensor, ...], peers: tuple[int, ...], finish: Callable[[], None] | None = None
    ) -> None:
        self.work, self.keep, self.peers, self.finish = work, keep, peers, finish

    def done(self) -> bool:
        """Poll a collective. Of a send or receive gloo says nothing before `wait`; a wait with a timeout is no way out,
        as the pair is closed for good when it expires."""
        return self.work is None or bool(self.work.is_completed())

    def wait(self) -> None:
        """Block without holding the GIL; errors of the other end come out as TransportError."""
        if self.work is None:
            return
        try:
            self.work.wait()
        except RuntimeError as error:
            raise _lost(self.peers, error) from error
        if self.finish is not None:
            self.finish()
        self.work, self.keep, self.finish = None, (), None


class GlooTransport:
    """Process groups made at the start, in one order on all ranks.

    store: any c10d store all ranks share. timeout_s: how long gloo waits for a silent peer; failures are found sooner,
    by closed connections and by the watchdog.
    """

    def __init__(self, store: Any, rank: int, topology: Topology, timeout_s: float = 300.0) -> None:
        self.rank = rank
        self.topology = topology
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=topology.world, timeout=timeout)
        self._members = dict(topology.groups)
        self._channels: dict[tuple[int, int], Any] = {}
        self._groups: dict[str, Any] = {}
        self._all: list[Any] = []
        make = [(pair, pair) for pair in topology.channels] + [(name, members) for name, members in topology.groups]
        for key, members in make:
            if len(set(members)) < 2:
                continue
            # Every rank must ask for every group, so that its name, a counter, agrees. (use_local_synchronization
            # hashes the number of groups a rank has already made, torch 2.13: overlapping groups then never meet.)
            label = f"{key[0]}>{key[1]}" if isinstance(key, tuple) else key
            group = dist.new_group(sorted(members), timeout=timeout, backend="gloo", group_desc=label)
            if rank not in members:
                continue
            self._all.append(group)
            if isinstance(key, tuple):
                self._channels[key] = group
            else:
                self._groups[key] = group

    def send(self, dst: int, tensor: Tensor) -> GlooHandle:
        """Post a message; the handle holds the buffer until the peer has taken it."""
        tensor = tensor.contiguous()
        work = self._post(lambda: dist.isend(tensor, dst, group=self._channels[self.rank, dst]), (dst,))
        return GlooHandle(work, (tensor,), (dst,))

    def recv(self, src: int, into: Tensor) -> GlooHandle:
        """Post a receive; it completes in the background."""
        work = self._post(lambda: dist.irecv(into, src, group=self._channels[src, self.rank]), (src,))
        return GlooHandle(work, (into,), (src,))

    def all_reduce(self, group: str, tensor: Tensor) -> GlooHandle:
        """Sum in place."""
        if (g := self._groups.get(group)) is None:
            return self._alone(group)
        work = self._post(lambda: dist.all_reduce(tensor, group=g, async_op=True), self._peers(group))
        return GlooHandle(work, (tensor,), self._peers(group))

    def reduce_scatter(self, group: str, into: Tensor, tensor: Tensor) -> GlooHandle:
        """Sum; keep this member's part."""
        if (g := self._groups.get(group)) is None:
            into.copy_(tensor)
            return self._alone(group)
        work = self._post(lambda: dist.reduce_scatter_tensor(into, tensor, group=g, async_op=True), self._peers(group))
        return GlooHandle(work, (into, tensor), self._peers(group))

    def all_gather(self, group: str, into: Tensor, tensor: Tensor) -> GlooHandle:
        """Concatenate the members' parts."""
        if (g := self._groups.get(group)) is None:
            into.copy_(tensor)
            return self._alone(group)
        work = self._post(lambda: dist.all_gather_into_tensor(into, tensor, group=g, async_op=True), self._peers(group))
        return GlooHandle(work, (into, tensor), self._peers(group))

    def all_to_all(
        self, group: str, into: Tensor, tensor: Tensor, into_sizes: Sequence[int], sizes: Sequence[int]
    ) -> GlooHandle:
        """Exchange rows, unevenly if need be."""
        if (g := self._groups.get(group)) is None:
            into.copy_(tensor)
            return self._alone(group)
        work = self._post(
            lambda: dist.all_to_all_single(into, tensor, list(into_sizes), list(sizes), group=g, async_op=True),
            self._peers(group),
        )
        return GlooHandle(work, (into, tensor), self._peers(group))

    def barrier(self) -> None:
        """On the world's own group, which carries nothing else."""
        everyone = tuple(range(self.topology.world))
        work = self._post(lambda: dist.barrier(async_op=True), everyone)
        GlooHandle(work, (), everyone).wait()

    def close(self) -> None:
        """Meet once more, so that no rank closes a connection another still uses; then take down groups in reverse."""
        self.barrier()
        for group in reversed(self._all):
            dist.destroy_process_group(group)
        dist.destroy_process_group()

    def _peers(self, group: str) -> tuple[int, ...]:
        return tuple(r for r in self._members[group] if r != self.rank)

    def _alone(self, group: str) -> GlooHandle:
        if self.rank not in self._members[group]:
            raise KeyError(f"rank {self.rank} is not in group {group!r}")
        return GlooHandle(None, (), ())

    @staticmethod
    def _post(call: Callable[[], Any], peers: tuple[int, ...]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise _lost(peers, error) from error


def _lost(peers: Sequence[int], error: BaseException) -> TransportError:
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return TransportError(f"connection to rank {', '.join(map(str, peers))}: {reason}", peers)


def file_store(path: str, world: int, timeout_s: float = 60.0) -> Any:
    """A store in a file, for ranks on one machine."""
    store = FileStore(path, world)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store
