"""Profiles: what ops and links took on one machine. `profile.file` keeps them as JSON.

Ops are kept by class (`ir.graph.classes`), so a profile taken on one schedule, microbatch count and partition serves
any other of the same model sizes; other sizes are read off those measured (`profile_shapes`). Times are of the
machine in the header and of no other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from statistics import median
from typing import Annotated

import numpy as np
from msgspec import Meta

from cost_models.profile.fit import MessageCurve, Seconds, fit
from cost_models.profile.machine import ProfileMachine
from cost_models.profile.pairs import KernelPair
from cost_models.profile.shapes import CostBySize, KernelShape, between
from ir.core.work import Message, MessageKind
from ir.graph.classes import link_class, node_classes
from ir.plan.plan import OpKind, Plan

__all__ = ["CostSource", "MeasuredCost", "OpEntry", "Profile", "ProfileCost", "ProfileMachine", "lookup", "plan_keys"]

VERSION = 2


class CostSource(StrEnum):
    """Where seconds come from."""

    MEASURED = "measured"  # of this very class and size
    INTERPOLATED = "interpolated"  # between measured sizes
    EXTRAPOLATED = "extrapolated"  # beyond them
    MODELLED = "modelled"  # from the hardware file


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """Seconds of one op or message. spread_s: between the quartiles. count: how often it was timed."""

    median_s: Seconds
    spread_s: Seconds
    count: Annotated[int, Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class OpEntry:
    """One class of nodes. time: of one instance on an idle machine. shape: which sizes of what it is.

    alone: the messages inside it are not in its time, and come on top.
    """

    time: MeasuredCost
    shape: KernelShape | None = None
    alone: bool = False


@dataclass(frozen=True)
class Profile:
    """Everything that was measured. ops: by class of node. links: by `ir.graph.classes.link_class`.

    curves: by a link's key without its bytes, where several sizes were measured. host_s: seconds that the host needs
    per op beside the op's own work; None where it was not measured. pairs: slowdowns by `profile_pairs.pair_key`.
    origins: how each part of it was come by, in words. sealed: nobody has changed the file since it was written.
    """

    machine: ProfileMachine
    ops: Mapping[str, OpEntry]
    links: Mapping[str, MeasuredCost] = field(default_factory=dict)
    curves: Mapping[str, MessageCurve] = field(default_factory=dict)
    host_s: float | None = None
    pairs: Mapping[str, KernelPair] = field(default_factory=dict)
    origins: tuple[str, ...] = ()
    sealed: bool = True

    @classmethod
    def of(
        cls,
        machine: ProfileMachine,
        ops: Mapping[str, OpEntry],
        links: Mapping[str, MeasuredCost] | None = None,
        host_s: float | None = None,
        pairs: Mapping[str, KernelPair] | None = None,
        origins: tuple[str, ...] = (),
    ) -> Profile:
        """From measurements; the curves are fitted here."""
        links = links or {}
        points: dict[str, list[tuple[int, MeasuredCost]]] = {}
        for key, found in links.items():
            name, _, size = key.rpartition(" ")
            points.setdefault(name, []).append((int(size), found))
        several = {name: at for name, at in points.items() if len({size for size, _ in at}) > 1}
        curves = {name: fit([(n, m.median_s) for n, m in at], _noise(at)) for name, at in several.items()}
        return cls(machine, ops, links, curves, host_s, pairs or {}, origins)

    @property
    def fit_error(self) -> float:
        """The largest error of any curve at a size it was fitted to, relative; 0 where there is no curve."""
        return max((c.error for c in self.curves.values()), default=0.0)

    @cached_property
    def families(self) -> dict[tuple[str, bool], list[CostBySize]]:
        """What was measured of each family, whether alone or with the messages inside."""
        out: dict[tuple[str, bool], list[CostBySize]] = {}
        for e in self.ops.values():
            if e.shape is not None:
                known = out.setdefault((e.shape.family, e.alone), [])
                known.append(CostBySize(e.shape.at, e.time.median_s, e.time.spread_s))
        return out


def _noise(points: list[tuple[int, MeasuredCost]]) -> float:
    return median(m.spread_s / m.median_s if m.median_s else 0.0 for _, m in points)


@dataclass(frozen=True, slots=True)
class ProfileCost:
    """Seconds for a key, and their spread: what was measured, or what a curve may be off. alone: see `OpEntry`."""

    seconds: float
    spread_s: float
    source: CostSource = CostSource.MEASURED
    alone: bool = False


def lookup(profile: Profile, key: str, shape: KernelShape | None = None) -> ProfileCost | None:
    """What a profile says about a class of nodes or a message. shape: which other sizes may stand in for a node's.

    >>> p = Profile.of(ProfileMachine("x", 1, "", 0, {}, ""), {}, {"p2p 1000": MeasuredCost(2e-3, 0.0, 9)})
    >>> lookup(p, "p2p 1000").seconds, lookup(p, "p2p 2000")
    (0.002, None)
    """
    entry = profile.ops.get(key)
    found = entry.time if entry is not None else profile.links.get(key)
    if found is not None:
        return ProfileCost(found.median_s, found.spread_s, alone=entry is not None and entry.alone)
    if shape is not None:
        return _sized(profile, shape)
    name, _, size = key.rpartition(" ")
    if name in profile.curves and size.isdecimal():
        curve = profile.curves[name]
        source = CostSource.INTERPOLATED if curve.inside(int(size)) else CostSource.EXTRAPOLATED
        return ProfileCost(curve.seconds(int(size)), curve.doubt_s(int(size)), source)
    return None


def _sized(profile: Profile, shape: KernelShape) -> ProfileCost | None:
    for alone in (True, False):
        known = profile.families.get((shape.family, alone), [])
        same = next((k for k in known if k.at == shape.at), None)  # an update does not know of sequence lengths
        if same is not None:
            return ProfileCost(same.seconds, same.spread_s, alone=alone)
        got = between(known, shape.at)
        if got is not None:
            source = CostSource.INTERPOLATED if got.inside else CostSource.EXTRAPOLATED
            return ProfileCost(got.seconds, got.spread_s, source, alone)
    return None


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
                out[link_class(Message(MessageKind.P2P, size, ("pp",)), 2)] += times
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
