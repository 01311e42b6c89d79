"""What a process was doing when its run failed: stacks of its threads, and what its process groups were last given."""

import faulthandler
import json
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import torch

from executor.runtime.target import write_whole

SIGNAL = signal.SIGUSR2
ASKED = "flight-asked"  # a file in the launch's folder: tell what your process groups were given
ASK_EVERY_S = 0.2
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # NCCL's with CUDA events; any backend's


def arm(folder: Path, rank: int) -> None:
    """From now on, `SIGUSR2` writes the stacks of all threads to `folder`, even of one that hangs inside a library."""
    file = os.open(stacks_file(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    faulthandler.register(SIGNAL, file, all_threads=True)


def listen(folder: Path, rank: int) -> None:
    """Answer once, from a thread of its own, when `folder` asks what the process groups were given."""

    def wait() -> None:
        tick = threading.Event()
        while not (folder / ASKED).exists():
            tick.wait(ASK_EVERY_S)
        with suppress(OSError):
            write_whole(operations_file(folder, rank), operations())

    threading.Thread(target=wait, name="flight", daemon=True).start()


def stacks_file(folder: Path, rank: int) -> Path:
    """Where `arm` writes. rank: the first of the process."""
    return folder / f"stacks-{rank}"


def operations_file(folder: Path, rank: int) -> Path:
    """Where `listen` writes."""
    return folder / f"operations-{rank}.json"


def stacks() -> str:
    """Of all threads of this process, now, the newest call first."""
    read, write = os.pipe()  # faulthandler writes to files alone; a pipe holds 64 KiB, of which it fills little
    os.set_blocking(write, False)
    try:
        faulthandler.dump_traceback(write, all_threads=True)
    finally:
        os.close(write)
    with os.fdopen(read, "rb") as file:
        return file.read().decode(errors="replace")


def operations() -> str:
    """What torch's process groups of this process were given last, as torch's flight recorder tells it (JSON).

    Each entry: the backend's operation, its group and number in it, sizes, and whether it was scheduled, started or
    completed; the last `TORCH_FR_BUFFER_SIZE` of them (torch: 2,000). Without such a recorder, no entries.
    """
    for name in _DUMPS:
        dump = getattr(torch._C._distributed_c10d, name, None) if torch.distributed.is_available() else None
        if dump is not None and (found := json.loads(dump(True, False))).get("entries"):
            return json.dumps(found)
    return json.dumps({"entries": []})
