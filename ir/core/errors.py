"""The one exception of the house: what went wrong, where, what is allowed, the nearest fix."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from importlib.util import find_spec

from ir.core.synonyms import synonym

_LONGEST = 80
_UNIT = re.compile(r"([KMGTP]?)(i?)(B|b|FLOPs?)(ps|/s|s)?|(n|u|m|)(s)")
_LOWER = {w.lower(): w for w in ("KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB", "Mbps", "Gbps", "TFLOPs")}
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_SECONDS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0}
_SEPARATORS = re.compile(r"[-_. ]")


class ErrorKind(StrEnum):
    """Who has to act on an error. Kinds and exit codes are part of the command line's contract."""

    USAGE = "usage"
    JOB = "job"
    HARDWARE = "hardware"
    MODEL = "model"
    DIRECTIVE = "directive"
    ILLEGAL_PLAN = "illegal_plan"
    DEADLOCK = "deadlock"
    RANK_FAILED = "rank_failed"
    MISSING_DEPENDENCY = "missing_dependency"
    IO = "io"

    @property
    def exit_code(self) -> int:
        """2 for bad input, 3 for what only the graph or plan shows, 4 for a failed run."""
        match self:
            case ErrorKind.ILLEGAL_PLAN | ErrorKind.DEADLOCK:
                return 3
            case ErrorKind.RANK_FAILED:
                return 4
            case _:
                return 2


class PiperError(Exception):
    """An error a user can act on.

    >>> e = PiperError(ErrorKind.JOB, "unknown schedule 'dualpip'", key="schedule.name", suggestion="dualpipe")
    >>> print(e)
    schedule.name: unknown schedule 'dualpip'
    fix: dualpipe
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        file: str | None = None,
        key: str | None = None,
        allowed: Iterable[str] | str | None = None,
        suggestion: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.file = file
        self.key = key
        self.allowed = allowed if allowed is None or isinstance(allowed, str) else ", ".join(map(str, allowed))
        self.suggestion = suggestion
        self.details = ""  # what a log says of it: shown beside the error, no part of it

    def __str__(self) -> str:
        where = ": ".join(x for x in (self.file, self.key) if x)
        lines = [f"{where}: {self.message}" if where else self.message]
        if self.allowed:
            lines.append(f"allowed: {self.allowed}")
        if self.suggestion:
            lines.append(f"fix: {self.suggestion}")
        return printable("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.kind, self.message, self.file, self.key, self.allowed, self.suggestion))

    def to_dict(self) -> dict[str, object]:
        """As `--json` prints it, with what else a kind of error knows: of a failed run rank, op and who waits."""
        known = ("file", "key", "message", "allowed", "suggestion", "rank", "op", "waiting")
        return {"kind": str(self.kind)} | {k: getattr(self, k) for k in known if hasattr(self, k)}

    def at(self, *, file: str | None = None, key: str | None = None, allowed: str | None = None) -> PiperError:
        """The same error, with what was not known yet filled in."""
        may = self.allowed or allowed
        return _rebuild(self.kind, self.message, self.file or file, self.key or key, may, self.suggestion)


def _rebuild(
    kind: ErrorKind, message: str, file: str | None, key: str | None, allowed: str | None, suggestion: str | None
) -> PiperError:
    return PiperError(kind, message, file=file, key=key, allowed=allowed, suggestion=suggestion)


def job_error(
    key: str | None,
    message: str,
    fix: str | None = None,
    allowed: Iterable[str] | str | None = None,
    file: str | None = None,
) -> PiperError:
    """What a key of the job cannot be."""
    return PiperError(ErrorKind.JOB, message, file=file, key=key, allowed=allowed, suggestion=fix)


def usage_error(
    key: str | None, message: str, fix: str | None = None, allowed: Iterable[str] | str | None = None
) -> PiperError:
    """What a flag, or an argument of the library, cannot be."""
    return PiperError(ErrorKind.USAGE, message, key=key, allowed=allowed, suggestion=fix)


def directive_error(message: str, allowed: Iterable[str] | str | None = None, fix: str | None = None) -> PiperError:
    """What a directive, a filter or a strategy file cannot say."""
    return PiperError(ErrorKind.DIRECTIVE, message, allowed=allowed, suggestion=fix)


def check_installed(module: str, extra: str, what: str) -> None:
    """Raise PiperError (missing_dependency) where an optional module is not there, which this extra brings.

    >>> check_installed("numpy", "exec", "arrays")
    """
    if find_spec(module) is None:
        fix = f"pip install 'piper-sim[{extra}]'"
        raise PiperError(ErrorKind.MISSING_DEPENDENCY, f"{what}: needs {module}", key=module, suggestion=fix)


def printable(text: str) -> str:
    r"""A text as a terminal may show it: what could move the cursor, hide or reverse letters is spelled out.

    >>> print(printable("a\x1b[31mb"))
    a\x1b[31mb
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)


