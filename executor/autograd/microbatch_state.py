"""What a stage holds of one microbatch, at the edges of the work done so far and inside its units."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from executor.autograd.compiled import CompiledPass
from executor.autograd.split import SplitPass
from executor.parallel.expert_all_to_all import ExpertRoute, ExpertRowCounts

Values = tuple[Tensor, ...]
Grads = list[Tensor | None]
Ports = Mapping[str, tuple[int, ...]]  # port → which of a unit's outputs are read under this name


@dataclass(slots=True)
class PartState:
    """One unit's life for one microbatch: what forward left, until W. inputs: what each unit it reads gave it; None
    where that is made again. sizes: how many tensors each of them gave; outs: how many it gives itself.
    """

    run: SplitPass | CompiledPass
    sizes: tuple[int, ...] = ()
    outs: int = 1
    inputs: tuple[Values | None, ...] = ()
    extras: tuple[object, ...] = ()
    waits_for_r: bool = False


@dataclass(slots=True)
class MicrobatchState:
    """What stands at the edge of the work done so far of one microbatch, by what it comes from ("": outside).

    acts: outputs, until every reader has run. again: the same, made again by R. grads: sums of what readers' I gave.
    counts: numbers of rows sent and got, until the host has read them; routes: what it has read.
    """

    acts: dict[str, Values] = field(default_factory=dict)
    again: dict[str, Values] = field(default_factory=dict)
    left: Counter[str] = field(default_factory=Counter)
    left_again: Counter[str] = field(default_factory=Counter)
    grads: dict[str, Grads] = field(default_factory=dict)
    units: dict[str, PartState] = field(default_factory=dict)
    extras: dict[str, tuple[object, ...]] = field(default_factory=dict)
    counts: dict[str, ExpertRowCounts] = field(default_factory=dict)
    routes: dict[str, ExpertRoute] = field(default_factory=dict)

    def idle(self) -> bool:
        return not (self.units or self.acts or any(g is not None for grads in self.grads.values() for g in grads))

    def give(self, outs: Values, ports: Ports, readers: Mapping[str, int], *, again: bool = False) -> None:
        """A unit's outputs, for so many readers of each port; what nobody makes again is let go of at once."""
        values, left = (self.again, self.left_again) if again else (self.acts, self.left)
        for port, at in ports.items():
            if readers.get(port, 0) or not again:
                values[port], left[port] = tuple(outs[k] for k in at), readers.get(port, 0)

    def take(self, name: str, *, again: bool = False) -> Values:
        """What one reader more gets; with the last one it goes."""
        values, left = (self.again, self.left_again) if again else (self.acts, self.left)
        left[name] -= 1
        return values[name] if left[name] else values.pop(name)

    def arrived(self, ports: Ports, outs: int) -> Grads:
        """The gradients of a unit's outputs; all None for a loss."""
        out: Grads = [None] * outs
        for port, at in ports.items():
            for k, grad in zip(at, self.grads.pop(port, [None] * len(at)), strict=True):
                out[k] = grad
        return out

    def pass_on(self, reads: Sequence[str], sizes: Sequence[int], grads: Sequence[Tensor | None]) -> None:
        """A unit's input gradients, for what it reads: an output has two readers at most, so each is one sum."""
        first = 0
        for r, size in zip(reads, sizes, strict=True):
            new, first = grads[first : first + size], first + size
            before = self.grads.get(r, [None] * size)
            self.grads[r] = [b if a is None else a if b is None else a + b for a, b in zip(before, new, strict=True)]
