"""Every collective by size: does it give what it ought to, how long does it take, how long was it predicted to take?"""

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

import msgspec
import torch

from cost_models import LinkFabric, load_hardware, message_seconds
from cost_models.hardware import presets
from executor.device.device import Device
from executor.measure.links import MessageSample, link_rows, met, spans
from executor.runtime.target import Target
from executor.runtime.worker import RankContext
from executor.transport.base import Transport
from ir.core.files import named_path
from ir.core.work import DType, Message, MessageKind
from ir.job.schema import Job
from ir.job.table import keys_of
from piper_sim.app.doctor.runs import MachineRanks, wrong

SIZES = {"gloo": (2**10, 2**16, 2**22), "nccl": (2**10, 2**16, 2**22, 2**28)}
REPEATS = 5
FACTOR = 2.0  # between a long message and its prediction, either way
RANK: Target = "piper_sim.app.doctor.collectives:collectives_rank"


def collectives(at: MachineRanks, job: Job | None) -> Mapping[str, object]:
    """Every kind of message, over every kind of group, in several sizes.

    Raises PiperError: one gives something else than it ought to, or a long one takes another time than the job's
    hardware says, by more than FACTOR in each of its repetitions.
    """
    wants = list(asked(at))
    args = {"wants": msgspec.to_builtins(wants), "backend": at.backend, "repeats": REPEATS}
    found = at.call(RANK, args)
    if odd := next((text for one, _ in found for text in one["odd"]), None):
        raise wrong(f"{odd} on {at.backend} gives something else than it ought to", "what the ranks have given")
    rows = [[(*row[:3], *(t - ahead for t in row[3:])) for row in one["links"]] for one, ahead in found]
    times = spans(wants, rows)
    fabric = None if job is None else fabric_of(job, at.node)
    table, far = [], list[str]()
    for (index, size), each in times.items():
        w, nodes = wants[index], len({member // at.node for member in wants[index].members})
        row: dict[str, object] = {"kind": str(w.kind), "ranks": len(w.members), "nodes": nodes, "bytes": size}
        row["seconds"] = median(each)
        if fabric is not None:
            per_node = len(w.members) // nodes if w.kind is not MessageKind.P2P else 3 - nodes
            predicted = message_seconds(Message(w.kind, size, ("dp",)), len(w.members), per_node, fabric)
            row["predicted_s"] = predicted
            if size == w.sizes[-1] and not (min(each) <= FACTOR * predicted and max(each) >= predicted / FACTOR):
                on = f"{len(w.members)} ranks on {nodes} node{'s' * (nodes > 1)}"
                far.append(f"{w.kind} of {size} bytes, {on}: {median(each):.2g} s, predicted {predicted:.2g}")
        table.append(row)
    if far:
        allowed = f"within a factor of {FACTOR:.0f} of what {job and job.cluster.gpu} says"
        raise wrong("; ".join(far), allowed, "a hardware file of this cluster: piper-sim cluster --nccl-tests")
    found_out: dict[str, object] = {"messages": len(table), "table": table}
    return found_out if job else {**found_out, "undecided": "times are held against no hardware: name a JOB"}


def asked(at: MachineRanks) -> Iterable[MessageSample]:
    """Over all ranks, over those of one machine, and from one rank to another, on one machine and across.

    >>> [(str(w.kind), w.members) for w in asked(MachineRanks(4, 2)) if w.kind is MessageKind.P2P]
    [('p2p', (0, 1)), ('p2p', (0, 2))]
    """
    sizes, alone = SIZES[at.backend], at.node >= at.ranks
    for members in [tuple(range(at.ranks)), *([] if alone or at.node == 1 else [tuple(range(at.node))])]:
        for kind in MessageKind:
            if kind is not MessageKind.P2P:
                yield MessageSample(kind, members, sizes, DType.FP32)
    for peer in ([1] if at.node > 1 else []) + ([] if alone else [at.node]):
        yield MessageSample(MessageKind.P2P, (0, peer), sizes, DType.FP32)


def fabric_of(job: Job, node: int) -> LinkFabric:
    """What the hardware that a job names says of idle links between machines of so many ranks."""
    hardware = load_hardware(
        named_path(job.file, job.cluster.gpu, presets()), job.cluster.overrides, keys_of("cluster")
    )
    return LinkFabric.of(hardware, node)


def collectives_rank(ctx: RankContext, wants: list[Any], backend: str, repeats: int) -> dict[str, Any]:
    """One rank's part: what came out otherwise than it ought to, and when each message began and ended."""
    device, transport, asked, note = met(ctx, wants, backend)
    odd = []
    for w in asked:
        for size in w.sizes if ctx.rank in w.members else ():
            note(f"{w.kind} of {size} bytes")
            if not right(w, size, transport, device):
                odd.append(f"{w.kind} of {size} bytes over {len(w.members)} ranks")
    rows = link_rows(asked, transport, device, repeats, note)
    ctx.progress.wait(text="end")
    transport.close()
    return {"odd": odd, "links": rows}


def right(w: MessageSample, size: int, transport: Transport, device: Device) -> bool:
    """Whether this rank gets what the members give, each its own numbers, which are whole and small: sums are exact."""
    n, me = len(w.members), w.members.index(transport.rank)
    each = -(-size // (4 * n))
    peers = torch.arange(1.0, n + 1, device=device.torch).repeat_interleave(each)  # each member's number, in turn
    mine, total = peers.new_full((each,), me + 1.0), n * (n + 1) / 2
    into: torch.Tensor
    match w.kind:
        case MessageKind.P2P:
            into, want = (peers.clone() if me == 0 else torch.zeros_like(peers)), peers
            (transport.send(w.members[1], into) if me == 0 else transport.recv(w.members[0], into)).wait()
        case MessageKind.ALL_REDUCE:
            into, want = peers * (me + 1.0), peers * total
            transport.all_reduce(w.group, into).wait()
        case MessageKind.REDUCE_SCATTER:
            into, want = torch.zeros_like(mine), mine * total
            transport.reduce_scatter(w.group, into, peers * (me + 1.0)).wait()
        case MessageKind.ALL_GATHER:
            into, want = torch.zeros_like(peers), peers
            transport.all_gather(w.group, into, mine).wait()
        case MessageKind.ALL_TO_ALL:
            into, want = torch.zeros_like(peers), peers * (me + 1.0)
            transport.all_to_all(w.group, into, peers * (me + 1.0), [each] * n, [each] * n).wait()
    return bool(torch.equal(into, want))
