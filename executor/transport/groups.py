"""torch.distributed: one process group per channel and per named group, so that no stream waits behind another.

Gloo's, on CPU, make progress by themselves, in threads that do not need the interpreter. NCCL's, one GPU per rank, are
posted on the stream's lane and never waited for by the host. What a CPU can prove about it, tests prove with a device
that only writes down who follows whom (tests/executor/device/test_device.py).
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from executor.device.device import Device
from executor.transport.base import TransportError, TransportTopology


class GroupTransportHandle:
    """A `Work` and the tensors it reads or writes."""

    __slots__ = ("keep", "peers", "work")

    def __init__(self, work: Any, keep: tuple[Tensor, ...], peers: tuple[int, ...]) -> None:
        self.work, self.keep, self.peers = work, keep, peers

    def done(self) -> bool:
        """Poll a collective. Of a send or receive gloo says nothing before `wait`; a wait with a timeout is no way out,
        as the pair is closed for good when it expires."""
        return self.work is None or bool(self.work.is_completed())

    def wait(self) -> None:
        """Wait as the library does; errors of the other end come out as TransportError."""
        if self.work is None:
            return
        try:
            self.work.wait()
        except RuntimeError as error:
            raise lost(self.peers, error) from error
        self.work, self.keep = None, ()


class GroupTransport:
    """Process groups made at the start, in one order on all ranks.

    store: any c10d store all ranks share. timeout_s: how long the backend waits for a silent peer; failures are found
    sooner, by closed connections and by the watchdog. options: of `init_process_group`.
    """

    backend = ""
    handle: ClassVar[type[GroupTransportHandle]] = GroupTransportHandle

    def __init__(
        self, store: Any, rank: int, topology: TransportTopology, timeout_s: float = 300.0, **options: Any
    ) -> None:
        self.rank = rank
        self.topology = topology
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            self.backend, store=store, rank=rank, world_size=topology.world, timeout=timeout, **options
        )
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
            group = dist.new_group(sorted(members), timeout=timeout, backend=self.backend, group_desc=label)
            if rank not in members:
                continue
            self._all.append(group)
            if isinstance(key, tuple):
                self._channels[key] = group
            else:
                self._groups[key] = group

    def send(self, dst: int, tensor: Tensor) -> GroupTransportHandle:
        tensor = tensor.contiguous()
        return self._post(lambda: dist.isend(tensor, dst, group=self._channels[self.rank, dst]), (tensor,), (dst,))

    def recv(self, src: int, into: Tensor) -> GroupTransportHandle:
        return self._post(lambda: dist.irecv(into, src, group=self._channels[src, self.rank]), (into,), (src,))

    def all_reduce(self, group: str, tensor: Tensor, *, largest: bool = False) -> GroupTransportHandle:
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        return self._join(group, partial(dist.all_reduce, tensor, op), tensor, tensor)

    def reduce_scatter(self, group: str, into: Tensor, tensor: Tensor) -> GroupTransportHandle:
        return self._join(group, partial(dist.reduce_scatter_tensor, into, tensor), into, tensor)

    def all_gather(self, group: str, into: Tensor, tensor: Tensor) -> GroupTransportHandle:
        return self._join(group, partial(dist.all_gather_into_tensor, into, tensor), into, tensor)

    def all_to_all(
        self, group: str, into: Tensor, tensor: Tensor, into_sizes: Sequence[int], sizes: Sequence[int]
    ) -> GroupTransportHandle:
        rows = list(into_sizes), list(sizes)
        return self._join(group, partial(dist.all_to_all_single, into, tensor, *rows), into, tensor)

    def barrier(self) -> None:
        """On the world's own group, which carries nothing else."""
        self._post(lambda: dist.barrier(async_op=True), (), tuple(range(self.topology.world))).wait()

    def close(self) -> None:
        """Meet once more, so that no rank closes a connection another still uses; then take down groups in reverse."""
        self.barrier()
        for group in reversed(self._all):
            dist.destroy_process_group(group)
        dist.destroy_process_group()

    def _join(self, group: str, collective: Callable[..., Any], into: Tensor, tensor: Tensor) -> GroupTransportHandle:
        """A collective over a group; a member alone in it keeps what it gives."""
        members = self._members[group]
        if (g := self._groups.get(group)) is not None:
            others = tuple(r for r in members if r != self.rank)
            return self._post(lambda: collective(group=g, async_op=True), (into, tensor), others)
        if self.rank not in members:
            raise KeyError(f"rank {self.rank} is not in group {group!r}")
        if into is not tensor:
            into.copy_(tensor)
        return self.handle(None, (), ())

    def _post(self, call: Callable[[], Any], keep: tuple[Tensor, ...], peers: tuple[int, ...]) -> GroupTransportHandle:
        try:
            return self.handle(call(), keep, peers)
        except RuntimeError as error:
            raise lost(peers, error) from error


