"""Ranks to which something happens around a checkpoint; each the target of a launch in place of `train_rank`."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

from executor.checkpoint import folder as folder_module
from executor.checkpoint import keeper as keeper_module
from executor.checkpoint.keeper import Keeper
from executor.runtime.batch import Batch, Data
from executor.runtime.interpreter import Interpreter, StepResult
from executor.runtime.rank import train_rank
from executor.runtime.worker import RankContext
from executor.transport.base import Transport


def saved_at_once(ctx: RankContext, **spec: Any) -> Any:
    """What a rank has loaded is saved before its first step."""
    begin = Keeper.begin

    def and_save(self: Keeper, transport: Transport) -> None:
        begin(self, transport)
        if self.saving.resume is not None:
            self.after(self.saving.first, self.saving.first, transport)

    Keeper.begin = and_save  # type: ignore[method-assign]
    return train_rank(ctx, **spec)


def counted(ctx: RankContext, fault: dict[str, Any], **spec: Any) -> Any:
    """Rank 0 notes the steps it has done, and the saves it has begun."""
    step, write = Interpreter.step, Keeper._write

    def note(file: str, number: int) -> None:
        if ctx.rank == 0:
            with Path(fault["folder"], file).open("a") as out:
                out.write(f"{number}\n")

    def noted(self: Interpreter, number: int, batches: Any) -> StepResult:
        result = step(self, number, batches)
        note("steps", number + 1)
        return result

    def begun(self: Keeper, done: int) -> None:
        note("saves", done)
        write(self, done)

    Interpreter.step, Keeper._write = noted, begun  # type: ignore[method-assign]
    return train_rank(ctx, **spec)


# Moments of a save: what is called then, and whether the process ends before it or behind it.
MOMENTS = {
    "before any file": (keeper_module, "write_tensors", "before"),
    "behind its file": (keeper_module, "write_tensors", "behind"),
    "before the manifest": (Keeper, "_manifest", "before"),
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
    """Rank `rank` is killed when it has written so many bytes of checkpoints."""
    write, written = os.write, 0

    def some(fd: int, data: Any) -> int:
        nonlocal written
        done = write(fd, data[: max(1, len(data) // 3)])
        written += done
        if ctx.rank == fault["rank"] and written >= fault["bytes"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    os.write = some
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
    load = Keeper._load

    def and_act(self: Keeper, *args: Any) -> None:
        load(self, *args)
        act(self)

    Keeper._load = and_act  # type: ignore[method-assign]
    return train_rank(ctx, **spec)


def without_moments(ctx: RankContext, **spec: Any) -> Any:
    """Moments are not taken up."""

    def forget(self: Keeper) -> None:
        for slots in self.sync.optimizer.state.values():
            for t in slots.values():
                t.zero_()

    return _loaded(forget, ctx, spec)


def counted_anew(ctx: RankContext, **spec: Any) -> Any:
    """The optimizer counts its steps from 0."""

    def forget(self: Keeper) -> None:
        self.sync.optimizer.steps = 0

    return _loaded(forget, ctx, spec)


def same_data(ctx: RankContext, **spec: Any) -> Any:
    """Data is read from its beginning again."""
    batch = Data.batch

    def early(self: Data, step: int, replica: int, mb: int) -> Batch:
        return batch(self, step - spec["saving"]["first"], replica, mb)

    Data.batch = early  # type: ignore[method-assign]
    return train_rank(ctx, **spec)


def drawn_anew(ctx: RankContext, **spec: Any) -> Any:
    """Random number generators are not taken up."""
    keeper_module._set_random_states = lambda states: None
    return train_rank(ctx, **spec)


def impatient(ctx: RankContext, **spec: Any) -> Any:
    """Rank 0 does not wait for what the others write."""
    together, write = Keeper._together, Keeper._write

    def wait(self: Keeper, transport: Transport, text: str) -> None:
        if not text.startswith("save step"):
            together(self, transport, text)

    def late(self: Keeper, done: int) -> None:
        time.sleep(0.5 if ctx.rank else 0.0)
        write(self, done)

    Keeper._together, Keeper._write = wait, late  # type: ignore[method-assign]
    return train_rank(ctx, **spec)
