"""Storages and kernels of a pass that runs without values: what is made, how long it lives, who reads and writes it.

Views are no storages of their own and cost nothing. What is neither made from an input nor from a parameter (masks,
rotary tables) is a constant.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from executor.device.memory import OpWatch
from executor.frontend.aten import OVERWRITES, kernel_of, looped, of_a_shape, rewritten, touched
from executor.frontend.calls import KernelCall, KernelRead
from executor.frontend.masks import KernelMasks
from ir.core.work import Kernel, KernelKind, Work


@dataclass(frozen=True)
class PassCalls:
    """What ran between two looks. calls: those that depend on anything. peak: of bytes."""

    work: Work
    calls: tuple[KernelCall, ...]
    peak: int


class _Role(StrEnum):
    GIVEN = "given"  # parameters, buffers, token ids: there before and after
    MADE = "made"
    CONSTANT = "constant"


@dataclass(frozen=True)
class _Fact:
    alive: weakref.ref[Any]
    bytes: int
    role: _Role


class StorageKernels(OpWatch):
    """Every storage that appears, by serial number, whether it depends on anything, and the kernels that ran."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.facts: list[_Fact] = []
        self.serial: dict[int, int] = {}
        self.work: list[Kernel] = []
        self.calls: list[KernelCall] = []
        self.values: list[int] = []  # what each storage holds: another number when it has been written again
        self.written = 0
        self.now = self.peak = 0
        self.masks, self.backward, self.hidden = KernelMasks(), False, 0
        for tensor in given:
            self._see(tensor, _Role.GIVEN)

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        known = [self._find(t) for t in read]
        depends = any(k is None or self.facts[k].role is not _Role.CONSTANT for k in known)
        reads = () if of_a_shape(func.overloadpacket.__name__) else tuple(self._read(t) for t in read)
        out = func(*args, **kwargs)
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        fresh = [t for t in made if self._see(t, _Role.MADE if depends else _Role.CONSTANT) not in known]
        if not self.backward:
            self.masks.note(func, args, kwargs, out, lambda t: self._see(t, _Role.MADE))
        if (kernel := kernel_of(func, args, kwargs, out, read, fresh)) is not None:
            self.work.append(kernel)
            again = rewritten(func, args)
            for t in again:
                self._write(self.serial[id(t.untyped_storage())])
            if depends:
                writes = tuple((self._holds(t), touched(t)) for t in (*fresh, *again))
                form, size = looped(func, args, read, made)
                if again and func.overloadpacket.__name__ in OVERWRITES:
                    reads = (replace(reads[0], bytes=0), *reads[1:])
                many = max((t.numel() for t in made), default=0)
                kernel = self._masked(kernel, kwargs)
                self.calls.append(KernelCall(kernel, form, size, many, reads, writes))
        return out

    def given(self, tensors: Iterable[Tensor | None]) -> list[int]:
        """Serial numbers of what a pass is given: it depends on something."""
        serials = self.of(tensors)
        for k in serials:
            self.facts[k] = replace(self.facts[k], role=_Role.MADE)
        return serials

    def holds(self, tensors: Iterable[Tensor | None]) -> set[int]:
        """The values that tensors' storages hold now."""
        return {self._holds(t) for t in tensors if t is not None}

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

    def take(self) -> PassCalls:
        """What ran since the last call, and the peak of bytes since then."""
        taken = PassCalls(tuple(self.work), tuple(self.calls), self.peak)
        self.work, self.calls, self.peak = [], [], self.now
        return taken

    def _holds(self, tensor: Tensor) -> int:
        return self.values[self._see(tensor, _Role.MADE)]

    def _write(self, serial: int) -> None:
        self.written += 1
        self.values[serial] = self.written

    def _read(self, tensor: Tensor) -> KernelRead:
        storage = tensor.untyped_storage()
        view = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        given = self.facts[self._see(tensor, _Role.MADE)].role is _Role.GIVEN
        number = self.masks.number(tensor)
        return KernelRead(self._holds(tensor), view, touched(tensor), storage.nbytes(), given, number)

    def _masked(self, kernel: Kernel, kwargs: dict[str, Any]) -> Kernel:
        """Attention without the pairs that a mask hides. What values pick for each query no kernel leaves out where
        each head has its own keys: it is hidden from the model's FLOPs alone."""
        if kernel.kind is not KernelKind.ATTENTION or not isinstance(mask := kwargs.get("attn_mask"), Tensor):
            return kernel
        number = self.masks.number(mask)
        flops = int(kernel.flops * self.masks.share(number))
        if not self.masks.picked(number):
            return replace(kernel, flops=flops)
        self.hidden += 0 if self.backward else kernel.flops - flops
        return kernel

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
        self.values.append(0)
        self._write(len(self.facts) - 1)
        self.now += size
        self.peak = max(self.peak, self.now)
        return len(self.facts) - 1
