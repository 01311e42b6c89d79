"""What the optimizer and the gradient norm allocate for one tensor, per element: the same loop for all of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from executor.measure.alloc_record import Recorder
from executor.modules.base import TORCH
from executor.optim.optimizer import Optimizer, OptimizerConfig, square_sums
from ir.core.alloc import BEFORE, AllocList, Birth, Release
from ir.graph.classes import sync_class
from ir.graph.graph import Once
from ir.job.build import Prepared, precision_of

# Prime, so that no other storage's size is a multiple. The second finds what the first left, and leaves as much.
SIZES = (1009, 1013, 1019)


def sync_lists(prepared: Prepared) -> dict[str, AllocList]:
    """The lists of squaring and of updating one tensor, by class (`ir.graph.classes.sync_class`).

    Where the job clips, gradients are scaled: a step whose norm is within the limit may need less.
    """
    job, precision = prepared.job, precision_of(prepared.job)
    clip = job.optimizer.clip_norm > 0
    config = OptimizerConfig(job.optimizer.name, job.optimizer.lr, job.optimizer.clip_norm)
    out = {}
    for flat in (False, True):
        dtype = TORCH[precision.reduce if flat else precision.grads]
        optimizer = Optimizer(config, _tensors(TORCH[precision.params]), TORCH[precision.optimizer])
        state = [*optimizer.params.values(), *optimizer.masters.values()]
        state += [t for slots in optimizer.state.values() for t in slots.values()]
        runs: dict[Once, tuple[Callable[[_Marked], object], list[Tensor]]] = {
            Once.UPDATE: (lambda grads, to=optimizer: to.step(grads, 0.5 if clip else 1.0), state),  # type: ignore[misc]
            Once.NORM: (lambda grads: square_sums(grads, list(grads)), []),
        }
        for kind, (run, held) in runs.items():
            name = sync_class(kind, flat=flat, precision=precision, optimizer=config.name, clip=clip)
            out[name] = _second(run, _tensors(dtype), held)
    return out


def _tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    return {str(n): torch.ones(n, dtype=dtype) for n in SIZES}


class _Marked(dict[str, Tensor]):
    """Gradients by name; reading one tells that the loop has come to the next tensor."""

    def __init__(self, tensors: dict[str, Tensor], recorder: Recorder) -> None:
        super().__init__(tensors)
        self.recorder = recorder
        self.taken: list[tuple[Birth | Release, ...]] = []

    def __getitem__(self, name: str) -> Tensor:
        self.taken.append(self.recorder.take())
        self.recorder.rename(BEFORE)
        return super().__getitem__(name)


def _second(run: Callable[[_Marked], object], grads: dict[str, Tensor], held: list[Tensor]) -> AllocList:
    """The events of the second tensor: from reading its gradient to reading the third's."""
    recorder = Recorder([*held, *grads.values()])
    marked = _Marked(grads, recorder)
    with recorder, recorder.noting("T"):
        run(marked)
    events: list[Birth | Release] = []
    for e in marked.taken[2]:
        if isinstance(e, Birth) and e.bytes % SIZES[1] == 0:
            e = Birth(e.bytes // SIZES[1], each=True)
        if not (events and e == events[-1] == Release(BEFORE)):
            events.append(e)
    return AllocList(tuple(events))
