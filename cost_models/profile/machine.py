"""Where a profile was taken: processor, GPU, versions. No host name and no path is in it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

from msgspec import Meta

PACKAGES = ("numpy", "torch")


@dataclass(frozen=True)
class ProfileMachine:
    """cpu "" and cores 0 where it is not known (an imported trace). gpu "" where none was used.

    versions: of Python and packages. date: UTC. threads: that one process computes with.
    """

    cpu: str
    cores: Annotated[int, Meta(ge=0)]
    gpu: str
    gpus: Annotated[int, Meta(ge=0)]
    versions: Mapping[str, str]
    date: str
    threads: Annotated[int, Meta(ge=1)] = 1

    @classmethod
    def here(cls, gpu: str = "", gpus: int = 0, threads: int = 1) -> ProfileMachine:
        """This machine, now. gpu, gpus: as the executor sees them; nothing here asks a device."""
        versions = {"python": platform.python_version()} | {p: v for p in PACKAGES if (v := _version(p))}
        return cls(_cpu(), len(os.sched_getaffinity(0)), gpu, gpus, versions, _now(), threads)

    @classmethod
    def elsewhere(cls, gpu: str = "", gpus: int = 0, versions: Mapping[str, str] | None = None) -> ProfileMachine:
        """A machine of which only its output is at hand; the date is that of reading it."""
        return cls("", 0, gpu, gpus, versions or {}, _now())

    @property
    def device(self) -> str:
        """What computed, where it is known: the GPU, else the processor."""
        return self.gpu or self.cpu

    @property
    def fingerprint(self) -> str:
        """One line that is equal on equal machines; the date is not in it.

        >>> ProfileMachine("Xeon", 2, "", 0, {"torch": "2.13.0"}, "2026-01-01T00:00:00Z").fingerprint
        'Xeon x2, 1 thread, torch 2.13.0'
        """
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        cpu = (f"{self.cpu} x{self.cores}", threads) if self.cpu else ()
        gpu = (f"{self.gpu} x{self.gpus}",) if self.gpu else ()
        found = [*cpu, *gpu, *(f"{p} {v}" for p, v in sorted(self.versions.items()))]
        return ", ".join(found) or "not known"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
