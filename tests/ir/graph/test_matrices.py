"""Hidden matrices: which there are, that a share has them whole, and what the modes of tp take."""

from collections import Counter
from dataclasses import replace
from math import prod

import pytest

from ir.core.work import MessageKind
from ir.graph.classes import node_classes
from ir.graph.matrices import MatrixShard, MuonOptimizer, heaviest, hidden_matrix, orthogonalised, packed
from ir.graph.sync import buckets
from ir.job.build import PreparedJob, prepare
from ir.job.load import job_from
from ir.job.schema import JobOptimizer
from ir.workload.part import PartLayout


def flops(m: MatrixShard, muon: MuonOptimizer) -> int:
    return sum(k.flops * k.count for k in orthogonalised(m, muon)[0] if k.shape)


@pytest.mark.parametrize("cut", [0, 1])
def test_modes_of_tp_are_megatrons(cut: int) -> None:
    """Blockwise: a block alone. Duplicated: gathered, whole on each. Distributed: A of the uncut dim, summed."""
    whole, tp, steps = (24, 40), 4, 5
    block = tuple(n // tp if d == cut else n for d, n in enumerate(whole))
    m = MatrixShard(1, *block, cut, tp)
    alone, gathered, together = (MuonOptimizer(steps, mode) for mode in ("blockwise", "duplicated", "distributed"))
    assert flops(m, alone) == flops(MatrixShard(1, *block), alone) and orthogonalised(m, alone)[1] == ()
    assert flops(m, gathered) == flops(MatrixShard(1, *whole), gathered)
    (message,) = orthogonalised(m, gathered)[1]
    assert (message.kind, message.bytes, message.axes) == (MessageKind.ALL_GATHER, 4 * prod(whole), ("tp",))
    short, long = block[1 - cut], block[cut]
    assert flops(m, together) == steps * (4 * short * short * long + 2 * short**3)
    messages = orthogonalised(m, together)[1]
    assert len(orthogonalised(replace(m, count=3), gathered)[1]) == 3
    assert Counter((x.kind, x.bytes) for x in messages) == {(MessageKind.ALL_REDUCE, 2 * short * short): steps}


def test_bytes_are_what_each_kernel_reads_and_writes() -> None:
    """Of X and of A = X Xt, in bf16. First fp32 is read and X written, read for its norm, read and written divided."""
    work, messages, room = orthogonalised(MatrixShard(3, 6, 4, cut=0), MuonOptimizer(steps=2, tp_mode="distributed"))
    x, a = 2 * 6 * 4, 2 * 4 * 4
    moved = {"norm": 2 * x + 4 * x, "gram": x + a, "square": a + a + a, "apply": a + x + x + x}
    assert {k.label: k.bytes for k in work} == {f"muon.{name}": n for name, n in moved.items()}
    assert [k.count for k in work] == [3, 6, 6, 6] and messages == () and work[0].flops == 3 * 6 * 4
    # The gradient and its look ahead in fp32, X and the next X, A and what A is applied as.
    assert room == 2 * x + 2 * x + 2 * x + 2 * a


def test_the_slowest_rank_is_the_one_with_most_flops_not_most_elements() -> None:
    """4 m^2 n + 2 m^3 of each matrix: 64 of 4 x 4 take 24,576, one of 2 x 512 takes 8,208; 8 x 8 takes 3,072."""
    thin, many, square, least = (MatrixShard(*x) for x in ((1, 2, 512), (64, 4, 4), (1, 8, 8), (1, 1, 8)))
    assert heaviest([thin, many], 2) == [many]
    assert heaviest([square, MatrixShard(1, 2, 32), least], 2) == [square, least]
    assert heaviest([many, thin], 1) == [many, thin]


def prepared(model: str = "tiny-llama", zero: int = 1, **more: object) -> PreparedJob:
    parallel = {"pp": 2, "dp": 2, "zero": zero, **({"ep": 2} if model == "tiny-moe" else {}), **more}
    job = {"model": {"config": model, "seq_len": 64}, "parallel": parallel, "optimizer": {"name": "muon"}}
    return prepare(job_from({**job, "cluster": {"nodes": 1, "gpus_per_node": 4}}))


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-moe"])
def test_matrices_are_the_linear_maps_of_layers(model: str) -> None:
    made = prepared(model)
    found = {n for b in buckets(made.graph()) if b.matrices for n in b.params}
    shapes = {p.name: p.shape for e in made.base.entries for p in e.part.params}
    maps = {n for n, s in shapes.items() if len(s) > 1 and not any(x in n for x in ("embed", "lm_head"))}
    assert found == maps and any("proj" in n for n in found)


def test_no_share_cuts_a_matrix_and_all_are_dealt_out() -> None:
    for b in (b for b in buckets(prepared().graph()) if b.matrices):
        sizes = [m.numel for m in b.matrices]
        owners = packed(sizes, b.ranks)
        loads = [sum(n for n, o in zip(sizes, owners, strict=True) if o == r) for r in range(b.ranks)]
        assert max(loads) == b.shard and sum(loads) == b.numel
        assert max(loads) - min(loads) <= max(sizes)
        slowest = sum(flops(m, MuonOptimizer()) for m in heaviest(b.matrices, b.ranks))
        assert slowest >= sum(flops(m, MuonOptimizer()) for m in b.matrices) / b.ranks


def test_matrices_dealt_out_are_not_cut_into_buckets_of_padding() -> None:
    """Fewer matrices than replicas in a bucket would leave most shares empty; all of a stage are spread evenly."""
    many = {"pp": 1, "dp": 4}
    for zero, groups in ((1, {1}), (0, set(range(2, 99)))):
        found = [b for b in buckets(prepared(zero=zero, bucket_MiB=0.01, **many).graph()) if b.matrices]
        assert len(found) in groups
        if zero:
            numel, largest = sum(b.numel for b in found), max(m.numel for b in found for m in b.matrices)
            assert sum(b.shard * b.ranks for b in found) <= numel + 4 * largest
    plain = prepared(zero=1, bucket_MiB=0.01, **many)
    assert len(buckets(prepare(replace(plain.job, optimizer=JobOptimizer())).graph())) > 2, "all else is cut"


@pytest.mark.parametrize(("zero", "tp"), [(0, 1), (1, 1), (0, 2)])
def test_an_update_orthogonalises_all_that_its_rank_updates(zero: int, tp: int) -> None:
    """Shapes alone say what that takes. Two replicas of ZeRO-1 have half of each size; tp halves one side of each."""
    made = prepared(zero=zero, tp=tp, dp=2 // tp)
    made = prepare(replace(made.job, optimizer=JobOptimizer("muon", tp_mode="duplicated")))
    shapes = {p.name: p.shape for e in made.base.entries for p in e.part.params}
    found = [b for b in buckets(made.graph()) if b.matrices]
    for n in (n for n in made.plan().graph.nodes if n.numel):
        sides = [sorted(shapes[name]) for b in found if n.groups[0] in b.owners for name in b.params]
        assert (1 + zero) * sum(k.flops * k.count for k in n.work if k.shape) == 5 * sum(
            4 * short**2 * long + 2 * short**3 for short, long in sides
        )
        assert n.workspace == max(12 * short * long + 4 * short**2 for short, long in sides)
        assert n.matrices * tp * (1 + zero) == sum(short * long for short, long in sides)
        assert len(n.inline) == (tp > 1) * len(sides)


def test_adamw_keeps_its_buckets_and_a_norm_by_heads_is_no_matrix() -> None:
    job = prepared().job
    plain = prepare(replace(job, optimizer=JobOptimizer()))
    assert job.optimizer.name == "muon" and not any(b.matrices for b in buckets(plain.graph()))
    assert all(n.matrices == 0 and not n.work for n in plain.plan().graph.nodes if n.once)
    gpt = {p.name: p for e in plain.base.entries for p in e.part.params}
    assert hidden_matrix(gpt["lm_head.weight"], PartLayout()) is None


def test_an_update_is_measured_by_itself() -> None:
    """Under its own name: another number of steps is another update, AdamW's is as it was."""
    found = []
    for name in ("adamw", "muon"):
        for steps in (4, 5) if name == "muon" else (5,):
            made = prepared()
            graph = prepare(replace(made.job, optimizer=JobOptimizer(name, ns_steps=steps))).plan().graph
            found.append(next(c for n, c in zip(graph.nodes, node_classes(graph), strict=True) if n.numel))
    assert len(set(found)) == 3
