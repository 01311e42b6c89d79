"""Values that forward lets go of and backward makes again: `[schedule] recompute` of less than a part.

A module says what can be made again (`remade`); whoever runs it for training says which options are wanted
(`remaking`). Whoever saves such a value for backward, autograd or a deferred weight gradient, saves how to find it; the
tensor itself goes when forward is done with it. Pass R makes it again, or the first who asks.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

REMADE = frozenset({"norm", "up_projection", "activation", "operators"})  # the options that name such values


def outputs(out: Any) -> tuple[Tensor, ...]:
    """What a module returned, one tensor or several."""
    return (out,) if isinstance(out, Tensor) else tuple(out)


class RemadeBufferCall:
    """One call of a function of tensors, and what it gave. readers: the passages that will still read some of it."""

    def __init__(self, make: Callable[..., Any], inputs: tuple["Tensor | RemadeBufferView", ...]) -> None:
        self.make, self.inputs = make, inputs
        self.readers = set[int]()
        self.made: tuple[Tensor, ...] | None = None

    def again(self) -> tuple[Tensor, ...]:
        """What forward had, to the last bit: made now, or before."""
        if self.made is None:
            with torch.no_grad():
                self.made = outputs(self.make(*map(tensor_of, self.inputs)))
            self.inputs = ()
        return self.made

    def forget(self, reader: int) -> None:
        """A reader less; without any, what was made goes."""
        self.readers.discard(reader)
        if not self.readers:
            self.made, self.inputs = None, ()


@dataclass(frozen=True, slots=True)
class RemadeBufferView:
    """Where in what a call gives some saved tensor lies."""

    call: RemadeBufferCall
    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """The tensor."""
        return self.call.again()[self.number].as_strided(self.shape, self.stride, self.offset)


def tensor_of(saved: Tensor | RemadeBufferView) -> Tensor:
    """What was saved."""
    return saved if isinstance(saved, Tensor) else saved.tensor()


class RemadeBuffers:
    """Those of one module's passage with one microbatch. given: those of the modules whose outputs it reads.

    >>> values, x = RemadeBuffers({"norm"}), torch.ones(2)
    >>> with values.remaking():
    ...     y = remade("norm", torch.neg, x)
    ...     saved = values.kept(y)
    >>> del y; type(saved).__name__, tensor_of(saved).tolist()
    ('RemadeBufferView', [-1.0, -1.0])
    """

    def __init__(self, options: Collection[str], given: Iterable["RemadeBuffers"] = ()) -> None:
        self.options = options
        self.reads: dict[RemadeBufferCall, bool] = {}  # by what backward will read, in forward's order: will W?
        self.late = False  # whether what is saved now is for weight gradients
        self._at: dict[int, tuple[RemadeBufferCall, int, StorageWeakRef]] = {}  # by storage, whose number stays its own
        for values in given:
            self._at.update(values._at)

    @contextmanager
    def remaking(self) -> Iterator[None]:
        """While a module runs: its values of these options are noted, and what autograd saves of them is not kept."""
        token = _RUNNING.set(self)
        try:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: self.kept(t, late=self.late), tensor_of):
                yield
        finally:
            _RUNNING.reset(token)

    @contextmanager
    def lately(self) -> Iterator[None]:
        """What is saved inside is for weight gradients, too."""
        was, self.late = self.late, True
        try:
            yield
        finally:
            self.late = was

    def holds(self, t: Tensor) -> bool:
        """Whether a tensor is one of them, or a view of one."""
        return t.untyped_storage()._cdata in self._at

    def kept(self, t: Tensor, *, late: bool = False) -> Tensor | RemadeBufferView:
        """What to save of a tensor."""
        if (at := self._at.get(t.untyped_storage()._cdata)) is None:
            return t
        call, number, _ = at
        call.readers.add(id(self))
        self.reads[call] = late or self.reads.get(call, False)
        return RemadeBufferView(call, number, tuple(t.shape), t.stride(), int(t.storage_offset()))

    def note(self, make: Callable[..., Any], inputs: tuple[Tensor, ...], outs: tuple[Tensor, ...]) -> None:
        """That outs can be made again, from inputs that are kept or are made again themselves."""
        own = {x.untyped_storage()._cdata for x in inputs}  # a view of an input is kept as that is
        call = RemadeBufferCall(make, tuple(self.kept(x.detach()) for x in inputs))
        for number, out in enumerate(outs):
            storage = out.untyped_storage()
            if storage._cdata not in own:
                self._at[storage._cdata] = call, number, StorageWeakRef(storage)

    def make(self) -> None:
        """R: all that is not kept and will be read."""
        for call in self.reads:
            call.again()

    def forget(self, *, late: bool) -> None:
        """What input gradients alone read is done with; with late, all is."""
        done = [call for call, later in self.reads.items() if late or not later]
        for call in done:
            del self.reads[call]
            call.forget(id(self))
        if late:
            self._at.clear()


_RUNNING: ContextVar[RemadeBuffers | None] = ContextVar("remade values", default=None)


def remade(option: str, make: Callable[..., Any], *inputs: Tensor) -> Any:
    """make(*inputs), which backward may be told to make again: outputs of their own storage, and the same bits."""
    out = make(*inputs)
    remade_as(option, make, inputs, out)
    return out


def remade_as(option: str, make: Callable[..., Any], inputs: tuple[Tensor, ...], out: Any) -> None:
    """The same of what was made with more: make(*inputs) gives out again, to the last bit."""
    if (values := _RUNNING.get()) is not None and option in values.options:
        values.note(make, inputs, outputs(out))


def following(make: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """make(*inputs), made again where any of its inputs is; the others are kept for it."""
    out = make(*inputs)
    if (values := _RUNNING.get()) is not None and any(map(values.holds, inputs)):
        values.note(make, inputs, (out,))
    return out


def kept(t: Tensor) -> Tensor | RemadeBufferView:
    """What to save of a tensor inside of hooks of one's own: autograd asks the innermost ones alone."""
    values = _RUNNING.get()
    return t if values is None else values.kept(t, late=values.late)
