"""What computes, and its queues: a CPU, where everything is done when the call returns, or a CUDA device.

A lane is a queue of a device; what is launched while a lane is active runs on it, in order. A mark is a point in a
lane; a lane that follows a mark goes on when that point has been reached. On a CPU the host does all work itself, so
a mark is a moment that has passed, and nothing is ever followed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from executor.device import clock

_Event: Any = torch.cuda.Event  # whose stubs are not typed
_Stream: Any = torch.cuda.Stream

ZERO_S = 10.0  # CUDA tells what lies between two events as 32-bit milliseconds: an hour apart, to 250 µs; so, to 1 µs

Lane = Callable[[], AbstractContextManager[Any]]  # call it to make it the thread's active lane


class StreamEvent(Protocol):
    """A point in a lane."""

    def done(self) -> bool:
        """Whether the lane has come there; never blocks."""

    def wait(self) -> None:
        """Block the host until it has."""

    def seconds(self) -> float:
        """When it did, on the host's clock. Only of a mark that is done."""


@dataclass(frozen=True)
class DeviceCopy:
    """What a device had at a mark, for the host."""

    mark: StreamEvent
    tensors: tuple[Tensor, ...]

    def read(self) -> tuple[Tensor, ...]:
        """Block until it has come."""
        self.mark.wait()
        return self.tensors


def upload(tensor: Tensor, to: torch.device) -> Tensor:
    """A copy of what the host has, made while it goes on: from memory that a GPU reads by itself."""
    return (tensor.pin_memory() if to.type == "cuda" else tensor).to(to, non_blocking=True, copy=True)


class Device(Protocol):
    """Where a rank computes. ahead: the host only launches, and runs ahead of the device. host_threads: the host's, for
    work that a device leaves to it."""

    torch: torch.device
    ahead: bool
    host_threads: int

    def bind(self) -> None:
        """Make it what this thread launches on."""

    def lane(self, name: str) -> Lane:
        """A new queue."""

    def mark(self) -> StreamEvent:
        """This point of the active lane."""

    def follow(self, mark: StreamEvent) -> None:
        """The active lane goes on behind the mark."""

    def fetch(self, tensors: Sequence[Tensor]) -> DeviceCopy:
        """Copies for the host, which goes on, of what tensors hold at this point of the active lane."""

    def at(self, op: str) -> None:
        """What this thread does from now on is that op's; "": none's."""

    def unseen(self) -> AbstractContextManager[Any]:
        """What one rank does there for several is not seen by those who follow this thread's ops."""


class HostDeviceEvent:
    """A mark on a host that does everything itself."""

    __slots__ = ("at_s",)

    def __init__(self) -> None:
        self.at_s = clock.now()

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing to wait for."""

    def seconds(self) -> float:
        return self.at_s


class HostDevice:
    """A CPU.

    >>> host = HostDevice(); lane = host.lane("compute")
    >>> with lane():
    ...     mark = host.mark()
    >>> mark.done(), host.ahead
    (True, False)
    """

    torch = torch.device("cpu")
    ahead = False
    host_threads = 1  # ranks share the cores

    def bind(self) -> None:
        """It is the default, unless a user has asked for another."""
        if torch.get_default_device() != self.torch:
            torch.set_default_device(self.torch)

    def lane(self, name: str) -> Lane:
        return nullcontext

    def mark(self) -> StreamEvent:
        return HostDeviceEvent()

    def follow(self, mark: StreamEvent) -> None:
        """It has passed already."""

    def fetch(self, tensors: Sequence[Tensor]) -> DeviceCopy:
        """The host has them."""
        return DeviceCopy(self.mark(), tuple(tensors))

    def at(self, op: str) -> None:
        """Nobody asks."""

    def unseen(self) -> AbstractContextManager[Any]:
        return _disable_current_modes()


def made_on(device: torch.device) -> AbstractContextManager[Any]:
    """Tensors made inside are there, whatever device a user has made the default."""
    return nullcontext() if torch.get_default_device() == device else device


def make_default(device: torch.device) -> None:
    """This thread's tensors are made there, where nothing else is said.

    Every call of torch pays for a default that is not the host (`torch.utils._device`): 4 of 33 ms of a small GPT-2's
    step, so it is for code that does not say where alone.
    """
    if torch.get_default_device() != device:
        torch.set_default_device(None if device == HostDevice.torch else device)


def on_host() -> AbstractContextManager[Any]:
    """They are the host's."""
    return made_on(HostDevice.torch)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many for a tensor: where it is cut between them, the last bit of an elementwise function may differ."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def on_gpu(x: Tensor) -> bool:
    """Whether kernels are a GPU's: few and large, as each costs the host some microseconds to launch."""
    return x.is_cuda


