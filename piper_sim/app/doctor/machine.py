"""What is there before anything runs: versions, devices, room for files, a clock."""

import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from statistics import median

from ir.core.errors import ErrorKind, PiperError, usage_error

PACKAGES = ("piper-sim", "torch", "numpy", "simpy", "msgspec")
ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "NCCL_",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_NCCL_",
    "GLOO_",
    "OMP_NUM_THREADS",
)
ROOM_BYTES = 64 * 2**20  # what a small run and its checkpoint leave in the folder for temporary files
SLEEPS = 50
LATE_S = 0.02  # a sleep of a millisecond that takes so much longer: times of ops would mean little


def versions() -> Mapping[str, object]:
    """Python, packages, and the variables that change how they run.

    Raises PiperError (missing_dependency): a package that is not there, older than we take, or torch not to be loaded.
    """
    found: dict[str, object] = {"python": platform.python_version(), "system": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = have = version(name)
        except PackageNotFoundError as error:
            raise _lacking(name, f"{name} is not installed") from error
        if (least := _least(name)) and _numbers(have) < _numbers(least):
            raise _lacking(name, f"{name} {have} is too old", f"{least} or newer")
    try:
        import_module("torch")
    except (ImportError, OSError) as error:  # a library that it needs is missing, or another's
        raise _lacking("torch", f"torch {found['torch']} cannot be loaded: {error}") from error
    return found | {k: v for k, v in sorted(os.environ.items()) if k.startswith(ENVIRONMENT)}


def _least(name: str) -> str | None:
    """The lowest version of a package that ours asks for."""
    asked = (re.match(rf"{name}\s*>=\s*([\d.]+)", text) for text in requires("piper-sim") or ())
    return next((m[1] for m in asked if m), None)


def _numbers(text: str) -> list[int]:
    """A version's numbers, in order.

    >>> _numbers("2.9.1+cpu") < _numbers("2.10") <= _numbers("2.10.0a0")
    True
    """
    head = re.match(r"[\d.]*", text)
    return [int(x) for x in (head[0] if head else "").split(".") if x]


def _lacking(name: str, message: str, allowed: str | None = None) -> PiperError:
    fix = "pip install 'piper-sim[exec]'"
    return PiperError(ErrorKind.MISSING_DEPENDENCY, message, key=name, allowed=allowed, suggestion=fix)


def devices() -> Mapping[str, object]:
    """Cores and GPUs. Raises PiperError (usage): a variable that makes GPUs run plans one op at a time, or hang."""
    import torch

    gpus = [torch.cuda.get_device_properties(k) for k in range(torch.cuda.device_count())]
    if gpus and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        message = "one hardware queue: a receive that waits at its head keeps every stream waiting"
        raise usage_error("CUDA_DEVICE_MAX_CONNECTIONS", message, "unset CUDA_DEVICE_MAX_CONNECTIONS", "8 to 32")
    found: dict[str, object] = {"cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()}
    return found | {
        "gpus": [{"name": g.name, "memory_bytes": g.total_memory, "sms": g.multi_processor_count} for g in gpus]
    }


def files() -> Mapping[str, object]:
    """Room where ranks meet and leave their results. Raises PiperError (io): none, or too little."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < ROOM_BYTES:
        message = f"{free / 2**20:.0f} MiB free"
        fix = "make room there, or set TMPDIR to another folder"
        raise PiperError(
            ErrorKind.IO, message, file=folder, allowed=f"{ROOM_BYTES // 2**20} MiB or more", suggestion=fix
        )
    return {"folder": folder, "free_bytes": free}


def sees(folder: str) -> bool:
    """This machine sees a folder that another has made. Raises PiperError (io): it does not."""
    if not os.path.isdir(folder):
        fix = "--shared DIR on a file system that every machine has mounted"
        raise PiperError(ErrorKind.IO, "not seen here", file=folder, allowed="a folder of all machines", suggestion=fix)
    return True


def clock() -> Mapping[str, object]:
    """How fine the clock is that traces are written by. Raises PiperError (usage): sleeps end far too late."""
    late = []
    for _ in range(SLEEPS):
        before = time.monotonic()
        time.sleep(0.001)
        late.append(time.monotonic() - before - 0.001)
    if median(late) > LATE_S:
        message = f"a sleep of 1 ms ends {1e3 * median(late):.0f} ms late in the median: the machine is overloaded"
        raise PiperError(
            ErrorKind.USAGE, message, allowed=f"{1e3 * LATE_S:.0f} ms", suggestion="ask again when it is quiet"
        )
    return {"resolution_s": time.get_clock_info("monotonic").resolution, "late_s": median(late)}
