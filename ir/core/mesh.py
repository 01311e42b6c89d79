"""The mesh: devices factored into atomic axes, so that tp·cp·dp and etp·ep·edp are two views of the same ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

from ir.core.errors import PiperError, job_error
from ir.core.limits import divisors

DENSE = ("tp", "cp", "dp")
EXPERT = ("etp", "ep", "edp")
ORDER = ("tp", "cp", "ep", "dp", "pp")
_TWIN = {"tp": "etp", "dp": "edp"}
_COPIED = ("dp", "edp")  # axes whose outer part may hold copies of shards


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """An axis that neither view divides: `size` ranks, `stride` apart."""

    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A communication group as the network sees it: how many ranks, and how many of them share a node."""

    ranks: int
    per_node: int


@dataclass(frozen=True)
class Mesh:
    """All ranks of a job. `axes` maps each axis name to the atoms whose product it is.

    >>> mesh = Mesh.of(tp=2, cp=1, dp=4, pp=2, ep=4, etp=1)
    >>> mesh.axes["ep"]
    (MeshAxis(size=2, stride=1), MeshAxis(size=2, stride=2))
    >>> mesh.shape(("dp",), per_node=8), mesh.ranks
    (RankGroup(ranks=4, per_node=4), 16)

    With dp_replicate, dp and edp have an inner part that shards lie over, and an outer one that copies them:

    >>> Mesh.of(tp=1, cp=1, dp=8, pp=1, ep=2, dp_replicate=2).divided(("edp",))
    (('edp_shard',), ('edp_replicate',))
    """

    sizes: Mapping[str, int]
    axes: Mapping[str, tuple[MeshAxis, ...]]

    @classmethod
    def of(
        cls,
        *,
        tp: int,
        cp: int,
        dp: int,
        pp: int,
        ep: int = 1,
        etp: int = 1,
        dp_replicate: int = 1,
        order: Sequence[str] = ORDER,
    ) -> Mesh:
        """Factor the devices. `order` names the axes, fastest varying first (what lands inside a node).

        Raises PiperError (job) where experts do not divide the devices or the two views have no common refinement, or
        where dp or edp has no dp_replicate equal parts.
        """
        if sorted(order) != sorted(ORDER):
            raise job_error("parallel.order", f"{' '.join(order)!r} does not name each axis once", " ".join(ORDER))
        devices = tp * cp * dp
        sizes = dict(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, edp=devices // (ep * etp))
        if devices % (ep * etp):
            raise _no_ep(sizes, order, f"etp·ep = {etp * ep} does not divide tp·cp·dp = {devices}")
        dense = _strides([a for a in order if a != "ep"], sizes)
        expert = _strides([_TWIN.get(a, a) for a in order if a != "cp"], sizes)
        apart = dense["pp"] != expert["pp"]
        if apart and ep * etp > 1:
            raise job_error("parallel.order", "pp stands between the axes that experts share", "'pp' first or last")
        # Experts that are whole on each rank have edp alone: all but pp, on both sides of it.
        strides, cuts = (
            (dense, sorted({*dense.values(), devices * pp})) if apart else (dense | expert, _cuts(sizes, order))
        )
        if cuts is None:
            why = "the dense and the expert view of the devices have no common refinement"
            raise _no_ep(sizes, order, why)
        if dp_replicate > 1:
            sizes, strides, cuts = _replicated(sizes, strides, cuts, dp_replicate)
        atoms = [MeshAxis(b // a, a) for a, b in pairwise(cuts)]
        axes = {a: tuple(t for t in atoms if s <= t.stride < s * sizes[a]) for a, s in strides.items()}
        return cls(sizes, axes | _whole_experts(axes) if apart else axes)

    def divided(self, axes: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Of axes that hold the same parameters: those over which shards of them lie, and those that copy the shards.

        >>> Mesh.of(tp=1, cp=2, dp=4, pp=1).divided(("cp", "dp"))
        (('cp', 'dp'), ())
        """
        split = [a for a in axes if f"{a}_replicate" in self.sizes]
        return tuple(f"{a}_shard" if a in split else a for a in axes), tuple(f"{a}_replicate" for a in split)

    @property
    def ranks(self) -> int:
        """Number of devices of the job."""
        return self.sizes["tp"] * self.sizes["cp"] * self.sizes["dp"] * self.sizes["pp"]

    def size(self, axes: Iterable[str]) -> int:
        """Ranks in a group over these axes."""
        return prod(self.sizes[a] for a in axes)

    def offsets(self, axes: Iterable[str], programs: Sequence[int] = (0,)) -> list[int]:
        """Global ranks of the group of rank 0 over these axes, joined over pipeline ranks `programs`."""
        atoms = [t for a in axes for t in self.axes[a]]
        steps = [[i * t.stride for i in range(t.size)] for t in atoms]
        stride = self.program_stride
        return sorted(p * stride + sum(c) for p in programs for c in product(*steps))

    @property
    def program_stride(self) -> int:
        """Distance in ranks between neighbouring pipeline ranks."""
        return self.axes["pp"][0].stride if self.axes["pp"] else self.ranks // self.sizes["pp"]

    def shape(self, axes: Iterable[str], per_node: int, programs: Sequence[int] = (0,)) -> RankGroup:
        """The group's size and how many of its ranks share the node of its first rank."""
        ranks = self.offsets(axes, programs)
        home = ranks[0] // per_node
        return RankGroup(len(ranks), sum(r // per_node == home for r in ranks))

    def coordinates(self, rank: int) -> dict[str, int]:
        """A global rank's index on every axis.

        >>> Mesh.of(tp=2, cp=1, dp=2, pp=2).coordinates(5)["tp"]
        1
        """
        out = {}
        for axis, atoms in self.axes.items():
            index, scale = 0, 1
            for t in atoms:
                index += rank // t.stride % t.size * scale
                scale *= t.size
            out[axis] = index
        return out


def _strides(order: Sequence[str], sizes: Mapping[str, int]) -> dict[str, int]:
    out, stride = {}, 1
    for axis in order:
        out[axis] = stride
        stride *= sizes[axis]
    return out


def _cuts(sizes: Mapping[str, int], order: Sequence[str]) -> list[int] | None:
    """The strides of both views in one divisibility chain, or None where there is none."""
    dense = _strides([a for a in order if a != "ep"], sizes)
    expert = _strides([_TWIN.get(a, a) for a in order if a != "cp"], sizes)
    total = sizes["tp"] * sizes["cp"] * sizes["dp"] * sizes["pp"]
    cuts = sorted({*dense.values(), *expert.values(), total})
    return None if any(b % a for a, b in pairwise(cuts)) else cuts


def _replicated(
    sizes: Mapping[str, int], strides: Mapping[str, int], cuts: Sequence[int], parts: int
) -> tuple[dict[str, int], dict[str, int], list[int]]:
    """Sizes, strides and cuts with dp and edp divided: `parts` outer parts, each of the ranks that lie closest."""

    copied = [a for a in _COPIED if a in strides]  # edp is told of what dp is where it lies on both sides of pp

    def cut(n: int) -> list[int] | None:
        made = sorted({*cuts, *(strides[a] * sizes[a] // n for a in copied)})
        good = not any(sizes[a] % n for a in _COPIED) and not any(b % a for a, b in pairwise(made))
        return made if good else None

    made = cut(parts)
    if made is None:
        legal = [n for n in divisors(sizes["dp"]) if cut(n)]
        message = f"dp = {sizes['dp']}, and for experts edp = {sizes['edp']}, have no {parts} equal parts"
        fix = f"dp_replicate = {min(legal, key=lambda n: abs(n - parts))}"
        raise job_error("parallel.dp_replicate", message, fix, f"dp_replicate in {legal[:16]}")
    sizes, strides = dict(sizes), dict(strides)
    for axis in _COPIED:
        inner = sizes[axis] // parts
        sizes |= {f"{axis}_shard": inner, f"{axis}_replicate": parts}
        if axis in copied:
            strides |= {f"{axis}_shard": strides[axis], f"{axis}_replicate": strides[axis] * inner}
    return sizes, strides, made


def _whole_experts(axes: Mapping[str, tuple[MeshAxis, ...]]) -> dict[str, tuple[MeshAxis, ...]]:
    """The experts' axes where each rank has all of them: edp is all others but pp, its copies are dp's."""

    def joined(*names: str) -> tuple[MeshAxis, ...]:
        return tuple(sorted((t for a in names for t in axes[a]), key=lambda t: t.stride))

    out: dict[str, tuple[MeshAxis, ...]] = {"etp": (), "ep": (), "edp": joined("tp", "cp", "dp")}
    if "dp_replicate" in axes:
        out |= {"edp_shard": joined("tp", "cp", "dp_shard"), "edp_replicate": axes["dp_replicate"]}
    return out


def _no_ep(sizes: Mapping[str, int], order: Sequence[str], why: str) -> PiperError:
    devices, etp, ep = sizes["tp"] * sizes["cp"] * sizes["dp"], sizes["etp"], sizes["ep"]
    fits = [e for e in divisors(devices) if devices % (e * etp) == 0]
    legal = [e for e in fits if _cuts({**sizes, "ep": e, "edp": devices // (e * etp)}, order)]
    best = min(legal, key=lambda e: abs(e - ep), default=None)
    allowed = f"ep in {legal[:16]}" + (" …" if len(legal) > 16 else "")
    return job_error("parallel.ep", f"ep = {ep}: {why}", f"ep = {best}" if best else None, allowed)
