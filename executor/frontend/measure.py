"""What one unit's passes do and keep, found by running them without values (FakeTensor): kernels, bytes, lifetimes.

Storages are followed one by one, so nothing is counted twice and views cost nothing. What is neither made from an
input nor from a parameter (masks, rotary tables) is a constant and counted apart. `survey`
measures all units of a model.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_leaves

from executor.autograd.split import SplitPass
from executor.device.memory import OpWatch
from executor.frontend.aten import kernel_of
from executor.modules.attention.attend import forget_masks
from executor.modules.attention.rope import forget_tables
from executor.modules.base import BuiltChunks, Model, example_extra, wiring
from executor.modules.user.annotate import model_error
from executor.modules.user.routed import balanced
from executor.parallel.inline import MessageAxis
from ir.core.work import Kernel, Message, Work

Sizes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


Take = Callable[[], tuple[Message, ...]]


def _none() -> tuple[Message, ...]:
    return ()


@dataclass(frozen=True)
class PassMeasure:
    """One pass. workspace: bytes alive only while it runs, beside what was there, what it returns and leaves behind.
    messages: what it exchanges with ranks that share its work, in their order."""

    work: Work
    workspace: int
    messages: tuple[Message, ...] = ()


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
    until_i: tuple[int, ...]
    until_w: tuple[int, ...]
    keeps: tuple[str, ...]
    keeps_outs: tuple[str, ...]
    stash: tuple[int, ...]
    constants: int
    ins: tuple[int, ...] = ()


class _Role(StrEnum):
    GIVEN = "given"  # parameters, buffers, token ids: there before and after
    MADE = "made"
    CONSTANT = "constant"


@dataclass(frozen=True)
class _Fact:
    alive: weakref.ref[Any]
    bytes: int
    role: _Role


class _Tracker(OpWatch):
    """Every storage that appears, by serial number, whether it depends on anything, and the kernels that ran."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.facts: list[_Fact] = []
        self.serial: dict[int, int] = {}
        self.work: list[Kernel] = []
        self.now = self.peak = 0
        for tensor in given:
            self._see(tensor, _Role.GIVEN)

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        known = {self._find(t) for t in read}
        depends = any(k is None or self.facts[k].role is not _Role.CONSTANT for k in known)
        out = func(*args, **kwargs)
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        fresh = [t for t in made if self._see(t, _Role.MADE if depends else _Role.CONSTANT) not in known]
        if (kernel := kernel_of(func, args, kwargs, out, read, fresh)) is not None:
            self.work.append(kernel)
        return out

    def of(self, tensors: Iterable[Tensor | None]) -> list[int]:
        """Serial numbers of some tensors' storages."""
        return [self._see(t, _Role.MADE) for t in tensors if t is not None]

    def alive(self) -> set[int]:
        """Storages made here that are still held."""
        return {k for k in self.serial.values() if self.facts[k].role is not _Role.GIVEN and self.facts[k].alive()}

    def bytes(self, serials: Iterable[int]) -> tuple[int, ...]:
        """Sizes; of a set, in order of birth."""
        return tuple(self.facts[k].bytes for k in (sorted(serials) if isinstance(serials, set) else serials))

    def made(self, serials: Iterable[int]) -> set[int]:
        """Those that depend on something."""
        return {k for k in serials if self.facts[k].role is _Role.MADE}

    def take(self) -> tuple[Work, int]:
        """The kernels since the last call, and the peak of bytes since then."""
        work, peak = tuple(self.work), self.peak
        self.work, self.peak = [], self.now
        return work, peak

    def _find(self, tensor: Tensor) -> int | None:
        k = self.serial.get(id(storage := tensor.untyped_storage()))
        return k if k is not None and self.facts[k].alive() is storage else None

    def _see(self, tensor: Tensor, role: _Role) -> int:
        if (found := self._find(tensor)) is not None:
            return found
        storage = tensor.untyped_storage()
        size = storage.nbytes() if role is not _Role.GIVEN else 0

        def gone(_: object) -> None:
            self.now -= size

        self.serial[id(storage)] = len(self.facts)
        self.facts.append(_Fact(weakref.ref(storage, gone), size, role))
        self.now += size
        self.peak = max(self.peak, self.now)
        return len(self.facts) - 1