def release(device: torch.device) -> None:
    """Give back what torch keeps of a GPU for tensors to come, and cuBLAS's workspaces, one for each stream it saw."""
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def repeatable() -> None:
    """Kernels that give the same bits every time, or refuse to run: whatever the plan, sums have one order.

    cuBLAS reads its setting where its first handle is made, so ask before the device computes anything.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs a kernel each


# Read where the device is first touched. Streams with a hardware queue each wait for what the plan says, and for no
# other stream that stands before them; code is loaded at the start and not in the first step, where a receive spins.
LAUNCHES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}


def gpu_of(local_rank: int) -> int:
    """A rank's GPU among those that its process sees: where each was given one (`--gpus-per-task=1`), that."""
    return local_rank if torch.cuda.device_count() != 1 else 0


class CudaDevice:
    """One GPU; several ranks of one process may share it. Lanes are streams, marks are events."""

    ahead = True

    def __init__(self, index: int) -> None:
        repeatable()
        for name, value in LAUNCHES.items():
            os.environ.setdefault(name, value)
        self.torch = torch.device("cuda", index)
        self.host_threads = max(1, len(os.sched_getaffinity(0)) // max(1, torch.cuda.device_count()))  # as many ranks
        torch.cuda.set_device(index)
        torch.cuda.synchronize()
        event = _Event(enable_timing=True)
        event.record()
        event.synchronize()
        self._zero, self._zero_s = _CudaMark(event), clock.now()
        self._zero.known_s = self._zero_s

    def bind(self) -> None:
        """All are this thread's alone.

        Backward stays in the thread that asks for it: ranks that share a process meet inside, and torch has one thread
        for a device.
        """
        torch.autograd.set_multithreading_enabled(False)
        torch.cuda.set_device(self.torch)

    def lane(self, name: str) -> Lane:
        stream = _Stream(self.torch)
        return lambda: torch.cuda.stream(stream)

    def mark(self) -> StreamEvent:
        event = _Event(enable_timing=True)
        event.record()
        mark, now = _CudaMark(event, self._zero), clock.now()
        if now - self._zero_s > ZERO_S:
            self._zero, self._zero_s = mark, now
        return mark

    def follow(self, mark: StreamEvent) -> None:
        assert isinstance(mark, _CudaMark)
        torch.cuda.current_stream(self.torch).wait_event(mark.event)

    def fetch(self, tensors: Sequence[Tensor]) -> DeviceCopy:
        found = [torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True) for t in tensors]
        for into, tensor in zip(found, tensors, strict=True):
            into.copy_(tensor, non_blocking=True)
        return DeviceCopy(self.mark(), tuple(found))

    def at(self, op: str) -> None:
        """Nobody asks."""

    def unseen(self) -> AbstractContextManager[Any]:
        return _disable_current_modes()


class _CudaMark:
    """An event, and one before it from which the device's clock counts."""

    __slots__ = ("event", "known_s", "zero")

    def __init__(self, event: Any, zero: _CudaMark | None = None) -> None:
        self.event, self.zero = event, zero
        self.known_s: float | None = None

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def seconds(self) -> float:
        if self.known_s is None:
            assert self.zero is not None
            self.zero.wait()  # it stands on another lane, perhaps, and was recorded before
            self.known_s = self.zero.seconds() + float(self.zero.event.elapsed_time(self.event)) / 1e3
            self.zero = None
        return self.known_s
