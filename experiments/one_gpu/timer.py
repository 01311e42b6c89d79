"""Single calls timed on the device and on the host, and the tables they are written to."""

import csv
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

FLUSH_BYTES = 2**28
HELD_CYCLES = 400_000  # of a kernel that waits: longer than the host needs to launch what is timed
GPUS = ("gb300", "gb200", "b200", "h200", "h100", "a100")


def gpu() -> str:
    """The device's name as tables of kernels have it, or in full."""
    name = torch.cuda.get_device_name(0)
    return next((known for known in GPUS if known in name.lower()), name)


def about() -> str:
    """Device and versions, for the head of a table."""
    p = torch.cuda.get_device_properties(0)
    size = f"{p.multi_processor_count} SMs, {p.total_memory / 2**30:.1f} GiB"
    return f"{p.name} ({size}), PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"


class Deadline:
    """An end to measuring."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def near(self, needs: float = 3.0) -> bool:
        """Whether there is no time for something that needs so many seconds."""
        return time.monotonic() + needs > self._end


@contextmanager
def measured_table(path: Path, columns: Sequence[str]) -> Iterator[Callable[..., object]]:
    """What writes a row of a CSV file with the device in its head. It is on disk as soon as it is known."""
    with path.open("w", newline="", buffering=1) as file:
        file.write(f"# {about()}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        yield lambda *cells: writer.writerow([round(c, 3) if isinstance(c, float) else c for c in cells])


class KernelTimer:
    """Microseconds of single calls on the device, their launches held back, with another tensor's bytes in its cache.

    Those bytes were written just before: what a call reads pushes them out, which small calls (tens of MB) feel.
    """

    def __init__(self, calls: int = 8, warm: int = 3) -> None:
        self._calls, self._warm = calls, warm
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self.nothing = self(lambda: None)

    def __call__(self, call: Callable[[], object]) -> float:
        """The median."""
        found: list[float] = []
        for _ in range(self._warm + self._calls):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            torch.cuda._sleep(HELD_CYCLES)
            start.record()
            call()
            end.record()
            end.synchronize()
            found.append(1e3 * start.elapsed_time(end))
        return median(found[self._warm :])


def host_us(call: Callable[[], object], calls: int = 1000, rounds: int = 5) -> tuple[float, float]:
    """Microseconds that the host needs for a call, and how far apart rounds of them lie."""
    call()
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        found.append(1e6 * (time.perf_counter() - begin) / calls)
    torch.cuda.synchronize()
    return median(found), max(found) - min(found)
