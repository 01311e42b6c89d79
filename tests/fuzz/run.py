"""Cases run and judged: a value or an error that names file, key and what is allowed, within seconds and a GiB."""

from __future__ import annotations

import random
import resource
import time
import traceback
from collections import Counter
from pathlib import Path

from ir.core.errors import PiperError
from tests.fuzz.formats import Format
from tests.fuzz.mutate import mutated

SECONDS = 5.0


def _peak() -> int:
    """KiB that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def judged(form: Format, path: Path) -> str:
    """ "read", "refused", or what is wrong with the answer."""
    began, before = time.process_time(), _peak()
    try:
        form.read(path)
        said = "read"
    except PiperError as e:
        lacking = [k for k in ("file", "key", "allowed") if not getattr(e, k)]
        said = f"no {', '.join(lacking)}: {str(e)[:200]!r}" if lacking else "refused"
    except Exception:
        said = traceback.format_exc(limit=-3)
    spent = time.process_time() - began
    if spent > SECONDS:
        said = f"{spent:.1f} s"
    if _peak() - before > 2**20:
        said = "more than a GiB"
    return said


def fuzz(form: Format, cases: int, folder: Path, seed: int = 0) -> tuple[Counter[str], list[tuple[int, str]]]:
    """So many cases of a format: how they ended, and the bad ones by their number."""
    path = folder / form.name
    ends: Counter[str] = Counter()
    bad: list[tuple[int, str]] = []
    for i in range(cases):
        path.write_bytes(mutated(form.seed, random.Random(f"{seed} {form.name} {i}")))
        said = judged(form, path)
        if said in ("read", "refused"):
            ends[said] += 1
        else:
            ends["bad"] += 1
            bad.append((i, said))
    return ends, bad
