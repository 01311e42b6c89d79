"""Backward in two halves: input gradients now (I), weight gradients later (W), for any module, bit for bit.

Every torch function that reads a weight beside another tensor becomes a *seam*: one autograd node on the outside,
with a small graph of its own inside. Running the outer graph gives the input gradients, frees all other saved
tensors, and leaves one `DeferredPass` per seam: what the function saved, and its output gradient. `W` runs those
jobs. The same kernels run in the same order as in a whole backward, so the sums are the same to the last bit.
A linear, as most seams are, stays in the outer graph, which is asked for its output's gradient beside the others.
Weights of any shape and use count: Linear, Embedding, norms, a weight used twice, a weight cast or transposed before
use. (torch's private `stage_backward_input/weight` is the oracle in the tests; it frees nothing between I and W.)

Two limits. A composite function that reads its input several times (`F.rms_norm` with a weight) sums these gradients
before those of the input's other readers, so against torch's whole backward, not between plans, the last bit may
differ. A weight that reaches a function no mode sees (a user's `autograd.Function`, our norms) gets its gradient in I
already, and hands it in with W; a Python function that calls `handle_torch_function` is seen, as one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from executor.autograd.deferred import DeferredLinearPass, DeferredPass
from executor.modules.remade import RemadeBuffers, outputs

Sink = Callable[[str, Tensor], None]
Casts = WeakValueDictionary[tuple[int, torch.dtype], Tensor]  # of weights, by id and format, that some graph holds
Room = Callable[[str, torch.dtype], Tensor | None]
SEQUENCES = (tuple, list)
_FLOATS = {(d,) for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}  # what `Tensor.to` is asked for
LINEARS: frozenset[Any] = frozenset({F.linear, torch.ops.aten.linear.default})  # as exported graphs call them, too
ADDED: frozenset[Any] = frozenset({torch.addmm, torch.ops.aten.addmm.default})  # bias, x, and a weight (into, out)


class SplitPass:
    """One microbatch's passage through one module: forward once, then `input_grad`, then `weight_grad`.

    weights: global name → parameter. sink: receives (name, gradient), once per weight and microbatch. room:
    (name, dtype) → a tensor for this gradient, which is then made there, and not handed to the sink; or None.
    remade: values that are not kept for backward, but made again. casts: of weights that are wider than what they meet,
    which passages share.

    >>> layer, got = torch.nn.Linear(3, 2, bias=False), {}
    >>> run = SplitPass({"w": layer.weight}, got.__setitem__)
    >>> (y,) = run.forward(layer, torch.ones(1, 3))
    >>> dx, = run.input_grad(torch.ones(1, 2)); sorted(got)
    []
    >>> run.weight_grad(); got["w"].tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        sink: Sink,
        room: Room = lambda name, dtype: None,
        remade: RemadeBuffers | None = None,
        casts: Casts | None = None,
        *,
        inputs: bool = True,
    ) -> None:
        """inputs: whether they have gradients, too."""
        self._wanted = inputs
        self.room, self.remade, self.casts = room, remade, Casts() if casts is None else casts
        self.weights = {n: w for n, w in weights.items() if w.requires_grad}
        self.names = {id(w): n for n, w in self.weights.items()}
        self.sink = sink
        self.jobs: list[DeferredPass | DeferredLinearPass] = []
        self.uses: dict[str, int] = {}
        self._partial: dict[str, Tensor] = {}
        self._inputs: tuple[GradientEdge | None, ...] = ()
        self._roots: tuple[GradientEdge | None, ...] = ()

    def forward(self, module: Callable[..., Any], *inputs: Tensor, extras: Sequence[object] = ()) -> tuple[Tensor, ...]:
        """Run the module and note the way back. Floating inputs get gradients, extras none; outputs are detached."""
        device = next((t.device for t in (*inputs, *self.weights.values())), None)
        self.anchor = torch.zeros((), requires_grad=True, device=device)
        with torch.enable_grad():
            wanted = [self._wanted and x.is_floating_point() for x in inputs]
            given = [_apply(_Source, self.anchor, x) if w else x for x, w in zip(inputs, wanted, strict=True)]
            self._inputs = tuple(get_gradient_edge(x) if x.requires_grad else None for x in given)
            with _Seams(self), nullcontext() if self.remade is None else self.remade.remaking():
                outs = outputs(module(*given, *extras))
        self._roots = tuple(get_gradient_edge(o) if o.requires_grad else None for o in outs)
        return tuple(o.detach() for o in outs)

    def remake(self) -> None:
        """R: make what was not kept."""
        if self.remade is not None:
            self.remade.make()

    def input_grad(self, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """I: gradients of the inputs (None where there is none); weight gradients stay behind as jobs."""
        dxs = self._input_grad(*grads)
        if self.remade is not None:
            self.remade.forget(late=False)
        return dxs

    def _input_grad(self, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grads = grads or (None,) * len(self._roots)
        given = any(g is not None for g in grads)  # else the roots are losses
        pairs = [
            (r, g) for r, g in zip(self._roots, grads, strict=True) if r is not None and (g is not None or not given)
        ]
        inputs, self._inputs, self._roots = self._inputs, (), ()
        if not pairs:
            return (None,) * len(inputs)
        roots, dys = [r for r, _ in pairs], [g for _, g in pairs]
        del pairs, grads
        linears = [job for job in self.jobs if type(job) is DeferredLinearPass]
        # The weights are asked for too: what reaches one past all seams comes here, early.
        ends: list[Any] = [*(e for e in inputs if e is not None), *(j.edge for j in linears)]
        ends += [self.anchor, *self.weights.values()]
        found = iter(torch.autograd.grad(roots, ends, dys, allow_unused=True))
        dxs = tuple(None if e is None else next(found) for e in inputs)
        for job in linears:
            job.edge, job.grads = None, next(found)
        next(found)
        for name, direct in zip(self.weights, found, strict=True):
            if direct is not None:
                self._partial[name] = direct
        return dxs

    def weight_grad(self) -> None:
        """W: finish the jobs in the order the whole backward would have run them; afterwards nothing is held."""
        with torch.no_grad():
            while self.jobs:
                job = self.jobs.pop()
                if job.grads is None:  # nothing that was asked for comes from it
                    self._collect(job.weights, (None,) * len(job.weights))
                elif not self._made_in_its_room(job):
                    self._collect(job.weights, job.run())
                del job
        if self.remade is not None:
            self.remade.forget(late=True)
        for name, grad in self._partial.items():
            self.sink(name, grad)
        self._partial.clear()

    def _made_in_its_room(self, job: DeferredPass | DeferredLinearPass) -> bool:
        """The gradient of a linear's only weight, where that has no other use."""
        if type(job) is not DeferredLinearPass or len(job.weights) > 1:
            return False
        name = self.names[id(job.weights[0])]
        if self.uses[name] > 1 or name in self._partial or (room := self.room(name, job.weights[0].dtype)) is None:
            return False
        self.uses[name] -= 1
        job.run(room)
        return True

    def reads(self, job: DeferredPass | DeferredLinearPass) -> None:
        """One job more, and one use more of each of its weights."""
        self.jobs.append(job)
        for w in job.weights:
            name = self.names[id(w)]
            self.uses[name] = self.uses.get(name, 0) + 1

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, flipped: bool = False) -> Tensor:
        """`F.linear` of whole weights, the usual function of weights, in torch's own graph: I asks it for one more.
        flipped: `torch.addmm`.
        """
        weights, kept_bias = (weight,) if bias is None else (weight, bias), None if bias is None else bias.detach()
        if flipped:
            assert kept_bias is not None
            y = torch.addmm(kept_bias, x, weight.detach())
        else:
            y = F.linear(x, weight.detach(), kept_bias)
        made = y if y._base is None else y._base  # a view has another history when it has been written to
        kept = x.detach() if self.remade is None else self.remade.kept(x.detach(), late=True)
        self.reads(DeferredLinearPass(kept, x._version, weights, get_gradient_edge(made), flipped))
        return y

    def cast(self, weight: Tensor, into: torch.dtype) -> Tensor:
        """`weight.to(into)`, made once while others hold it for their backward."""
        made = self.casts.get((id(weight), into))
        if made is None:
            made = self.casts[id(weight), into] = weight.detach().to(into)
        found: Tensor = _apply(_Cast, weight, made)
        return found

    def leaf(self, act: Tensor) -> Tensor:
        """An activation where the graph of a seam begins; one that is not kept must not stay as a leaf."""
        if self.remade is None or not self.remade.holds(act):
            return act.detach().requires_grad_()
        with torch.enable_grad():
            source: Tensor = _apply(_Source, self.anchor, act)
        return source

    def _collect(self, weights: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
        for weight, grad in zip(weights, grads, strict=True):
            name = self.names[id(weight)]
            self.uses[name] -= 1
            if grad is None:
                continue
            # Several uses of one weight are summed first, as autograd does, then accumulated over microbatches.
            if (before := self._partial.pop(name, None)) is not None:
                grad = before + grad
            if self.uses[name]:
                self._partial[name] = grad
            else:
                self.sink(name, grad)


class _Seams(TorchFunctionMode):
    """While active, functions of a weight and something else are seams; functions of weights alone are noted."""

    def __init__(self, run: SplitPass) -> None:
        super().__init__()
        self.run = run
        self.derived: dict[int, tuple[Tensor, tuple[Tensor, ...]]] = {}  # id → (kept alive, the weights it comes from)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        names, derived = self.run.names, self.derived
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        for x in args:
            if id(x) in names or id(x) in derived or isinstance(x, SEQUENCES):
                break
        else:
            if not kwargs:
                return func(*args)
        if not kwargs and func in LINEARS and _is_plain(names, *args):
            return self.run.linear(*args)
        if not kwargs and func in ADDED and args[0].shape == args[2].shape[1:]:
            bias, x, weight = args
            if _is_plain(names, x, weight, bias):
                return self.run.linear(x, weight, bias, flipped=True)
        weights: dict[int, Tensor] = {}
        is_derived, others, acts = False, 0, []
        for x in _tensors(args, kwargs):
            if id(x) in names and x.requires_grad:
                weights[id(x)] = x
            elif id(x) in derived:
                is_derived = True
                weights.update((id(w), w) for w in derived[id(x)][1])
            else:
                others += 1
                if x.requires_grad:
                    acts.append(x)
        if not weights:
            return func(*args, **kwargs)
        if not others:
            casts = func is torch.Tensor.to and not kwargs and id(args[0]) in names and args[1:] in _FLOATS
            out = self.run.cast(*args) if casts else func(*args, **kwargs)
            for y in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(y, Tensor) and y.requires_grad and id(y) not in names:
                    derived[id(y)] = (y, tuple(weights.values()))
            return out
        name, target = getattr(func, "__name__", "").partition(".")[0], args[0] if args else None  # add_.Tensor, too
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if writes and isinstance(target, Tensor):
            # In place (`x += w` arrives as add_): run it on a copy, then write the result, and its history, back.
            call = _Call(func, args, kwargs, tuple(weights.values()), is_derived, in_place=True)
            return target.copy_(_Seam.run(self.run, call, tuple(acts)))
        return _Seam.run(self.run, _Call(func, args, kwargs, tuple(weights.values()), is_derived), tuple(acts))


class _Cast(torch.autograd.Function):
    """A weight in another format, of which that is there already."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, made: Tensor) -> Tensor:
        ctx.dtype, ctx.made = weight.dtype, made  # held for the others: `Casts` alone would let go of it
        return made.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


class _Source(torch.autograd.Function):
    """An input's place in the graph, without holding its data: who needs that, saves it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


@dataclass(frozen=True)
class _Call:
    """One call of a torch function that reads weights. derived: they were made of weights by another function."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    weights: tuple[Tensor, ...]
    derived: bool
    in_place: bool = False


class _Seam(torch.autograd.Function):
    """One function of weights, as one autograd node whose weight gradients may wait."""

    @staticmethod
    def run(run: SplitPass, call: _Call, acts: tuple[Tensor, ...]) -> Any:
        """Apply, then put a list or tuple of outputs back into its form."""
        form: list[type | None] = []
        outs = _apply(_Seam, run, call, form, run.anchor, *acts)
        return outs if form[0] is None else form[0](outs if isinstance(outs, tuple) else (outs,))

    @staticmethod
    def forward(ctx: Any, run: SplitPass, call: _Call, form: list[type | None], anchor: Tensor, *acts: Tensor) -> Any:
        leaves = {id(a): run.leaf(a) for a in acts}
        with torch.enable_grad(), nullcontext() if run.remade is None else run.remade.lately():
            given = _swap(call.args, leaves)
            if call.in_place:
                given = (given[0].clone(), *given[1:])
            made = call.func(*given, **_swap(call.kwargs, leaves))
            out = given[0] if call.in_place and made is None else made  # x[0] = w gives nothing
        outs = (out,) if isinstance(out, Tensor) else tuple(out)
        form.append(None if isinstance(out, Tensor) else (list if isinstance(out, list) else tuple))
        live = [isinstance(o, Tensor) and o.requires_grad for o in outs]  # some functions give a None beside a tensor
        edges = tuple(get_gradient_edge(o) for o, on in zip(outs, live, strict=True) if on)
        ctx.set_materialize_grads(False)
        ctx.live = live
        results = tuple(o.detach() if isinstance(o, Tensor) else o for o in outs)
        dead = (r for r, on in zip(results, live, strict=True) if isinstance(r, Tensor) and not on)
        ctx.mark_non_differentiable(*dead)
        ctx.acts = [id(a) for a in acts]
        ends = tuple(x if x.is_leaf else get_gradient_edge(x) for x in leaves.values())
        ctx.job = DeferredPass(edges, ends, call.weights, call.derived)
        run.reads(ctx.job)
        return results[0] if isinstance(out, Tensor) else results

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        job: DeferredPass = ctx.job
        ctx.job = None
        live = [(e, g) for e, g in zip(job.edges, (g for g, on in zip(dys, ctx.live, strict=True) if on), strict=True)]
        live = [(e, g) for e, g in live if g is not None]
        none: tuple[Tensor | None, ...] = (None,) * 4  # run, call, form, anchor
        dxs: tuple[Tensor | None, ...] = (None,) * len(job.leaves)
        if not live:
            return none + dxs
        job.edges, job.grads = tuple(e for e, _ in live), tuple(g for _, g in live)
        if job.leaves:
            dxs = torch.autograd.grad(job.edges, job.leaves, job.grads, retain_graph=True, allow_unused=True)
        job.leaves = ()
        by_id = dict(zip(dict.fromkeys(ctx.acts), dxs, strict=True))
        # An activation passed twice to one function gets its gradient once: its leaf was one.
        return none + tuple(by_id.pop(a, None) for a in ctx.acts)


def _is_plain(names: Mapping[int, str], x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether a linear's weight gradient is the product written here in torch's own backward, too."""
    if id(weight) not in names or not (bias is None or id(bias) in names) or not x.requires_grad:
        return False
    if weight._backward_hooks or (bias is not None and bias._backward_hooks):
        return False  # autograd calls them
    plain = x.dim() > 1 and min(weight.shape) > 1 and x.is_contiguous() and weight.is_contiguous()
    return plain and x.dtype == weight.dtype and not (x.is_complex() or torch.is_autocast_enabled(x.device.type))


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    return function.apply(*args)


def _tensors(args: Any, kwargs: Any) -> Iterable[Tensor]:
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from (y for y in x if isinstance(y, Tensor))


def _swap(value: Any, leaves: Mapping[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return leaves.get(id(value), value)
    if isinstance(value, (tuple, list)):
        return type(value)(_swap(v, leaves) for v in value)
    if isinstance(value, dict):
        return {k: _swap(v, leaves) for k, v in value.items()}
    return value
