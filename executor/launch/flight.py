"""A failed run's flight records, kept in its `--out`: for each rank its op, whom it waits for, stacks, operations."""

import os
import shutil
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from executor.device import clock
from executor.device.progress import RankRecord, read
from executor.launch.verdict import RankFailed, RankFindings
from executor.runtime.flight import ASKED, SIGNAL, operations, operations_file, stacks, stacks_file
from executor.runtime.target import write_whole

FOLDER = "flight"
PATIENCE_S = 1.5  # for those that are asked


def keep(
    out: Path,
    folder: Path,
    groups: Iterable[tuple[int, ...]],
    findings: Callable[[], RankFindings],
    ask: Callable[[], None],
) -> None:
    """Ask the processes that live, and write what is known of every rank to `out`/flight.

    groups: the ranks of each process that lives. ask: sends them the signal. The run has failed: nothing here may.
    """
    with suppress(OSError):
        (folder / ASKED).touch()
        ask()
        firsts = [ranks[0] for ranks in groups]
        limit = time.monotonic() + PATIENCE_S
        while time.monotonic() < limit and not all(
            operations_file(folder, r).exists() and stacks_file(folder, r).stat().st_size for r in firsts
        ):
            time.sleep(0.02)
        found = findings()
        first = {r: ranks[0] for ranks in groups for r in ranks}
        for record in found.records:
            at = first.get(record.rank)
            told = found.said.get(record.rank, {}).get("traceback", "")
            told = told or ("it had ended" if at is None else text_of(stacks_file(folder, at)))
            note(out, record, found.now_s, told, at)
            if (file := operations_file(folder, record.rank)).exists():
                shutil.copyfile(file, out / FOLDER / f"rank-{record.rank}.json")


@dataclass
class RankFlight:
    """A rank's own part, where nobody stands above the ranks. out: None keeps nothing; fell: its own traceback."""

    out: Path | None
    rank: int
    progress: Path
    fell: str = ""

    def tell(self) -> None:
        """What this rank was doing."""
        if self.out is not None:
            with suppress(OSError):
                note(self.out, replace(read(self.progress, 1)[0], rank=self.rank), clock.now(), self.fell or stacks())
                write_whole(self.out / FOLDER / f"rank-{self.rank}.json", operations())

    def ask(self, rank: int, pid: int, progress: Path) -> None:
        """What another of this machine is doing, if it has not said so; one that hangs in a library still answers."""
        if self.out is None or (self.out / FOLDER / f"rank-{rank}.txt").exists():
            return
        file, limit = stacks_file(progress.parent, rank), clock.now() + 0.3
        with suppress(OSError, struct.error):
            os.kill(pid, SIGNAL)
            while not file.stat().st_size and clock.now() < limit:
                clock.sleep_until(clock.now() + 0.01)
            note(self.out, replace(read(progress, 1)[0], rank=rank), clock.now(), text_of(file))


def forget(out: Path, rank: int) -> None:
    """Of a run before."""
    for end in ("txt", "json"):
        (out / FOLDER / f"rank-{rank}.{end}").unlink(missing_ok=True)


def note(out: Path, record: RankRecord, now_s: float, told: str, process: int | None = None) -> None:
    """One rank's text. now_s: on the record's clock. told: its stacks, or its traceback; process: its first rank."""
    (out / FOLDER).mkdir(parents=True, exist_ok=True)
    head = f"rank {record.rank}: {record.state.name.lower()} at {record.op or 'nothing yet'}"
    head += f" (op {record.index} of its plan)" if record.index >= 0 else ""
    head += f", posting {record.posting}" if record.posting else ""
    head += f", for {now_s - record.changed_s:.1f} s" if record.changed_s else ""
    head += f"; it waits for rank {', '.join(map(str, record.peers))}" if record.peers else ""
    shared = f"\n(all ranks of its process, whose first is {process})" if process not in (None, record.rank) else ""
    write_whole(out / FOLDER / f"rank-{record.rank}.txt", f"{head}{shared}\n\n{told or 'it did not answer'}\n")


def text_of(file: Path) -> str:
    """A file's text, "" without one."""
    with suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace")
    return ""


def pointed(error: RankFailed, out: Path | None) -> RankFailed:
    """The error, with where its flight records lie."""
    if out is not None:
        error.suggestion = f"{out / FOLDER} says what every rank was doing"
    return error
