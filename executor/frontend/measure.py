"""What one unit's passes do and keep, found by running them without values (FakeTensor): kernels, bytes, lifetimes.

Storages are followed one by one, so nothing is counted twice and views cost nothing. What is neither made from an
input nor from a parameter (masks, rotary tables) is a constant and counted apart. `survey`
measures all units of a model.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)

from executor.autograd.split import SplitPass
from executor.device.device import on_host
from executor.frontend.fuse import fused
from executor.frontend.storages import PassCalls, StorageKernels
from executor.modules.attention.attend import forget_masks, kept_masks
from executor.modules.attention.rope import forget_tables
from executor.modules.base import BuiltChunks, Model, example_extra, wiring
from executor.modules.user.annotate import model_error
from executor.modules.user.exported import tensors_of
from executor.modules.user.model import UserModel
from executor.modules.user.routed import balanced
from executor.parallel.inline import MessageAxis
from ir.core.errors import PiperError
from ir.core.work import Message, Work

Sizes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


Take = Callable[[], tuple[Message, ...]]


@dataclass(frozen=True)
class PassMeasure:
    """One pass. workspace: bytes alive only while it runs, beside what was there, what it returns and leaves behind.
    messages: what it exchanges with ranks that share its work, in their order. work: its kernels one by one, as eager
    mode has them; compiled: as a compiler would fuse them; hidden: FLOPs of these on what a mask hides."""

    work: Work
    workspace: int
    messages: tuple[Message, ...] = ()
    compiled: Work = ()
    hidden: int = 0


@dataclass(frozen=True)
class PartMeasure:
    """One unit, one microbatch; bytes on one device.

    outs: of each output, whose shapes and formats are `shapes`. until_i, until_w: each storage that forward saves and
    I, or W, reads last; not inputs, outputs, constants. keeps, keeps_outs: until when an input, or the unit's own
    output, is read again: "I", "W" or "". stash: each storage made in I, or output gradient, that W reads.
    constants: bytes saved that depend on nothing. ins: bytes of each input.
    """

    forward: PassMeasure
    input_grad: PassMeasure
    weight_grad: PassMeasure
    shapes: Sizes
    outs: tuple[int, ...]
    until_i: tuple[int, ...] = ()
    until_w: tuple[int, ...] = ()
    keeps: tuple[str, ...] = ()
    keeps_outs: tuple[str, ...] = ()
    stash: tuple[int, ...] = ()
    constants: int = 0
    ins: tuple[int, ...] = ()


def measure(
    module: nn.Module,
    inputs: Sizes,
    extras: Sequence[object],
    weights: Mapping[str, Tensor],
    messages: Take = tuple,
    *,
    inward: bool = True,
    backward: bool = True,
) -> PartMeasure:
    """Run F, I and W of one unit on inputs of these shapes, inside the fake mode that its weights were made in.

    messages: asked for those noted since it was last asked. inward: whether inputs have gradients. backward: or F only.
    """
    with StorageKernels([*tensors_of(module), *kept_masks(), *(e for e in extras if isinstance(e, Tensor))]) as t:
        due = set[int]()  # what W hands out
        run = SplitPass(weights, lambda name, grad: due.update(t.holds([grad])), inputs=inward)
        acts = [torch.ones(s, dtype=d, device="cpu") for s, d in inputs]
        ins = t.given(acts)
        t.take()
        outs = list(run.forward(module, *acts, extras=extras))
        first, out = t.take(), t.holds(outs)
        forward, t.backward = PassMeasure(first.work, first.peak - t.now, messages()), True
        mine, sizes = t.of(outs), tuple((tuple(o.shape), o.dtype) for o in outs)
        if not backward:
            forward = replace(forward, compiled=fused([first.calls], [out], t.masks.share)[0], hidden=t.hidden)
            return PartMeasure(forward, none := PassMeasure((), 0), none, sizes, t.bytes(mine))
        acts.clear()
        outs.clear()
        saved = t.alive()
        input_grad, held, fresh, second, back = _input_grad(t, run, sizes)
        input_grad = replace(input_grad, messages=messages())
        t.take()
        start = t.now
        run.weight_grad()
        third = t.take()
        weight_grad = PassMeasure(third.work, third.peak - start, messages())
        del run
        if t.made(t.alive()):
            raise _keeps()
    own = t.made(saved) - {*ins, *mine}

    def until(serials: Iterable[int]) -> tuple[str, ...]:
        return tuple("" if k not in saved else "W" if k in held else "I" for k in serials)

    made = fused([first.calls, second.calls, third.calls], [out, back, due], t.masks.share)
    return PartMeasure(
        replace(forward, compiled=made[0], hidden=t.hidden),
        replace(input_grad, compiled=made[1]),
        replace(weight_grad, compiled=made[2]),
        sizes,
        t.bytes(mine),
        t.bytes(own - held),
        t.bytes(own & held),
        until(ins),
        until(mine),
        t.bytes(fresh),
        sum(t.bytes(saved - t.made(saved))),
        t.bytes(ins),
    )


def _keeps() -> PiperError:
    message, fix = "forward keeps a tensor that it has computed", "parametrizations.weight_norm, say, for weight_norm"
    return model_error(message, fix, "forwards that depend on parameters and inputs alone", "model.module")


def _input_grad(
    t: StorageKernels, run: SplitPass, sizes: Sizes
) -> tuple[PassMeasure, set[int], set[int], PassCalls, set[int]]:
    """Pass I. Returns it, what is held behind it, what of that was not there before forward ended, its calls, and the
    values that it hands out."""
    loss = len(sizes) == 1 and sizes[0][0] == ()
    before = t.alive()
    dys = [torch.ones(s, dtype=d, device="cpu") if d.is_floating_point and not loss else None for s, d in sizes]
    arrived = t.given(dys)
    t.take()
    start = t.now
    grads = list(run.input_grad(*dys))
    taken, wanted = t.take(), t.holds(grads)
    dys.clear()
    back = set(t.of(grads)) - before - set(arrived)
    grads.clear()
    held = t.made(t.alive())
    fresh = held - before
    left = sum(t.bytes((back | fresh) - set(arrived)))
    return PassMeasure(taken.work, max(0, taken.peak - start - left)), held, fresh, taken, wanted


@contextmanager
def without_values() -> Iterator[Callable[[Callable[[], object]], object]]:
    """Tensors made inside have shapes and no values, and take no memory. Gives what is to call a user's `build`."""
    with _OneMode(allow_non_fake_inputs=True) as mode, on_host():
        yield mode.built


