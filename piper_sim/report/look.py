"""How an op looks: one glyph, word and colour per pass, the same in text, picture and page."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ir.core.order import FloatArray, IntArray
from ir.trace.trace import Trace

COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class OpLook:
    """What stands for one class of ops. Colours are Okabe and Ito's, safe for colour-blind eyes, slightly tuned."""

    key: str
    glyph: str
    word: str
    colour: str


# The first seven are on compute streams, the rest on all others.
LOOKS = (
    OpLook("F", "F", "forward", "#3d7fc4"),
    OpLook("B", "B", "backward", "#e08214"),
    OpLook("I", "I", "input grad", "#f0a63c"),
    OpLook("W", "W", "weight grad", "#1b9e77"),
    OpLook("R", "R", "recompute", "#86c5ee"),
    OpLook("FB", "X", "fused forward + backward", "#9a7fb0"),
    OpLook("other", "u", "update and other", "#7b8491"),
    OpLook("pp", "p", "send, receive", "#8d99ab"),
    OpLook("ep", "e", "expert all-to-all", "#c9699f"),
    OpLook("tp", "t", "tensor parallel", "#6f5bc0"),
    OpLook("cp", "c", "context parallel", "#2a9fa8"),
    OpLook("dp", "d", "data parallel", "#b59a00"),
    OpLook("comm", "~", "other communication", "#a0785a"),
)
INDEX = {look.key: i for i, look in enumerate(LOOKS)}
_PASS = re.compile(r"\d+([FBIWR])\d+(?![\d])")
_HEAD = re.compile(r"[a-z]+")
_FAMILY = {"send": "pp", "recv": "pp", "pp": "pp", "ep": "ep", "tp": "tp", "cp": "cp", "dp": "dp", "edp": "dp"}
_STREAM_ORDER = ("compute", "host", "tp", "cp", "ep", "pp", "send", "recv", "dp", "edp")


def look_of(stream: str, op: str) -> OpLook:
    """The class of an op: its stream says compute or which communication, its text says which pass.

    >>> [look_of("compute", t).key for t in ("2F0", "2I0/l7.experts", "(0F7;7B3)OVERLAP_F_B", "update")]
    ['F', 'I', 'FB', 'other']
    >>> look_of("recv<2", "2RECV_F6").key, look_of("ep", "2F6/l0.dispatch").key
    ('pp', 'ep')
    """
    if stream != COMPUTE:
        head = _HEAD.match(stream)
        name = head[0] if head else ""
        return LOOKS[INDEX["other" if name == "host" else _FAMILY.get(name, "comm")]]
    if op.endswith("OVERLAP_F_B"):
        return LOOKS[INDEX["FB"]]
    found = _PASS.match(op)
    return LOOKS[INDEX[found[1] if found else "other"]]


def legend_looks(used: Iterable[int]) -> list[OpLook]:
    """The looks to explain where ops of these classes are drawn: a fused pair is drawn as its two halves.

    >>> [look.key for look in legend_looks([INDEX["FB"], INDEX["W"]])]
    ['F', 'B', 'W']
    """
    wanted = {LOOKS[i].key for i in used}
    wanted |= {"F", "B"} if "FB" in wanted else set()
    return [look for look in LOOKS if look.key in wanted - {"FB"}]


def half_colours(half: int) -> list[str]:
    """The colour of every class in the upper (0) or lower (1) half of a lane; only fused pairs differ.

    >>> half_colours(1)[INDEX["FB"]] == LOOKS[INDEX["B"]].colour
    True
    """
    return [LOOKS[INDEX["FB"[half]]].colour if look.key == "FB" else look.colour for look in LOOKS]


def short_op(op: str) -> str:
    """An op's text for narrow places.

    >>> short_op("(0F7;7B3)OVERLAP_F_B"), short_op("2F0")
    ('0F7;7B3', '2F0')
    """
    return op[1 : -len(")OVERLAP_F_B")] if op.endswith(")OVERLAP_F_B") else op


