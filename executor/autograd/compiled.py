"""A unit whose passes are compiled by Inductor, in place of `SplitPass`: F, I and W are one compiled graph each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from executor.autograd.inductor import Kernel, PassGraphs, options, passes, placeholders, results
from executor.autograd.split import Sink
from executor.device import clock
from executor.modules.attention.attend import forget_masks
from executor.modules.attention.rope import forget_tables
from executor.modules.base import TORCH, TRACING, BuiltChunks, example_extra
from executor.modules.remade import outputs
from executor.parallel.inline import RankAxis, RankRegion
from executor.parallel.traced import collectives_traced, over_axes
from ir.core.errors import ErrorKind, PiperError
from ir.job.build import PreparedJob, precision_of

Note = Callable[[str], None]


@dataclass(frozen=True)
class CompiledPart:
    """One unit, compiled. names: global, of its weights. extras: which of those of a microbatch are a scale, by place.

    A loss is computed for a scale of 1, and multiplied: torch would take the number for a constant.
    """

    plan: PassGraphs
    code: Mapping[str, Kernel]
    weights: Mapping[str, Tensor]
    buffers: tuple[Tensor, ...]
    scales: tuple[bool, ...]
    axes: Mapping[str, RankAxis] = field(default_factory=dict)  # whom its code meets

    def begin(self, sink: Sink) -> CompiledPass:
        return CompiledPass(self, sink)


@dataclass(slots=True)
class CompiledPass:
    """As `SplitPass`: forward once, then `input_grad`, then `weight_grad`."""

    part: CompiledPart
    sink: Sink
    held: dict[str, Tensor] = field(default_factory=dict)  # what later passes read, by the graphs' names
    scale: float = 1.0
    early: dict[str, Tensor] = field(default_factory=dict)  # weight gradients that came with I, until W hands them in

    def forward(self, module: Callable[..., Any], *inputs: Tensor, extras: Sequence[object] = ()) -> tuple[Tensor, ...]:
        """F. The module is not called: its code is."""
        part, plan = self.part, self.part.plan
        given = [*inputs, *(e for e in extras if isinstance(e, Tensor)), *part.buffers]
        for extra, scales in zip(extras, part.scales, strict=True):
            if scales:
                assert isinstance(extra, float)
                self.scale = extra
        first = len(part.weights)
        self.held = {f"in{first + k}": x.contiguous() for k, x in enumerate(given)}
        found = self._run("F")
        later = {n for p in "IW" for n in plan.reads[p]}
        self.held = {n: x for n, x in self.held.items() if n in later}
        self.held |= zip(plan.keeps["F"], found[(n := len(plan.outs)) :], strict=True)
        return tuple(x * self.scale for x in found[:n]) if any(part.scales) else tuple(found[:n])

    def remake(self) -> None:
        """R: compiled code keeps what its passes read."""

    def input_grad(self, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        part, plan = self.part, self.part.plan
        for k, out in enumerate(plan.outs):
            if (grad := grads[k] if k < len(grads) else None) is None:  # a loss has none: it is multiplied
                value = self.scale if any(part.scales) else 0.0
                grad = torch.full(out.shape, value, dtype=out.dtype, device=out.device)
            self.held[f"grad{k}"] = grad.contiguous()
        found = self._run("I")
        got = dict(zip(plan.dx, found, strict=False))
        later = set(plan.reads["W"])
        self.held = {n: x for n, x in self.held.items() if n in later}
        self.held |= zip(plan.keeps["I"], found[len(plan.dx) :], strict=True)
        self.early = {n: got[k] for k, n in enumerate(part.weights) if k in got}
        return tuple(got.get(len(part.weights) + k) for k in range(plan.acts))

    def weight_grad(self) -> None:
        names = list(self.part.weights)
        found = {names[k]: grad for k, grad in zip(self.part.plan.dw, self._run("W"), strict=True)}
        for name, grad in (self.early | found).items():
            self.sink(name, _hooked(self.part.weights[name], grad))
        self.held, self.early = {}, {}

    def _run(self, pass_: str) -> Sequence[Tensor]:
        if (code := self.part.code.get(pass_)) is None:
            return ()
        weights = {f"in{k}": w.detach() for k, w in enumerate(self.part.weights.values())}
        with torch.no_grad(), over_axes(self.part.axes):
            return code(*(weights[n] if n in weights else self.held[n] for n in self.part.plan.reads[pass_]))


def _hooked(weight: Tensor, grad: Tensor) -> Tensor:
    """What the hooks of a parameter make of its gradient; autograd, which would call them, is not there."""
    for hook in (weight._backward_hooks or {}).values():
        made = hook(grad)
        grad = grad if made is None else made
    return grad


class PartCompiler:
    """Compiles units of one rank; equal graphs once. note: is told before each, which may take a minute. axes: to the
    ranks that its units meet.
    """

    def __init__(self, note: Note, axes: Mapping[str, RankAxis] | None = None) -> None:
        self.note, self.axes = note, axes or {}
        self.made: dict[str, Mapping[str, Kernel]] = {}

    @property
    def graphs(self) -> int:
        return sum(len(code) for code in self.made.values())

    def part(
        self,
        name: str,
        unit: nn.Module,
        weights: Mapping[str, Tensor],
        acts: Sequence[Tensor],
        extras: Sequence[object],
    ) -> CompiledPart:
        """A unit, for inputs of these shapes. Raises PiperError (model): torch cannot compile it."""
        self.note(f"compile {name}")
        with TRACING:
            try:
                plan = _traced(unit, weights, acts, extras)
                if (key := plan.key) not in self.made:
                    self.made[key] = {p: self._compiled(f"{name} {p}", g) for p, g in plan.graphs.items() if results(g)}
            except Exception as error:  # of dynamo, of Inductor, of the C++ compiler, of the user's code: of any kind
                said = next((line for line in str(error).splitlines() if line.strip()), "")
                message = f"{name} cannot be compiled ({type(error).__name__}: {said.strip()[:300]})"
                fix = "run.compile = false"
                raise PiperError(ErrorKind.MODEL, message, key="run.compile", suggestion=fix) from error
        scales = tuple(not isinstance(e, Tensor) for e in extras)
        dry = {name: axis.unconnected() for name, axis in self.axes.items()}
        part = CompiledPart(plan, self.made[key], weights, tuple(_constants(unit, weights).values()), scales, dry)
        trial = part.begin(lambda name, grad: None)  # what its code does when it is first called
        trial.input_grad(*(torch.zeros_like(out) for out in trial.forward(unit, *acts, extras=extras)))
        trial.weight_grad()
        return replace(part, axes=self.axes)

    def _compiled(self, what: str, graph: torch.fx.GraphModule) -> Kernel:
        from torch._inductor import standalone_compile

        self.note(f"compile {what}")
        given = [n.meta["val"] for n in placeholders(graph)]
        code: Kernel = standalone_compile(graph, given, dynamic_shapes="from_graph", options=options())
        return code


def _forget() -> None:
    """Tables that were traced are no tensors: neither the next trace nor a run must find them."""
    forget_tables()
    forget_masks()


def _constants(unit: nn.Module, weights: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """What a unit reads and nobody trains, by id: frozen parameters, buffers."""
    trained = {id(w) for w in weights.values()}
    return {id(t): t for t in (*unit.parameters(), *unit.buffers()) if id(t) not in trained}


def _traced(
    unit: nn.Module, weights: Mapping[str, Tensor], acts: Sequence[Tensor], extras: Sequence[object]
) -> PassGraphs:
    """The unit as a function of weights, inputs, extras and buffers."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    ids = {id(w): k for k, w in enumerate(weights.values())}
    constants = _constants(unit, weights)
    held = {i: k for k, i in enumerate(constants)}
    every = [*unit.named_parameters(remove_duplicate=False), *unit.named_buffers(remove_duplicate=False)]
    places = {n: ids[id(t)] for n, t in every if id(t) in ids}
    fixed = {n: held[id(t)] for n, t in every if id(t) in held}
    free = [e for e in extras if isinstance(e, Tensor)]

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        inputs, last = values[len(weights) : len(weights) + len(acts)], values[len(values) - len(held) :]
        _forget()
        rest = iter(values[len(weights) + len(acts) :])
        more = [next(rest) if isinstance(e, Tensor) else 1.0 for e in extras]
        named = {n: values[k] for n, k in places.items()} | {n: last[k] for n, k in fixed.items()}
        outs = outputs(torch.func.functional_call(unit, named, (*inputs, *more)))
        return tuple(
            o.clone() if o._is_view() or any(o is v for v in values) else o for o in outs
        )  # AOT takes no views

    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    with torch.enable_grad(), collectives_traced():
        inputs = [a.detach().requires_grad_(a.is_floating_point()) for a in acts]
        fakes = [mode.from_tensor(g) for g in (*weights.values(), *inputs, *free, *constants.values())]
        try:
            return passes(function, fakes, len(weights), len(acts))
        finally:
            _forget()


