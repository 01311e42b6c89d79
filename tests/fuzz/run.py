"""Cases run and judged: a value or an error that names file, key and what is allowed, within seconds and a GiB.

A worker of its own process runs them, under a limit of memory and an alarm; where it dies, its case is the answer, and
another worker goes on behind it.
"""

import json
import os
import random
import resource
import shutil
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ir.core.errors import PiperError
from tests.fuzz.corrupt import PLACES, corrupted
from tests.fuzz.formats import Format

SECONDS, WAITED = 5.0, 30  # of processor time; of any time so many times as much, for what waits: machines are busy
GIB = 2**30
OVER = 77  # exit code of a worker that had no memory left
SIGNALS = {signal.SIGPROF: "more than 5 s of processor time", signal.SIGALRM: "it waits", signal.SIGKILL: "killed"}


@dataclass
class Outcome:
    """Of the cases of one format: the next one, how they ended, the bad ones and what is wrong, processor's seconds."""

    next: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    bad: list[tuple[int, str]] = field(default_factory=list)
    seconds: float = 0.0


def placed(form: Format, folder: Path, data: bytes | str) -> Path:
    """A case's file, alone with what its reader puts beside it."""
    path = folder / form.file
    with suppress(FileNotFoundError):
        path.unlink() if not path.is_dir() or path.is_symlink() else shutil.rmtree(path)
    if isinstance(data, str):
        PLACES[data](path)
    else:
        path.write_bytes(data)
    return path


def judged(form: Format, path: Path) -> str:
    """ "read", "refused", or what is wrong with the answer."""
    try:
        form.read(path)
    except PiperError as e:
        lacking = [k for k in form.said if not getattr(e, k)]
        elsewhere = "file" in form.said and e.file and str(path.parent) not in e.file and not os.path.exists(e.file)
        return f"no {', '.join(lacking) or 'such file'}: {str(e)[:300]!r}" if lacking or elsewhere else "refused"
    except MemoryError:
        return "more than a GiB"
    except Exception:
        return traceback.format_exc(limit=-4)
    return "read"


def case(form: Format, seed: int, number: int) -> bytes | str:
    """What the case of this number is."""
    return corrupted(form.seed, form.file, random.Random(f"{seed} {form.name} {number}"))


def fuzz(form: Format, numbers: range, folder: Path, seed: int = 0) -> Outcome:
    """Some cases of a format, in this process."""
    out = Outcome(numbers.stop)
    for i in numbers:
        said = judged(form, placed(form, folder, case(form, seed, i)))
        out.ends[said if said in ("read", "refused") else "bad"] += 1
        if said not in ("read", "refused"):
            out.bad.append((i, said))
    return out


def guarded(form: Format, numbers: range, folder: Path, seed: int = 0, seconds: float = SECONDS) -> Outcome:
    """Some cases of a format, in workers under an alarm and a limit of memory."""
    out, began = Outcome(numbers.start), time.process_time() + _children()
    while out.next < numbers.stop:
        where = folder / "at"
        where.write_bytes(b"")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads of a test runner; the worker has none
            pid = os.fork()
        if not pid:
            _work(form, range(out.next, numbers.stop), folder, seed, seconds)
        _, status = os.waitpid(pid, 0)
        lines = where.read_text("utf-8").splitlines()
        for line in lines:
            i, said = json.loads(line)
            if said is None:
                out.next = i
                continue
            out.next = i + 1
            out.ends[said if said in ("read", "refused") else "bad"] += 1
            if said not in ("read", "refused"):
                out.bad.append((i, said))
        if os.WIFSIGNALED(status):
            out.ends["bad"] += 1
            out.bad.append((out.next, SIGNALS.get(os.WTERMSIG(status), f"signal {os.WTERMSIG(status)}")))  # type: ignore[call-overload]
            out.next += 1
        elif os.WEXITSTATUS(status) not in (0, OVER):
            raise RuntimeError(f"a worker of {form.name} ended with {status} at case {out.next}")
    out.seconds = time.process_time() + _children() - began
    return out


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _work(form: Format, numbers: Sequence[int], folder: Path, seed: int, seconds: float) -> None:
    """A worker: notes what it begins and how it ended; never returns."""
    code = 1
    try:
        os.chdir(folder)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + GIB, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with (folder / "at").open("a", buffering=1, encoding="utf-8") as told:
            for i in numbers:
                path = placed(form, folder, case(form, seed, i))
                told.write(f"[{i}, null]\n")
                signal.setitimer(signal.ITIMER_PROF, seconds)
                signal.setitimer(signal.ITIMER_REAL, WAITED * seconds)
                said = judged(form, path)
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.setitimer(signal.ITIMER_REAL, 0)
                told.write(json.dumps([i, said]) + "\n")
                if said == "more than a GiB":
                    code = OVER
                    return
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
