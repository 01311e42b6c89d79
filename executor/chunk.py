"""A stage's chunks at work: forward, input gradient, weight gradient of one microbatch, and the sums of gradients.

A `Stage` is a set of named units ("l0", or finer, "l0.attn"), each cut off from the others' autograd graphs and wired
to those it reads, so an op of the plan may cover any of them whose inputs are there, others in forward than in
backward. Nothing depends on where the cuts are: an output has two readers at most, so its gradient is one sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from executor.modules.base import total, wiring
from executor.split import SplitRun
from ir.ops import Pass


class Gradients:
    """Sums of weight gradients by global name, in the dtype they are accumulated in; each `add` is one microbatch.

    >>> grads = Gradients({"w": torch.zeros(2)}); grads.add("w", torch.ones(2)); grads.add("w", torch.ones(2))
    >>> grads["w"].tolist()
    [2.0, 2.0]
    """

    def __init__(self, params: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        self.sums = {n: torch.zeros_like(p, dtype=dtype or p.dtype, requires_grad=False) for n, p in params.items()}
        self.passing: dict[tuple[str, int], Tensor] = {}  # of a microbatch, to be reduced before it is summed

    def __getitem__(self, name: str) -> Tensor:
        return self.sums[name]

    def add(self, name: str, grad: Tensor, mb: int = 0) -> None:
        """Add microbatch mb's gradient."""
        (self.sums[name] if name in self.sums else self.passing[name, mb]).add_(grad.detach())

    def zero(self) -> None:
        """Start a new step."""
        for g in self.sums.values():
            g.zero_()


Values = tuple[Tensor, ...]
Grads = list[Tensor | None]


@dataclass(slots=True)
class _Unit:
    """One unit's life for one microbatch: what forward left, until W. inputs: what each unit it reads gave it; None
    where that is made again. sizes: how many tensors each of them gave; outs: how many it gives itself.
    """

    run: SplitRun
    sizes: tuple[int, ...] = ()
    outs: int = 1
    inputs: tuple[Values | None, ...] = ()
    extras: tuple[object, ...] = ()
    waits_for_r: bool = False


@dataclass(slots=True)
class _Flow:
    """What stands at the edge of the work done so far of one microbatch, by the unit it comes from ("": outside).

    acts: outputs, until every reader has run. again: the same, made again by R. grads: sums of what readers' I gave.
    """

    acts: dict[str, Values] = field(default_factory=dict)
    again: dict[str, Values] = field(default_factory=dict)
    left: Counter[str] = field(default_factory=Counter)
    left_again: Counter[str] = field(default_factory=Counter)
    grads: dict[str, Grads] = field(default_factory=dict)
    units: dict[str, _Unit] = field(default_factory=dict)
    extras: dict[str, tuple[object, ...]] = field(default_factory=dict)

    def idle(self) -> bool:
        """Whether nothing is held."""
        return not (self.units or self.acts or any(g is not None for grads in self.grads.values() for g in grads))


