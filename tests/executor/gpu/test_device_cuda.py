"""What CUDA is asked for, written down on a machine that has none: streams, events, kernels that repeat themselves."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor.device.device import CudaDevice, upload
from executor.device.progress import RankProgress, create
from executor.runtime.rank import device_of
from executor.runtime.worker import RankContext
from ir.job.run_options import JobRunOptions


class _Cuda:
    """As much of torch.cuda as a device uses, on no device: streams are names, events remember theirs."""

    def __init__(self) -> None:
        self.current, self.log, self.count = ["default"], list[tuple[str, ...]](), 0

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        cuda = self

        class Event:
            def record(self) -> None:
                self.name, self.at = cuda.current[-1], len(cuda.log)

            def query(self) -> bool:
                return False

            def synchronize(self) -> None:
                cuda.log.append(("synchronize", self.name))

            def elapsed_time(self, other: Any) -> float:
                return 1e3 * (other.at - self.at)  # milliseconds, from this event to the other

        return Event()

    def new_stream(self, device: object) -> str:
        self.count += 1
        return f"stream {self.count}"

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        self.current.append(name)
        yield
        self.current.pop()

    def current_stream(self, device: object) -> Any:
        cuda = self

        class Stream:
            def wait_event(self, event: Any) -> None:
                cuda.log.append((cuda.current[-1], "follows", event.name))

        return Stream()


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """A device asks torch for kernels that repeat themselves, which compile otherwise: not for tests behind these."""
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def test_cuda_lanes_are_streams_and_marks_are_events(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _Cuda()
    monkeypatch.setattr("executor.device.device._Event", fake.event)
    monkeypatch.setattr("executor.device.device._Stream", fake.new_stream)
    for name, call in (("stream", fake.stream), ("current_stream", fake.current_stream)):
        monkeypatch.setattr(torch.cuda, name, call)
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: fake.log.append(("touched",)))
    asked = _asked(monkeypatch, fake)
    device = CudaDevice(0)
    assert asked == fake.log[:1] == [("deterministic",)]  # before the device is touched
    compute, send = device.lane("compute"), device.lane("send>1")
    with compute():
        made = device.mark()
        with send():
            device.follow(made)
            sent = device.mark()
        device.follow(sent)
    follows = [line for line in fake.log if "follows" in line]
    assert follows == [("stream 2", "follows", "stream 1"), ("stream 1", "follows", "stream 2")]
    assert sent.seconds() - made.seconds() == pytest.approx(1.0)
    assert not made.done() and device.ahead


def test_an_hour_later_a_device_still_tells_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = now[0]

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: Any) -> float:
            return float(np.float32(1e3 * (other.at - self.at)))  # as CUDA has it

    monkeypatch.setattr("executor.device.device._Event", Event)
    monkeypatch.setattr("executor.device.device.clock.now", lambda: now[0])
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)

    def worst() -> float:
        """How far off the time between two marks is, over an hour of marks, read fifty at a time."""
        now[0] = 100.0
        device, read, true = CudaDevice(0), list[float](), list[float]()
        for _ in range(144):
            marks = []
            for _ in range(50):
                now[0] += 0.5001234567
                true.append(now[0])
                marks.append(device.mark())
            read += [mark.seconds() for mark in marks]
        return float(np.abs(np.diff(read) - np.diff(true)).max())

    assert worst() < 2e-6
    monkeypatch.setattr("executor.device.device.ZERO_S", 1e9)
    assert worst() > 100e-6


def test_what_goes_to_a_gpu_and_comes_from_it_does_so_beside_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, asked = _Cuda(), dict[str, Any]()
    monkeypatch.setattr("executor.device.device._Event", fake.event)
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    real_empty, real_copy, real_to = torch.empty, torch.Tensor.copy_, torch.Tensor.to

    def empty(*size: Any, device: str, pin_memory: bool, **more: Any) -> torch.Tensor:
        assert device == "cpu" and pin_memory  # whatever the thread's default is
        return real_empty(*size, **more)

    def copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        asked["fetched"] = non_blocking
        return real_copy(self, source)

    def to(self: torch.Tensor, device: torch.device, **how: Any) -> torch.Tensor:
        asked["sent"] = (device.type, how)
        return real_to(self, "cpu", copy=True)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    device = CudaDevice(0)
    (found,) = device.fetch([torch.arange(3)]).read()
    assert found.tolist() == [0, 1, 2] and asked == {"fetched": True}
    assert fake.log[-1][0] == "synchronize"  # with the mark behind the copy
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: asked.__setitem__("pinned", True) or self)
    monkeypatch.setattr(torch.Tensor, "to", to)
    upload(torch.arange(3), torch.device("cuda", 0))
    assert asked["pinned"] and asked["sent"] == ("cuda", {"non_blocking": True, "copy": True})


def _asked(monkeypatch: pytest.MonkeyPatch, fake: _Cuda) -> list[tuple[str, ...]]:
    """Where torch is asked for repeatable kernels; cuBLAS must have its setting by then."""
    asked: list[tuple[str, ...]] = []
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)

    def ask(mode: bool, *, warn_only: bool = False) -> None:
        assert mode and not warn_only and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        asked.append(("deterministic",))
        fake.log.append(asked[-1])

    monkeypatch.setattr(torch, "use_deterministic_algorithms", ask)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    return asked


@pytest.mark.parametrize(
    ("backend", "real", "gpu"),
    [("nccl", True, True), ("local", True, True), ("local", False, False), ("gloo", True, False)],
)
def test_real_kernels_of_a_gpu_are_repeatable_kernels(
    backend: str, real: bool, gpu: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("executor.device.device.repeatable", lambda: asked.append(backend))
    monkeypatch.setattr("executor.device.device._Event", _Cuda().event)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    create(tmp_path / "progress", 1)
    options = JobRunOptions(1, backend=backend, emulate=None if real else 0.0)
    device_of(options, RankContext(0, 1, tmp_path, RankProgress(tmp_path / "progress", 0)))
    assert asked == ([backend] if gpu else [])


def test_torch_has_what_a_gpu_would_be_asked() -> None:
    names = ("record", "query", "synchronize", "elapsed_time")
    assert all(callable(getattr(torch.cuda.Event, name)) for name in names)
    assert callable(torch.cuda.Stream.wait_event) and callable(torch.cuda.current_stream)
