"""torch.distributed: one process group per channel and per named group, so that no stream waits behind another.

Gloo's, on CPU, make progress by themselves, in threads that do not need the interpreter. NCCL's, one GPU per rank, are
posted on the stream's lane and never waited for by the host. What a CPU can prove about it, tests prove with a device
that only writes down who follows whom (tests/executor/device/test_device.py).

A rank makes its own groups and no others, as torch's own `_dist2` makes one: a backend over a store under the group's
label, in a ProcessGroup (2.10 to 2.13). Of what torch has besides, `new_group` is asked of every rank for every group
of the world, and where a device is bound splits the world's communicator each time, with all ranks taking part. Its
`use_local_synchronization` names a group by how many the rank has made before it, so that members of overlapping
groups look for each other under different names, and splits the world all the same. `split_group`, NCCL's alone, is
one call of the whole world for each set of groups that do not overlap. What a split saves is one rendezvous over the
store per group: each group here pays that, among its members. The world's own group carries barriers; made by gloo it
is a full mesh, which thousands of ranks should not ask for.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from executor.device.device import Device
from executor.transport.base import TransportError, TransportGroup, TransportTopology
from ir.core.work import MessageKind

# Of a ProcessGroup, which in 2.11 has them with an underscore alone.
_GATHER, _SCATTER = (
    (new if hasattr(dist.ProcessGroup, new) else old)
    for new, old in (("all_gather_single", "_allgather_base"), ("reduce_scatter_single", "_reduce_scatter_base"))
)


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
    """Process groups made at the start, each by its members, in the order of `TransportTopology.own`.

    store: any c10d store all ranks share. timeout_s: how long the backend waits for a silent peer; failures are found
    sooner, by closed connections and by the watchdog. options: of `init_process_group`.
    """

    backend = ""
    handle: ClassVar[type[GroupTransportHandle]] = GroupTransportHandle
    where = torch.device("cpu")

    def __init__(
        self, store: Any, rank: int, topology: TransportTopology, timeout_s: float = 300.0, **options: Any
    ) -> None:
        self.rank = rank
        self.topology = topology
        self.timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            self.backend, store=store, rank=rank, world_size=topology.world, timeout=self.timeout, **options
        )
        self._members = {name: tuple(sorted(members)) for name, members in topology.groups}
        self._own = topology.own(rank)
        self._made: dict[str, Any] = {}
        for group in self._own:
            try:
                self._made[group.label] = self._make(group, PrefixStore(group.label, store))
            except RuntimeError as error:
                raise lost([r for r in group.members if r != rank], error) from error

    def _make(self, group: TransportGroup, store: Any) -> Any:
        """As torch's `_dist2` does. Its names with an underscore have no others, and all of `torch.distributed` that
        makes groups for users asks the whole world."""
        index, kind = group.members.index(self.rank), getattr(dist.ProcessGroup.BackendType, self.backend.upper())
        made: Any = dist.ProcessGroup(store, index, len(group.members))
        made._set_default_backend(kind)
        made._register_backend(self.where, kind, backend := self._connection(group, index, store))
        made._set_group_name(group.label)  # both are what flight records call it
        made._set_group_desc(group.label)
        backend.eager_connect_single_device(self.where)  # NCCL's communicator, now; gloo's is there
        return made

    def _connection(self, group: TransportGroup, index: int, store: Any) -> Any:
        """A backend between the members of a group, of which this rank is the index-th."""
        raise NotImplementedError

    def send(self, dst: int, tensor: Tensor) -> GroupTransportHandle:
        tensor, group = tensor.contiguous(), self._made[f"{self.rank}>{dst}"]
        return self._post(lambda: group.send([tensor], int(dst > self.rank), 0), (tensor,), (dst,))

    def recv(self, src: int, into: Tensor) -> GroupTransportHandle:
        group = self._made[f"{src}>{self.rank}"]
        return self._post(lambda: group.recv([into], int(src > self.rank), 0), (into,), (src,))

    def all_reduce(self, group: str, tensor: Tensor, *, largest: bool = False) -> GroupTransportHandle:
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        return self._join(group, lambda made: made.allreduce([tensor], op), tensor, tensor)

    def reduce_scatter(self, group: str, into: Tensor, tensor: Tensor) -> GroupTransportHandle:
        return self._join(group, lambda made: getattr(made, _SCATTER)(into, tensor), into, tensor)

    def all_gather(self, group: str, into: Tensor, tensor: Tensor) -> GroupTransportHandle:
        return self._join(group, lambda made: getattr(made, _GATHER)(into, tensor), into, tensor)

    def all_to_all(
        self, group: str, into: Tensor, tensor: Tensor, into_sizes: Sequence[int], sizes: Sequence[int]
    ) -> GroupTransportHandle:
        rows = list(into_sizes), list(sizes)
        return self._join(group, lambda made: made.alltoall_base(into, tensor, *rows), into, tensor)

    def barrier(self) -> None:
        """On the world's own group, which carries nothing else."""
        self._post(lambda: dist.barrier(async_op=True), (), tuple(range(self.topology.world))).wait()

    def close(self) -> None:
        """Meet once more, so that no rank closes a connection another still uses; then take down groups in reverse."""
        self.barrier()
        while self._made:
            self._made.popitem()[1].shutdown()
        dist.destroy_process_group()

    def _join(self, group: str, collective: Callable[[Any], Any], into: Tensor, tensor: Tensor) -> GroupTransportHandle:
        """A collective over a group; a member alone in it keeps what it gives."""
        members = self._members[group]
        if (made := self._made.get(group)) is not None:
            return self._post(partial(collective, made), (into, tensor), tuple(r for r in members if r != self.rank))
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

    def _connection(self, group: TransportGroup, index: int, store: Any) -> Any:
        return ProcessGroupGloo(store, index, len(group.members), self.timeout)


