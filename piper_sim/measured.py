"""What a profile says about one job's plan: measured seconds, which go before modelled ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cost_models.profile import Found, Profile, cover, lookup, plan_keys
from cost_models.profile_file import load_profile
from ir.classes import link_class, node_classes
from ir.errors import ErrorKind, PiperError
from ir.graph import Node
from ir.job import Job
from ir.job.build import Prepared
from ir.work import Message

_Key = tuple[int, str, str]  # stage, part, pass


def profile_of(job: Job) -> Profile | None:
    """`[costs] profile`; its path starts at the job's folder. Raises PiperError: it cannot be read, or not be used."""
    if job.costs.profile is None:
        return None
    if job.costs.stage_times is not None:
        fix = "leave one of the two out"
        message = "stage_times and a profile both say what ops take"
        raise PiperError(ErrorKind.JOB, message, key="costs.profile", file=job.file, suggestion=fix)
    return load_profile(Path(job.file).parent / job.costs.profile)


@dataclass(frozen=True, eq=False)
class Measurements:
    """Seconds by node and by message. host_s: of a host that computes itself, for each op. source: `cost_source`."""

    nodes: Mapping[_Key, Found] = field(default_factory=dict)
    profile: Profile | None = None
    host_s: float = 0.0
    source: str = "modelled"

    @classmethod
    def of(cls, prepared: Prepared, profile: Profile | None = None) -> Measurements | None:
        """Of a job's plan, from a profile or else the job's own; None where there is none."""
        profile = profile or profile_of(prepared.job)
        if profile is None:
            return None
        plan = prepared.plan()
        graph = plan.graph
        found = {_key(n): lookup(profile, c) for n, c in zip(graph.nodes, node_classes(graph), strict=True)}
        nodes = {key: got for key, got in found.items() if got is not None}
        return cls(nodes, profile, profile.host_s or 0.0, cover(profile, plan_keys(plan)).source)

    def node(self, n: Node) -> float | None:
        """Seconds of one instance of a node that computes."""
        found = self.nodes.get(_key(n)) if n.message is None else None
        return None if found is None else found.seconds

    def link(self, message: Message, ranks: int, modelled: float) -> float:
        """Seconds of a message among so many ranks; as modelled where it was not measured."""
        found = None if self.profile is None else lookup(self.profile, link_class(message, ranks))
        return modelled if found is None else found.seconds


MODELLED = Measurements()


def scaled(shares: list[float], seconds: float) -> list[float]:
    """Shares in the same proportion that sum to so many seconds; all compute where nothing was modelled.

    >>> scaled([1.0, 0.0, 3.0, 0.0, 0.0], 2.0)
    [0.5, 0.0, 1.5, 0.0, 0.0]
    """
    total = sum(shares)
    return [x * seconds / total for x in shares] if total else [seconds, *[0.0] * (len(shares) - 1)]


def _key(n: Node) -> _Key:
    return n.stage, n.part, str(n.kind)