class Stage:
    """Some units of the model, in order, and every microbatch now inside them.

    units: name → module, called with the outputs of the units it reads (and its `extras`, e.g. the labels for the
    head). reads: see `Built`. params: global name → parameter; one name may be used by several units. recompute: units
    whose forward keeps only its inputs, and not even those that units of the same chunk make again; pass R makes the
    rest (I and W do it themselves where it did not run).

    >>> layer = nn.Linear(1, 1, bias=False); _ = nn.init.constant_(layer.weight, 3.0)
    >>> stage = Stage({"l0": layer}, {"w": layer.weight})
    >>> stage.forward(0, torch.tensor([[2.0]]))[0].item()
    6.0
    >>> dx, = stage.backward(0, torch.ones(1, 1)); dx.item(), stage.grads["w"].item(), stage.in_flight
    (3.0, 2.0, 0)
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        params: Mapping[str, Tensor],
        *,
        grads: torch.dtype | Gradients | None = None,
        recompute: Iterable[str] = (),
        reads: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.units = dict(units)
        self.params = dict(params)
        self.grads = grads if isinstance(grads, Gradients) else Gradients(self.params, grads)
        self.recompute = frozenset(recompute)
        self.reads = wiring(self.units, reads or {})
        names = {id(p): n for n, p in self.params.items()}
        self._weights = {u: {names[id(p)]: p for p in m.parameters()} for u, m in self.units.items()}
        self._flows: dict[int, _Flow] = {}
        self._readers = Counter(r for reads in self.reads.values() for r in reads)
        self._again = Counter(r for u, reads in self.reads.items() for r in reads if self._made_again(r, u))
        self._ends = tuple(u for u in self.units if not self._readers[u])

    @property
    def in_flight(self) -> int:
        """Microbatches of which something is still held."""
        return len(self._flows)

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
        for name in names:
            match pass_:
                case Pass.F:
                    self._forward(mb, name)
                case Pass.R:
                    self._recompute(mb, name)
                case Pass.I:
                    self._input_grad(mb, name)
                case Pass.W:
                    self._weight_grad(mb, name)

    def whole(self, mb: int, units: Sequence[str] | None = None) -> None:
        """B: I and W of each unit at once, the units given (default: all) in backward order."""
        for name in list(self.units)[::-1] if units is None else units:
            unit = self._take(mb, name)
            self._pass_on(mb, name, unit, unit.run.whole(*self._arrived(mb, name, unit)))
            self._drop(mb, name)

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

    # -- whole stages, in one call -----------------------------------------------------------------------------------

    def forward(self, mb: int, *acts: Tensor) -> Values:
        """F of the whole stage: input in, output out."""
        self.feed(mb, *acts)
        self.run(Pass.F, mb)
        return self.take_output(mb)

    def backward(self, mb: int, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """B of the whole stage: output gradient in, input gradient out."""
        self._feed_if(mb, grads)
        self.whole(mb)
        return self.take_input_grad(mb)

    def backward_input(self, mb: int, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """I of the whole stage."""
        self._feed_if(mb, grads)
        self.run(Pass.I, mb)
        return self.take_input_grad(mb)

    def backward_weight(self, mb: int) -> None:
        """W of the whole stage."""
        self.run(Pass.W, mb)

    # -- units -------------------------------------------------------------------------------------------------------

    def _forward(self, mb: int, name: str) -> None:
        flow, module, reads = self._flow(mb), self.units[name], self.reads[name]
        inputs = [flow.acts[r] for r in reads]
        unit = _Unit(SplitRun(self._weights[name], lambda n, g: self.grads.add(n, g, mb)), tuple(map(len, inputs)))
        acts, extras = tuple(x for values in inputs for x in values), flow.extras.pop(name, ())
        if name in self.recompute:
            unit.inputs = tuple(None if self._made_again(r, name) else flow.acts[r] for r in reads)
            unit.extras, unit.waits_for_r = extras, True
            with torch.no_grad():
                out = module(*acts, *extras)
            outs = (out,) if isinstance(out, Tensor) else tuple(out)
        else:
            outs = unit.run.forward(module, *acts, extras=extras)
        for r in reads:
            _used(flow.acts, flow.left, r)
        flow.acts[name], flow.left[name] = outs, self._readers[name]
        unit.outs, flow.units[name] = len(outs), unit

    def _recompute(self, mb: int, name: str) -> None:
        flow = self._flow(mb)
        unit = flow.units[name]
        if not unit.waits_for_r:
            return
        acts: list[Tensor] = []
        for r, given in zip(self.reads[name], unit.inputs, strict=True):
            if given is None and flow.units[r].waits_for_r:
                self._recompute(mb, r)
            acts += flow.again[r] if given is None else given
            if given is None:
                _used(flow.again, flow.left_again, r)
        outs = unit.run.forward(self.units[name], *acts, extras=unit.extras)
        unit.inputs, unit.extras, unit.waits_for_r = (), (), False
        if self._again[name]:
            flow.again[name], flow.left_again[name] = outs, self._again[name]

    def _input_grad(self, mb: int, name: str) -> None:
        unit = self._take(mb, name)
        self._pass_on(mb, name, unit, unit.run.input_grad(*self._arrived(mb, name, unit)))
        if not self._weights[name]:
            self._drop(mb, name)  # it has no W

    def _weight_grad(self, mb: int, name: str) -> None:
        if self._weights[name]:
            self._take(mb, name).run.weight_grad()
            self._drop(mb, name)

    def _arrived(self, mb: int, name: str, unit: _Unit) -> Grads:
        """The gradients of a unit's outputs; none for a loss."""
        grads = self._flow(mb).grads.pop(name, [])
        return grads if any(g is not None for g in grads) else [None] * unit.outs

    def _pass_on(self, mb: int, name: str, unit: _Unit, grads: Sequence[Tensor | None]) -> None:
        flow, first = self._flow(mb), 0
        for r, size in zip(self.reads[name], unit.sizes, strict=True):
            new, first = grads[first : first + size], first + size
            before = flow.grads.get(r, [None] * size)
            flow.grads[r] = [b if a is None else a if b is None else a + b for a, b in zip(before, new, strict=True)]

    def _take(self, mb: int, name: str) -> _Unit:
        unit = self._flow(mb).units[name]
        if unit.waits_for_r:
            self._recompute(mb, name)
        return unit

    def _made_again(self, read: str, reader: str) -> bool:
        """Whether backward of `reader` gets this input from a recomputed unit."""
        both = read in self.recompute and reader in self.recompute
        return both and read.split(".")[0] == reader.split(".")[0]

    def _feed_if(self, mb: int, grads: Sequence[Tensor | None]) -> None:
        if grads:
            self.feed_grad(mb, *grads)

    def _drop(self, mb: int, name: str) -> None:
        del self._flow(mb).units[name]
        self._tidy(mb)

    def _flow(self, mb: int) -> _Flow:
        if mb not in self._flows:
            self._flows[mb] = _Flow()
        return self._flows[mb]

    def _tidy(self, mb: int) -> None:
        if self._flows[mb].idle():
            del self._flows[mb]


def _used(values: dict[str, Values], left: Counter[str], name: str) -> None:
    """One reader more has run; the last one lets go."""
    left[name] -= 1
    if not left[name]:
        del values[name]
