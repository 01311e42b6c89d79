"""Ranks to which something happens around a checkpoint; each the target of a launch in place of `train_rank`."""

import json
import os
import resource
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

from executor.checkpoint import folder as folder_module
from executor.checkpoint import keeper as keeper_module
from executor.checkpoint.keeper import RankCheckpoint
from executor.device.progress import RankProgress, RankState
from executor.optim.optimizer import WEIGHT
from executor.runtime.batch import Microbatch, MicrobatchLoader
from executor.runtime.interpreter import PlanInterpreter, StepResult
from executor.runtime.rank import train_rank
from executor.runtime.worker import RankContext
from executor.transport.base import Transport


def saved_at_once(ctx: RankContext, **spec: Any) -> Any:
    """What a rank has loaded is saved before its first step."""
    begin = RankCheckpoint.begin

    def and_save(self: RankCheckpoint, transport: Transport, board: Any = None) -> None:
        begin(self, transport, board)
        if self.saving.resume is not None:
            self.after(self.saving.first, self.saving.first, transport)

    RankCheckpoint.begin = and_save  # type: ignore[method-assign]
    return train_rank(ctx, **spec)


FILES = ("write", "fsync", "rename", "unlink", "mkdir")  # of os: what a save does to the disk


def killed_at_event(ctx: RankContext, fault: dict[str, Any], **spec: Any) -> Any:
    """Rank `rank` is killed before its `number`-th event of a kind: "op", what its progress says; "file", what it asks
    of the disk, where files are written by thirds. Steps done go to a file, and how many events there were."""
    counts, step, say = {"op": 0, "file": 0}, PlanInterpreter.step, RankProgress._write

    def event(kind: str) -> None:
        counts[kind] += 1
        if (ctx.rank, kind, counts[kind]) == (fault["rank"], fault["kind"], fault["number"]):
            os.kill(os.getpid(), signal.SIGKILL)

    def asked(real: Any, *args: Any, **named: Any) -> Any:
        event("file")
        if real is os_write:
            args = args[0], args[1][: -(-len(args[1]) // 3)]
        return real(*args, **named)

    def said(self: RankProgress, state: RankState) -> None:
        event("op")
        say(self, state)

    def noted(self: PlanInterpreter, number: int, batches: Any) -> StepResult:
        result = step(self, number, batches)
        if ctx.rank == 0:
            with Path(fault["folder"], "steps").open("a") as out:
                out.write(f"{number + 1}\n")
        return result

    os_write = os.write
    for name in FILES:
        setattr(os, name, partial(asked, getattr(os, name)))
    PlanInterpreter.step, RankProgress._write = noted, said  # type: ignore[method-assign]
    found = train_rank(ctx, **spec)
    Path(fault["folder"], f"events-{ctx.rank}").write_text(json.dumps(counts))
    return found


# Moments of a save: what is called then, and whether the process ends before it or behind it.
MOMENTS = {
    "before any file": (keeper_module, "write_tensors", "before"),
    "behind its file": (keeper_module, "write_tensors", "behind"),
    "before the manifest": (RankCheckpoint, "_manifest", "before"),
    "before the rename": (keeper_module, "publish", "before"),
    "behind the rename": (keeper_module, "publish", "behind"),
    "while old ones go": (folder_module, "discard", "behind"),
}


def killed_at(ctx: RankContext, fault: dict[str, Any], **spec: Any) -> Any:
    """Rank `rank` is killed at a moment of its `visit`-th save."""
    where, name, when = MOMENTS[fault["moment"]]
    real, visits = getattr(where, name), 0

    def last(*args: Any, **named: Any) -> Any:
        nonlocal visits
        visits += 1
        mine = ctx.rank == fault["rank"] and visits == fault["visit"]
        if mine and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        found = real(*args, **named)
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(where, name, last)
    return train_rank(ctx, **spec)


def killed_within_a_file(ctx: RankContext, fault: dict[str, Any], **spec: Any) -> Any:
    """Rank `rank` is killed when it has written a `share` of its second file, which is as long as its first."""
    write, real, sizes, written = os.write, keeper_module.write_tensors, list[int](), 0

    def some(fd: int, data: Any) -> int:
        nonlocal written
        done = write(fd, data[: -(-len(data) // 3)])
        written += done
        if ctx.rank == fault["rank"] and len(sizes) == 1 and written >= sizes[0] * (1 + fault["share"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    def noted(*args: Any) -> Any:
        found = real(*args)
        sizes.append(found.bytes)
        return found

    os.write, keeper_module.write_tensors = some, noted
    return train_rank(ctx, **spec)


def short_of_room(ctx: RankContext, fault: dict[str, Any], **spec: Any) -> Any:
    """Rank `rank` may not write files of more than `bytes`, from its second save on."""
    real, visits = keeper_module.write_tensors, 0

    def last(*args: Any) -> Any:
        nonlocal visits
        visits += 1
        if ctx.rank == fault["rank"] and visits == 2:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (fault["bytes"], resource.RLIM_INFINITY))
        return real(*args)

    keeper_module.write_tensors = last  # type: ignore[assignment]
    return train_rank(ctx, **spec)


def _loaded(act: Any, ctx: RankContext, spec: dict[str, Any]) -> Any:
    load = RankCheckpoint._load

    def and_act(self: RankCheckpoint, *args: Any) -> None:
        load(self, *args)
        act(self)

    RankCheckpoint._load = and_act  # type: ignore[method-assign]
    return train_rank(ctx, **spec)


def without_moments(ctx: RankContext, **spec: Any) -> Any:
    """Moments are not taken up."""

    def forget(self: RankCheckpoint) -> None:
        for _, _, slots in self.sync.kept():
            for slot, flat in slots.items():
                if slot != WEIGHT:
                    flat.zero_()

    return _loaded(forget, ctx, spec)


def counted_anew(ctx: RankContext, **spec: Any) -> Any:
    """The optimizer counts its steps from 0."""

    def forget(self: RankCheckpoint) -> None:
        self.sync.optimizer.resume(0)

    return _loaded(forget, ctx, spec)


def same_data(ctx: RankContext, **spec: Any) -> Any:
    """Data is read from its beginning again."""
    batch = MicrobatchLoader.batch

    def early(self: MicrobatchLoader, step: int, replica: int, mb: int) -> Microbatch:
        return batch(self, step - spec["saving"]["first"], replica, mb)

    MicrobatchLoader.batch = early  # type: ignore[method-assign]
    return train_rank(ctx, **spec)


def impatient(ctx: RankContext, **spec: Any) -> Any:
    """Rank 0 does not wait for what the others write."""
    together, write = RankCheckpoint._together, RankCheckpoint._write

    def wait(self: RankCheckpoint, transport: Transport, text: str) -> None:
        if not text.startswith("save step"):
            together(self, transport, text)

    def late(self: RankCheckpoint, *given: Any) -> None:
        if ctx.rank:
            threading.Event().wait()  # until the run has failed
        write(self, *given)

    RankCheckpoint._together, RankCheckpoint._write = wait, late  # type: ignore[method-assign]
    return train_rank(ctx, **spec)
