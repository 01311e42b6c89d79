"""Hidden matrices, which Muon orthogonalises by Newton-Schulz: which parameters they are, whose, and at what cost.

Muon keeps one moment of each and updates it by an orthogonal matrix near that moment: `steps` times
X <- a X + (b A + c A A) X with A = X Xt, of the matrix turned so that it has no more rows than columns
(kellerjordan.github.io/posts/muon, torch.optim.Muon). All else, embeddings and the head among it, is AdamW's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from ir.core.work import DType, Kernel, KernelKind, Message, MessageKind, Work
from ir.workload.params import local_shape
from ir.workload.part import Param, PartLayout


@dataclass(frozen=True, slots=True)
class MuonOptimizer:
    """How matrices are orthogonalised. tp_mode, of those that tp cuts: "blockwise": each rank its own block;
    "duplicated": gathered, by every rank; "distributed": together, A summed over ranks in each step.
    """

    steps: int = 5
    tp_mode: str = "blockwise"


@dataclass(frozen=True, slots=True)
class MatrixShard:
    """What one device holds of a parameter: `count` matrices (experts), of rows x columns. cut: the dim that `axis`
    cuts, over `ranks`; none where one rank has all of it.
    """

    count: int
    rows: int
    columns: int
    cut: int | None = None
    ranks: int = 1
    axis: str = "tp"

    @property
    def numel(self) -> int:
        """Elements."""
        return self.count * self.rows * self.columns


def hidden_matrix(param: Param, layout: PartLayout) -> MatrixShard | None:
    """What a device holds of a hidden matrix, or of one for each expert; None of what AdamW updates.

    >>> hidden_matrix(Param("w", (8, 6), ("tp",), dims=(1,)), PartLayout(tp=2))
    MatrixShard(count=1, rows=8, columns=3, cut=1, ranks=2, axis='tp')
    >>> hidden_matrix(Param("experts", (8, 4, 6), ("ep", "etp"), True, (0, 1)), PartLayout(ep=4))
    MatrixShard(count=2, rows=4, columns=6, cut=None, ranks=1, axis='etp')
    """
    if param.table or len(param.shape) != 2 + param.expert:
        return None
    axis = "etp" if param.expert else "tp"
    at = param.dims[param.sharded.index(axis)] - param.expert if axis in param.sharded else None
    ranks = int(getattr(layout, axis)) if at is not None else 1
    *many, rows, columns = local_shape(param, layout)
    return MatrixShard(prod(many), rows, columns, at if ranks > 1 else None, ranks, axis)


def packed(numels: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Which rank has each of some parameters whole: the largest first, each to the rank that has least.

    >>> packed((4, 9, 5, 3), 2)
    (1, 0, 1, 0)
    """
    load, out = [0] * ranks, [0] * len(numels)
    for i in sorted(range(len(numels)), key=lambda i: -numels[i]):
        out[i] = load.index(min(load))
        load[out[i]] += numels[i]
    return tuple(out)


def heaviest(matrices: Sequence[MatrixShard], ranks: int) -> list[MatrixShard]:
    """Those of the rank with the most FLOPs."""
    owners, each = packed([m.numel for m in matrices], ranks), MuonOptimizer()
    shares = [[m for m, owner in zip(matrices, owners, strict=True) if owner == r] for r in range(ranks)]
    return max(shares, key=lambda some: sum(k.flops * k.count for m in some for k in orthogonalised(m, each)[0]))


def orthogonalised(m: MatrixShard, muon: MuonOptimizer) -> tuple[Work, tuple[Message, ...], int]:
    """(kernels, messages over its axis, bytes on the way) of Newton-Schulz of a parameter; products are in bf16.

    FLOPs of one matrix are steps · (4 m² n + 2 m³), m the smaller side:

    >>> work, _, _ = orthogonalised(MatrixShard(1, 64, 16), MuonOptimizer(steps=5))
    >>> sum(k.flops * k.count for k in work) - 5 * (4 * 16**2 * 64 + 2 * 16**3) == work[0].flops
    True
    """
    rows, columns, axis, mode = m.rows, m.columns, (m.axis,), muon.tp_mode if m.ranks > 1 else "blockwise"
    if mode == "duplicated":
        rows, columns = (rows * m.ranks, columns) if m.cut == 0 else (rows, columns * m.ranks)
    short, long = sorted((rows, columns))
    if mode == "distributed":  # A is summed over the dim that is cut, whichever is the smaller
        short, long = (columns, rows) if m.cut == 0 else (rows, columns)
    square, all_of = short * short, short * long
    times = m.count * muon.steps
    work = (
        # The moment and its look ahead are read as the update's are; here the format's change, a norm, a division.
        Kernel(KernelKind.MEMORY, 3 * all_of, 12 * all_of, DType.FP32, label="muon.norm", count=m.count),
        _product("muon.gram", short, short, long, all_of + square, times),
        _product("muon.square", short, short, short, 3 * square, times),
        _product("muon.apply", short, long, short, square + 3 * all_of, times),
    )
    messages: tuple[Message, ...] = ()
    if mode == "duplicated":
        messages = (Message(MessageKind.ALL_GATHER, 4 * all_of, axis),) * m.count
    if mode == "distributed":
        messages = (Message(MessageKind.ALL_REDUCE, 2 * square, axis),) * times
    # A gradient times the clip factor and its look ahead in fp32, X and the next X, A and b A + c A A.
    return work, messages, 12 * all_of + 4 * square


def shared_kinds(matrices: Iterable[MatrixShard], muon: MuonOptimizer) -> dict[str, set[MessageKind]]:
    """By axis, what its ranks do together to orthogonalise any of these.

    >>> shared_kinds([MatrixShard(1, 8, 3, 1, 2)], MuonOptimizer(tp_mode="duplicated"))
    {'tp': {<MessageKind.ALL_GATHER: 'all_gather'>}}
    """
    out: dict[str, set[MessageKind]] = {}
    for m in matrices:
        out.setdefault(m.axis, set()).update(x.kind for x in orthogonalised(m, muon)[1])
    return out


def _product(label: str, m: int, n: int, k: int, elements: int, count: int) -> Kernel:
    return Kernel(KernelKind.GEMM, 2 * m * n * k, 2 * elements, DType.BF16, (m, n, k), label, count)
