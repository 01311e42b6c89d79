"""The one exception of the house: what went wrong, where, what is allowed, the nearest fix."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from enum import StrEnum


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

    def __str__(self) -> str:
        where = ": ".join(x for x in (self.file, self.key) if x)
        lines = [f"{where}: {self.message}" if where else self.message]
        if self.allowed:
            lines.append(f"allowed: {self.allowed}")
        if self.suggestion:
            lines.append(f"fix: {self.suggestion}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.kind, self.message, self.file, self.key, self.allowed, self.suggestion))

    def at(self, *, file: str | None = None, key: str | None = None) -> PiperError:
        """The same error, with the file or key filled in where it was not known yet."""
        return _rebuild(self.kind, self.message, self.file or file, self.key or key, self.allowed, self.suggestion)


def _rebuild(
    kind: ErrorKind, message: str, file: str | None, key: str | None, allowed: str | None, suggestion: str | None
) -> PiperError:
    return PiperError(kind, message, file=file, key=key, allowed=allowed, suggestion=suggestion)


def nearest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The known word closest to a mistyped one, or None. cutoff: how close it must be, from 0 to 1.

    >>> nearest("dualpip", ["1f1b", "dualpipe", "zbv"])
    'dualpipe'
    """
    known = list(known)
    low = {k.lower(): k for k in known}
    match = get_close_matches(word.lower(), list(low), n=1, cutoff=cutoff)
    return low[match[0]] if match else None


def same_name(word: str, known: Iterable[str]) -> str | None:
    """The known word that is the same but for case and what stands between letters and digits, or None.

    For names that say what something is, where the closest other one is something else.

    >>> same_name("Qwen3-MoE", ["qwen3", "qwen3_moe"]), same_name("gpt_oss", ["gpt2"])
    ('qwen3_moe', None)
    """
    bare = {_bare(k): k for k in known}
    return bare.get(_bare(word))


def _bare(word: str) -> str:
    return "".join(c for c in word.lower() if c.isalnum())
