"""Before the first step a communicator is used once for each kind of operation that steps do on it, and no others."""

from pathlib import Path
from typing import Any

import pytest

from executor.launch.launch import launch
from executor.parallel import collective
from executor.runtime.given import given_text
from executor.runtime.rank import train_rank
from executor.runtime.spec import PlanRun
from executor.runtime.worker import RankContext
from executor.transport.base import TransportTopology
from ir.core.work import MessageKind
from ir.job.run_options import JobRunOptions
from tests.executor.families import TINY
from tests.executor.runs import judged
from tests.executor.transport.fake_nccl import FakeNccl

PRESET, OVERRIDES = TINY["mixtral"]
MOE = f"model.config={PRESET}", *(f"model.{key}={value}" for key, value in OVERRIDES.items())
JOBS = {
    "channels and shards": ("schedule.name=zb1p", "parallel.dp=2", "parallel.zero=2"),
    "both ways, gathered": ("schedule.name=dualpipe", "parallel.dp=2", "parallel.zero=3"),
    "tensor and context parallel": ("parallel.pp=1", "parallel.tp=2", "parallel.cp=2"),
    "replicas, vocabulary divided": ("parallel.pp=1", "parallel.tp=2", "parallel.dp=2", "parallel.zero=0"),
    "experts": (*MOE, "parallel.dp=2", "parallel.ep=2", "parallel.zero=1"),
}
Noted = list[tuple[str, str]]


def noted_rank(ctx: RankContext, blind: str, **spec: Any) -> tuple[Noted, Noted]:
    """Train a step; what was used before it, and in it. blind: a kind that is left out of what is connected."""
    made: list[tuple[FakeNccl, int]] = []

    def nccl(self: RankContext, topology: TransportTopology, timeout_s: float = 20.0) -> FakeNccl:
        t = FakeNccl(self.store(), self.rank, topology)
        made.append((t, len(t.noted)))
        return t

    def of(*args: Any) -> list[collective.Meeting]:
        return [(name, members, frozenset(k for k in kinds if k != blind)) for name, members, kinds in groups(*args)]

    groups = collective.groups
    train_rank.__globals__["groups"] = of
    RankContext.gloo = nccl  # type: ignore[assignment,method-assign]
    train_rank(ctx, **spec)
    ((t, connected),) = made
    return t.noted[:connected], t.noted[connected:]


def missing(folder: Path, name: str, blind: str = "") -> list[set[tuple[str, str]]]:
    """Of each rank, what its steps use and its start did not, or the other way round."""
    prepared, plan = judged(folder, *JOBS[name])
    spec = PlanRun(JobRunOptions(prepared.ranks, 2, memory=False)).told()
    found = launch(noted_rank, prepared.ranks, {"blind": blind, **spec}, given=[given_text(prepared, plan)])
    before, after = ([{tuple(x) for x in pair[k]} for pair in found] for k in (0, 1))
    assert all(len(pair[0]) == len(b) for pair, b in zip(found, before, strict=True)) and all(before)  # each once
    return [b ^ a for b, a in zip(before, after, strict=True)]


@pytest.mark.parametrize("name", JOBS)
def test_what_steps_do_was_done_once_before_them_and_nothing_else(name: str, tmp_path: Path) -> None:
    assert missing(tmp_path, name) == [set()] * 4


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("channels and shards", MessageKind.REDUCE_SCATTER),
        ("both ways, gathered", MessageKind.ALL_GATHER),
        ("experts", MessageKind.ALL_TO_ALL),
    ],
)
def test_a_kind_that_is_left_out_is_missed(name: str, kind: MessageKind, tmp_path: Path) -> None:
    assert all({str(k) for _, k in rank} == {str(kind)} for rank in missing(tmp_path, name, str(kind)))
