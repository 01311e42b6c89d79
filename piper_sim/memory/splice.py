"""Peak bytes of every rank of a run, from alloc lists: each program's dispatch order replayed, storage by storage.

What the executor does between its units is replayed as it does it: a receive's buffer is there from its dispatch; what
crosses stages is held by a table until the plan frees it; an output is held until its last reader inside the stage has
run; tokens and labels come with the pass that reads them. Weights that are gathered for some ops, and a microbatch's
gradients that are reduced by themselves, are there from where the plan's buffers begin to where they end, in the
executor's padded flat tensors. With lists taken on any plan of the same model, sizes and formats, the peak is what
`executor.device.memory` measures on the run, to the byte.

Ranks that run one program differ in their place: which part of a bucket is theirs. Each is told by itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from ir.core.alloc import AllocList
from ir.core.ops import Pass
from ir.graph.graph import Node, Once
from ir.job.build import Prepared
from ir.plan.places import Places
from ir.plan.plan import AT_START, OpKind, Plan
from piper_sim.memory.splice_account import Account, Storage, Storages
from piper_sim.memory.splice_flow import Flows
from piper_sim.memory.splice_rows import Rows
from piper_sim.memory.splice_sync import SyncMemory
from piper_sim.memory.splice_table import Table, Value
from piper_sim.memory.splice_wiring import Wiring


def exchanges(plan: Plan) -> bool:
    """Whether ranks exchange rows in it (experts over ranks): how many, routers choose, unless they are forced."""
    once = [plan.graph.nodes[s.covers[0][0]].once for s in plan.shapes if s.kind is OpKind.COLLECTIVE and s.covers]
    return not all(once)


def peaks(prepared: Prepared, plan: Plan, lists: Mapping[str, AllocList]) -> tuple[int, ...]:
    """Peak allocated bytes of each rank over one step of the executor.

    lists: by class, as `executor.measure.alloc.take_lists` returns them or a profile holds them.

    Where ranks exchange rows, tokens are routed as `[routing]` says, as in a run that is forced to. Raises PiperError
    (job): something of the plan has no list.
    """
    places, wiring = Places.of(plan), Wiring.of(plan, lists)
    known: dict[object, int] = {}
    out = []
    for rank in range(places.ranks):
        sync, program = SyncMemory(prepared, plan, lists, rank, places), places.program(rank)
        rows = Rows.of(prepared, plan, rank, places)
        # All in which positions may differ.
        alike = program, sync.persistent, sync.squaring, sync.updating, tuple(rows.got.values())
        if alike not in known:
            known[alike] = _Rank(plan, wiring, sync, program, rows).step()
        out.append(known[alike])
    return tuple(out)


class _Rank:
    """One rank's step."""

    def __init__(self, plan: Plan, wiring: Wiring, sync: SyncMemory, program: int, rows: Rows) -> None:
        self.plan, self.wiring, self.sync = plan, wiring, sync
        self.account = Account()
        self.flows = Flows(self.account, wiring, rows)
        self.leaving: dict[int, Storages] = {}  # by exchange that nobody has waited for: what it sends
        self.exchanged: dict[tuple[int, int], int] = {}  # (node, microbatch) → its op
        self.values: dict[Value, Storage | None] = {}
        self.rows = range(int(plan.bounds[program]), int(plan.bounds[program + 1]))
        self.table = Table.of(plan, program, wiring, sync.flat)

    def step(self) -> int:
        """The most bytes at one time."""
        plan, account = self.plan, self.account
        account.add(self.sync.persistent)
        for i in self.rows:
            shape = plan.shapes[int(plan.shape[i])]
            match shape.kind:
                case OpKind.COMPUTE:
                    self._compute(i)
                case OpKind.RECV:
                    assert shape.slot is not None
                    node, slot = shape.slot
                    self.values[node, slot, int(plan.mb[i])] = account.born(plan.graph.nodes[node].writes[slot].bytes)
                case OpKind.COLLECTIVE:
                    self._collective(i)
        account.drop_all(self.values.values())
        self.sync.end(account)
        return account.peak

    def _collective(self, i: int) -> None:
        """A gather gets its room, the norm its sums, what arrives by an exchange too; reductions happen in place."""
        self._open(i, 0)
        for index, _ in self.plan.shapes[int(self.plan.shape[i])].covers:
            node, mb = self.plan.graph.nodes[index], int(self.plan.mb[i])
            if node.kind is Once.NORM:
                self.sync.norm(self.account, keep=True)
            elif not node.once:
                self.exchanged[index, mb] = i
                self.leaving[i] = self.flows.exchange(node, mb)

    def _wait(self, exchange: int) -> None:
        """It has ended: what it sent is let go of."""
        self.account.drop_all(self.leaving.pop(exchange, []))

    # -- compute ops --------------------------------------------------------------------------------------------------

    def _compute(self, i: int) -> None:
        plan = self.plan
        for w in plan.waits.row(i).tolist():
            self._wait(w)
        self._free(i, AT_START)
        mbs = int(plan.mb[i]), int(plan.mb2[i])
        for cover, (index, member) in enumerate(plan.shapes[int(plan.shape[i])].covers):
            for exchange in self.wiring.brought.get(index, ()):
                self._wait(self.exchanged[exchange, mbs[member]])
            self._open(i, cover)
            node = plan.graph.nodes[index]
            if node.once:
                self.sync.update(self.account)
            else:
                self._node(index, node, mbs[member])
            self._free(i, cover)

    def _node(self, index: int, node: Node, mb: int) -> None:
        unit, made = self.wiring.units[node.stage, node.part], self.wiring.lists[index]
        match Pass(str(node.kind)):
            case Pass.F:
                entering = self._read(index, mb, self.wiring.outside[unit.stage]) if unit.first else []
                self._hand_on(index, mb, self.flows.forward(unit, mb, made, entering))
            case Pass.R:
                self.flows.recompute(unit, mb, made)
            case Pass.I:
                entering = self._read(index, mb, 1) if unit.last else []
                self._hand_on(index, mb, self.flows.input_grad(unit, mb, made, entering))
            case Pass.W:
                self.flows.weight_grad(unit, mb, made)

    # -- values that the plan gives and takes -------------------------------------------------------------------------

    def _read(self, index: int, mb: int, holds: int) -> Storages:
        """What a stage's end reads of another stage, held by that many readers; the batch needs no holding."""
        if (outer := self.wiring.outer.get(index)) is None:
            return []
        storage = self.values[(*outer, mb)]
        if storage is not None:
            storage.holds += holds
        return [storage]

    def _hand_on(self, index: int, mb: int, out: Storages) -> None:
        """Into the table what another stage reads; a loss, and a gradient that nobody wants, end here."""
        slot = self.wiring.crosses.get(index)
        for storage in out:
            if slot is None:
                self.account.drop(storage)
            else:
                self.values[index, slot, mb] = storage

    def _open(self, i: int, cover: int) -> None:
        for value, size in self.table.births.get((i, cover), ()):
            self.values[value] = self.account.born(size)

    def _free(self, i: int, cover: int) -> None:
        for value in self.table.frees.get((i, cover), ()):
            self.account.drop(self.values.pop(value, None))
