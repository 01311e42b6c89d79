"""The carriers move the same tensors: gloo between two processes, and virtual ranks in threads."""

import pytest
import torch

from executor.launch.launch import launch
from executor.parallel.inline import holders
from executor.runtime.worker import RankContext
from executor.transport.base import DelayedTransport, Transport, TransportError, TransportTopology
from executor.transport.groups import NcclTransportHandle
from executor.transport.local import LocalTransport, LocalTransportHub
from ir.core.work import MessageKind
from tests.executor.threads import run_threads
from tests.executor.transport.fake_nccl import FakeNccl

TOPOLOGY = TransportTopology.of(2, [(0, 1), (1, 0)], {"both": (0, 1), "me": (0,)})


def _everything(t: Transport) -> list[float]:
    """Ping with receives posted ahead and sends never waited for inline; then each collective once."""
    other, out = 1 - t.rank, []
    boxes = [torch.empty(2, 3) for _ in range(3)]
    received = [t.recv(other, b) for b in boxes]
    sent = [t.send(other, torch.full((2, 3), 10.0 * t.rank + i)) for i in range(3)]
    for h, b in zip(received, boxes, strict=True):
        h.wait()
        assert h.done()
        out.append(float(b[0, 0]))
    for h in sent:
        h.wait()
    x = torch.tensor([1.0 + t.rank, 2.0])
    t.all_reduce("both", x).wait()
    most = torch.tensor([1.0 + t.rank, 5.0 - t.rank])
    t.all_reduce("both", most, largest=True).wait()
    part = torch.empty(1)
    t.reduce_scatter("both", part, torch.tensor([1.0, 5.0 + t.rank])).wait()
    whole = torch.empty(2)
    t.all_gather("both", whole, part).wait()
    mine, theirs = ([2, 1], [2, 1]) if t.rank == 0 else ([1, 0], [1, 0])
    got = torch.empty(sum(theirs))
    sizes = [2, 1] if t.rank == 0 else [1, 0]
    t.all_to_all("both", got, torch.arange(sum(sizes)) + 100.0 * t.rank, [2, 1] if t.rank == 0 else [1, 0], mine).wait()
    out += [*x.tolist(), *most.tolist(), *part.tolist(), *whole.tolist(), *got.tolist()]
    if t.rank == 0:
        alone = torch.ones(1)
        t.all_reduce("me", alone).wait()
        out.append(float(alone))
    t.close()
    return out


def _rank(ctx: RankContext) -> list[float]:
    return _everything(ctx.gloo(TOPOLOGY, timeout_s=20))


WANT = [
    [10.0, 11.0, 12.0, 3.0, 4.0, 2.0, 5.0, 2.0, 2.0, 11.0, 0.0, 1.0, 100.0, 1.0],
    [0.0, 1.0, 2.0, 3.0, 4.0, 2.0, 5.0, 11.0, 2.0, 11.0, 2.0],
]


def test_gloo_between_two_processes() -> None:
    assert launch(_rank, 2) == WANT


OWN = [["0>1", "0>2", "2>0", "all"], ["0>1", "1>2", "all", "two"], ["0>2", "1>2", "2>0", "all", "two"]]


def _nccl_on_gloo(ctx: RankContext) -> tuple[list[float], list[str], list[tuple[str, str]]]:
    """NCCL's transport, all but the wire: which communicators are made, in which order, and their first uses."""
    FakeNccl.handle = NcclTransportHandle
    kinds = {"all": list(MessageKind)[:-1], "two": [MessageKind.ALL_GATHER]}
    ring = TransportTopology.of(3, [(0, 1), (1, 2), (2, 0), (0, 2)], {"all": (0, 1, 2), "two": (1, 2)}, kinds)
    t = FakeNccl(ctx.store(), ctx.rank, ring)
    used = [*t.noted]
    got, x = torch.empty(1), torch.tensor([float(ctx.rank)])
    handle = t.recv((ctx.rank - 1) % 3, got)
    sent = t.send((ctx.rank + 1) % 3, x)
    assert handle.done() and sent.done()  # both stand in a queue: nobody's host waits
    handle.wait()
    sent.wait()
    t.all_reduce("all", x).wait()
    t.close()
    return [float(got), float(x)], [*t.made], used


def test_nccls_communicators_are_made_in_one_order_and_used_for_what_is_asked_alone() -> None:
    found = launch(_nccl_on_gloo, 3)
    assert [numbers for numbers, _, _ in found] == [[2.0, 3.0], [0.0, 3.0], [1.0, 3.0]]
    every, gather = sorted(map(str, list(MessageKind)[:-1])), ["all_gather"]
    for rank, (_, made, used) in enumerate(found):
        assert made == ["world", *OWN[rank]] and [*dict.fromkeys(label for label, _ in used)] == OWN[rank]
        assert [kind for label, kind in used if label == "all"] == every
        assert [kind for label, kind in used if label == "two"] == gather[: "two" in OWN[rank]]
        assert all(kind == "p2p" for label, kind in used if ">" in label)


def test_virtual_ranks_in_threads() -> None:
    assert run_threads(_everything, TOPOLOGY) == WANT


def test_a_send_ends_only_when_it_is_received() -> None:
    def main(t: LocalTransport) -> bool:
        if t.rank == 0:
            h = t.send(1, torch.ones(1))
            before = h.done()
            t.barrier()
            h.wait()
            return before
        t.barrier()
        t.recv(0, torch.empty(1)).wait()
        return True

    assert run_threads(main, TOPOLOGY) == [False, True]


def test_a_failed_virtual_rank_wakes_the_others() -> None:
    def main(t: LocalTransport) -> None:
        if t.rank == 0:
            raise ValueError("bad luck")
        with pytest.raises(TransportError, match="rank 0"):
            t.recv(0, torch.empty(1)).wait()

    with pytest.raises(ValueError, match="bad luck"):
        run_threads(main, TOPOLOGY)


def test_it_wakes_those_that_wait_already_and_stops_those_that_come() -> None:
    hub = LocalTransportHub(TOPOLOGY)
    t = LocalTransport(hub, 1)
    waiting = [t.recv(0, torch.empty(1)), t.all_reduce("world", torch.ones(1))]
    hub.fail(0)
    for handle in (*waiting, t.recv(0, torch.empty(1)), t.all_reduce("world", torch.ones(1))):
        with pytest.raises(TransportError, match="rank 0 has failed"):
            handle.wait()


def _lonely(ctx: RankContext) -> str:
    t = ctx.gloo(TOPOLOGY, timeout_s=1)
    if ctx.rank == 1:
        ctx.store().wait(["named"])
        return ""
    try:
        t.recv(1, torch.empty(1)).wait()
    except TransportError as error:
        return str(error.peers)
    finally:
        ctx.store().set("named", "")
    return "it came"


def test_gloos_own_errors_name_the_peer() -> None:
    assert launch(_lonely, 2)[0] == "(1,)"


class _Polled:
    """Over whenever it is asked; lets go of its tensors when somebody waits for it, as gloo's collectives do."""

    def __init__(self, keep: torch.Tensor) -> None:
        self.keep: tuple[torch.Tensor, ...] = (keep,)

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        self.keep = ()


def test_a_delayed_message_that_was_seen_to_be_over_lets_go_of_its_tensors_all_the_same() -> None:
    x = torch.zeros(3)
    before = holders(x)
    late = DelayedTransport(_Polled(x.detach()), 0.0)
    assert late.done() and holders(x) > before
    late.wait()
    assert holders(x) == before
