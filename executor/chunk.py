"""A stage's chunks at work: forward, input gradient, weight gradient of one microbatch, and the sums of gradients.

A `Stage` is a row of named units ("l0", or finer, "l0.attn"), each cut off from its neighbours' autograd graphs, so
an op of the plan may cover any unbroken stretch of them, another one in forward than in backward. Nothing depends on
where the cuts are: the sums are taken in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

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

    def __getitem__(self, name: str) -> Tensor:
        return self.sums[name]

    def add(self, name: str, grad: Tensor) -> None:
        """Add one microbatch's gradient."""
        self.sums[name].add_(grad.detach())

    def zero(self) -> None:
        """Start a new step."""
        for g in self.sums.values():
            g.zero_()


@dataclass(slots=True)
class _Unit:
    """One unit's life for one microbatch: what forward left, until W."""

    run: SplitRun
    inputs: tuple[Tensor, ...] = ()
    extras: tuple[object, ...] = ()
    waits_for_r: bool = False


@dataclass(slots=True)
class _Flow:
    """What stands at the edge of the work done so far of one microbatch, in either direction."""

    acts: tuple[Tensor, ...] = ()
    grads: tuple[Tensor | None, ...] = ()
    units: dict[str, _Unit] = field(default_factory=dict)
    extras: dict[str, tuple[object, ...]] = field(default_factory=dict)


class Stage:
    """Some units of the model, in order, and every microbatch now inside them.

    units: name → module, called with the activations (and its `extras`, e.g. the labels for the head).
    params: global name → parameter; one name may be used by several units. recompute: units whose forward keeps only
    its input, and not even that where the unit before, of the same chunk, makes it again; pass R makes the rest (I and
    W do it themselves where it did not run).

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
    ) -> None:
        self.units = dict(units)
        self.params = dict(params)
        self.grads = grads if isinstance(grads, Gradients) else Gradients(self.params, grads)
        self.recompute = frozenset(recompute)
        names = {id(p): n for n, p in self.params.items()}
        self._weights = {u: {names[id(p)]: p for p in m.parameters()} for u, m in self.units.items()}
        self._flows: dict[int, _Flow] = {}
        pairs = [(a, b) for a, b in pairwise(self.units) if a.split(".")[0] == b.split(".")[0]]
        self._before = {b: a for a, b in pairs if a in self.recompute and b in self.recompute}
        self._behind = {a: b for b, a in self._before.items()}

    @property
    def in_flight(self) -> int:
        """Microbatches of which something is still held."""
        return len(self._flows)

    # -- one pass over a stretch of units: what an op of the plan calls ----------------------------------------------

    def feed(self, mb: int, *acts: Tensor) -> None:
        """Give microbatch mb's input (token ids or received activations) to the next forward."""
        self._flow(mb).acts = acts

    def feed_extra(self, mb: int, unit: str, *extras: object) -> None:
        """Give a unit its further arguments: the head its labels. They get no gradient."""
        self._flow(mb).extras[unit] = extras

    def feed_grad(self, mb: int, *grads: Tensor | None) -> None:
        """Give the gradient of the stage's output to the next backward. A loss needs none."""
        self._flow(mb).grads = grads

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
            run, flow = self._take(mb, name).run, self._flow(mb)
            grads, flow.grads = flow.grads, ()
            flow.grads = run.whole(*grads)
            self._drop(mb, name)

    def take_output(self, mb: int) -> tuple[Tensor, ...]:
        """What the last forward left, to be sent or read; the stage lets go of it."""
        flow = self._flow(mb)
        acts, flow.acts = flow.acts, ()
        self._tidy(mb)
        return acts

    def take_input_grad(self, mb: int) -> tuple[Tensor | None, ...]:
        """The gradient of the stage's input, to be sent; the stage lets go of it."""
        flow = self._flow(mb)
        grads, flow.grads = flow.grads, ()
        self._tidy(mb)
        return grads

    # -- whole stages, in one call -----------------------------------------------------------------------------------

    def forward(self, mb: int, *acts: Tensor) -> tuple[Tensor, ...]:
        """F of the whole stage: input in, output out."""
        self.feed(mb, *acts)
        self.run(Pass.F, mb)
        return self.take_output(mb)

    def backward(self, mb: int, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """B of the whole stage: output gradient in, input gradient out."""
        self.feed_grad(mb, *grads)
        self.whole(mb)
        return self.take_input_grad(mb)

    def backward_input(self, mb: int, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """I of the whole stage."""
        self.feed_grad(mb, *grads)
        self.run(Pass.I, mb)
        return self.take_input_grad(mb)

    def backward_weight(self, mb: int) -> None:
        """W of the whole stage."""
        self.run(Pass.W, mb)

    # -- units -------------------------------------------------------------------------------------------------------

    def _forward(self, mb: int, name: str) -> None:
        flow, module = self._flow(mb), self.units[name]
        unit = _Unit(SplitRun(self._weights[name], self.grads.add))
        acts, extras = flow.acts, flow.extras.pop(name, ())
        if name in self.recompute:
            unit.inputs, unit.extras, unit.waits_for_r = () if name in self._before else acts, extras, True
            with torch.no_grad():
                out = module(*acts, *extras)
            flow.acts = (out,) if isinstance(out, Tensor) else tuple(out)
        else:
            flow.acts = unit.run.forward(module, *acts, extras=extras)
        flow.units[name] = unit

    def _recompute(self, mb: int, name: str) -> None:
        units = self._flow(mb).units
        unit = units[name]
        if not unit.waits_for_r:
            return
        if name in self._before:
            self._recompute(mb, self._before[name])
        outs = unit.run.forward(self.units[name], *unit.inputs, extras=unit.extras)
        unit.inputs, unit.extras, unit.waits_for_r = (), (), False
        if name in self._behind:
            units[self._behind[name]].inputs = outs

    def _input_grad(self, mb: int, name: str) -> None:
        run, flow = self._take(mb, name).run, self._flow(mb)
        grads, flow.grads = flow.grads, ()
        flow.grads = run.input_grad(*grads)

    def _weight_grad(self, mb: int, name: str) -> None:
        self._take(mb, name).run.weight_grad()
        self._drop(mb, name)

    def _take(self, mb: int, name: str) -> _Unit:
        unit = self._flow(mb).units[name]
        if unit.waits_for_r:
            self._recompute(mb, name)
        return unit

    def _drop(self, mb: int, name: str) -> None:
        del self._flow(mb).units[name]
        self._tidy(mb)

    def _flow(self, mb: int) -> _Flow:
        if mb not in self._flows:
            self._flows[mb] = _Flow()
        return self._flows[mb]

    def _tidy(self, mb: int) -> None:
        flow = self._flows[mb]
        if not (flow.units or flow.acts or any(g is not None for g in flow.grads)):
            del self._flows[mb]
