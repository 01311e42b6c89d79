"""A stage's chunks at work: forward, input gradient, weight gradient of one microbatch, and the sums of gradients.

A `Stage` is a set of named units ("l0", or finer, "l0.attn"), each cut off from the others' autograd graphs and wired
to those it reads, so an op of the plan may cover any of them whose inputs are there, others in forward than in
backward. Nothing depends on where the cuts are: an output has two readers at most, so its gradient is one sum.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from executor.autograd.compiled import CompiledPart, CompiledPass
from executor.autograd.microbatch_state import MicrobatchState, PartState, Ports, Values
from executor.autograd.split import Casts, SplitPass
from executor.modules.base import total, wiring
from executor.modules.remade import RemadeBuffers, outputs
from executor.optim.optimizer import ParamGradients
from executor.parallel.expert_all_to_all import ExpertAllToAll, ExpertRoute, ExpertTransfer, even, travel
from ir.core.ops import Pass


class Stage:
    """Some units of the model, in order, and every microbatch now inside them.

    units: name → module, called with the outputs of the units it reads (and its `extras`, e.g. the labels for the
    head). reads: see `Built`. params: global name → parameter; one name may be used by several units. recompute: units
    whose forward keeps only its inputs, and not even those that units of the same chunk make again; pass R makes the
    rest (I and W do it themselves where it did not run). ports: unit → its outputs by who reads them, where not all
    readers read all. exchanges: by name, what reaches its reader from another rank's unit; `exchange` begins each.
    routes: (chunk, microbatch) → the rows they carry, where these are known and not read off the device. compiled:
    units whose passes are compiled code, set by who has compiled them. remade: of units that are not recomputed whole,
    the options of what R makes again inside (`executor.modules.remade`), set by who knows them. still: units that have
    no backward, as nothing is trained in them nor before; edge: those that read them, whose inputs have no gradients.

    >>> layer = nn.Linear(1, 1, bias=False); _ = nn.init.constant_(layer.weight, 3.0)
    >>> stage = Stage({"l0": layer}, {"w": layer.weight})
    >>> stage.feed(0, torch.tensor([[2.0]])); stage.run(Pass.F, 0); stage.take_output(0)[0].item()
    6.0
    >>> stage.feed_grad(0, torch.ones(1, 1)); stage.run(Pass.I, 0); stage.run(Pass.W, 0)
    >>> stage.take_input_grad(0)[0].item(), stage.grads["w"].item(), stage.in_flight
    (3.0, 2.0, 0)
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        params: Mapping[str, Tensor],
        *,
        grads: torch.dtype | ParamGradients | None = None,
        recompute: Iterable[str] = (),
        reads: Mapping[str, tuple[str, ...]] | None = None,
        ports: Mapping[str, Ports] | None = None,
        exchanges: Mapping[str, ExpertAllToAll] | None = None,
        routes: Callable[[str, int], ExpertRoute] | None = None,
    ) -> None:
        self.units, self._routes = dict(units), routes
        self.compiled: Mapping[str, CompiledPart] = {}
        self.remade: Mapping[str, frozenset[str]] = {}
        self.still, self.edge = frozenset[str](), frozenset[str]()
        self.params = dict(params)
        self.grads = grads if isinstance(grads, ParamGradients) else ParamGradients(self.params, grads)
        self.recompute = frozenset(recompute)
        self._ports = {u: p for u, p in (ports or {}).items() if u in self.units}
        self._of = {port: u for u in self.units for port in self._ports.get(u, (u,))}  # port or exchange → its unit
        self.exchanges = {n: x for n, x in (exchanges or {}).items() if x.reads in self._of}
        self._of |= {n: self._of[x.reads] for n, x in self.exchanges.items()}
        self.reads = wiring(self.units, reads or {}, self._of)
        names = {id(p): n for n, p in self.params.items()}
        self.weights = {u: {names[id(p)]: p for p in m.parameters() if id(p) in names} for u, m in self.units.items()}
        self._flows: dict[int, MicrobatchState] = {}
        self._casts = Casts()
        found = [*((r, u) for u, reads in self.reads.items() for r in reads)]
        found += [(x.reads, u) for n, x in self.exchanges.items() for u in (self._behind(n) or ("",))]
        self._readers = Counter(r for r, _ in found)
        self._again = Counter(r for r, u in found if self._made_again(r, u))
        self._run: dict[Pass, Callable[[int, str], None]] = {
            Pass.F: self._forward,
            Pass.R: self._recompute,
            Pass.I: self._input_grad,
            Pass.W: self._weight_grad,
        }
        self._ends = tuple(u for u in self.units if not any(self._readers[p] for p in self._ports.get(u, (u,))))

    @property
    def in_flight(self) -> int:
        return len(self._flows)

    def ported(self, unit: str, outs: int) -> Ports:
        """Under which names a unit's outputs are read, so many of them."""
        return self._ports.get(unit, {unit: tuple(range(outs))})

    # -- one pass over a stretch of units: what an op of the plan calls ----------------------------------------------

    def feed(self, mb: int, *acts: Tensor) -> None:
        """Give microbatch mb's input (token ids or received activations) to the next forward."""
        if self._readers[""]:
            flow = self._flow(mb)
            flow.acts[""], flow.left[""] = acts, self._readers[""]

    def feed_extra(self, mb: int, unit: str, *extras: object) -> None:
        """Give a unit its further arguments: the head its labels. They get no gradient."""
        self._flow(mb).extras[unit] = extras

    def feed_grad(self, mb: int, *grads: Tensor | None) -> None:
        """Give the gradient of the stage's output to the next backward. A loss needs none."""
        (end,) = self._ends
        self._flow(mb).grads[end] = list(grads)

    def run(self, pass_: Pass, mb: int, units: Sequence[str] | None = None) -> None:
        """Run one pass over units (default: all; F and R as listed, I and W backwards)."""
        names = list(self.units) if units is None else list(units)
        if pass_ in (Pass.I, Pass.W) and units is None:
            names.reverse()
        self.work(mb, [(pass_, name) for name in names])

    def work(self, mb: int, passes: Iterable[tuple[Pass, str]]) -> None:
        """Run passes of units in this order."""
        for pass_, name in passes:
            self._run[pass_](mb, name)

    def exchange(self, pass_: Pass, mb: int, name: str) -> ExpertTransfer:
        """Begin an all-to-all behind the unit it reads: what is to travel. Its reader may run when it has ended.

        One whose sizes must be read first asks the device for them: what carries them must have ended.
        """
        wire, flow = self.exchanges[name], self._flow(mb)
        if not wire.counts:
            trade = even(wire, *flow.take(wire.reads))
            assert trade.counts is not None
            flow.counts[name] = trade.counts
            return trade
        if wire.counts not in flow.routes:
            flow.routes[wire.counts] = self._route(flow, wire, mb)
        route = flow.routes[wire.counts]
        if pass_ is Pass.I:
            grads = [g for g in flow.grads.pop(name) if g is not None]
            trade = travel(wire, route, grads, gradients=True)
            flow.grads[wire.reads] = list(trade.arrives)
            if not wire.back:
                del flow.routes[wire.counts]
            return trade
        again = pass_ is Pass.R
        trade = travel(wire, route, flow.take(wire.reads, again=again), gradients=False)
        readers = self._again if again else self._readers
        flow.give(trade.arrives, {name: tuple(range(len(trade.arrives)))}, readers, again=again)
        if pass_ is Pass.F and not wire.back:
            for unit in self._behind(name):
                flow.extras[unit] = (route.tables,)
        return trade

    def _route(self, flow: MicrobatchState, wire: ExpertAllToAll, mb: int) -> ExpertRoute:
        counts, (chunk, _, _) = flow.counts.pop(wire.counts), wire.counts.rpartition(".")
        return counts.route(wire.group) if self._routes is None else self._routes(chunk, mb)

    def take_output(self, mb: int) -> Values:
        """What the units that nobody reads have left, to be sent or read; several losses are added up."""
        flow = self._flow(mb)
        outs = [flow.acts.pop(u) for u in self._ends if u in flow.acts]
        self._tidy(mb)
        if len(outs) == 1:
            return outs[0]
        return (total([out[0] for out in outs]),) if outs else ()

    def take_input_grad(self, mb: int) -> tuple[Tensor | None, ...]:
        """The gradient of the stage's input, to be sent; the stage lets go of it."""
        grads = self._flow(mb).grads.pop("", [None])
        self._tidy(mb)
        return tuple(grads)

    # -- units -------------------------------------------------------------------------------------------------------

    def _forward(self, mb: int, name: str) -> None:
        flow, module, reads = self._flow(mb), self.units[name], self.reads[name]
        inputs = [flow.acts[r] for r in reads]
        acts, extras = tuple(x for values in inputs for x in values), flow.extras.pop(name, ())
        if name in self.still:
            outs = self._without_traces(name, acts, extras)
            for r in reads:
                flow.take(r)
            flow.give(outs, self.ported(name, len(outs)), self._readers)
            return
        unit = PartState(self._begin(name, mb), tuple(map(len, inputs)))
        if name in self.recompute:
            unit.inputs = tuple(None if self._made_again(r, name) else flow.acts[r] for r in reads)
            unit.extras, unit.waits_for_r = extras, True
            outs = self._without_traces(name, acts, extras)
        else:
            outs = unit.run.forward(module, *acts, extras=extras)
        for r in reads:
            flow.take(r)
        flow.give(outs, self.ported(name, len(outs)), self._readers)
        unit.outs, flow.units[name] = len(outs), unit

    def _begin(self, name: str, mb: int) -> SplitPass | CompiledPass:
        part, sink = self.compiled.get(name), partial(self.grads.add, mb=mb)
        if part is not None:
            return part.begin(sink)
        inward, remade = name not in self.edge, self._remade(name, mb)
        return SplitPass(self.weights[name], sink, self.grads.room, remade, self._casts, inputs=inward)

    def _remade(self, name: str, mb: int) -> RemadeBuffers | None:
        """What of a unit R will make again; of what it reads, too, where that is so in the unit that made it."""
        if name in self.recompute or not (options := self.remade.get(name)):
            return None
        makers = (self._flow(mb).units.get(self._of.get(r, "")) for r in self.reads[name])
        given = (m.run.remade for m in makers if m is not None and isinstance(m.run, SplitPass))
        return RemadeBuffers(options, (values for values in given if values is not None))

    def _without_traces(self, name: str, acts: Values, extras: tuple[object, ...]) -> Values:
        """A forward of which nothing but its outputs stays."""
        module = self.units[name]
        if (part := self.compiled.get(name)) is not None:
            return part.begin(self.grads.add).forward(module, *acts, extras=extras)
        with torch.no_grad():
            return outputs(module(*acts, *extras))

    def _recompute(self, mb: int, name: str) -> None:
        flow = self._flow(mb)
        unit = flow.units[name]
        if not unit.waits_for_r:
            unit.run.remake()
            return
        acts: list[Tensor] = []
        for r, given in zip(self.reads[name], unit.inputs, strict=True):
            if given is None and r not in self.exchanges and flow.units[self._of[r]].waits_for_r:
                self._recompute(mb, self._of[r])
            acts += flow.take(r, again=True) if given is None else given
        outs = unit.run.forward(self.units[name], *acts, extras=unit.extras)
        unit.inputs, unit.extras, unit.waits_for_r = (), (), False
        flow.give(outs, self.ported(name, len(outs)), self._again, again=True)

    def _input_grad(self, mb: int, name: str) -> None:
        unit, flow = self._take(mb, name), self._flow(mb)
        ports = self.ported(name, unit.outs)
        grads = unit.run.input_grad(*flow.arrived(ports, unit.outs))
        if name not in self.edge:
            flow.pass_on(self.reads[name], unit.sizes, grads)
        if not self.weights[name]:
            self._drop(mb, name)  # it has no W

    def _weight_grad(self, mb: int, name: str) -> None:
        if self.weights[name]:
            self._take(mb, name).run.weight_grad()
            self._drop(mb, name)

    def _take(self, mb: int, name: str) -> PartState:
        unit = self._flow(mb).units[name]
        if unit.waits_for_r:
            self._recompute(mb, name)
        return unit

    def _behind(self, exchange: str) -> tuple[str, ...]:
        return tuple(u for u, reads in self.reads.items() if exchange in reads)

    def _made_again(self, read: str, reader: str) -> bool:
        """Whether backward of `reader` gets this input from a recomputed unit."""
        maker = self._of.get(read, read)
        both = maker in self.recompute and reader in self.recompute
        return both and maker.split(".")[0] == reader.split(".")[0]

    def _drop(self, mb: int, name: str) -> None:
        del self._flow(mb).units[name]
        self._tidy(mb)

    def _flow(self, mb: int) -> MicrobatchState:
        if mb not in self._flows:
            self._flows[mb] = MicrobatchState()
        return self._flows[mb]

    def _tidy(self, mb: int) -> None:
        if self._flows[mb].idle():
            del self._flows[mb]
        if not self._flows:  # weights may change now
            self._casts.clear()
