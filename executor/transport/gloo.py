"""Gloo, on CPU: a process group per stream makes progress by itself, in threads that do not need the interpreter."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import FileStore  # type: ignore[attr-defined]

from executor.transport.base import TransportTopology
from executor.transport.groups import GroupTransport


class GlooTransport(GroupTransport):
    """Between processes, over TCP."""

    backend = "gloo"

    def __init__(self, store: Any, rank: int, topology: TransportTopology, timeout_s: float = 300.0) -> None:
        super().__init__(store, rank, topology, timeout_s)


def file_store(path: str, world: int, timeout_s: float = 60.0) -> Any:
    """A store in a file, for ranks on one machine."""
    store = FileStore(path, world)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store
