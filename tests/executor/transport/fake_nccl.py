"""NCCL's names in torch.distributed on a machine without a GPU: what is asked is written down.

Gloo moves the bytes; for a world of which only one rank is here, nobody does.
"""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo  # type: ignore[attr-defined]
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup

from executor.device.device import HostDevice
from executor.transport.base import TransportGroup, TransportTopology
from executor.transport.groups import GroupTransportHandle, NcclTransport
from ir.core.work import MessageKind

KINDS = {
    "allreduce": MessageKind.ALL_REDUCE,
    "alltoall_base": MessageKind.ALL_TO_ALL,
    "send": MessageKind.P2P,
    "recv": MessageKind.P2P,
    "all_gather_single": MessageKind.ALL_GATHER,
    "_allgather_base": MessageKind.ALL_GATHER,
    "reduce_scatter_single": MessageKind.REDUCE_SCATTER,
    "_reduce_scatter_base": MessageKind.REDUCE_SCATTER,
}


class _Options:
    def __init__(self) -> None:
        self.config = SimpleNamespace()
        self.group_name, self.global_ranks_in_group = "", list[int]()


class _Noting:
    """A process group whose operations are noted with its label."""

    def __init__(self, made: Any, noted: list[tuple[str, str]]) -> None:
        self._made, self._noted = made, noted

    def __getattr__(self, name: str) -> Any:
        if name in KINDS:
            self._noted.append((self._made.group_desc, str(KINDS[name])))
        return getattr(self._made, name)


class FakeNccl(NcclTransport):
    """All but the wire.

    made: the blocks of each communicator, by label, in the order they are made in; noted: (label, kind) of each
    operation. alone: no other rank is here.
    """

    backend = "gloo"
    handle = GroupTransportHandle

    def __init__(
        self, store: Any, rank: int, topology: TransportTopology, timeout_s: float = 20.0, *, alone: bool = False
    ) -> None:
        self.made: dict[str, int] = {}
        self.noted: list[tuple[str, str]] = []
        begin = dist.init_process_group  # type: ignore[attr-defined]

        def without_device(backend: str, *, device_id: object, pg_options: _Options, **options: Any) -> None:
            self.made["world"] = pg_options.config.max_ctas
            begin("fake" if alone else backend, **options)

        def connected(store: Any, index: int, size: int, options: _Options) -> Any:
            self.made[options.group_name] = options.config.max_ctas
            if alone:
                store.set("0", "a unique id" if index == 0 else "")  # of NCCL's rendezvous; the others read it
                return FakeProcessGroup._create_internal(index, size)
            return ProcessGroupGloo(store, index, size, self.timeout)

        connected.Options = _Options  # type: ignore[attr-defined]
        fakes = {"init_process_group": without_device, "ProcessGroupNCCL": connected}
        with patch.multiple(dist, create=True, **fakes):
            super().__init__(store, rank, topology, HostDevice(), timeout_s)

    def _make(self, group: TransportGroup, store: Any) -> Any:
        return _Noting(super()._make(group, store), self.noted)


class CountingStore(dist.Store):
    """A store that says how often it was asked, by everybody who holds it."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.asked = inner, list[str]()

    def set_timeout(self, timeout: Any) -> None:  # torch looks it up where the class is a Python one
        self.inner.set_timeout(timeout)

    @property
    def timeout(self) -> Any:
        return self.inner.timeout


def _counted(name: str) -> Any:
    def ask(self: CountingStore, *args: Any) -> Any:
        keys = args[0] if isinstance(args[0], list) else [args[0]]
        self.asked += keys
        return getattr(self.inner, name)(*args)

    return ask


for _name in ("set", "get", "add", "wait", "check", "compare_set", "delete_key", "append", "multi_get", "multi_set"):
    setattr(CountingStore, _name, _counted(_name))
CountingStore.has_extended_api = lambda self: True  # type: ignore[attr-defined,method-assign]