def lost(peers: Sequence[int], error: BaseException) -> TransportError:
    """What the other end's going looks like from here."""
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return TransportError(f"connection to rank {', '.join(map(str, peers))}: {reason}", peers)


class GlooTransport(GroupTransport):
    """Between processes, over TCP."""

    backend = "gloo"


def file_store(path: str, world: int, timeout_s: float = 60.0) -> Any:
    """A store in a file, for ranks on one machine."""
    store = FileStore(path, world)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def blocks_each(communicators: int, sms: int) -> int:
    """Thread blocks that a communicator may hold: all of a rank's together leave SMs to kernels that compute.

    >>> blocks_each(4, 132), blocks_each(8, 132), blocks_each(200, 132), blocks_each(0, 132)
    (28, 14, 1, 32)
    """
    return max(1, min(32, sms * 7 // 8 // max(1, communicators)))


def _sms(device: Device) -> int:
    return int(torch.cuda.get_device_properties(device.torch).multi_processor_count) if device.ahead else 132


class NcclTransportHandle(GroupTransportHandle):
    """A `Work` that stands on a communicator's own stream: to wait for it, the active lane goes on behind it.

    Its tensors are let go where the plan proves that nobody reads them.
    """

    __slots__ = ()

    def done(self) -> bool:
        """To wait for it is to tell a lane to, which never blocks."""
        return True


class NcclTransport(GroupTransport):
    """Between GPUs. All communicators are made at the start: a lazy one would block the host at its first use until the
    peer uses it too, in an order that no plan promises."""

    backend = "nccl"
    handle = NcclTransportHandle

    def __init__(
        self, store: Any, rank: int, topology: TransportTopology, device: Device, timeout_s: float = 300.0
    ) -> None:
        self.device = device
        # All algorithms are connected with the communicator; else the first large message would connect its own.
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        mine = sum(rank in pair for pair in topology.channels) + sum(rank in members for _, members in topology.groups)
        os.environ.setdefault("NCCL_MAX_CTAS", str(blocks_each(mine, _sms(device))))
        super().__init__(store, rank, topology, timeout_s, device_id=device.torch)
        self._connect()

    def _connect(self) -> None:
        """Use each communicator once, in the one order all ranks made them in."""
        for (src, dst), _ in sorted(self._channels.items()):
            one = torch.zeros(1, device=self.device.torch)
            (self.send(dst, one) if src == self.rank else self.recv(src, one)).wait()
        for name in sorted(self._groups):
            self.all_reduce(name, torch.zeros(1, device=self.device.torch)).wait()
            rows, ones = torch.zeros(len(self._members[name]), device=self.device.torch), [1] * len(self._members[name])
            self.all_to_all(name, torch.zeros_like(rows), rows, ones, ones).wait()  # between every two, by themselves
        self.device.mark().wait()

    def barrier(self) -> None:
        super().barrier()
        self.device.mark().wait()