class _OneMode(FakeTensorMode):
    """Copies of its tensors are its own: `build` may copy layers (torch.nn.TransformerEncoder does).

    building: nothing is remembered of the tensors made, as `Module.to` (which peft calls) swaps none that are.
    """

    building = False

    def __deepcopy__(self, memo: object) -> "_OneMode":
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # untyped
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            if self.building:
                self.fake_tensor_converter.meta_converter.tensor_memo.clear()

    def built(self, build: Callable[[], object]) -> object:
        """What `build` makes."""
        asarray = partial(_with_values, torch.asarray)
        with patch.object(self, "building", True), patch.object(torch, "asarray", asarray):
            return build()


def _with_values(asarray: Callable[..., Tensor], of: object, *args: Any, **kwargs: Any) -> Tensor:  # untyped
    """`torch.asarray`, of a file's bytes as outside of the mode, where it knows storages: peft reads adapters so."""
    with unset_fake_temporarily() if isinstance(of, torch.UntypedStorage) else nullcontext():
        return asarray(of, *args, **kwargs)


def survey(
    model: Model,
    size: int,
    length: int,
    *,
    chunks: Sequence[str] | None = None,
    given: Mapping[str, Sizes] | None = None,
    axis: MessageAxis | None = None,
    backward: bool = True,
) -> dict[str, PartMeasure]:
    """Measure the units of some chunks (default: all) on microbatches of `size` sequences of `length` tokens.

    given: what units outside of these chunks give. axis: notes their messages. backward: as `measure` has it. Call it
    inside `without_values`, so that weights are fake too.

    >>> from executor.modules.decoder import DecoderModel
    >>> from ir.workload.config.load import load_config
    >>> with without_values():
    ...     found = survey(DecoderModel(load_config("tiny-llama", {"num_hidden_layers": 1}), parts=True), 1, 16)
    >>> sum(k.flops for k in found["l0.mlp"].forward.work) == 3 * 2 * 16 * 64 * 128
    True
    """
    built = model.build(model.chunks if chunks is None else chunks)
    names = {id(p): n for n, p in built.params.items()}
    shapes: dict[str, Sizes] = {"": (((size, length), torch.int64),), **(given or {})}
    reads = {**wiring(built.units, built.reads), **built.reads}
    found, take = {}, tuple if axis is None else axis.take
    without, ids = _without_inputs(built), torch.zeros(size, length, dtype=torch.int64, device="cpu")
    for unit, module in built.units.items():
        inputs = tuple(s for r in reads[unit] for s in shapes[r])
        extras = [example_extra(want, ids) for want in built.extras.get(unit, ())]
        for wire in (built.exchanges[r] for r in reads[unit] if r in built.exchanges):
            if wire.counts and not wire.back:  # as many rows from each rank for each expert
                (((experts,), _),) = shapes[wire.counts]
                rows = balanced(inputs[0][0][0], experts)
                ranks = wire.group.spread
                extras = [[[rows[k::ranks] for k in range(ranks)]]]
        weights = {names[id(p)]: p for p in module.parameters() if id(p) in names}
        forget_tables()
        forget_masks()
        with _blaming(unit):
            if isinstance(model, UserModel) and model.divides > 1:  # so that the masks of all layers are there
                with torch.no_grad():
                    module(*(torch.ones(s, dtype=d, device="cpu") for s, d in inputs), *extras)
                take()
            inward = unit not in without
            found[unit] = measure(module, inputs, extras, weights, take, inward=inward, backward=backward)
        shapes[unit] = found[unit].shapes
        shapes |= {p: tuple(shapes[unit][k] for k in at) for p, at in built.ports.get(unit, {}).items()}
        shapes |= {n: shapes[x.reads] for n, x in built.exchanges.items() if x.reads in shapes}
    return found