def stream_key(stream: str) -> tuple[int, str]:
    """Sorts streams as people expect them: compute first, then communication by how tightly it is bound to it.

    >>> sorted(["send>1", "dp", "compute", "ep"], key=stream_key)
    ['compute', 'ep', 'send>1', 'dp']
    """
    head = _HEAD.match(stream)
    name = head[0] if head else ""
    return (_STREAM_ORDER.index(name) if name in _STREAM_ORDER else len(_STREAM_ORDER), stream)


def looks_of(trace: Trace) -> IntArray:
    """The class of every row, as an index into `LOOKS`; each distinct (stream, op) is looked at once."""
    pairs = list(zip(trace.stream, trace.op, strict=True))
    known = {pair: INDEX[look_of(*pair).key] for pair in set(pairs)}
    return np.array([known[pair] for pair in pairs], np.int64)


@dataclass(frozen=True, eq=False)
class StreamLane:
    """The rows of one stream of one rank, in order."""

    rank: int
    stream: str
    rows: IntArray


def lanes_of(trace: Trace) -> list[StreamLane]:
    """All lanes, by rank and then by stream as people expect them.

    >>> rows = [(0, 0, "ep", "0F0/d", 0.0, 0.0, 1.0), (0, 0, "compute", "0F0", 0.0, 0.0, 1.0)]
    >>> [(lane.rank, lane.stream, lane.rows.tolist()) for lane in lanes_of(Trace.of({}, rows))]
    [(0, 'compute', [0]), (0, 'ep', [1])]
    """
    names = sorted(set(trace.stream), key=stream_key)
    code = {s: i for i, s in enumerate(names)}
    codes = np.fromiter((code[s] for s in trace.stream), np.int64, len(trace))
    lane = trace.rank * len(names) + codes
    by = np.argsort(lane, kind="stable")
    cuts = np.flatnonzero(np.diff(lane[by])) + 1
    parts = np.split(by, cuts) if len(by) else []
    return [StreamLane(int(trace.rank[p[0]]), trace.stream[int(p[0])], p.astype(np.int64)) for p in parts]


def coverage(start_s: FloatArray, end_s: FloatArray, looks: IntArray, edges: FloatArray) -> FloatArray:
    """Seconds of each class of ops between each pair of neighbouring edges: (classes, edges − 1).

    >>> c = coverage(np.array([0.0, 1.0]), np.array([1.0, 2.5]), np.array([0, 1]), np.array([0.0, 2.0, 4.0]))
    >>> c[:2].tolist()
    [[1.0, 0.0], [1.0, 0.5]]
    """
    covered = np.zeros((len(LOOKS), len(edges) - 1))
    for look in np.unique(looks).tolist():
        mine = looks == look
        # Σ (t − start)⁺ − Σ (t − end)⁺ is the busy time before t, whatever overlaps.
        covered[look] = np.diff(_ramp(start_s[mine], edges) - _ramp(end_s[mine], edges))
    return covered


def _ramp(at: FloatArray, t: FloatArray) -> FloatArray:
    at = np.sort(at)
    sums = np.concatenate(([0.0], np.cumsum(at)))
    n = np.searchsorted(at, t)
    return np.asarray(n * t - sums[n], dtype=np.float64)


def span(trace: Trace) -> tuple[float, float]:
    """First start and last end; (0, 0) of an empty trace."""
    return (float(trace.start_s.min()), float(trace.end_s.max())) if len(trace) else (0.0, 0.0)


def tick_times(begin: float, end: float, most: int) -> list[float]:
    """Round times between two others, at most `most` of them.

    >>> tick_times(0.0, 1.0, 6)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not end > begin:
        return [begin]
    raw = (end - begin) / max(1, most - 1)
    power = int(np.floor(np.log10(raw)))
    digit = next(m for m in (1, 2, 5, 10) if m * 10.0**power >= raw * (1 - 1e-9))
    step = float(f"{digit}e{power}")
    first, last = int(np.ceil(begin / step - 1e-9)), int(np.floor(end / step + 1e-9))
    # Through text, because 3 * 0.2 is not 0.6.
    return [float(f"{i * digit}e{power}") for i in range(first, last + 1)]
