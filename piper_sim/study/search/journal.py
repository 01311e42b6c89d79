"""What a search has simulated, kept in a file as it goes: a search that was cut off goes on from there."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import msgspec

from ir.core.errors import ErrorKind, PiperError
from piper_sim.study.search.evaluate import BoundedJob, EvaluatedJob, JobRefusal
from piper_sim.study.search.space import JobSpace
from piper_sim.study.simulate import job_digest


class JobJournal:
    """Simulations by what they change, one line each behind a line that says of which space; "": kept nowhere.

    A line is written whole and at once. What a kill leaves of the last one is dropped.

    Raises PiperError (usage): the file is of another space, or no journal; (io): it cannot be written.
    """

    def __init__(self, path: str, space: JobSpace, hardware: object) -> None:
        self.path, self.known = path, dict[str, EvaluatedJob]()
        if not path:
            return
        said = [space.values, space.schedules, space.job.search.memory_limit_GiB, msgspec.to_builtins(hardware)]
        digest = hashlib.sha256(json.dumps([job_digest(space.own), said], default=str).encode()).hexdigest()
        head = json.dumps({"schema_version": 1, "space": digest}) + "\n"
        try:
            with Path(path).open("a+", encoding="utf-8") as file:
                file.seek(0)
                text = file.read()
                whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
                self._read(whole or [text], head)  # what is no journal is left as it is
                file.truncate(sum(len(line.encode()) for line in whole))
                if not whole:
                    file.write(head)
        except (OSError, UnicodeDecodeError) as e:
            raise PiperError(ErrorKind.IO, str(e), file=path, key="--journal") from None

    def _read(self, lines: list[str], head: str) -> None:
        try:
            same = head.startswith(lines[0])  # or as much of it as there is
            for row in map(json.loads, lines[1:]):
                kind = row["found"]["kind"]
                found = row["found"] | {"kind": None if kind is None else JobRefusal(kind)}
                self.known[row["changes"]] = EvaluatedJob(**found)
        except (ValueError, KeyError, TypeError):
            same = False
        if not same:
            message, fix = "a journal of another job, space or hardware", "another file, or remove this one"
            raise PiperError(ErrorKind.USAGE, message, file=self.path, key="--journal", suggestion=fix)

    def add(self, one: BoundedJob, found: EvaluatedJob) -> None:
        """Keep one more."""
        if self.path and self.of(one) is None:
            with Path(self.path).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"changes": _key(one), "found": asdict(found)}) + "\n")

    def of(self, one: BoundedJob) -> EvaluatedJob | None:
        """What is known of one."""
        return self.known.get(_key(one))


def _key(one: BoundedJob) -> str:
    return json.dumps(one.changes, sort_keys=True)
