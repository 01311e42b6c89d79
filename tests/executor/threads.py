"""Virtual ranks of this process, one thread each: for what is said about transports and devices alone."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from executor.device.device import Device
from executor.transport.base import TransportError, TransportTopology
from executor.transport.local import LocalTransport, LocalTransportHub

T = TypeVar("T")


def run_threads(
    fn: Callable[[LocalTransport], T], topology: TransportTopology, device: Device | None = None
) -> list[T]:
    """Run a function on every virtual rank, each in a thread; the first failure is raised when all have ended.

    >>> import torch
    >>> def double(t):
    ...     x = torch.ones(1); t.all_reduce("world", x).wait(); return x.item()
    >>> run_threads(double, TransportTopology.of(2))
    [2.0, 2.0]
    """
    hub = LocalTransportHub(topology, device)
    return together(lambda rank: fn(LocalTransport(hub, rank)), topology.world, hub.fail)


def together(life: Callable[[int], T], ranks: int, fail: Callable[[int], object]) -> list[T]:
    """What every rank's life gives, each in a thread of its own; `fail` tells the others of one that has raised."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            results[rank] = life(rank)
        except BaseException as error:
            errors.append(error)
            fail(rank)

    threads = [threading.Thread(target=main, args=(r,), name=f"rank-{r}", daemon=True) for r in range(ranks)]
    with one_core():
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, TransportError)), errors[0])
    return [results[r] for r in range(ranks)]


@contextmanager
def one_core(thread: int = 0) -> Iterator[None]:
    """What a thread, by its number, starts inside has one core: this one. At each small op threads hand the interpreter
    over, which between cores takes them half as much time again."""
    before = os.sched_getaffinity(thread)
    os.sched_setaffinity(thread, {int(Path("/proc/thread-self/stat").read_text().rsplit(")")[-1].split()[36])})
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.sched_setaffinity(thread, before)