def _without_inputs(built: BuiltChunks) -> frozenset[str]:
    """Units whose inputs nobody wants a gradient of: those of chunks before the first that trains something, and of
    that one those that read the last, where anything before is frozen."""
    held, trained = {id(p) for p in built.frozen.values()}, {id(p) for p in built.params.values()}
    chunks: dict[str, list[str]] = {}
    for unit in built.units:
        chunks.setdefault(unit.partition(".")[0], []).append(unit)
    out, frozen = list[str](), False
    for units in chunks.values():
        params = {id(p) for u in units for p in built.units[u].parameters()}
        if params & trained:
            own = {*units, *built.exchanges, *(r for u in units for r in built.ports.get(u, ()))}
            out += [u for u in units if not any(r in own for r in built.reads.get(u, ()))]
            break
        out += units
        frozen |= bool(params & held)
    return frozenset(out) if frozen else frozenset()


@contextmanager
def _blaming(unit: str) -> Iterator[None]:
    """Name the unit in whatever a user's code raises."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        message = f"{unit}: shapes depend on values ({error}), and here are none"
        raise model_error(message, "make shapes depend on sizes alone, as with balanced experts") from error
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError) as error:
        message = f"{unit} failed without values: {type(error).__name__}: {error}"
        raise model_error(message, "run the module on a small batch first") from error
