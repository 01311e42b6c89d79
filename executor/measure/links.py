"""Messages and collectives over the groups that a plan has, in several sizes, timed on idle ranks."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Any

import msgspec
import torch

from executor.device import clock
from executor.device.device import CudaDevice, Device, HostDevice, gpu_of
from executor.measure.ops import WARM_UP, Note
from executor.modules.base import TORCH
from executor.runtime.worker import RankContext
from executor.transport.base import Transport, TransportHandle, TransportTopology
from ir.core.files import resolve_types
from ir.core.work import DType, Message, MessageKind
from ir.graph.classes import link_class
from ir.job.build import PreparedJob, precision_of
from ir.plan.places import RankPlacement
from ir.plan.plan import OpKind, Plan

LEAST, MOST, STEP = 2**10, 2**22, 4  # bytes of the sizes beside the plan's own, and how they grow
TOGETHER = 10  # messages between two events: one by itself is shorter than what a launch costs
Row = tuple[int, int, int, float, float]  # want, bytes, repetition, start, end


@dataclass(frozen=True, slots=True)
class MessageSample:
    """One kind of message between some of the ranks here, in several sizes; reductions add numbers of one format."""

    kind: MessageKind
    members: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: DType

    @property
    def group(self) -> str:
        return f"calibrate:{','.join(map(str, self.members))}"


resolve_types(MessageSample)


def wanted(prepared: PreparedJob, plan: Plan, processes: int) -> list[MessageSample]:
    """Every kind of message of a plan, over every size of group; those larger than there are processes are left out.

    With a process for every rank, over a group that the plan has; else over the first ranks there are.
    """
    sizes: dict[tuple[MessageKind, int], set[int]] = defaultdict(set)
    members: dict[tuple[MessageKind, int], tuple[int, ...]] = {}
    for message, group in _messages(plan):
        key = (message.kind, len(group))
        if 1 < len(group) <= processes and message.bytes > 0:
            sizes[key].add(message.bytes)
            members.setdefault(key, group if processes == prepared.ranks else tuple(range(len(group))))
    dtype = precision_of(prepared.job).reduce
    return [MessageSample(kind, members[kind, n], ladder(found), dtype) for (kind, n), found in sorted(sizes.items())]


def _messages(plan: Plan) -> list[tuple[Message, tuple[int, ...]]]:
    """Every message that a rank of each program sends or takes part in, and with whom."""
    places, nodes = RankPlacement.of(plan), plan.graph.nodes
    out: list[tuple[Message, tuple[int, ...]]] = []
    for p, index in sorted({*zip(plan.program.tolist(), plan.shape.tolist(), strict=True)}):
        s, rank = plan.shapes[index], places.table[p][0]
        if s.kind is OpKind.SEND:
            assert s.slot is not None
            message = Message(MessageKind.P2P, nodes[s.slot[0]].writes[s.slot[1]].bytes, ("pp",))
            out.append((message, (rank, places.peer(rank, s.peer))))
        for n, _ in s.covers:
            found = (*nodes[n].inline, nodes[n].message)
            programs: tuple[int, ...] = nodes[n].groups if nodes[n].once else (p,)
            out += [(m, places.group(rank, m.axes, programs)) for m in found if m is not None]
        if s.kind is OpKind.COLLECTIVE and not s.covers and s.message is not None:
            out.append((s.message, places.group(rank, s.message.axes, (p,))))
    return out


def ladder(sizes: set[int]) -> tuple[int, ...]:
    """The plan's own sizes, and some from a kilobyte up, to see how time grows with size.

    >>> ladder({5000})[:4]
    (1024, 4096, 5000, 16384)
    """
    out, size = set(sizes), LEAST
    while size <= max(MOST, *sizes):
        out.add(size)
        size *= STEP
    return tuple(sorted(out))


def topology(wants: Sequence[MessageSample], world: int) -> TransportTopology:
    """The channels and groups to connect."""
    channels = [(w.members[0], w.members[1]) for w in wants if w.kind is MessageKind.P2P]
    groups = [w for w in wants if w.kind is not MessageKind.P2P]
    kinds = {g.group: {w.kind for w in groups if w.group == g.group} for g in groups}
    return TransportTopology.of(world, channels, {g.group: g.members for g in groups}, kinds)


def met(ctx: RankContext, wants: Sequence[Any], backend: str) -> tuple[Device, Transport, list[MessageSample], Note]:
    """What a rank that sends them needs: its device, a transport over their groups, they themselves, who counts ops."""
    device: Device = CudaDevice(gpu_of(ctx.local_rank)) if backend == "nccl" else HostDevice()
    device.bind()
    asked, done = msgspec.convert(wants, list[MessageSample]), count(1)
    transport = ctx.connect(backend, topology(asked, ctx.world), device)
    return device, transport, asked, lambda text: ctx.progress.op(next(done), text)


def link_rows(
    wants: Sequence[MessageSample], transport: Transport, device: Device, repeats: int, note: Note
) -> list[Row]:
    """When each message began and ended on this rank. All ranks call it, whether or not they take part."""
    out: list[Row] = []
    lane = device.lane("calibrate")
    for index, w in enumerate(wants):
        for size in w.sizes:
            note(f"{w.kind} of {size} bytes")
            post = _post(w, size, transport, device) if transport.rank in w.members else None
            for k in range(WARM_UP + repeats):
                transport.barrier()
                if post is None:
                    continue
                with lane():
                    start, end = _span(post, device)
                if k >= WARM_UP:
                    out.append((index, size, k - WARM_UP, start, end))
            del post
    return out


def _span(post: Callable[[], TransportHandle], device: Device) -> tuple[float, float]:
    """Of one message, by this machine's clock; on a GPU of the mean of several, from 0."""
    if not isinstance(device, CudaDevice):
        start = clock.now()
        post().wait()
        return start, clock.now()
    begin = device.mark()
    for _ in range(TOGETHER):
        post().wait()
    end = device.mark()
    end.wait()
    return 0.0, (end.seconds() - begin.seconds()) / TOGETHER


