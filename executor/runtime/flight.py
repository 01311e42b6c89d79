"""What every rank was doing when a run failed, kept in its `--out`: op, peers, stacks, operations of process groups."""

import faulthandler
import json
import os
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from executor.device import clock
from executor.device.progress import RankRecord, read
from executor.runtime.target import write_whole
from ir.core.errors import PiperError

SIGNAL = signal.SIGUSR2
ASKED = "flight-asked"  # a file in the launch's folder: tell what your process groups were given
ASK_EVERY_S = 0.2
FOLDER = "flight"
PATIENCE_S = 1.5  # for those that are asked
LONG_S = 60.0  # whoever waits longer for a hang to be one does not ask again with --out
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # NCCL's with CUDA events; any backend's


def arm(folder: Path, rank: int) -> None:
    """From now on, `SIGUSR2` writes the stacks of all threads to `folder`, even of one that hangs inside a library.

    And torch notes what process groups are given, which 2.10 does not unless it is told how much to keep.
    """
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # its older name
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    file = os.open(stacks_file(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    faulthandler.register(SIGNAL, file, all_threads=True)


def listen(folder: Path, rank: int) -> None:
    """Answer once, from a thread of its own, when `folder` asks what the process groups were given."""

    def wait() -> None:
        tick = threading.Event()
        while not (folder / ASKED).exists():
            tick.wait(ASK_EVERY_S)
        with suppress(OSError):
            write_whole(operations_file(folder, rank), operations())

    threading.Thread(target=wait, name="flight", daemon=True).start()


def stacks_file(folder: Path, rank: int) -> Path:
    """Where `arm` writes. rank: the first of the process."""
    return folder / f"stacks-{rank}"


def operations_file(folder: Path, rank: int) -> Path:
    """Where `listen` writes."""
    return folder / f"operations-{rank}.json"


def stacks() -> str:
    """Of all threads of this process, now, the newest call first."""
    read, write = os.pipe()  # faulthandler writes to files alone; a pipe holds 64 KiB, of which it fills little
    os.set_blocking(write, False)
    try:
        faulthandler.dump_traceback(write, all_threads=True)
    finally:
        os.close(write)
    with os.fdopen(read, "rb") as file:
        return file.read().decode(errors="replace")


def operations() -> str:
    """What torch's process groups of this process were given last, as torch's flight recorder tells it (JSON).

    Each entry: the backend's operation, its group and number in it, sizes, and whether it was scheduled, started or
    completed; the last `TORCH_FR_BUFFER_SIZE` of them (torch: 2,000). Without such a recorder, no entries.
    """
    for name in _DUMPS:
        dump = getattr(torch._C._distributed_c10d, name, None) if torch.distributed.is_available() else None
        if dump is not None and (found := json.loads(dump(True, False))).get("entries"):
            return json.dumps(found)
    return json.dumps({"entries": []})


# -- what is kept of them ---------------------------------------------------------------------------------------------


def kept_in(out: Path | None, watchdog_s: float, owner: int) -> Path | None:
    """Where a run that fails leaves its records: `out`, or after a long wait at least among temporary files.

    owner: a process id that all of the run's ranks on this machine know, and no other run has.
    """
    if out is not None or watchdog_s <= LONG_S:
        return out
    return Path(tempfile.gettempdir()) / f"piper-flight-{owner}"


def keep(
    out: Path,
    folder: Path,
    groups: Iterable[tuple[int, ...]],
    findings: Callable[[], tuple[Iterable[RankRecord], Mapping[int, Mapping[str, Any]], float]],
    ask: Callable[[], None],
) -> None:
    """Ask the processes that live, and write what is known of every rank to `out`/flight.

    groups: the ranks of each process that lives. findings: every rank's record, what those said that failed, and the
    time on the clock of the records. ask: sends them the signal. The run has failed: nothing here may.
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
        records, said, now_s = findings()
        first = {r: ranks[0] for ranks in groups for r in ranks}
        for record in records:
            at = first.get(record.rank)
            told = said.get(record.rank, {}).get("traceback", "")
            told = told or ("it had ended" if at is None else text_of(stacks_file(folder, at)))
            note(out, record, now_s, told, at)
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


def pointed(error: PiperError, out: Path | None, parted: str = "") -> PiperError:
    """The error, with where its flight records lie. parted: what `first_parting` says of them."""
    if out is not None:
        error.suggestion = f"{out / FOLDER} says what every rank was doing" + (f"; {parted}" if parted else "")
    return error


# -- where they part --------------------------------------------------------------------------------------------------

Entries = Sequence[Mapping[str, Any]]  # what torch's flight recorder tells of a rank, oldest first


def kept_parting(out: Path, suspect: int | None = None) -> str:
    """`first_parting` of what ranks left in `out`/flight; of another torch's records, perhaps, nothing."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = {f.stem.removeprefix("rank-"): json.loads(f.read_text("utf-8")) for f in (out / FOLDER).glob("*.json")}
        return first_parting({int(rank): told["entries"] for rank, told in found.items()}, suspect)
    return ""


def first_parting(records: Mapping[int, Entries], suspect: int | None = None) -> str:
    """The first collective in which the ranks of a group differ, "" where none is seen.

    One in whose place some did another; else one that some have joined and others have not, of those that `suspect`
    has not joined if there are any. Messages between two ranks are left out, as receives are posted long before.

    >>> def of(number, what):
    ...     more = {"is_p2p": False, "record_id": 0, "time_created_ns": number}
    ...     return {"profiling_name": what, "process_group": ["dp:0,1"] * 2, "collective_seq_id": number} | more
    >>> first_parting({0: [of(1, "gloo:all_reduce"), of(2, "gloo:all_gather")], 1: [of(1, "gloo:all_reduce")]})
    'rank 0 was in all_gather, number 2 of group dp:0,1, and rank 1 was not'
    """
    groups: dict[str, dict[int, dict[int, Mapping[str, Any]]]] = {}
    whole = {r for r, entries in records.items() if not entries or entries[0]["record_id"] == 0}  # none was dropped
    for rank, entries in records.items():
        for e in entries:
            if not e["is_p2p"]:
                groups.setdefault(e["process_group"][1], {}).setdefault(rank, {})[e["collective_seq_id"]] = e
    found = []
    for group, ranks in groups.items():
        _, colon, named = group.partition(":")
        members = {int(r) for r in named.split(",")} if colon else {*records}  # or the world's own
        ranks |= {r: {} for r in members & whole - ranks.keys()}
        if (parting := _parting(group, ranks, suspect)) is not None:
            found.append(parting)
    return min(found)[-1] if found else ""


def _parting(
    group: str, ranks: Mapping[int, Mapping[int, Mapping[str, Any]]], suspect: int | None
) -> tuple[bool, bool, int, str] | None:
    """A group's first: whether all did the same, whether the suspect was in it, when, and in words."""
    for number in sorted({n for done in ranks.values() for n in done}):
        here = {r: done[number] for r, done in ranks.items() if number in done}
        said: dict[str, list[int]] = {}
        for r, entry in sorted(here.items()):
            said.setdefault(_said(entry), []).append(r)
        late = sorted(r for r, done in ranks.items() if max(done, default=0) < number)
        if len(said) == 1 and not late:
            continue
        words = " and ".join(f"rank {', '.join(map(str, who))} was in {what}" for what, who in said.items())
        rest = f", and rank {', '.join(map(str, late))} was not" if late else ""
        since = min(e["time_created_ns"] for e in here.values())
        return len(said) == 1, suspect not in late, since, f"{words}, number {number} of group {group}{rest}"
    return None


def _said(entry: Mapping[str, Any]) -> str:
    """An operation as all members should have it: of an exchange each has sizes of its own."""
    name = str(entry["profiling_name"]).partition(":")[2]
    return name if "all_to_all" in name or "input_sizes" not in entry else f"{name} of {entry['input_sizes']}"


if __name__ == "__main__":  # python -m executor.runtime.flight DIR
    print(kept_parting(Path(sys.argv[1])) or "no collective is seen in which ranks part")
