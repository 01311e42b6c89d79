"""Inside one process: find the function to run, run it as one rank or as several, leave a record of how each ended."""

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from executor.device.device import Device
from executor.device.progress import RankProgress, RankState
from executor.device.race import RaceDevice
from executor.modules.user.exports.shared_exports import RankExports
from executor.runtime.flight import arm, listen, operations, operations_file
from executor.runtime.given import Checksums, given_name, read_given
from executor.runtime.target import NO_ROOM, find, temporary, write_whole
from executor.transport.base import Transport, TransportError, TransportTopology
from executor.transport.groups import GlooTransport, NcclTransport, file_store
from executor.transport.local import LocalTransport, LocalTransportHub
from ir.core.errors import PiperError
from ir.job.build import PreparedJob
from ir.plan.plan import Plan

PATIENCE_S = 86_400.0  # a receive may be posted long before its message: the watchdog finds who hangs


@dataclass
class LocalRanks:
    """Where the ranks that are threads of one process meet, once the first of them has said what they need."""

    made: LocalTransportHub | None = None
    race: RaceDevice | None = None
    failed: int | None = None
    exports: RankExports = field(default_factory=RankExports)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, topology: TransportTopology, device: Device) -> LocalTransportHub:
        with self.lock:
            if self.made is None:
                self.made = LocalTransportHub(topology, device)
                if self.failed is not None:
                    self.made.fail(self.failed)
            return self.made

    def race_device(self) -> RaceDevice:
        with self.lock:
            self.race = self.race or RaceDevice()
            return self.race

    def fail(self, rank: int) -> None:
        with self.lock:
            self.failed = rank if self.failed is None else self.failed
            if self.made is not None:
                self.made.fail(rank)


@dataclass(frozen=True)
class RankContext:
    """What a rank's function gets: who it is, where to write progress, how to reach the others.

    dir: a folder of this launch, gone afterwards. local_rank: among the ranks of this machine. open_store: a c10d store
    of this launch, by name.
    """

    rank: int
    world: int
    dir: Path
    progress: RankProgress
    local_rank: int = 0
    open_store: Callable[[str], Any] | None = None
    hub: LocalRanks = field(default_factory=LocalRanks)

    def given(self, number: int = 0) -> tuple[PreparedJob, Plan]:
        """The resolved job and the plan that this launch was given, of several the number-th."""
        return read_given(self.dir / given_name(number))[:2]

    def drawn(self, number: int = 0) -> Checksums:
        """What its module's build() has drawn before any rank began."""
        return read_given(self.dir / given_name(number))[2]

    def store(self, name: str = "groups") -> Any:
        return self.open_store(name) if self.open_store is not None else file_store(str(self.dir / name), self.world)

    def connect(self, backend: str, topology: TransportTopology, device: Device) -> Transport:
        match backend:
            case "local":
                return LocalTransport(self.hub.get(topology, device), self.rank)
            case "nccl":
                return NcclTransport(self.store(), self.rank, topology, device, PATIENCE_S)
            case _:
                return self.gloo(topology)

    def gloo(self, topology: TransportTopology, timeout_s: float = PATIENCE_S) -> GlooTransport:
        return GlooTransport(self.store(), self.rank, topology, timeout_s)


def main(spec: Mapping[str, Any], ranks: Sequence[int]) -> int:
    """The life of a process that is one rank, or several; returns its exit code.

    spec: what `executor.launch.launch` has written for all processes of the run.
    """
    folder = Path(spec["dir"])
    log = os.open(folder / f"log-{ranks[0]}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for fd in (1, 2):
        os.dup2(log, fd)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)  # of a killed rank, too, all lines
    faulthandler.enable()
    if spec["flight"]:
        arm(folder, ranks[0])
        listen(folder, ranks[0])
    pens = {r: RankProgress(folder / "progress", r, beat_every_s=0.1) for r in ranks}
    hub, codes = LocalRanks(), dict[int, int]()
    try:
        # Behind everything else: what lies in the user's folders must not stand in for a library, or for us.
        sys.path += [path for path in spec["sys_path"] if path not in sys.path]
        os.chdir(spec["cwd"])
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        while not (folder / "go").exists():  # until ranks.json is complete
            time.sleep(0.002)

        def life(rank: int) -> None:
            codes[rank] = _rank(spec, folder, rank, pens[rank], hub)

        if len(ranks) == 1:
            life(ranks[0])
        else:
            choose_kernels()
            threads = [threading.Thread(target=life, args=(r,), name=f"rank-{r}", daemon=True) for r in ranks]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return max(codes.values())
    except BaseException as error:
        return _leave_word(folder, ranks[0], error)


def choose_kernels() -> None:
    """Ask vector math for each function once, before several threads do at the same time.

    MKL chooses its kernels when a function is first asked for. A thread that comes amid another's choice is now and
    then (in 2 of 3,413 processes of eight threads) served by a coarser one, wrong by 1e-10: copies of a parameter part.
    """
    for dtype in (torch.float32, torch.float64):
        x = torch.full((64,), 0.5, dtype=dtype)
        for name in ("log", "log10", "log1p", "log2", "exp", "expm1", "sqrt", "rsqrt", "sin", "cos", "tan", "tanh",
                     "asin", "acos", "atan", "sinh", "cosh", "erf", "erfc", "erfinv", "sigmoid", "pow"):  # fmt: skip
            getattr(torch, name)(x, *((x,) if name == "pow" else ()))


def _rank(spec: Mapping[str, Any], folder: Path, rank: int, progress: RankProgress, hub: LocalRanks) -> int:
    """A rank's life; returns its exit code."""
    try:
        context = RankContext(rank, int(spec["world"]), folder, progress, local_rank=rank, hub=hub)
        result = find(spec["target"])(context, **spec["args"])
        with temporary():
            write_whole(folder / f"result-{rank}", json.dumps(result))
        progress.end()
        return 0
    except BaseException as error:
        code = _leave_word(folder, rank, error)
        progress.end(RankState.FAILED)
        if spec["flight"] and code != NO_ROOM:
            with suppress(OSError):  # why it failed is said, and stays
                write_whole(operations_file(folder, rank), operations())
        hub.fail(rank)
        return code


def _leave_word(folder: Path, rank: int, error: BaseException) -> int:
    """Of a failure; returns the exit code."""
    try:
        write_whole(folder / f"failure-{rank}", json.dumps(failure(error)))
    except OSError:
        return NO_ROOM
    return 1


def failure(error: BaseException) -> dict[str, Any]:
    """What a rank that fails leaves to be read by whoever reports it. An error of ours says all of it itself."""
    known, name = isinstance(error, PiperError), type(error).__name__
    return {
        "type": name,
        "message": str(error) or name,
        "traceback": "" if known else "".join(traceback.format_exception(error)),
        "witness": isinstance(error, TransportError),
        "peers": error.peers if isinstance(error, TransportError) else (),
        "kind": error.kind.value if isinstance(error, PiperError) else None,
        "time_s": time.monotonic(),
    }
