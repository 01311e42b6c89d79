"""What every runnable model offers: its chunks, its parameters' global names, the units of any stretch of chunks."""

import hashlib
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from executor.device.device import HostDevice
from executor.modules import philox
from executor.modules.functions import token_loss
from executor.modules.remade import outputs
from executor.parallel.expert_all_to_all import ExpertAllToAll
from executor.parallel.inline import RankRegion
from executor.parallel.shares import ParamShard
from ir.core.work import DType

_HALF, _LOW = np.uint64(32), np.uint64(2**32 - 1)
_DRAWN = 2**18  # elements at a time: their float64 copies stay in a cache
TRACING = Lock()  # ranks that are threads share the generators of torch and the host, and what tracing sets
NUMBER = ("number",)  # all that a router reads of a batch: the microbatch's number in the global one
DRAWS = "draws"  # what dropout depends on: step, microbatch's number, whether to drop
TORCH = {
    DType.FP64: torch.float64,
    DType.FP32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
}


@dataclass(frozen=True)
class BuiltChunks:
    """Some chunks, built. A unit that nobody reads gives an output of the model: its loss, or a share of it."""

    units: dict[str, nn.Module]  # by name, in order
    params: dict[str, nn.Parameter]  # by global name
    extras: Mapping[str, tuple[str, ...]]  # what a unit takes beside activations, out of "ids", "labels", "scale", …
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # whose outputs it takes, if not the last one's
    ports: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)  # see `autograd.stage.Stage`
    exchanges: Mapping[str, ExpertAllToAll] = field(default_factory=dict)  # the same
    frozen: Mapping[str, nn.Parameter] = field(default_factory=dict)  # by global name, those that nobody trains


def wiring(
    units: Iterable[str], reads: Mapping[str, tuple[str, ...]], more: Container[str] = ()
) -> dict[str, tuple[str, ...]]:
    """The units that each unit reads, or what else it reads by name; "" stands for what comes from outside.

    >>> wiring(["a", "b", "c"], {"c": ("a", "b")})
    {'a': ('',), 'b': ('a',), 'c': ('a', 'b')}
    """
    names, before, out = list(units), "", {}
    for name in names:
        given = reads.get(name, (before,))
        out[name] = tuple(r if r in names or r in more else "" for r in given)
        before = name
    return out


def example_extra(want: str, ids: Tensor) -> object:
    """What a unit may be given of a microbatch, for its shape."""
    if want == "scale":
        return 1.0
    return torch.zeros(3, dtype=torch.int64, device=ids.device) if want == DRAWS else ids


def evaluate(built: BuiltChunks, x: Tensor, extras: Mapping[str, tuple[object, ...]]) -> Tensor:
    """Run all units under plain autograd; the sum of the outputs that nobody reads."""
    values: dict[str, tuple[Tensor, ...]] = {"": (x,)}
    wired = wiring(built.units, built.reads)
    read = {r for reads in wired.values() for r in reads}
    for name, unit in built.units.items():
        values[name] = outputs(unit(*(v for r in wired[name] for v in values[r]), *extras.get(name, ())))
    ends = [values[name][0] for name in built.units if name not in read]
    return total(ends)


def total(ends: Sequence[Tensor]) -> Tensor:
    """The sum of a model's outputs, in their order."""
    out = ends[0]
    for more in ends[1:]:
        out = out + more
    return out


class Model(Protocol):
    """A model that any rank can build any part of, with the same values."""

    @property
    def chunks(self) -> tuple[str, ...]:
        """All chunk names, in order."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global parameter names in canonical order, and shapes."""

    def build(self, chunks: Sequence[str]) -> BuiltChunks:
        """Build some chunks."""


def initial(
    name: str,
    share: ParamShard,
    seed: int,
    std: float,
    dtype: torch.dtype,
    start: float | None = None,
    where: torch.device = HostDevice.torch,
) -> Tensor:
    """What a rank holds of a parameter's first values: functions of its global name, the seed, and an element's place.

    Whoever builds it, in whatever order, draws no more than the share: a word of a counter-based generator for each
    element, made normal (Box and Muller) in float64, then rounded, so that all precisions start from the same numbers.
    start: the same everywhere. where: a GPU that is to have them draws them, whose logarithms and cosines may be off
    the host's by the last bit of float64; for all others the host does.

    >>> initial("model.norm.weight", ParamShard((2,)), 0, 0.02, torch.float32, 1.0).tolist()
    [1.0, 1.0]
    """
    where = where if where.type == "cuda" else HostDevice.torch
    if start is not None:
        return torch.full(share.local, start, dtype=dtype, device=where)
    out, at = torch.empty(share.local, dtype=dtype, device=where), 0
    if is_fake(out):
        return out
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    for ahead, behind in _halves(int.from_bytes(digest[:16], "big"), share, where):
        normal = ((ahead + 0.5) * 2.0**-32).log_().mul_(-2.0).sqrt_().mul_((behind * (2.0**-32 * math.tau)).cos_())
        out.view(-1)[at : at + len(normal)] = normal.mul_(std)
        at += len(normal)
    return out


def _halves(key: int, share: ParamShard, where: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """The upper and the lower 32 bits of every element's word, in float64, some elements at a time."""
    if where == HostDevice.torch:
        for made in _words(key, *share.stretches()):
            yield (
                torch.from_numpy((made >> _HALF).astype(np.float64)),
                torch.from_numpy((made & _LOW).astype(np.float64)),
            )
    else:
        for drawn in philox.words(key, *share.stretches(), where):
            yield ((drawn >> 32) & philox.LOW).double(), (drawn & philox.LOW).double()


def _words(key: int, starts: np.ndarray, counts: np.ndarray) -> Iterator[np.ndarray]:
    """64 bits for every element of these stretches of a parameter, about `_DRAWN` of them at a time."""
    held: list[np.ndarray] = []
    for first, end in zip(starts.tolist(), (starts + counts).tolist(), strict=True):
        for low in range(first, end, _DRAWN):
            block, skipped = divmod(low, 4)  # it makes four words for each number it counts
            made = np.random.Philox(key=key, counter=block).random_raw(skipped + min(_DRAWN, end - low))
            held.append(made[skipped:])
            if sum(map(len, held)) >= _DRAWN:
                yield np.concatenate(held)
                held = []
    if held:
        yield np.concatenate(held)


class TokenLoss(nn.Module):
    """The last chunk and the loss behind it: Σ token losses · scale, scale = 1 / the step's valid tokens. Sums only.

    region: with whom this rank shares words and tokens; the loss is that of its own tokens.

    >>> loss = TokenLoss(nn.Identity())(torch.zeros(1, 2, 4), torch.tensor([[1, -100]]), 0.5)
    >>> round(loss.item(), 4)  # half of ln 4: the second token is masked
    0.6931
    """

    IGNORE = -100

    def __init__(self, inner: nn.Module, region: RankRegion | None = None) -> None:
        super().__init__()
        self.inner, self.region = inner, region or RankRegion()

    def forward(self, x: Tensor, *rest: object) -> Tensor:
        """The extras of the chunk come before labels, those of whole sequences, and scale."""
        *extras, labels, scale = rest
        assert isinstance(labels, Tensor) and isinstance(scale, float)
        logits, labels = self.inner(x, *extras).flatten(0, 1), self.region.inner(labels).flatten()
        return token_loss(logits, labels, scale, self.IGNORE, self.region.tp)
