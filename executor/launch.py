"""Run one function on N local ranks and watch them; when one fails, say which, at what op, who waits; then end all."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from executor.forkserver import ForkServer
from executor.progress import Record, State, create, read
from executor.target import Target, describe, write_whole
from ir.errors import ErrorKind, PiperError


class RankFailed(PiperError):
    """A run that failed: the rank that caused it, the op it was at, and the op every rank behind it waits at.

    >>> print(RankFailed("killed by SIGKILL", rank=1, op="1F0", waiting={0: "0B0"}))
    rank 1 failed at 1F0: killed by SIGKILL; rank 0 waits at 0B0
    """

    def __init__(
        self, reason: str, *, rank: int, op: str | None, waiting: Mapping[int, str], details: str = ""
    ) -> None:
        self.reason, self.rank, self.op, self.waiting, self.details = reason, rank, op, dict(waiting), details
        at = f" at {op}" if op else " before its first op"
        behind = "".join(f"; rank {r} waits at {o}" for r, o in sorted(waiting.items()))
        super().__init__(ErrorKind.RANK_FAILED, f"rank {rank} failed{at}: {reason}{behind}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.reason, self.rank, self.op, self.waiting, self.details)


def _rebuild(reason: str, rank: int, op: str | None, waiting: dict[int, str], details: str) -> RankFailed:
    return RankFailed(reason, rank=rank, op=op, waiting=waiting, details=details)


@dataclass
class _Run:
    """The parent's view of one launch."""

    world: int
    folder: Path
    watchdog_s: float
    startup_s: float
    alive: dict[str, int] = field(default_factory=dict)  # key → rank
    codes: dict[int, int] = field(default_factory=dict)  # rank → exit code
    seen_s: dict[int, float] = field(default_factory=dict)

    def note(self, event: Mapping[str, Any]) -> None:
        """An exit."""
        if event["event"] == "exit" and event["key"] in self.alive:
            rank = self.alive.pop(event["key"])
            self.codes[rank], self.seen_s[rank] = event["code"], time.monotonic()

    def records(self) -> list[Record]:
        """All ranks' progress."""
        return read(self.folder / "progress", self.world)

    def failure(self, rank: int) -> dict[str, Any] | None:
        """What a rank said when it failed."""
        path = self.folder / f"failure-{rank}"
        if not path.exists():
            return None
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def log(self, rank: int) -> str:
        """The end of what a rank printed."""
        path = self.folder / f"log-{rank}"
        return path.read_text(encoding="utf-8", errors="replace")[-2000:] if path.exists() else ""