EAGER = ("router", "experts", "shared", "add")  # what experts get is known by the host alone, and only as it runs


@dataclass(frozen=True)
class CompiledParts:
    """What one rank has compiled. graphs: so many, equal ones once; seconds: how long it took."""

    parts: dict[str, CompiledPart]
    graphs: int = 0
    seconds: float = 0.0

    def told(self) -> tuple[int, int, float]:
        """For the run's object: units, graphs, seconds."""
        return len(self.parts), self.graphs, self.seconds


def compile_parts(
    prepared: PreparedJob,
    built: BuiltChunks,
    units: Iterable[str],
    device: torch.device,
    region: RankRegion,
    note: Note | None,
) -> CompiledParts:
    """Compile those units of a rank that can be; before its parameters become views of flat buckets. note: told before
    each graph.
    """
    job, began = prepared.job, clock.now()
    batch = job.schedule.microbatch_size, job.model.seq_len
    ids = torch.zeros(batch, dtype=torch.int64, device=device)
    shape = batch[0], batch[1] // region.divides, prepared.config.hidden
    formats = precision_of(job)
    stream, normed = (torch.zeros(*shape, dtype=TORCH[d], device=device) for d in (formats.stream, formats.compute))
    names = {id(p): n for n, p in built.params.items()}
    made = PartCompiler(note or (lambda text: None), region.axes)
    parts, first = {}, prepared.base.entries[0].name
    for name in units:
        if name.rpartition(".")[2] in EAGER:
            continue
        unit, reads = built.units[name], built.reads.get(name, ("",))
        weights = {names[id(p)]: p for p in unit.parameters() if id(p) in names}
        if name == first and not weights:  # a frozen embedding: nothing of it has a gradient
            continue
        act = ids if name == first else normed if name.endswith(".head") else stream
        acts = [act] * len(reads)
        extras = [example_extra(w, ids) for w in built.extras.get(name, ())]
        parts[name] = made.part(name, unit, weights, acts, extras)
    return CompiledParts(parts, made.graphs, clock.now() - began)
