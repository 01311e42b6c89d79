"""NCCL's kernels in a trace as messages: kind, ranks, nodes and bytes from what PyTorch writes beside each."""

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from cost_models.profile.profile import MeasuredCost
from ir.core.work import Message, MessageKind
from ir.graph.classes import link_class
from piper_sim.study.calibrate.trace_events import US, Json, TraceFile

BYTES = {
    "Double": 8, "Long": 8, "Float": 4, "Int": 4, "BFloat16": 2, "Half": 2, "Short": 2,
    "Byte": 1, "Char": 1, "Bool": 1, "Float8_e4m3fn": 1, "Float8_e5m2": 1,
}  # fmt: skip
KINDS = {
    "allreduce": (MessageKind.ALL_REDUCE, "In msg nelems"),
    "reduce_scatter": (MessageKind.REDUCE_SCATTER, "In msg nelems"),
    "_reduce_scatter_base": (MessageKind.REDUCE_SCATTER, "In msg nelems"),
    "allgather": (MessageKind.ALL_GATHER, "Out msg nelems"),
    "_allgather_base": (MessageKind.ALL_GATHER, "Out msg nelems"),
    "all_to_all": (MessageKind.ALL_TO_ALL, "In msg nelems"),
    "all_to_allv": (MessageKind.ALL_TO_ALL, "In msg nelems"),
    "alltoall": (MessageKind.ALL_TO_ALL, "In msg nelems"),
    "send": (MessageKind.P2P, "In msg nelems"),
    "recv": (MessageKind.P2P, "Out msg nelems"),
}
QUICK = 0.1  # a kernel that waited for its peers lasts longer than its message: the quickest tenth did not


def link_times(traces: Sequence[TraceFile], per_node: int) -> tuple[dict[str, MeasuredCost], int]:
    """(seconds by class of message, NCCL kernels of which the bytes are not known).

    A message that several ranks' traces have (by group and sequence number) takes as long as the last to come took.
    """
    shortest: dict[tuple[str, object], float] = {}
    unknown = 0
    for number, t in enumerate(traces):
        for k, (us, args) in enumerate(t.collectives):
            if (key := link_key(args, per_node)) is None:
                unknown += 1
                continue
            seq = args.get("Seq")
            same = (args.get("Process Group Name"), args.get("Process Group Ranks"), seq)
            which: object = (number, k) if seq is None or key.startswith("p2p") else same
            shortest[key, which] = min(us, shortest.get((key, which), us))
    times: dict[str, list[float]] = defaultdict(list)
    for (key, _), us in shortest.items():
        times[key].append(us * US)
    return {key: _quick(x) for key, x in times.items()}, unknown


def _quick(seconds: list[float]) -> MeasuredCost:
    """The quickest tenth, and how far the median is from it."""
    quick, middle = np.quantile(np.array(seconds), [QUICK, 0.5]).tolist()
    return MeasuredCost(quick, middle - quick, len(seconds))


def link_key(args: Json, per_node: int) -> str | None:
    """The class of a message; None where its bytes or its group are not known.

    >>> args = {"Collective name": "_allgather_base", "dtype": "BFloat16", "In msg nelems": 4, "Out msg nelems": 32}
    >>> link_key({**args, "Group size": 8, "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]"}, 4)
    'all_gather 8@2 64'
    """
    kind, which = KINDS.get(str(args.get("Collective name")), (None, ""))
    count, size = args.get(which), BYTES.get(str(args.get("dtype")))
    if kind is None or size is None or not isinstance(count, int) or count <= 0:
        return None
    ranks = args.get("Group size")
    members = _members(args, ranks)
    if kind is MessageKind.P2P:
        members, ranks = _ends(args), 2
    if not isinstance(ranks, int) or ranks < 2:
        return None
    nodes = len({r // per_node for r in members}) if len(members) == ranks else 0
    return link_class(Message(kind, count * size, ()), ranks, nodes)


def _members(args: Json, ranks: object) -> list[int]:
    """A group's ranks: a list, or where that was cut short, from where and how far apart they stand."""
    text = str(args.get("Process Group Ranks", ""))
    if re.fullmatch(r"\[\d+(,\s*\d+)*]", text):
        return [int(x) for x in re.findall(r"\d+", text)]
    first, step = _number(args.get("Global rank start")), _number(args.get("Global rank stride"))
    if isinstance(ranks, int) and first is not None and step:
        return [first + i * step for i in range(ranks)]
    return []


def _ends(args: Json) -> list[int]:
    found = [_number(args.get(k)) for k in ("Src Rank", "Dst Rank")]
    return [r for r in found if r is not None]


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