def _post(w: MessageSample, size: int, transport: Transport, device: Device) -> Callable[[], TransportHandle]:
    """What posts one message of so many bytes. Sizes that do not divide are rounded up to the next that does."""
    n = len(w.members)
    reduces = w.kind in (MessageKind.ALL_REDUCE, MessageKind.REDUCE_SCATTER)
    dtype = TORCH[w.dtype] if reduces else torch.uint8

    def room(parts: int) -> torch.Tensor:
        each = -(-size // (dtype.itemsize * parts))
        return torch.zeros(each * parts, dtype=dtype, device=device.torch)

    match w.kind:
        case MessageKind.P2P:
            (a, b), whole = w.members, room(1)
            return (lambda: transport.send(b, whole)) if transport.rank == a else (lambda: transport.recv(a, whole))
        case MessageKind.ALL_REDUCE:
            whole = room(1)
            return lambda: transport.all_reduce(w.group, whole)
        case MessageKind.REDUCE_SCATTER:
            whole = room(n)
            part = torch.empty_like(whole[: len(whole) // n])
            return lambda: transport.reduce_scatter(w.group, part, whole)
        case MessageKind.ALL_GATHER:
            whole = room(n)
            part = torch.zeros_like(whole[: len(whole) // n])
            return lambda: transport.all_gather(w.group, whole, part)
        case MessageKind.ALL_TO_ALL:
            whole = room(n)
            into, rows = torch.empty_like(whole), [len(whole) // n] * n
            return lambda: transport.all_to_all(w.group, into, whole, rows, rows)


def spans(wants: Sequence[MessageSample], rows: Sequence[Sequence[Row]]) -> dict[tuple[int, int], list[float]]:
    """By want and size, seconds of each repetition, from the rows of all ranks by one clock: from the last to come to
    the last to see its end. A transfer ends when its receiver has it.

    >>> want = MessageSample(MessageKind.P2P, (0, 1), (8,), DType.FP32)
    >>> spans([want], [[(0, 8, 0, 1.0, 9.0)], [(0, 8, 0, 2.0, 5.0)]])
    {(0, 8): [3.0]}
    """
    found: dict[tuple[int, int, int], dict[int, tuple[float, float]]] = defaultdict(dict)
    for rank, mine in enumerate(rows):
        for index, size, k, start, end in mine:
            found[index, size, k][rank] = start, end
    out: dict[tuple[int, int], list[float]] = defaultdict(list)
    for (index, size, _), each in sorted(found.items()):
        w = wants[index]
        begin = max(start for start, _ in each.values())
        end = each[w.members[1]][1] if w.kind is MessageKind.P2P else max(end for _, end in each.values())
        out[index, size].append(max(0.0, end - begin))
    return dict(out)


def link_samples(wants: Sequence[MessageSample], rows: Sequence[Sequence[Row]]) -> dict[str, list[float]]:
    """Seconds by class of message, of ranks on one node.

    >>> want = MessageSample(MessageKind.P2P, (0, 1), (8,), DType.FP32)
    >>> link_samples([want], [[(0, 8, 0, 1.0, 9.0)], [(0, 8, 0, 2.0, 5.0)]])
    {'p2p@1 8': [3.0]}
    """
    out: dict[str, list[float]] = defaultdict(list)
    for (index, size), seconds in spans(wants, rows).items():
        w = wants[index]
        out[link_class(Message(w.kind, size, ()), len(w.members), 1)] += seconds
    return {key: values for key, values in out.items() if median(values) > 0}
