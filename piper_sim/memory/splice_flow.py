"""One rank's stages: what the units of each hold of every microbatch, played pass by pass from their alloc lists."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ir.core.alloc import NONE, AllocList, Birth
from ir.core.errors import ErrorKind, PiperError
from ir.core.ops import Pass
from ir.graph.expert_rows import CARRIES
from ir.graph.graph import COUNTS, Node
from piper_sim.memory.splice_account import Account, Storage, Storages
from piper_sim.memory.splice_rows import Rows
from piper_sim.memory.splice_wiring import Unit, Wiring


@dataclass
class _Flow:
    """One microbatch inside one stage, by unit, port or exchange; "" is the stage's outside.

    acts: outputs. again: the same, made again. grads: of outputs, so far. names: what a unit's lists call storages.
    remade: the units whose forward has run again. counts: numbers of rows that the host has not read, by chunk.
    """

    acts: dict[str, Storages] = field(default_factory=dict)
    again: dict[str, Storages] = field(default_factory=dict)
    grads: dict[str, Storages] = field(default_factory=dict)
    names: dict[str, dict[str, Storage]] = field(default_factory=lambda: defaultdict(dict))
    remade: set[str] = field(default_factory=set)
    counts: dict[str, Storages] = field(default_factory=dict)


class Flows:
    """Every microbatch in every stage of one rank. rows: that its exchanges bring it."""

    def __init__(self, account: Account, wiring: Wiring, rows: Rows) -> None:
        self.account, self.wiring, self.rows = account, wiring, rows
        self.flows: dict[tuple[int, int], _Flow] = defaultdict(_Flow)

    def forward(self, unit: Unit, mb: int, made: AllocList, entering: Storages) -> Storages:
        """F. entering: what enters the stage, for its first unit. Returns what leaves it, from its last one."""
        flow = self.flows[unit.stage, mb]
        if unit.first:
            flow.acts[""] = entering
        _bind(flow.names[unit.name], "x", [s for read in unit.reads for s in flow.acts[read]])
        holds = _holds(unit, made, unit.readers, least=1)
        flow.acts |= _ported(unit, self._run(made, "F", flow.names[unit.name], holds, self._got(unit, mb)))
        if not unit.last:
            return []
        ends = [s for name in self.wiring.ends[unit.stage] for s in flow.acts[name]]
        return ends if len(ends) == 1 else [self._total(ends)]

    def recompute(self, unit: Unit, mb: int, made: AllocList) -> None:
        """R."""
        self._recompute(self.flows[unit.stage, mb], unit, made, mb)

    def input_grad(self, unit: Unit, mb: int, made: AllocList, entering: Storages) -> Storages:
        """I. entering: the gradient of what left the stage, for its last unit. Returns what its first one gives."""
        flow = self.flows[unit.stage, mb]
        if unit.last:
            flow.grads[unit.name] = entering
        self._recompute(flow, unit, self.wiring.again.get((unit.stage, unit.name)), mb)
        _bind(flow.names[unit.name], "g", _arrived(unit, flow))
        out = self._run(made, "I", flow.names[unit.name], [1] * len(made.outputs), self._got(unit, mb))
        self._pass_on(flow, unit, out)
        if not unit.has_w:
            del flow.names[unit.name]
        return flow.grads.pop("", []) if unit.first else []

    def weight_grad(self, unit: Unit, mb: int, made: AllocList) -> None:
        """W."""
        self._run(made, "W", self.flows[unit.stage, mb].names.pop(unit.name), [], self._got(unit, mb))

    def exchange(self, node: Node, mb: int) -> Storages:
        """Room for what arrives. Returns what is sent, which is held until somebody waits for the end."""
        flow, (chunk, _, name) = self.flows[node.stage, mb], node.part.rpartition(".")
        carried = f"{chunk}.{CARRIES[name]}"
        if name == COUNTS:
            (counts,) = flow.acts[carried]
            flow.counts[chunk] = [counts, self._like(counts, 1, 1)]
            return []
        self.account.drop_all(flow.counts.pop(chunk, []))
        own, got, back = self.rows.own, self.rows.got[chunk, mb], (name == "combine") != (node.kind is Pass.I)
        if node.kind is Pass.I:
            sent = flow.grads.pop(node.part)
            flow.grads[carried] = self._arriving(flow, chunk, len(sent), own if back else got)
            return sent
        held = flow.again if node.kind is Pass.R else flow.acts
        sent = held[carried]
        held[node.part] = self._arriving(flow, chunk, len(sent), own if back else got)
        return sent

    def _arriving(self, flow: _Flow, chunk: str, tensors: int, rows: int) -> Storages:
        """So many rows of the first tensors that the layer's router sends."""
        return [self._like(s, rows, self.rows.own) for s in flow.acts[f"{chunk}.router.rows"][:tensors]]

    def _like(self, storage: Storage | None, rows: int, of: int) -> Storage:
        assert storage is not None
        return self.account.born(storage.bytes * rows // of)

    def _got(self, unit: Unit, mb: int) -> int:
        """Rows from other ranks that a unit works on; only experts' lists ask."""
        return self.rows.got.get((unit.name.rpartition(".")[0], mb), 0)

    def _recompute(self, flow: _Flow, unit: Unit, made: AllocList | None, mb: int) -> None:
        """R, unless it has run; first of the units it takes from again. made None: it is the first half of I's list."""
        if not unit.recomputed or unit.name in flow.remade:
            return
        flow.remade.add(unit.name)
        found: Storages = []
        for read in unit.reads:
            if read in unit.again_reads:
                maker = self.wiring.makers.get((unit.stage, read), read)
                if (unit.stage, maker) in self.wiring.units:  # else an exchange, which the plan has run again
                    self._recompute(
                        flow, self.wiring.units[unit.stage, maker], self.wiring.again[unit.stage, maker], mb
                    )
                found += flow.again[read]
            else:
                found += [None] * len(flow.acts[read])
        _bind(flow.names[unit.name], "x", found)
        if made is not None:
            holds = _holds(unit, made, unit.again)
            flow.again |= _ported(unit, self._run(made, "R", flow.names[unit.name], holds, self._got(unit, mb)))

    def _pass_on(self, flow: _Flow, unit: Unit, out: Storages) -> None:
        """Add the gradients of what was read to those that other readers gave, in steps, as a stage does."""
        old: Storages = []
        spent: Storages = []
        first = 0
        for read in unit.reads:
            size = max(1, len(flow.acts[read]))
            new, first = out[first : first + size], first + size
            self.account.drop_all(old)
            before, old, sums = flow.grads.get(read, [None] * size), [], []
            for a, b in zip(before, new, strict=True):
                if a is None or b is None:
                    sums.append(b if a is None else a)
                    continue
                sums.append(self.account.born(b.bytes))
                old.append(a)
                spent.append(b)
            flow.grads[read] = sums
        self.account.drop_all(old + spent)

    def _total(self, ends: Storages) -> Storage | None:
        """Several losses are added up."""
        total = ends[0]
        for more in ends[1:]:
            assert total is not None and more is not None
            new = self.account.born(more.bytes)
            if total is not ends[0]:
                self.account.drop(total)
            total = new
        self.account.drop_all(ends)
        return total

    def _run(
        self, made: AllocList, letter: str, names: dict[str, Storage], holds: Sequence[int], rows: int
    ) -> Storages:
        """Play one list. holds: by how many each of its outputs will be held. rows: those its births may be about."""
        out = {name: names.get(name) for name in made.outputs if name != NONE}
        for name, more in zip(made.outputs, holds, strict=False):
            if (storage := out.get(name)) is not None:
                storage.holds += more
        births = 0
        for event in made.events:
            if isinstance(event, Birth):
                name = f"{letter}{births}"
                births += 1
                names[name] = self.account.born(event.bytes * rows if event.each else event.bytes)
                if name in out:
                    out[name] = names[name]
                    names[name].holds += sum(n for o, n in zip(made.outputs, holds, strict=True) if o == name)
            else:
                if event.name not in names:
                    message = f"an alloc list of pass {letter} frees {event.name}, which is not there"
                    raise PiperError(ErrorKind.JOB, message, key="costs.profile", suggestion="take the lists again")
                self.account.drop(names.pop(event.name))
        return [out.get(name) for name in made.outputs]


def _ported(unit: Unit, outs: Storages) -> dict[str, Storages]:
    """A unit's outputs by the names they are read under."""
    return {port: [outs[k] for k in at] for port, at in unit.ported(len(outs)).items()}


def _holds(unit: Unit, made: AllocList, readers: Mapping[str, int], least: int = 0) -> list[int]:
    """By how many each of a list's outputs is held. least: also of those that nobody reads."""
    out = [0] * len(made.outputs)
    for port, at in unit.ported(len(made.outputs)).items():
        for k in at:
            out[k] = max(least, readers[port])
    return out


def _arrived(unit: Unit, flow: _Flow) -> Storages:
    """The gradients of a unit's outputs."""
    if not unit.ports:
        return flow.grads.pop(unit.name, [])
    out: Storages = [None] * (1 + max(k for at in unit.ports.values() for k in at))
    for port, at in unit.ports.items():
        for k, grad in zip(at, flow.grads.pop(port, [None] * len(at)), strict=True):
            out[k] = grad
    return out


def _bind(names: dict[str, Storage], letter: str, given: Storages) -> None:
    """Storages that a pass is given, under the names that its list has for them."""
    names |= {f"{letter}{k}": storage for k, storage in enumerate(given) if storage is not None}