def measure(
    module: nn.Module,
    inputs: Sizes,
    extras: Sequence[object],
    weights: Mapping[str, Tensor],
    messages: Take = _none,
) -> PartMeasure:
    """Run F, I and W of one unit on inputs of these shapes, inside the fake mode that its weights were made in.

    messages: asked for those noted since it was last asked.
    """
    given = [*weights.values(), *module.buffers(), *(e for e in extras if isinstance(e, Tensor))]
    with _Tracker(given) as t:
        run = SplitPass(weights, lambda name, grad: None)
        acts = [torch.ones(s, dtype=d) for s, d in inputs]
        ins = t.of(acts)
        for k in ins:
            t.facts[k] = _Fact(t.facts[k].alive, t.facts[k].bytes, _Role.MADE)
        t.take()
        outs = list(run.forward(module, *acts, extras=extras))
        work, peak = t.take()
        forward = PassMeasure(work, peak - t.now, messages())
        mine, sizes = t.of(outs), tuple((tuple(o.shape), o.dtype) for o in outs)
        acts.clear()
        outs.clear()
        saved = t.alive()
        input_grad, held, fresh = _input_grad(t, run, sizes)
        input_grad = replace(input_grad, messages=messages())
        t.take()
        start = t.now
        run.weight_grad()
        work, peak = t.take()
        weight_grad = PassMeasure(work, peak - start, messages())
        del run
        assert not t.made(t.alive()), "a storage outlives its microbatch"
    own = t.made(saved) - {*ins, *mine}

    def until(serials: Iterable[int]) -> tuple[str, ...]:
        return tuple("" if k not in saved else "W" if k in held else "I" for k in serials)

    return PartMeasure(
        forward,
        input_grad,
        weight_grad,
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


def _input_grad(t: _Tracker, run: SplitPass, sizes: Sizes) -> tuple[PassMeasure, set[int], set[int]]:
    """Pass I. Returns it, what is held behind it, and what of that was not there before forward ended."""
    loss = len(sizes) == 1 and sizes[0][0] == ()
    before = t.alive()
    dys = [torch.ones(s, dtype=d) if d.is_floating_point and not loss else None for s, d in sizes]
    for k in (arrived := t.of(dys)):
        t.facts[k] = _Fact(t.facts[k].alive, t.facts[k].bytes, _Role.MADE)
    t.take()
    start = t.now
    grads = list(run.input_grad(*dys))
    work, peak = t.take()
    dys.clear()
    back = set(t.of(grads)) - before - set(arrived)
    grads.clear()
    held = t.made(t.alive())
    fresh = held - before
    left = sum(t.bytes((back | fresh) - set(arrived)))
    return PassMeasure(work, max(0, peak - start - left)), held, fresh


@contextmanager
def without_values() -> Iterator[None]:
    """Tensors made inside have shapes and no values, and take no memory."""
    with FakeTensorMode():
        yield


def survey(
    model: Model,
    size: int,
    length: int,
    *,
    chunks: Sequence[str] | None = None,
    given: Mapping[str, Sizes] | None = None,
    axis: MessageAxis | None = None,
) -> dict[str, PartMeasure]:
    """Measure the units of some chunks (default: all) on microbatches of `size` sequences of `length` tokens.

    given: what units outside of these chunks give. axis: notes their messages. Call it inside `without_values`, so
    that weights are fake too.

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
    found, take = {}, () if axis is None else (axis.take,)
    for unit, module in built.units.items():
        inputs = tuple(s for r in reads[unit] for s in shapes[r])
        extras = batch(built, unit, size, length)
        for wire in (built.exchanges[r] for r in reads[unit] if r in built.exchanges):
            if wire.counts and not wire.back:  # as many rows from each rank for each expert
                (((experts,), _),) = shapes[wire.counts]
                rows = balanced(inputs[0][0][0], experts)
                extras = [[rows[k :: wire.ranks] for k in range(wire.ranks)]]
        weights = {names[id(p)]: p for p in module.parameters()}
        forget_tables()
        forget_masks()
        with _blaming(unit):
            found[unit] = measure(module, inputs, extras, weights, *take)
        shapes[unit] = found[unit].shapes
        shapes |= {p: tuple(shapes[unit][k] for k in at) for p, at in built.ports.get(unit, {}).items()}
        shapes |= {n: shapes[x.reads] for n, x in built.exchanges.items() if x.reads in shapes}
    return found


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


def batch(built: BuiltChunks, unit: str, size: int, length: int) -> list[object]:
    """What a unit takes of a microbatch, without values."""
    ids = torch.zeros(size, length, dtype=torch.int64)
    return [example_extra(want, ids) for want in built.extras.get(unit, ())]
