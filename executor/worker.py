"""Inside one rank: find the function to run, run it, and leave a record of how it ended."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from executor.progress import Progress, State
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

    def gloo(self, topology: Topology, timeout_s: float = 300.0) -> GlooTransport:
        """Connect to the other ranks."""
        return GlooTransport(self.store(), self.rank, topology, timeout_s)


Target = Callable[..., object]


def describe(fn: Target) -> dict[str, str]:
    """How a fresh process finds a module-level function: by module name if it belongs to us, else by file."""
    module = sys.modules[fn.__module__]
    name, file = fn.__module__, getattr(module, "__file__", None)
    if "." in fn.__qualname__ or not file:
        raise TypeError(f"{fn.__qualname__} must be a module-level function in a file")
    if name.split(".")[0] in ("executor", "piper_sim", "experiments", "ir"):
        return {"module": name, "name": fn.__qualname__}
    return {"module": "__piper_main__" if name == "__main__" else name, "file": file, "name": fn.__qualname__}


def _find(target: dict[str, str]) -> Target:
    if target["module"] in sys.modules or "file" not in target:
        module = importlib.import_module(target["module"])
    else:
        spec = importlib.util.spec_from_file_location(target["module"], target["file"])
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[target["module"]] = module
        spec.loader.exec_module(module)
    found: Target = getattr(module, target["name"])
    return found


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
        result = _find(spec["target"])(RankContext(rank, int(spec["world"]), folder, progress), **spec["args"])
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


def write_whole(path: Path, text: str) -> None:
    """The file appears complete or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
