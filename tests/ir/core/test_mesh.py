"""Where ranks lie: each group by hand, for every order of the axes, pp between the others too."""

from itertools import permutations, product
from math import prod

import pytest

from ir.core.mesh import ORDER, Mesh
from tests.refusals import refusal

SIZES = {"tp": 2, "cp": 3, "dp": 4, "pp": 2}
ORDERS = [tuple(o) for o in permutations(ORDER)]


def ranks(order: tuple[str, ...], **fixed: int) -> list[int]:
    """Ranks whose coordinates are these, the fastest axis of an order first (Megatron-LM, RankGenerator)."""
    axes = [a for a in order if a != "ep"]
    out = []
    for at in product(*(range(SIZES[a]) for a in reversed(axes))):
        where = dict(zip(reversed(axes), at, strict=True))
        if all(where[a] == i for a, i in fixed.items()):
            out.append(sum(where[a] * prod(SIZES[b] for b in axes[: axes.index(a)]) for a in axes))
    return sorted(out)


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_groups_of_a_dense_model_are_those_of_its_coordinates(order: tuple[str, ...]) -> None:
    mesh = Mesh.of(**SIZES, order=order)
    for axes in (("tp",), ("cp",), ("dp",), ("tp", "cp"), ("dp", "cp")):
        assert mesh.offsets(axes) == ranks(order, **{a: 0 for a in SIZES if a not in axes})
    assert mesh.offsets(("edp",)) == ranks(order, pp=0) and mesh.offsets(("ep", "etp")) == [0]
    assert mesh.offsets(("edp",), programs=(1,)) == ranks(order, pp=1)
    for rank in range(mesh.ranks):
        found = mesh.coordinates(rank)
        assert rank in ranks(order, **{a: found[a] for a in SIZES})


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_copies_of_shards_lie_on_both_sides_of_pp(order: tuple[str, ...]) -> None:
    mesh = Mesh.of(tp=2, cp=2, dp=4, pp=2, dp_replicate=2, order=order)
    for whole, parts in (("dp", ("dp_shard", "dp_replicate")), ("edp", ("edp_shard", "edp_replicate"))):
        assert mesh.offsets((whole,)) == mesh.offsets(parts)
        assert [mesh.size((p,)) for p in parts] == [mesh.size((whole,)) // 2, 2]
        assert [len(mesh.offsets((p,))) for p in parts] == [mesh.size((p,)) for p in parts]


def test_experts_that_are_spread_need_pp_where_both_views_have_it() -> None:
    order = ("tp", "cp", "ep", "pp", "dp")
    mesh = Mesh.of(tp=2, cp=1, dp=4, pp=2, ep=2, order=order)  # etp · ep = tp · cp
    assert mesh.offsets(("ep",)) == mesh.offsets(("tp",)) == [0, 1] and mesh.offsets(("edp",)) == [0, 4, 8, 12]
    e = refusal(lambda: Mesh.of(tp=2, cp=1, dp=4, pp=2, ep=4, order=order), match="between the axes")
    assert e.suggestion == "'pp' first or last"
