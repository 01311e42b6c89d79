"""One unit of a stage by itself, with stand-ins for the units it reads and for those that read it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from executor.autograd.stage import Stage
from executor.measure.alloc_record import Recorder
from executor.measure.alloc_spread import Like
from executor.runtime.batch import Waiting
from ir.core.alloc import AllocList
from ir.core.errors import ErrorKind, PiperError
from ir.core.ops import Pass


class Bench:
    """Runs every pass of one microbatch of one unit, under a recorder.

    given: shapes and formats of what each unit that it reads gives. wants: what it reads of the batch, beside the token
    ids that the first unit is given; it comes as the pass begins. held: what is there all the time. more: further
    arguments, which are no tensors. outs: shapes and formats of what it gives, once forward has run.
    """

    def __init__(
        self,
        stage: Stage,
        name: str,
        given: Sequence[tuple[Like, ...]],
        batch: Waiting,
        wants: tuple[str, ...],
        held: Sequence[Tensor],
        more: tuple[object, ...] = (),
    ) -> None:
        self.more = more
        self.name, self.batch, self.wants, self.recorder = name, batch, wants, Recorder(held)
        self.reads = stage.reads[name]
        self.outs: tuple[Like, ...] = ()
        self.sources: dict[str, _Source] = {}
        first = 0
        for read, likes in zip(self.reads, given, strict=True):
            self.sources[read] = _Source(self.recorder, likes, first)
            first += len(likes)
        units: dict[str, nn.Module] = {r: s for r, s in self.sources.items() if r}
        reads: dict[str, tuple[str, ...]] = {**dict.fromkeys(units, ()), name: self.reads}
        units[name] = stage.units[name]
        again = [r for r in self.reads if r and stage._made_again(r, name)]
        again += [name] if name in stage.recompute else []
        if stage.made_again(name):  # else nobody keeps what is made again
            reader = f"{name.split('.')[0]}.reader"
            units[reader], reads[reader] = nn.Identity(), (name,)
            again.append(reader)
        self.stage = Stage(units, stage.params, grads=stage.grads, recompute=again, reads=reads)
        self.flow = self.stage._flow(0)

    def run(self, passes: Collection[Pass]) -> dict[Pass, AllocList]:
        """The lists of the passes that the plan has."""
        out = {}
        with self.recorder:
            out[Pass.F] = self._forward()
            if self.name in self.stage.recompute:
                for read in self.sources:
                    if read in self.stage.recompute:
                        self.stage.run(Pass.R, 0, [read])
            if Pass.R in passes:
                self._note(Pass.R)
                out[Pass.R] = self._list([*self.flow.again.pop(self.name, ())])
            out[Pass.I] = self._input_grad()
            if Pass.W in passes:
                self._note(Pass.W)
                out[Pass.W] = self._list([])
        return out

    def check(self) -> None:
        """Behind its last pass a unit holds nothing."""
        if left := sorted(self.recorder.names.values()):
            raise _unlike(self.name, f"still holds {', '.join(left[:4])} after its last pass")

    def _forward(self) -> AllocList:
        for read, source in self.sources.items():
            if read:
                self.stage.run(Pass.F, 0, [read])
            elif not source.tokens:
                self.stage.feed(0, *source())
        with self.recorder.noting(str(Pass.F)):
            if "" in self.sources and self.sources[""].tokens:
                self.stage.feed(0, self.batch.ids)
            if self.wants:
                self.stage.feed_extra(0, self.name, *self.batch.extras(self.wants))
            if self.more:
                self.stage.feed_extra(0, self.name, *self.more)
            self.stage.run(Pass.F, 0, [self.name])
        outs: list[Tensor | None] = [*self.flow.acts.pop(self.name)]
        self.outs = tuple((tuple(t.shape), t.dtype) for t in outs if t is not None)
        return self._list(outs)

    def _input_grad(self) -> AllocList:
        dys = [torch.empty(shape, dtype=d) if shape and d.is_floating_point else None for shape, d in self.outs]
        for k, dy in enumerate(dys):
            if dy is not None:
                self.recorder.name(dy, f"g{k}")
        self.flow.grads[self.name] = list(dys)
        dys.clear()
        dy = None
        self._note(Pass.I)
        return self._list([g for read in self.reads for g in self.flow.grads.pop(read)])

    def _note(self, pass_: Pass) -> None:
        with self.recorder.noting(str(pass_)):
            self.stage.run(pass_, 0, [self.name])

    def _list(self, outs: list[Tensor | None]) -> AllocList:
        """What has happened since the last list. outs: what the pass hands on, held by nobody else."""
        if any(t is not None and t.untyped_storage().nbytes() != t.numel() * t.element_size() for t in outs):
            raise _unlike(self.name, "hands on a part of a larger storage")
        names = tuple(map(self.recorder.of, outs))
        outs.clear()
        return AllocList(self.recorder.take(), names)


class _Source(nn.Module):
    """Gives fresh tensors, and tells the recorder what they are called: `x3`, for the fourth input of the unit."""

    def __init__(self, recorder: Recorder, likes: tuple[Like, ...], first: int) -> None:
        super().__init__()
        self.recorder, self.likes, self.first = recorder, likes, first

    @property
    def tokens(self) -> bool:
        """Whether it stands for token ids, which come with the batch."""
        return not self.likes[0][1].is_floating_point

    def forward(self) -> tuple[Tensor, ...]:
        """One of each."""
        made = tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in self.likes)
        for k, t in enumerate(made, self.first):
            self.recorder.name(t, f"x{k}")
        return made


def _unlike(name: str, what: str) -> PiperError:
    message = f"{name} {what}: its memory cannot be taken by itself"
    return PiperError(ErrorKind.MODEL, message, suggestion="a unit that hands on whole tensors and keeps nothing")
