"""Run one function on N ranks of this machine and watch them; when one fails, end all and report it."""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from executor.device.progress import RankRecord, RankState, create, read
from executor.launch.forkserver import RankForkServer, RankServerGone
from executor.launch.watch.verdict import RankFailed, RankFindings, failed, stuck, verdict
from executor.runtime.flight import FOLDER, keep, kept_in, kept_parting, pointed
from executor.runtime.given import given_name
from executor.runtime.target import Target, describe, temporary, write_whole
from ir.core.errors import ErrorKind, PiperError


@dataclass
class _Run:
    """The parent's view of one launch."""

    world: int
    folder: Path
    watchdog_s: float
    startup_s: float
    alive: dict[str, tuple[int, ...]] = field(default_factory=dict)  # key of a process → its ranks
    codes: dict[int, int] = field(default_factory=dict)  # rank → exit code
    seen_s: dict[int, float] = field(default_factory=dict)

    def note(self, event: Mapping[str, Any]) -> None:
        """An exit. Of the ranks that share a process, those that said nothing have not failed, unless all died."""
        if event["event"] == "exit" and event["key"] in self.alive:
            ranks = self.alive.pop(event["key"])
            said = [r for r in ranks if (self.folder / f"failure-{r}").exists()]
            for rank in ranks:
                self.codes[rank] = event["code"] if rank in said or not said else 0
                self.seen_s[rank] = time.monotonic()

    def living(self) -> set[int]:
        return {r for ranks in self.alive.values() for r in ranks}

    def records(self) -> list[RankRecord]:
        return read(self.folder / "progress", self.world)

    def findings(self) -> RankFindings:
        said = {r: json.loads(p.read_text("utf-8")) for r in range(self.world) if (p := self._failure(r)).exists()}
        codes = {r: c for r, c in sorted(self.codes.items(), key=lambda x: self.seen_s[x[0]])}
        return RankFindings(self.records(), said, codes, time.monotonic(), {r: self.log(r) for r in range(self.world)})

    def seen(self) -> tuple[list[RankRecord], Mapping[int, Mapping[str, Any]], float]:
        """For flight records."""
        found = self.findings()
        return found.records, found.said, found.now_s

    def _failure(self, rank: int) -> Path:
        return self.folder / f"failure-{rank}"

    def log(self, rank: int) -> str:
        path = self.folder / f"log-{rank}"
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        crash = text.rfind("Fatal Python error")  # of its stacks those of the thread that crashed come first
        return text[-2000:] if crash < 0 else text[crash:][:2000]


def launch(
    fn: Target,
    ranks: int,
    args: Mapping[str, object] | None = None,
    *,
    given: Sequence[str] = (),
    out: Path | None = None,
    watchdog_s: float = 15.0,
    startup_s: float = 120.0,
    together: bool = False,
) -> list[Any]:
    """Run `fn(context, **args)` on every rank; returns what they return, by rank. Arguments and results are JSON.

    given: jobs with their plans (`executor.runtime.given.given_text`), which ranks find at `context.given()`.
    out: a folder that gets `ranks.json`, whole, before any rank goes on; of a run that fails also `flight`, with what
    every rank was doing (`executor.runtime.flight`); without it, a run of a long watchdog_s leaves that among
    temporary files.
    watchdog_s: a rank that makes no progress for so long has failed; startup_s: the same before its first op.
    together: all ranks are threads of one process.

    Raises RankFailed. Whatever happens, no process is left.
    """
    target, kept = describe(fn), kept_in(out, watchdog_s, os.getpid())
    if out is not None:
        folder_for(out)
        shutil.rmtree(out / FOLDER, ignore_errors=True)  # of a run before
    with RankForkServer.lock, scratch("piper-run-") as name:
        run = _Run(ranks, Path(name), watchdog_s, startup_s)
        create(run.folder / "progress", ranks)
        for number, text in enumerate(given):
            (run.folder / given_name(number)).write_text(text, encoding="utf-8")
        groups = [list(range(ranks))] if together else [[r] for r in range(ranks)]
        run.alive = {f"{run.folder.name}/{group[0]}": tuple(group) for group in groups}
        spec = {
            "world": ranks,
            "dir": name,
            "target": target,
            "args": dict(args or {}),
            "given": len(given),
            "flight": kept is not None,
            "processes": run.alive,
            "cwd": os.getcwd(),
            "sys_path": [os.path.abspath(path) for path in sys.path],
        }
        (run.folder / "spec").write_text(json.dumps(spec), encoding="utf-8")
        server = RankForkServer.get()
        try:
            _watch(server, run, _start(server, run, out))
        except RankServerGone as error:
            raise _orphaned(run) from error
        except RankFailed as error:
            if kept is not None:
                keep(kept, run.folder, run.alive.values(), run.seen, lambda: server.send(ask=list(run.alive)))
                pointed(error, kept if (kept / FOLDER).is_dir() else None, kept_parting(kept, error.rank))
            raise
        finally:
            _end(server, run)
        return [json.loads((run.folder / f"result-{r}").read_text(encoding="utf-8")) for r in range(ranks)]


