"""A measured pair table: how much a kernel and a message side by side slow each other, as CSV."""

from cost_models.hardware.schema import COMM_KINDS
from cost_models.profile.machine import ProfileMachine
from cost_models.profile.pairs import BOUNDS, KernelPair, pair_key
from cost_models.profile.profile import Profile
from ir.core.errors import ErrorKind, PiperError, job_error, nearest
from ir.core.files import FileErrors, parse_csv, read_text

FORM = FileErrors("a pair table", ErrorKind.JOB, "--pairs", 10**7, "compute,message,held,moving,wire; a line per pair")
COLUMNS = ("compute", "message", "held", "moving", "wire")


def read_pairs(path: str) -> Profile:
    """A profile that holds the pairs of a table, and nothing else. Raises PiperError, with file and line."""
    lines = [(line, cells) for line, cells in parse_csv(read_text(path, FORM), FORM, path) if any(cells)]
    for line, header in lines[:1]:
        if tuple(header) != COLUMNS:
            raise _wrong(path, line, f"the first line is {', '.join(header)!r}", ",".join(COLUMNS))
    pairs: dict[str, KernelPair] = {}
    for line, cells in lines[1:]:
        key, pair = _row(path, line, cells)
        if key in pairs:
            raise _wrong(path, line, f"{key} is given twice", "one line for each pair")
        pairs[key] = pair
    if not pairs:
        raise _wrong(path, 1, "no pair in it", ",".join(COLUMNS))
    return Profile.of(ProfileMachine.elsewhere(), {}, pairs=pairs, origins=(f"{len(pairs)} pairs from a table",))


def _row(path: str, line: int, cells: list[str]) -> tuple[str, KernelPair]:
    if len(cells) != len(COLUMNS):
        raise _wrong(path, line, f"{len(cells)} columns", ",".join(COLUMNS))
    bound, kind, *numbers = cells
    for what, word, known in (("compute", bound, BOUNDS), ("message", kind, COMM_KINDS)):
        if word not in known:
            raise _wrong(path, line, f"{what} {word!r}", ", ".join(known), nearest(word, known))
    try:
        held, moving, wire = (float(x) for x in numbers)
    except ValueError:
        raise _wrong(
            path, line, f"not numbers: {', '.join(numbers)}", "added slowdowns: 0.2 is 1.2 times as long"
        ) from None
    if not all(0 <= x < 100 for x in (held, moving, wire)):
        raise _wrong(path, line, f"out of range: {', '.join(numbers)}", "0 or more: 0.2 is 1.2 times as long")
    return pair_key(bound, kind), KernelPair(held, moving, wire)


def _wrong(path: str, line: int, message: str, allowed: str, fix: str | None = None) -> PiperError:
    return job_error("--pairs", message, fix, allowed, file=f"{path}:{line}")
