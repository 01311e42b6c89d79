"""What one run of a node allocates and lets go of, in order: taken once by the executor, spliced by the simulator."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ir.core.errors import ErrorKind, PiperError

BEFORE = "~"
NONE = "none"


@dataclass(frozen=True, slots=True)
class Birth:
    """A storage appears. bytes: of the storage, or (each) of every element of the tensor that the list is about."""

    bytes: int
    each: bool = False

    def text(self) -> str:
        """Its token.

        >>> Birth(4, each=True).text()
        '+4n'
        """
        return f"+{self.bytes}{'n' if self.each else ''}"


@dataclass(frozen=True, slots=True)
class Release:
    """One that held a storage holds it no longer; with its last holder the storage dies.

    name: `F3` the storage that the fourth birth of this unit's F made (of the same microbatch), `x0` its first input,
    `g0` the gradient of its first output, `~` all that the tensor before left, in a list that is repeated.
    """

    name: str

    def text(self) -> str:
        """Its token."""
        return f"-{self.name}"


@dataclass(frozen=True, slots=True)
class AllocList:
    """Births and releases in order. outputs: the storages of what the pass hands on; "none" where there is nothing.

    >>> made = AllocList.parse("+4 +4096 -x0 -F0 >F1"); made.outputs, made.text()
    (('F1',), '+4 +4096 -x0 -F0 >F1')
    """

    events: tuple[Birth | Release, ...]
    outputs: tuple[str, ...] = ()

    def text(self) -> str:
        """One line; `parse` reads it back."""
        return " ".join([*(e.text() for e in self.events), *(f">{name}" for name in self.outputs)])

    @classmethod
    def parse(cls, text: str) -> AllocList:
        """Read `text()`. Raises PiperError (job): a token that is none.

        >>> AllocList.parse("+4 *F0")
        Traceback (most recent call last):
        ...
        ir.core.errors.PiperError: not an event of an alloc list: '*F0'
        allowed: +<bytes>, +<bytes>n, -<storage>, ><storage>
        """
        events: list[Birth | Release] = []
        outputs: list[str] = []
        for token in text.split():
            if not (m := _TOKEN.fullmatch(token)):
                allowed = "+<bytes>, +<bytes>n, -<storage>, ><storage>"
                raise PiperError(ErrorKind.JOB, f"not an event of an alloc list: {token[:40]!r}", allowed=allowed)
            if m["bytes"]:
                events.append(Birth(int(m["bytes"]), bool(m["each"])))
            elif m["dead"]:
                events.append(Release(m["dead"]))
            else:
                outputs.append(m["out"])
        return cls(tuple(events), tuple(outputs))


_TOKEN = re.compile(
    r"\+(?P<bytes>[1-9]\d{0,14})(?P<each>n?)|-(?P<dead>[FRIWTxg]\d{1,6}|~)|>(?P<out>[FRIWTxg]\d{1,6}|none)"
)
