"""One rank's stages: what the units of each hold of every microbatch, played pass by pass from their alloc lists."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from ir.alloc import NONE, AllocList, Birth
from ir.errors import ErrorKind, PiperError
from piper_sim.splice_account import Account, Storage, Storages
from piper_sim.splice_wiring import Unit, Wiring


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


class Flows:
    """Every microbatch in every stage of one rank."""

    def __init__(self, account: Account, wiring: Wiring) -> None:
        self.account, self.wiring = account, wiring
        self.flows: dict[tuple[int, int], _Flow] = defaultdict(_Flow)

    def forward(self, unit: Unit, mb: int, made: AllocList, entering: Storages) -> Storages:
        """F. entering: what enters the stage, for its first unit. Returns what leaves it, from its last one."""
        flow = self.flows[unit.stage, mb]
        if unit.first:
            flow.acts[""] = entering
        _bind(flow.names[unit.name], "x", [s for read in unit.reads for s in flow.acts[read]])
        flow.acts[unit.name] = self._run(made, "F", flow.names[unit.name], max(1, unit.readers))
        if not unit.last:
            return []
        ends = [s for name in self.wiring.ends[unit.stage] for s in flow.acts[name]]
        return ends if len(ends) == 1 else [self._total(ends)]

    def recompute(self, unit: Unit, mb: int, made: AllocList) -> None:
        """R."""
        self._recompute(self.flows[unit.stage, mb], unit, made)

    def input_grad(self, unit: Unit, mb: int, made: AllocList, entering: Storages) -> Storages:
        """I. entering: the gradient of what left the stage, for its last unit. Returns what its first one gives."""
        flow = self.flows[unit.stage, mb]
        if unit.last:
            flow.grads[unit.name] = entering
        self._recompute(flow, unit, self.wiring.again.get((unit.stage, unit.name)))
        _bind(flow.names[unit.name], "g", flow.grads.pop(unit.name, []))
        out = self._run(made, "I", flow.names[unit.name], 1)
        self._pass_on(flow, unit, out)
        if not unit.has_w:
            del flow.names[unit.name]
        return flow.grads.pop("", []) if unit.first else []

    def weight_grad(self, unit: Unit, mb: int, made: AllocList) -> None:
        """W."""
        self._run(made, "W", self.flows[unit.stage, mb].names.pop(unit.name), 0)

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
                names[name] = self.account.born(event.bytes)
                if name in out:
                    out[name] = names[name]
                    names[name].holds += readers * made.outputs.count(name)
            else:
                if event.name not in names:
                    message = f"an alloc list of pass {letter} frees {event.name}, which is not there"
                    raise PiperError(ErrorKind.JOB, message, key="costs.profile", suggestion="take the lists again")
                self.account.drop(names.pop(event.name))
        return [out.get(name) for name in made.outputs]


def _bind(names: dict[str, Storage], letter: str, given: Storages) -> None:
    """Storages that a pass is given, under the names that its list has for them."""
    names |= {f"{letter}{k}": storage for k, storage in enumerate(given) if storage is not None}
