"""A plan with its times as Chakra execution traces (MLCommons, schema et_def.proto): one protobuf file per rank.

A file is a GlobalMetadata and then Nodes, each behind its length. Attributes are those that the feeders of MLCommons
and ASTRA-sim read, of the types that they read: ends and tags of a transfer as int32, all else as int64. They follow
data_deps alone, so what holds an op's stream is there too. Group 0 is theirs for all ranks, so ours begin at 1.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ir.core.errors import job_error
from ir.core.work import MessageKind
from ir.plan.places import RankPlacement
from ir.plan.plan import OpKind, OpShape, Plan
from ir.trace.trace import Trace

MOST_NODES = 4_000_000
_NODE = {OpKind.COMPUTE: 4, OpKind.SEND: 5, OpKind.RECV: 6, OpKind.COLLECTIVE: 7}  # Node.type
_COLLECTIVE = {
    MessageKind.ALL_REDUCE: 0,
    MessageKind.ALL_GATHER: 2,
    MessageKind.ALL_TO_ALL: 6,
    MessageKind.REDUCE_SCATTER: 7,
}
_INT32, _INT64, _BOOL, _STRING = 7, 9, 27, 29  # of AttributeProto's values
_NARROW = ("comm_src", "comm_dst", "comm_tag")


def chakra_files(plan: Plan, trace: Trace) -> dict[str, bytes | str]:
    """rank.N.et for every rank, and comm_group.json: a process group's name -> its ranks. Times are a replica's.

    Raises PiperError (job): more nodes than a reader would take.
    """
    places = RankPlacement.of(plan)
    each = np.diff(plan.bounds)
    if (nodes := int(each.sum()) * places.ranks // max(1, plan.programs)) > MOST_NODES:
        message = f"{nodes:,} nodes on {places.ranks} ranks"
        raise job_error("parallel.dp", message, "--set parallel.dp=1, or fewer microbatches", f"up to {MOST_NODES:,}")
    times = {key: (a, b) for key, a, b in _rows(trace)}
    meeting = _meeting(plan)
    groups: dict[tuple[int, ...], str] = {}
    files: dict[str, bytes | str] = {}
    for rank in range(places.ranks):
        out = bytearray(_framed(_text(1, "0.0.4") + _message(2, _attribute("rank", rank))))
        for node in _nodes(plan, places, rank, times, (meeting, groups)):
            out += _framed(node)
        files[f"rank.{rank}.et"] = bytes(out)
    files["comm_group.json"] = json.dumps({name: ranks for ranks, name in groups.items()}) + "\n"
    return files


def _rows(trace: Trace) -> Iterator[tuple[tuple[int, str], int, int]]:
    zero = float(trace.start_s.min()) if len(trace.start_s) else 0.0
    start, end = (np.rint((x - zero) * 1e6).astype(int).tolist() for x in (trace.start_s, trace.end_s))
    yield from zip(zip(trace.rank.tolist(), trace.op, strict=True), start, end, strict=True)


def _meeting(plan: Plan) -> Mapping[int, tuple[int, ...]]:
    """The programs that meet in each collective."""
    found: dict[int, set[int]] = {}
    for row in np.flatnonzero(plan.collective >= 0).tolist():
        found.setdefault(int(plan.collective[row]), set()).add(int(plan.program[row]))
    return {k: tuple(sorted(v)) for k, v in found.items()}


def _nodes(
    plan: Plan,
    places: RankPlacement,
    rank: int,
    times: Mapping[tuple[int, str], tuple[int, int]],
    collectives: tuple[Mapping[int, tuple[int, ...]], dict[tuple[int, ...], str]],
) -> Iterator[bytes]:
    program = places.program(rank)
    first, last = int(plan.bounds[program]), int(plan.bounds[program + 1])
    before: dict[int, int] = {}
    for row in range(first, last):
        shape, text = plan.shapes[int(plan.shape[row])], plan.text(row)
        start, end = times.get((program, text), (0, 0))
        stream = int(plan.stream[row])
        head = _varint(1, row - first + 1) + _text(2, text) + _varint(3, _NODE[shape.kind])
        ahead = [before[stream] + 1] if stream in before else []
        before[stream] = row - first
        waits = {int(w) - first + 1 for w in plan.waits.row(row) if first <= w < last}
        deps = sorted(waits.union(ahead))
        out = head + _packed(4, ahead) + _packed(5, deps) + _varint(6, start) + _varint(7, end - start)
        attributes: dict[str, object] = {"is_cpu_op": False, "stream": plan.streams[stream][1]}
        size = _bytes(plan, shape)
        if shape.kind in (OpKind.SEND, OpKind.RECV):
            peer = places.peer(rank, shape.peer)
            ends = (rank, peer) if shape.kind is OpKind.SEND else (peer, rank)
            tag = min(row, int(plan.partner[row])) if plan.partner[row] >= 0 else row
            attributes |= {"comm_size": size, "comm_src": ends[0], "comm_dst": ends[1], "comm_tag": tag}
        elif shape.kind is OpKind.COLLECTIVE and shape.message is not None:
            meeting, groups = collectives
            joined = meeting.get(int(plan.collective[row]), (program,))
            ranks = places.group(rank, shape.message.axes, joined)
            name = groups.setdefault(ranks, str(len(groups) + 1))
            attributes |= {"comm_type": _COLLECTIVE[shape.message.kind], "comm_size": size, "pg_name": name}
        yield out + b"".join(_message(10, _attribute(k, v)) for k, v in attributes.items())


def _bytes(plan: Plan, s: OpShape) -> int:
    """What an op's message takes: of a transfer its buffer, on either side; 0 of what sends nothing."""
    if s.slot is not None:
        return plan.graph.nodes[s.slot[0]].writes[s.slot[1]].bytes
    return s.message.bytes if s.message is not None else 0


def _attribute(name: str, value: object) -> bytes:
    if isinstance(value, bool):
        return _text(1, name) + _varint(_BOOL, int(value), True)
    if isinstance(value, int):
        return _text(1, name) + _varint(_INT32 if name in _NARROW else _INT64, value, True)
    return _text(1, name) + _text(_STRING, str(value))


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint(field: int, value: int, always: bool = False) -> bytes:
    """A whole number, 0 or more; proto3 leaves zeros out but in a oneof."""
    return _number(field << 3) + _number(value) if value or always else b""


def _message(field: int, payload: bytes) -> bytes:
    return _number(field << 3 | 2) + _framed(payload)


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())


def _packed(field: int, values: Sequence[int]) -> bytes:
    return _message(field, b"".join(map(_number, values))) if values else b""


def _framed(payload: bytes) -> bytes:
    return _number(len(payload)) + payload