def file_store(path: str, world: int) -> Any:
    """A store in a file, for ranks on one machine."""
    store = FileStore(path, world)
    store.set_timeout(timedelta(seconds=60))
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
    """Between GPUs. All communicators are made and used at the start: a lazy one would block the host at its first use
    until the peer uses it too, in an order that no plan promises."""

    backend = "nccl"
    handle = NcclTransportHandle

    def __init__(
        self, store: Any, rank: int, topology: TransportTopology, device: Device, timeout_s: float = 300.0
    ) -> None:
        self.device, self.where, self.timeout = device, device.torch, timedelta(seconds=timeout_s)
        # All algorithms are connected with the communicator; else the first large message would connect its own.
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        super().__init__(store, rank, topology, timeout_s, device_id=device.torch, pg_options=self._options(1))
        for group in self._own:
            for kind in group.kinds:
                self._use(group, kind).wait()
        self.device.mark().wait()

    def _options(self, blocks: int) -> Any:
        """Of a communicator. A user's NCCL_MAX_CTAS still has the last word."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout  # as `init_process_group` sets it; `set_timeout` is a backend's
        options.config.max_ctas = blocks
        return options

    def _connection(self, group: TransportGroup, index: int, store: Any) -> Any:
        """All members give a communicator as many blocks: as the busiest of them can spare."""
        options = self._options(blocks_each(group.crowd, _sms(self.device)))
        options.group_name, options.global_ranks_in_group = group.label, list(group.members)
        return dist.ProcessGroupNCCL(store, index, len(group.members), options)

    def _use(self, group: TransportGroup, kind: MessageKind) -> GroupTransportHandle:
        """Once, in the one order that all ranks make groups in: each kind connects ranks in its own way, when first
        used, and loads its kernels."""
        n, name = len(group.members), group.label
        one, each = torch.zeros(1, device=self.where), torch.zeros(n, device=self.where)
        match kind:
            case MessageKind.P2P:
                src, dst = (int(rank) for rank in name.split(">"))
                return self.send(dst, one) if src == self.rank else self.recv(src, one)
            case MessageKind.ALL_REDUCE:
                return self.all_reduce(name, one)
            case MessageKind.REDUCE_SCATTER:
                return self.reduce_scatter(name, one, each)
            case MessageKind.ALL_GATHER:
                return self.all_gather(name, each, one)
            case MessageKind.ALL_TO_ALL:
                return self.all_to_all(name, torch.zeros_like(each), each, [1] * n, [1] * n)

    def barrier(self) -> None:
        super().barrier()
        self.device.mark().wait()