def launch(
    fn: Target,
    ranks: int,
    args: Mapping[str, object] | None = None,
    *,
    out: Path | None = None,
    watchdog_s: float = 15.0,
    startup_s: float = 120.0,
    timeout_s: float | None = None,
    threads: int = 1,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `fn(context, **args)` on every rank; returns what they return, by rank. Arguments and results are JSON.

    out: a folder that gets `ranks.json`, whole, before any rank goes on. watchdog_s: a rank that makes no progress for
    so long has failed; startup_s: the same before its first op. timeout_s: for everything.

    Raises RankFailed. Whatever happens, no process is left.
    """
    target = describe(fn)
    if out is not None:
        _folder(out)
    with ForkServer.lock, tempfile.TemporaryDirectory(prefix="piper-run-") as name:
        folder = Path(name)
        run = _Run(ranks, folder, watchdog_s, startup_s)
        create(folder / "progress", ranks)
        server = ForkServer.get()
        spec = {
            "world": ranks,
            "dir": name,
            "target": target,
            "args": dict(args or {}),
            "threads": threads,
            "cwd": os.getcwd(),
            "sys_path": sys.path,
            "env": {"GLOO_SOCKET_IFNAME": "lo", **(env or {})},
        }
        try:
            pids = _start(server, run, spec)
            if out is not None:
                table = {"ranks": {str(r): {"pid": pids[r]} for r in range(ranks)}}
                write_whole(out / "ranks.json", json.dumps(table))
            (folder / "go").touch()
            _watch(server, run, time.monotonic(), timeout_s)
        finally:
            _end(server, run)
        return [json.loads((folder / f"result-{r}").read_text(encoding="utf-8")) for r in range(ranks)]


def _folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot be a folder: {error.strerror}"
        raise PiperError(ErrorKind.IO, message, file=str(out), suggestion="choose another --out") from error


def _start(server: ForkServer, run: _Run, spec: dict[str, object]) -> dict[int, int]:
    for rank in range(run.world):
        path = run.folder / f"spec-{rank}"
        path.write_text(json.dumps({**spec, "rank": rank}), encoding="utf-8")
        key = f"{run.folder.name}/{rank}"
        run.alive[key] = rank
        server.send(start=str(path), key=key)
    pids: dict[int, int] = {}
    limit = time.monotonic() + run.startup_s
    while len(pids) < run.world:
        if time.monotonic() > limit:
            raise RankFailed("it did not start", rank=len(pids), op=None, waiting={})
        for event in server.events(0.5):
            if event["event"] == "started" and event["key"] in run.alive:
                pids[run.alive[event["key"]]] = event["pid"]
            run.note(event)
    return pids


def _watch(server: ForkServer, run: _Run, began_s: float, timeout_s: float | None) -> None:
    """Until all ranks have ended well; raises RankFailed with the first cause otherwise."""
    while run.alive:
        for event in server.events(0.05):
            run.note(event)
        if any(run.codes.values()):
            _settle(server, run)
            raise _verdict(run)
        now = time.monotonic()
        if stuck := _stuck(run, now, began_s):
            rank, seconds = stuck
            raise _failed(run, rank, f"no progress for {seconds:.0f} s", run.records())
        if timeout_s is not None and now - began_s > timeout_s:
            left = [r for r in run.records() if r.rank in run.alive.values()]
            worst = min(left, key=lambda r: (r.state != State.RUN, r.changed_s))
            raise _failed(run, worst.rank, f"not finished after {timeout_s:g} s", run.records())


def _stuck(run: _Run, now: float, began_s: float) -> tuple[int, float] | None:
    """The rank that has hung, if any: not the ones that wait for it."""
    live = [r for r in run.records() if r.rank in run.alive.values() and r.state is not State.DONE]
    idle = {r.rank: now - max(r.changed_s, began_s) for r in live}
    limit = {r.rank: run.startup_s if r.state is State.STARTING else run.watchdog_s for r in live}
    late = [r for r in live if idle[r.rank] >= limit[r.rank]]
    frozen = [r for r in late if now - max(r.beat_s, began_s) > min(run.watchdog_s, 5.0)]
    working = [r for r in late if r.state is not State.WAIT]
    if found := frozen or working:
        first = min(found, key=lambda r: r.changed_s)
        return first.rank, idle[first.rank]
    if late and len(late) == len(live):
        # All wait. Nobody computes: the one that has waited longest is as near to the cause as can be told.
        first = min(late, key=lambda r: r.changed_s)
        return first.rank, idle[first.rank]
    return None


def _settle(server: ForkServer, run: _Run, grace_s: float = 3.0) -> None:
    """After a first failure: let the others run into it, or come to wait, so that the report is complete."""
    limit = time.monotonic() + grace_s
    while run.alive and time.monotonic() < limit:
        for event in server.events(0.05):
            run.note(event)
        live = [r for r in run.records() if r.rank in run.alive.values()]
        if all(r.state is State.WAIT and time.monotonic() - r.changed_s > 0.3 for r in live):
            return


def _verdict(run: _Run) -> RankFailed:
    """Who was first: a rank dead without a word, else the earliest to fail on its own, else whom witnesses name."""
    failed = sorted((r for r, code in run.codes.items() if code), key=lambda r: run.seen_s[r])
    said = {r: run.failure(r) for r in failed}
    records = run.records()
    if silent := [r for r in failed if said[r] is None]:
        return _failed(run, silent[0], _exit_reason(run.codes[silent[0]]), records)
    told = {r: f for r, f in said.items() if f is not None}
    if own := [r for r, f in told.items() if not f["witness"]]:
        rank = min(own, key=lambda r: told[r]["time_s"])
        return _failed(run, rank, f"{told[rank]['type']}: {told[rank]['message']}", records, told[rank]["traceback"])
    witness = min(told, key=lambda r: told[r]["time_s"])
    accused = [p for p in told[witness]["peers"] if p not in told]
    if accused:
        return _failed(run, accused[0], f"rank {witness} lost it: {told[witness]['message']}", records)
    return _failed(run, witness, told[witness]["message"], records, told[witness]["traceback"])


def _exit_reason(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _failed(run: _Run, rank: int, reason: str, records: list[Record], details: str = "") -> RankFailed:
    waiting = {}
    for r in records:
        said = run.failure(r.rank)
        if r.rank != rank and r.op and ((said and said["witness"]) or r.state is State.WAIT):
            waiting[r.rank] = r.op
    log = run.log(rank)
    return RankFailed(reason, rank=rank, op=records[rank].op or None, waiting=waiting, details=details or log)


def _end(server: ForkServer, run: _Run) -> None:
    """Kill what is left and wait until it is gone."""
    limit = time.monotonic() + 30.0
    try:
        if run.alive:
            server.send(kill=list(run.alive))
        while run.alive and time.monotonic() < limit:
            for event in server.events(0.5):
                run.note(event)
    except (EOFError, OSError):
        server.close()  # the kernel has ended the ranks with it
