"""Peak bytes of every rank of a run, from alloc lists: each program's dispatch order replayed, storage by storage.

What the executor does between its units is replayed as it does it: a receive's buffer is there from its dispatch; what
crosses stages is held by a table until the plan frees it; an output is held until its last reader inside the stage has
run; the batch stays. With lists taken on any plan of the same model, sizes and formats, the peak is what
`executor.memory` measures on the run, to the byte.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from ir.alloc import NONE, AllocList, Birth
from ir.errors import ErrorKind, PiperError
from ir.graph import Node, Once
from ir.job.build import Prepared
from ir.ops import Pass
from ir.plan import AT_START, OpKind, Plan
from piper_sim.splice_sync import Account, SyncMemory
from piper_sim.splice_wiring import Unit, Wiring

TOKEN_BYTES = 8
Value = tuple[int, int, int]  # (node, slot, microbatch)


def peaks(prepared: Prepared, plan: Plan, lists: Mapping[str, AllocList]) -> tuple[int, ...]:
    """Peak allocated bytes of each program over one step of the executor.

    lists: by class, as `executor.alloc.take_lists` returns them or a profile holds them.

    Raises PiperError (job): something of the plan has no list.
    """
    wiring = Wiring.of(plan, lists)
    return tuple(_Rank(prepared, plan, lists, wiring, p).step() for p in range(plan.programs))


@dataclass(slots=True)
class Storage:
    """Some bytes, and how many hold them."""

    bytes: int
    holds: int


Storages = list[Storage | None]


@dataclass
class _Flow:
    """One microbatch inside one stage, by unit; "" is the stage's outside.

    acts: outputs. again: the same, made again. grads: of outputs, so far. names: what a unit's lists call storages.
    remade: the units whose forward has run again.
    """

    acts: dict[str, Storages] = field(default_factory=dict)
    again: dict[str, Storages] = field(default_factory=dict)
    grads: dict[str, Storages] = field(default_factory=dict)
    names: dict[str, dict[str, Storage]] = field(default_factory=lambda: defaultdict(dict))
    remade: set[str] = field(default_factory=set)


class _Rank:
    """One program's step."""

    def __init__(
        self, prepared: Prepared, plan: Plan, lists: Mapping[str, AllocList], wiring: Wiring, program: int
    ) -> None:
        self.plan, self.wiring, self.program = plan, wiring, program
        self.account = Account()
        self.batch_bytes = 2 * TOKEN_BYTES * prepared.job.schedule.microbatch_size * prepared.job.model.seq_len
        self.sync = SyncMemory(prepared, plan, lists, program)
        self.values: dict[Value, Storage | None] = {}
        self.flows: dict[tuple[int, int], _Flow] = defaultdict(_Flow)
        self.rows = range(int(plan.bounds[program]), int(plan.bounds[program + 1]))
        self.frees = self._frees()

    def step(self) -> int:
        """The most bytes at one time."""
        plan, account = self.plan, self.account
        account.add(self.sync.persistent + self._batches())
        for i in self.rows:
            shape = plan.shapes[int(plan.shape[i])]
            match shape.kind:
                case OpKind.COMPUTE:
                    self._compute(i)
                case OpKind.RECV:
                    assert shape.slot is not None
                    node, slot = shape.slot
                    self.values[node, slot, int(plan.mb[i])] = self._born(plan.graph.nodes[node].writes[slot].bytes)
                case OpKind.COLLECTIVE if plan.graph.nodes[shape.covers[0][0]].kind is Once.NORM:
                    self.sync.norm(account, keep=True)
        for storage in self.values.values():
            self._drop(storage)
        self.sync.end(account)
        return account.peak

    def _batches(self) -> int:
        """Bytes of tokens and labels of the microbatches that enter or end here; they are there all the step."""
        plan, ends, mbs = self.plan, (0, self.plan.graph.stages - 1), set()
        for i in self.rows:
            for index, member in plan.shapes[int(plan.shape[i])].covers:
                node = plan.graph.nodes[index]
                if node.kind is Pass.F and node.stage in ends:
                    mbs.add(int((plan.mb, plan.mb2)[member][i]))
        return len(mbs) * self.batch_bytes

    # -- compute ops --------------------------------------------------------------------------------------------------

    def _compute(self, i: int) -> None:
        plan = self.plan
        self._free(i, AT_START)
        mbs = int(plan.mb[i]), int(plan.mb2[i])
        for cover, (index, member) in enumerate(plan.shapes[int(plan.shape[i])].covers):
            node = plan.graph.nodes[index]
            if node.once:
                self.sync.update(self.account)
            else:
                self._node(index, node, mbs[member])
            self._free(i, cover)

    def _node(self, index: int, node: Node, mb: int) -> None:
        flow, unit = self.flows[node.stage, mb], self.wiring.units[node.stage, node.part]
        made = self.wiring.lists[index]
        match Pass(str(node.kind)):
            case Pass.F:
                self._forward(index, mb, flow, unit, made)
            case Pass.R:
                self._recompute(flow, unit, made)
            case Pass.I:
                self._input_grad(index, mb, flow, unit, made)
            case Pass.W:
                self._run(made, "W", flow.names.pop(unit.name), 0)

    def _forward(self, index: int, mb: int, flow: _Flow, unit: Unit, made: AllocList) -> None:
        if unit.first:
            flow.acts[""] = self._read(index, mb, self.wiring.outside[unit.stage])
        _bind(flow.names[unit.name], "x", [s for read in unit.reads for s in flow.acts[read]])
        flow.acts[unit.name] = self._run(made, "F", flow.names[unit.name], max(1, unit.readers))
        if unit.last:
            ends = [s for name in self.wiring.ends[unit.stage] for s in flow.acts[name]]
            self._hand_on(index, mb, ends if len(ends) == 1 else [self._total(ends)])

    def _input_grad(self, index: int, mb: int, flow: _Flow, unit: Unit, made: AllocList) -> None:
        if unit.last:
            flow.grads[unit.name] = self._read(index, mb, 1)
        self._recompute(flow, unit, self.wiring.again.get((unit.stage, unit.name)))
        _bind(flow.names[unit.name], "g", flow.grads.pop(unit.name, []))
        out = self._run(made, "I", flow.names[unit.name], 1)
        self._pass_on(flow, unit, out)
        if not unit.has_w:
            del flow.names[unit.name]
        if unit.first:
            self._hand_on(index, mb, flow.grads.pop("", []))

    def _recompute(self, flow: _Flow, unit: Unit, made: AllocList | None) -> None:
        """R, unless it has run; first of the units it takes from again. made None: it is the first half of I's list."""
        if not unit.recomputed or unit.name in flow.remade:
            return
        flow.remade.add(unit.name)
        found: Storages = []
        for read in unit.reads:
            if read in unit.again_reads:
                before = self.wiring.units[unit.stage, read]
                self._recompute(flow, before, self.wiring.again[unit.stage, read])
                found += flow.again[read]
            else:
                found += [None] * len(flow.acts[read])
        _bind(flow.names[unit.name], "x", found)
        if made is not None:
            flow.again[unit.name] = self._run(made, "R", flow.names[unit.name], len(unit.again))

    def _pass_on(self, flow: _Flow, unit: Unit, out: Storages) -> None:
        """Add the gradients of what was read to those that other readers gave; in steps, as `executor.chunk` does."""
        old: Storages = []
        spent: Storages = []
        first = 0
        for read in unit.reads:
            size = max(1, len(flow.acts[read]))
            new, first = out[first : first + size], first + size
            self._drop_all(old)
            before, old, sums = flow.grads.get(read, [None] * size), [], []
            for a, b in zip(before, new, strict=True):
                if a is None or b is None:
                    sums.append(b if a is None else a)
                    continue
                sums.append(self._born(b.bytes))
                old.append(a)
                spent.append(b)
            flow.grads[read] = sums
        self._drop_all(old + spent)

    def _total(self, ends: Storages) -> Storage | None:
        """Several losses are added up."""
        total = ends[0]
        for more in ends[1:]:
            assert total is not None and more is not None
            new = self._born(more.bytes)
            if total is not ends[0]:
                self._drop(total)
            total = new
        self._drop_all(ends)
        return total

    # -- values that cross stages -------------------------------------------------------------------------------------

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
                self._drop(storage)
            else:
                self.values[index, slot, mb] = storage

    def _free(self, i: int, cover: int) -> None:
        for value in self.frees.get((i, cover), ()):
            self._drop(self.values.pop(value, None))

    def _frees(self) -> dict[tuple[int, int], list[Value]]:
        """(op, cover) → the values that the plan lets go of there. What is inside a stage dies with its unit."""
        plan, b = self.plan, self.plan.buffers
        out: dict[tuple[int, int], list[Value]] = defaultdict(list)
        for k, op in enumerate(b.free.tolist()):
            if op not in self.rows:
                continue
            node, slot, mb = int(b.node[k]), int(b.slot[k]), int(b.mb[k])
            if node >= 0 and self.wiring.crosses.get(node) == slot:
                value = (node, slot, mb)
            elif node < 0 and (brought := plan.shapes[int(plan.shape[slot])].slot) is not None:
                value = (*brought, int(plan.mb[slot]))
            else:
                continue
            out[op, max(int(b.free_cover[k]), AT_START)].append(value)
        return out

    # -- storages -----------------------------------------------------------------------------------------------------

    def _run(self, made: AllocList, letter: str, names: dict[str, Storage], readers: int) -> Storages:
        """Play one list. readers: how many will hold each of its outputs."""
        out = {name: names.get(name) for name in made.outputs if name != NONE}
        for name in made.outputs:
            if (storage := out.get(name)) is not None:
                storage.holds += readers
        births = 0
        for event in made.events:
            if isinstance(event, Birth):
                name = f"{letter}{births}"
                births += 1
                names[name] = self._born(event.bytes)
                if name in out:
                    out[name] = names[name]
                    names[name].holds += readers * made.outputs.count(name)
            else:
                if event.name not in names:
                    message = f"an alloc list of pass {letter} frees {event.name}, which is not there"
                    raise PiperError(ErrorKind.JOB, message, key="costs.profile", suggestion="take the lists again")
                self._drop(names.pop(event.name))
        return [out.get(name) for name in made.outputs]

    def _born(self, size: int) -> Storage:
        self.account.add(size)
        return Storage(size, 1)

    def _drop(self, storage: Storage | None) -> None:
        if storage is not None:
            storage.holds -= 1
            if not storage.holds:
                self.account.take(storage.bytes)

    def _drop_all(self, storages: Storages) -> None:
        for storage in storages:
            self._drop(storage)


def _bind(names: dict[str, Storage], letter: str, given: Storages) -> None:
    """Storages that a pass is given, under the names that its list has for them."""
    names |= {f"{letter}{k}": storage for k, storage in enumerate(given) if storage is not None}
