"""Inside one rank: find the function to run, run it, and leave a record of how it ended."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from executor.progress import Progress, State
from executor.target import find, write_whole
from executor.transport.base import Topology, TransportError
from executor.transport.gloo import GlooTransport, file_store
from ir.errors import PiperError


@dataclass(frozen=True)
class RankContext:
    """What a rank's function gets: who it is, where to write progress, how to reach the others.

    dir: a folder all ranks of this launch share; it is gone afterwards.
    """

    rank: int
    world: int
    dir: Path
    progress: Progress

    def store(self) -> Any:
        """A c10d store of this launch."""
        return file_store(str(self.dir / "store"), self.world)

    def gloo(self, topology: Topology, timeout_s: float = 86_400.0) -> GlooTransport:
        """Connect to the other ranks. A receive may be posted long before its message: the watchdog finds who hangs."""
        return GlooTransport(self.store(), self.rank, topology, timeout_s)


def main(spec_path: str) -> int:
    """A rank's life; returns its exit code."""
    spec = json.loads(Path(spec_path).read_text(encoding="utf-8"))
    rank, folder = int(spec["rank"]), Path(spec["dir"])
    log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for fd in (1, 2):
        os.dup2(log, fd)
    faulthandler.enable()
    progress = Progress(folder / "progress", rank, beat_every_s=0.1)
    try:
        sys.path[:] = spec["sys_path"]
        os.chdir(spec["cwd"])
        os.environ.update(spec["env"])
        torch.set_num_threads(int(spec["threads"]))
        while not (folder / "go").exists():  # until ranks.json is complete
            time.sleep(0.002)
        result = find(spec["target"])(RankContext(rank, int(spec["world"]), folder, progress), **spec["args"])
        write_whole(folder / f"result-{rank}", json.dumps(result))
        progress.end()
        return 0
    except BaseException as error:
        _record(folder, rank, error)
        progress.end(State.FAILED)
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _record(folder: Path, rank: int, error: BaseException) -> None:
    witness = isinstance(error, TransportError)
    failure = {
        "type": type(error).__name__,
        "message": str(error) or type(error).__name__,
        "traceback": traceback.format_exc(),
        "witness": witness,
        "peers": error.peers if isinstance(error, TransportError) else (),
        "kind": error.kind.value if isinstance(error, PiperError) else None,
        "time_s": time.monotonic(),
    }
    write_whole(folder / f"failure-{rank}", json.dumps(failure))
