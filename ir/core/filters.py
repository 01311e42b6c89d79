"""The filter language of directives: a conjunction of tags, each an index, `*`, a range, a set or a negation.

{"PP": 0}               stage 0                     {"PP": 0, "PASS": "F"}   its forward
{"MB": "0..3"}          microbatches 0, 1, 2, 3     {"PP": "0,2,5..7"}       a set (a JSON list says the same)
{"PP": "!3"}            any stage but 3             {"EP": "*"}              carries tag EP, any index
{"EP": "-"}             does not carry tag EP       {}                       everything
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ir.core.errors import directive_error, nearest
from ir.core.ops import Pass

# Piper's spelling of passes beside ours. B is both halves of a backward.
PASSES: Mapping[str, tuple[Pass, ...]] = {
    "F": (Pass.F,),
    "I": (Pass.I,),
    "W": (Pass.W,),
    "R": (Pass.R,),
    "B": (Pass.I, Pass.W),
    "BI": (Pass.I,),
    "BW": (Pass.W,),
}
_ITEM = re.compile(r"(\d{1,9})(?:\.\.(\d{1,9}))?")


@dataclass(frozen=True, slots=True)
class DirectiveTagMatch:
    """What one tag of a filter accepts: index ranges, perhaps negated; any index; or only its absence."""

    ranges: tuple[range, ...] = ()
    negated: bool = False
    absent: bool = False
    any: bool = False

    def accepts(self, index: int | None) -> bool:
        """Whether a node with this index (None: the tag is absent) passes.

        >>> parse_match("MB", "!1..2").accepts(3), parse_match("EP", "-").accepts(None)
        (True, True)
        """
        if index is None:
            return self.absent
        if self.absent:
            return False
        return self.any or any(index in r for r in self.ranges) != self.negated


@dataclass(frozen=True, slots=True)
class DirectiveFilter:
    """A conjunction over tags. `text` is how the user wrote it."""

    matches: tuple[tuple[str, DirectiveTagMatch], ...]
    passes: tuple[Pass, ...] | None
    text: str

    def __str__(self) -> str:
        return self.text

    def microbatches(self, dim: str | None, mbs: int) -> tuple[range, ...]:
        """The microbatches that pass, as sorted disjoint ranges.

        >>> parse_filter({"MB": "0..1,3"}).microbatches("MB", 6)
        (range(0, 2), range(3, 4))
        """
        match = dict(self.matches).get(dim) if dim is not None else None
        if match is None:
            return (range(mbs),) if mbs else ()
        if len(match.ranges) == 1 and not match.negated:
            (r,) = match.ranges
            return (range(r.start, min(r.stop, mbs)),) if r.start < min(r.stop, mbs) else ()
        return runs(m for m in range(mbs) if match.accepts(m))

    def json(self) -> dict[str, object]:
        """As in a strategy file."""
        return dict(json.loads(self.text))

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags it names, PASS left out."""
        return tuple(t for t, _ in self.matches)


def runs(indices: Iterable[int]) -> tuple[range, ...]:
    """Sorted indices as maximal runs.

    >>> runs([0, 1, 4])
    (range(0, 2), range(4, 5))
    """
    out: list[range] = []
    for i in indices:
        if out and out[-1].stop == i:
            out[-1] = range(out[-1].start, i + 1)
        else:
            out.append(range(i, i + 1))
    return tuple(out)


def parse_filter(value: object) -> DirectiveFilter:
    """Read a filter from JSON. Raises PiperError (directive) naming the tag and what is allowed.

    >>> str(parse_filter({"PP": 0, "PASS": "BI"}))
    '{"PP": 0, "PASS": "BI"}'
    """
    if not isinstance(value, Mapping):
        raise directive_error(f"a filter is an object of tags, not {value!r}", '{"PP": 0, "MB": "0..3", "PASS": "F"}')
    matches: list[tuple[str, DirectiveTagMatch]] = []
    passes = None
    for tag, want in value.items():
        if tag == "PASS":
            if not isinstance(want, str) or want not in PASSES:
                fix = nearest(str(want), PASSES)
                raise directive_error(f"PASS: {want!r} is no pass", ", ".join(PASSES), fix)
            passes = PASSES[want]
        else:
            matches.append((str(tag), parse_match(str(tag), want)))
    text = json.dumps(dict(value))
    return DirectiveFilter(tuple(matches), passes, text)


def parse_match(tag: str, want: object) -> DirectiveTagMatch:
    """Read what one tag accepts.

    >>> parse_match("PP", "0,2,5..7").ranges
    (range(0, 1), range(2, 3), range(5, 8))
    """
    allowed = 'an index, "*", "0..3", "0,2,5..7", [0, 2], "!3" or "-"'
    if isinstance(want, bool) or want is None:
        raise directive_error(f"{tag}: {want!r} selects nothing", allowed)
    if isinstance(want, int):
        if want < 0:
            raise directive_error(f"{tag}: indices are not negative, got {want}", allowed)
        return DirectiveTagMatch((range(want, want + 1),))
    if isinstance(want, list):
        return DirectiveTagMatch(tuple(r for w in want for r in parse_match(tag, w).ranges))
    if not isinstance(want, str):
        raise directive_error(f"{tag}: {want!r} is no index", allowed)
    if want == "*":
        return DirectiveTagMatch(any=True)
    if want == "-":
        return DirectiveTagMatch(absent=True)
    body = want.removeprefix("!")
    ranges = []
    for item in body.split(","):
        if not (m := _ITEM.fullmatch(item.strip())):
            raise directive_error(f"{tag}: {want!r} is no index, range or set", allowed)
        first, last = int(m[1]), int(m[2] or m[1])
        if last < first:
            raise directive_error(f"{tag}: the range {item!r} is empty", allowed, f"{last}..{first}")
        ranges.append(range(first, last + 1))
    return DirectiveTagMatch(tuple(ranges), negated=body != want)
