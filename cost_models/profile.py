"""Profile files: what ops and links took on one machine, and what ops allocate there; JSON, read strictly.

Ops are kept by class (`ir.classes`), so a profile taken on one schedule, microbatch count and partition serves any
other of the same model sizes. Times are of the machine in the header and of no other.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from cost_models.profile_fit import Curve, fit
from ir.alloc import AllocList
from ir.classes import link_class, node_classes
from ir.plan import OpKind, Plan
from ir.work import CommKind, Message

VERSION = 1
PACKAGES = ("numpy", "torch")


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one op or message. spread_s: between the quartiles. count: how often it was timed."""

    median_s: float
    spread_s: float
    count: int


@dataclass(frozen=True, slots=True)
class OpEntry:
    """One class of nodes. time: of one instance on an idle machine. alloc: what it allocates and frees."""

    time: Measured | None = None
    alloc: AllocList | None = None


@dataclass(frozen=True)
class Machine:
    """Where a profile was taken. gpu "" where none was used. versions: of Python and packages. date: UTC."""

    cpu: str
    cores: int
    gpu: str
    gpus: int
    versions: Mapping[str, str]
    date: str

    @classmethod
    def here(cls, gpu: str = "", gpus: int = 0) -> Machine:
        """This machine, now. gpu, gpus: as the executor sees them; nothing here asks a device."""
        versions = {"python": platform.python_version()} | {p: v for p in PACKAGES if (v := _version(p))}
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return cls(_cpu(), len(os.sched_getaffinity(0)), gpu, gpus, versions, now)

    @property
    def fingerprint(self) -> str:
        """One line that is equal on equal machines; the date is not in it.

        >>> Machine("Xeon", 2, "", 0, {"torch": "2.13.0"}, "2026-01-01T00:00:00Z").fingerprint
        'Xeon x2, torch 2.13.0'
        """
        gpu = (f"{self.gpu} x{self.gpus}",) if self.gpu else ()
        return ", ".join([f"{self.cpu} x{self.cores}", *gpu, *(f"{p} {v}" for p, v in sorted(self.versions.items()))])


@dataclass(frozen=True)
class Profile:
    """Everything that was measured. ops: by class of node. links: by `ir.classes.link_class`.

    curves: by a link's key without its bytes, where several sizes were measured. host_s: seconds that the host needs
    per op beside the op's own work; None where it was not measured.
    """

    machine: Machine
    ops: Mapping[str, OpEntry]
    links: Mapping[str, Measured] = field(default_factory=dict)
    curves: Mapping[str, Curve] = field(default_factory=dict)
    host_s: float | None = None

    @classmethod
    def of(
        cls,
        machine: Machine,
        ops: Mapping[str, OpEntry],
        links: Mapping[str, Measured] | None = None,
        host_s: float | None = None,
    ) -> Profile:
        """From measurements; the curves are fitted here."""
        links = links or {}
        points: dict[str, list[tuple[int, float]]] = {}
        for key, found in links.items():
            name, _, size = key.rpartition(" ")
            points.setdefault(name, []).append((int(size), found.median_s))
        curves = {name: fit(at) for name, at in points.items() if len({size for size, _ in at}) > 1}
        return cls(machine, ops, links, curves, host_s)

    @property
    def fit_error(self) -> float:
        """The largest error of any curve at a size it was fitted to, relative; 0 where there is no curve."""
        return max((c.error for c in self.curves.values()), default=0.0)

    @property
    def lists(self) -> dict[str, AllocList]:
        """All alloc lists, for `piper_sim.splice.peaks`."""
        return {key: entry.alloc for key, entry in self.ops.items() if entry.alloc is not None}


@dataclass(frozen=True, slots=True)
class Found:
    """Seconds for a key. fitted: read off a curve, not measured at this size; spread_s is the curve's error then."""

    seconds: float
    spread_s: float
    fitted: bool = False


def lookup(profile: Profile, key: str) -> Found | None:
    """What a profile says about a class of nodes or a message.

    >>> p = Profile.of(Machine("x", 1, "", 0, {}, ""), {}, {"p2p 1000": Measured(2e-3, 0.0, 9)})
    >>> lookup(p, "p2p 1000"), lookup(p, "p2p 2000")
    (Found(seconds=0.002, spread_s=0.0, fitted=False), None)
    """
    entry = profile.ops.get(key)
    found = entry.time if entry is not None else profile.links.get(key)
    if found is not None:
        return Found(found.median_s, found.spread_s)
    name, _, size = key.rpartition(" ")
    if name in profile.curves and size.isdecimal():
        curve = profile.curves[name]
        seconds = curve.seconds(int(size))
        return Found(seconds, seconds * curve.error, fitted=True)
    return None


@dataclass(frozen=True)
class Coverage:
    """How much of a plan a profile knows. found, missing: keys. spread: of the seconds found, relative."""

    found: Mapping[str, Found]
    missing: tuple[str, ...]
    spread: float

    @property
    def source(self) -> str:
        """The result's `cost_source`: measured, modelled or mixed."""
        if not self.found:
            return "modelled"
        return "mixed" if self.missing or any(f.fitted for f in self.found.values()) else "measured"


def cover(profile: Profile, keys: Mapping[str, int]) -> Coverage:
    """Look up a plan's keys. keys: how often each occurs; the spread weighs each by its share of the seconds found.

    >>> p = Profile(Machine("x", 1, "", 0, {}, ""), {"F/attn 1": OpEntry(Measured(1.0, 0.5, 9))})
    >>> c = cover(p, {"F/attn 1": 2, "F/mlp 2": 2}); c.missing, c.spread, c.source
    (('F/mlp 2',), 0.5, 'mixed')
    """
    looked = {key: lookup(profile, key) for key in keys}
    found = {key: got for key, got in looked.items() if got is not None}
    seconds = sum(keys[key] * got.seconds for key, got in found.items())
    spread = sum(keys[key] * got.spread_s for key, got in found.items())
    return Coverage(found, tuple(k for k, got in looked.items() if got is None), spread / seconds if seconds else 0.0)


def plan_keys(plan: Plan) -> Counter[str]:
    """What a plan's seconds are made of: classes of nodes and messages, and how often each occurs.

    A transfer counts once, at its sender; a collective once for every rank that takes part.
    """
    g, out = plan.graph, Counter[str]()
    names = node_classes(g)
    for s, times in zip(plan.shapes, np.bincount(plan.shape, minlength=len(plan.shapes)).tolist(), strict=True):
        match s.kind:
            case OpKind.COMPUTE:
                for index, _ in s.covers:
                    out[names[index]] += times
            case OpKind.SEND:
                assert s.slot is not None
                size = g.nodes[s.slot[0]].writes[s.slot[1]].bytes
                out[link_class(Message(CommKind.P2P, size, ("pp",)), 2)] += times
            case OpKind.COLLECTIVE:
                node = g.nodes[s.covers[0][0]] if s.covers else None
                message = s.message if node is None else node.message
                if message is not None and g.mesh is not None:
                    joint = node is not None and node.once and "pp" not in message.axes
                    programs = node.groups if joint and node is not None else (0,)
                    out[link_class(message, len(g.mesh.offsets(message.axes, programs)))] += times
            case OpKind.RECV:
                pass
    return out


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