def folder_for(out: Path) -> None:
    """Make a folder, and see that files can be written there. Raises PiperError (io)."""
    with _writing(out, "cannot be a folder"):
        out.mkdir(parents=True, exist_ok=True)
    with _writing(out), tempfile.TemporaryFile(dir=out):
        pass


@contextmanager
def _writing(path: Path, cannot: str = "cannot be written") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message, fix = f"{cannot}: {error.strerror}", "choose another --out"
        raise PiperError(ErrorKind.IO, message, file=str(path), suggestion=fix) from error


@contextmanager
def scratch(prefix: str) -> Iterator[str]:
    """A folder for temporary files. What cannot be removed stays: on NFS, what somebody still has open. Raises
    PiperError (io): there is no room for them."""
    with temporary(), tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        yield name


def _start(server: RankForkServer, run: _Run, out: Path | None) -> float:
    """Start all processes, and let them go once `ranks.json` is there; returns when that was."""
    server.send(start=str(run.folder), env=dict(os.environ))
    pids: dict[int, int] = {}
    limit = time.monotonic() + run.startup_s
    while len(pids) < run.world:
        if time.monotonic() > limit:
            raise RankFailed("it did not start", rank=len(pids), op=None, waiting={})
        for event in server.events(0.5):
            if event["event"] == "started" and event["key"] in run.alive:
                pids |= dict.fromkeys(run.alive[event["key"]], event["pid"])
            run.note(event)
    if out is not None:
        with _writing(out / "ranks.json"):
            write_whole(out / "ranks.json", json.dumps({"ranks": {str(r): {"pid": pids[r]} for r in sorted(pids)}}))
    (run.folder / "go").touch()
    return time.monotonic()


def _watch(server: RankForkServer, run: _Run, began_s: float) -> None:
    """Until all ranks have ended well; raises RankFailed with the first cause otherwise."""
    while run.alive:
        for event in server.events(0.05):
            run.note(event)
        if any(run.codes.values()) or (len(run.alive) == 1 < run.world and any(run.folder.glob("failure-*"))):
            _settle(server, run)
            raise verdict(run.findings())
        live = [r for r in run.records() if r.rank in run.living()]
        if found := stuck(live, time.monotonic(), began_s, run.watchdog_s, run.startup_s):
            rank, seconds = found
            raise failed(run.findings(), rank, f"no progress for {seconds:.0f} s")


def _orphaned(run: _Run) -> RankFailed:
    """All ranks have died with the process that had started them: of the first that was at work, if one was."""
    first = min(run.records(), key=lambda r: (r.state is not RankState.RUN, r.rank))
    return failed(run.findings(), first.rank, "killed with the fork server, which somebody has killed")


def _settle(server: RankForkServer, run: _Run, grace_s: float = 3.0) -> None:
    """After a first failure: let the others run into it, or come to wait, so that the report is complete."""
    limit = time.monotonic() + grace_s
    while run.alive and time.monotonic() < limit:
        for event in server.events(0.05):
            run.note(event)
        live = [r for r in run.records() if r.rank in run.living()]
        if all(r.state in (RankState.WAIT, RankState.FAILED) and time.monotonic() - r.changed_s > 0.3 for r in live):
            return


def _end(server: RankForkServer, run: _Run) -> None:
    """Kill what is left and wait until it is gone."""
    limit = time.monotonic() + 30.0
    try:
        if run.alive:
            server.send(kill=list(run.alive))
        while run.alive and time.monotonic() < limit:
            for event in server.events(0.5):
                run.note(event)
    except RankServerGone:
        server.close()  # the kernel has ended the ranks with it