def nearest(word: str, known: Iterable[str], coded: bool = True) -> str | None:
    """The known word that a mistyped or foreign one can only mean, or None: a wrong fix is worse than none.

    Digits, units and, where names are codes, the few letters beside digits (h100, bf16) are never mended: they tell one
    thing from another. Of two words that are as near, neither is meant.

    >>> nearest("dualpip", ["1f1b", "dualpipe", "zbv"]), nearest("h100", ["h100-sxm", "h800-sxm"])
    ('dualpipe', 'h100-sxm')
    >>> nearest("fp4", ["fp8", "fp64"]), nearest("nic_GBps", ["nic_Gbps"]), nearest("memory_GB", ["memory_ramp_KiB"])
    (None, None, None)
    >>> nearest("b100-sxm", ["h100-sxm"]), nearest("f16", ["fp16", "bf16"]), nearest("bf61", ["fp16", "bf16"])
    (None, None, 'bf16')
    >>> nearest("1f1", ["1f1b", "dualpipe"]), nearest("1f1", ["1f1b", "dualpipe"], coded=False)
    (None, '1f1b')
    >>> nearest("pipeline_parallel_size", ["tp", "pp"]), nearest("gpus", ["gpu", "nodes"])
    ('pp', None)
    """
    known = list(known)
    if len(word) > _LONGEST or not word:
        return None
    if (same := synonym(word, known)) is not None:
        return same[0] if len(same) == 1 else None
    low, digits, unit, codes = word.lower(), _digits(word), unit_of(word), _codes(word)
    few = min(2, max(1, len(word) // 4))
    longer, best = list[str](), list[tuple[int, str]]()
    for k in known:
        if _digits(k) != digits or (unit and unit_of(k) and unit_of(k) != unit):
            continue
        other = k.lower()
        if len(word) > 2 and other.startswith(low) and _SEPARATORS.match(other, len(low)):
            longer.append(k)
        meant = abs(len(low) - len(other)) <= few and (not coded or _codes(k) == codes)
        if meant and (edits := _edits(low, other)) <= few:
            best.append((edits, k))
    best.sort()
    if best and (len(best) == 1 or best[0][0] < best[1][0]):
        return best[0][1]
    return longer[0] if len(longer) == 1 and not best else None


def same_name(word: str, known: Iterable[str]) -> str | None:
    """The known word that is the same but for case and what stands between letters and digits, or None.

    For names that say what something is, where the closest other one is something else.

    >>> same_name("Qwen3-MoE", ["qwen3", "qwen3_moe"]), same_name("gpt_oss", ["gpt2"])
    ('qwen3_moe', None)
    """
    return {_bare(k): k for k in known}.get(_bare(word))


def _bare(word: str) -> str:
    return "".join(c for c in word.lower() if c.isalnum())


def converted(key: str, value: object, known: Iterable[str]) -> str | None:
    """A quantity under the known key that has its name and another unit of its kind, as `key = value`.

    >>> converted("nic_GBps", 100, ["nic_Gbps"]), converted("hbm_GB", 80, ["hbm_GiB", "hbm_GBps"])
    ('nic_Gbps = 800', 'hbm_GiB = 74.5058')
    """
    unit = unit_of(key)
    if unit is None or not isinstance(value, int | float) or isinstance(value, bool):
        return None
    for k in known:
        other = unit_of(k)
        if other and other[0] == unit[0] and other != unit and _stem(k) == _stem(key):
            return f"{k} = {value * unit[1] / other[1]:.6g}"
    return None


def unit_of(key: str) -> tuple[str, float] | None:
    """(what it measures, in how many of its smallest units) behind the last `_` of a key, None where none is.

    >>> unit_of("nic_Gbps"), unit_of("nvlink_GBps"), unit_of("hbm_GiB"), unit_of("launch_us"), unit_of("seq_len")
    (('b/s', 1000000000.0), ('b/s', 8000000000.0), ('b', 8589934592.0), ('s', 1e-06), None)
    """
    stem, _, last = key.rpartition("_")
    m = _UNIT.fullmatch(_LOWER.get(last, last))
    if not stem or not m:
        return None
    if m[6]:
        return "s", _SECONDS[m[5]]
    size = float((1024 if m[2] else 1000) ** _POWER[m[1]])
    if m[3][0] == "F":
        return "FLOP", size
    return "b/s" if m[4] else "b", size * (8 if m[3] == "B" else 1)


def _stem(key: str) -> str:
    return key.rpartition("_")[0].lower()


def _codes(word: str) -> list[str]:
    """The letters, sorted, of what has one to three of them beside digits."""
    parts = (
        [c for c in part if c.isalpha()] for part in _SEPARATORS.split(word.lower()) if any(map(str.isdigit, part))
    )
    return sorted("".join(sorted(part)) for part in parts if 0 < len(part) < 4)


def _digits(word: str) -> list[str]:
    return sorted(c for c in word if c.isdigit())


def _edits(a: str, b: str) -> int:
    """Letters to insert, drop, replace or swap with the next one.

    >>> _edits("evne", "even"), _edits("flsh", "flash")
    (1, 1)
    """
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, before, row = before, row, [i]
        for j, y in enumerate(b, 1):
            least = min(row[-1] + 1, before[j] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and y == a[i - 2]:
                least = min(least, last[j - 2] + 1)
            row.append(least)
    return row[-1]
