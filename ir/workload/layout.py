"""Megatron's pipeline layout: which parts of the model stand on which stage, as one string, `Et*3|(tt|)*29,m|L`.

E embedding, t a decoder layer, m a multi-token prediction module, L the head with the loss; `|` ends a stage, `x*n` and
`(…)*n` repeat, commas and blanks say nothing. Stage v·P + p is rank p's v-th.
"""

import re
from collections.abc import Sequence
from itertools import groupby, pairwise

from ir.core.errors import PiperError, job_error
from ir.workload.part import Chunk, Part

Stages = tuple[tuple[Chunk, ...], ...]
_KEY = "schedule.layout"
_LETTERS = "EtmL"
_ALLOWED = "E t m L |, x*n, (…)*n"
_WORDS = {"E": "embedding", "t": "decoder layer", "m": "MTP module", "L": "head"}
_MOST = 100_000
_TOKEN = re.compile(r"(?P<one>[EtmL|])|(?P<open>\()|(?P<close>\))|(?P<times>\*\d{1,6})|[, ]")


def parse_layout(text: str) -> tuple[str, ...]:
    """The letters of each stage.

    Raises PiperError (job): a sign that is none of the language, at which position, and what would do.

    >>> parse_layout("Et*3|(tt|)*2,m|L")
    ('Ettt', 'tt', 'tt', 'm', 'L')
    >>> parse_layout("E|t||tL")
    ('E', 't', '', 'tL')
    """
    done, group, last, at = "", -1, "", 0  # group: where an open one began in `done`; last: what `*` would repeat
    while at < len(text):
        m = _TOKEN.match(text, at)
        if m is None:
            fix = "a digit only behind *" if text[at].isdigit() else None
            raise _no(text, at, f"{text[at]!r} is no part of a layout", fix)
        match m.lastgroup:
            case "one":
                done, last = done + m[0], m[0]
            case "open":
                if group >= 0:
                    raise _no(text, at, "a group inside of a group", "write the inner one out")
                group, last = len(done), ""
            case "close":
                if group < 0:
                    raise _no(text, at, "')' without '('", f"({text[:at]})")
                last, group = done[group:], -1
            case "times":
                n = int(m[0][1:])
                if not last or n < 1:
                    raise _no(text, at, f"{m[0]!r} repeats nothing", "t*3, (tt|)*3")
                if len(done) + len(last) * n > _MOST:
                    raise _no(text, at, f"more than {_MOST:,} parts", "a smaller number")
                done, last = done + last * (n - 1), ""
        at = m.end()
    if group >= 0:
        raise _no(text, len(text), "'(' without ')'", f"{text})")
    return tuple(done.split("|"))


def format_layout(stages: Sequence[str]) -> str:
    """The shortest usual text of a layout, which `parse_layout` reads as the same stages.

    >>> format_layout(parse_layout("E t t t | (tt|)*29 m|L"))
    'Et*3|(tt|)*29,m|L'
    """
    out = ""
    runs = [(stage, len(list(same))) for stage, same in groupby(stages[:-1])]
    for stage, n in runs:
        comma = "," if out.endswith(tuple("0123456789")) else ""
        out += comma + (f"{_short(stage)}|" if n == 1 else f"({_short(stage)}|)*{n}")
    return out + ("," if out.endswith(tuple("0123456789")) and stages[-1] else "") + _short(stages[-1])


def _short(stage: str) -> str:
    runs = [(letter, len(list(same))) for letter, same in groupby(stage)]
    return "".join(f"{x}*{n}" if n > 2 else x * n for x, n in runs)


def layout_of(stages: Sequence[Sequence[Chunk]]) -> tuple[str, ...]:
    """The letters of stages as they are; a stage that only hands on has none."""
    return tuple("".join(map(_letter, stage)) for stage in stages)


def laid_out(chunks: Sequence[Chunk], layout: Sequence[str]) -> Stages:
    """The model's chunks on the layout's stages.

    Raises PiperError (job): parts that the model does not have, or in another order.
    """
    have = "".join(map(_letter, chunks))
    flat = "".join(layout)
    if flat != have:
        at = next((k for k, (a, b) in enumerate(zip(flat, have, strict=False)) if a != b), min(len(flat), len(have)))
        stage = sum(1 for s in range(len(layout)) if len("".join(layout[: s + 1])) <= at)
        counts = " ".join(
            f"{_WORDS[x]} {flat.count(x)} of {have.count(x)}" for x in _LETTERS if flat.count(x) != have.count(x)
        )
        want = f"{_WORDS[have[at]]} ({have[at]})" if at < len(have) else "nothing more"
        given = flat[at] if at < len(flat) else "nothing"
        message = f"part {at + 1}, on stage {min(stage, len(layout) - 1)}, is {given}, where the model has {want}"
        cuts = pairwise(round(k * len(have) / len(layout)) for k in range(len(layout) + 1))
        fix, allowed = format_layout([have[a:b] for a, b in cuts]), f"{format_layout([have])} with | between"
        raise job_error(_KEY, f"{message}; {counts or 'in another order'}", fix, allowed)
    found = iter(chunks)
    stages = [tuple(next(found) for _ in stage) for stage in layout]
    return tuple(s or (Chunk(f"skip{n}", (Part("skip"),)),) for n, s in enumerate(stages))


def _letter(chunk: Chunk) -> str:
    if "L" in chunk.tags:
        return "t"
    if "MTP" in chunk.tags:
        return "m"
    return {"embed": "E", "head": "L"}.get(chunk.name, "")


def _no(text: str, at: int, message: str, fix: str | None) -> PiperError:
    return job_error(_KEY, f"{text!r}, position {at + 1}: {message}", fix, _ALLOWED)
