"""The vocabulary of ops and their text: `2F0` is stage 2's forward of microbatch 0, spelled as PyTorch spells it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from ir.core.errors import directive_error


class Pass(StrEnum):
    """What a compute node does for one microbatch. There is no B: it orders I, then W."""

    F = "F"
    I = "I"
    W = "W"
    R = "R"


class OpToken(IntEnum):
    """What a schedule table may say. B is the whole backward: I, then W."""

    F = 0
    I = 1
    W = 2
    B = 3


@dataclass(frozen=True, slots=True)
class ScheduledOp:
    """One entry of a schedule table. Its text is its identity.

    >>> str(ScheduledOp(2, OpToken.F, 0))
    '2F0'
    """

    stage: int
    token: OpToken
    mb: int

    def __str__(self) -> str:
        return f"{self.stage}{self.token.name}{self.mb}"


_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_GROUP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def parse_action(text: str) -> ScheduledOp:
    """Parse `<stage><F|B|I|W><microbatch>`, strictly.

    Raises PiperError (directive): the text is no op.

    >>> parse_action("2F0")
    ScheduledOp(stage=2, token=<OpToken.F: 0>, mb=0)
    """
    if not (m := _ACTION.fullmatch(text)):
        raise directive_error(f"not an op: {text!r}", "<stage><F|B|I|W><microbatch>", "e.g. 2F0")
    return ScheduledOp(int(m[1]), OpToken[m[2]], int(m[3]))


def parse_cell(text: str) -> tuple[ScheduledOp, ...]:
    """Parse one cell of a schedule: an op, or several that are to run interleaved.

    >>> [str(a) for a in parse_cell("(0F7;7B3)OVERLAP_F_B")]
    ['0F7', '7B3']
    """
    if m := _GROUP.fullmatch(text):
        return tuple(parse_action(t) for t in m[1].split(";"))
    return (parse_action(text),)


def cell_text(actions: Iterable[ScheduledOp]) -> str:
    """The text of one cell; the inverse of `parse_cell`.

    >>> cell_text([ScheduledOp(0, OpToken.F, 7), ScheduledOp(7, OpToken.B, 3)])
    '(0F7;7B3)OVERLAP_F_B'
    """
    texts = [str(a) for a in actions]
    return texts[0] if len(texts) == 1 else f"({';'.join(texts)})OVERLAP_F_B"
