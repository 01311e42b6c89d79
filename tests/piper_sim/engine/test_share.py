"""Max-min sharing against what defines it, and pairwise slowdowns worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from cost_models import load_hardware
from cost_models.compute.interference import KernelSlowdown, fewer_sms, products_held
from cost_models.hardware.schema import COMM_KINDS
from cost_models.software import load_software
from ir.core.work import DType, Kernel, KernelKind
from ir.lower import PlanPolicy
from ir.plan.plan import OpKind, Plan
from piper_sim.engine import EngineScenario, KernelInterference, Links, play
from piper_sim.engine.contention import fill
from piper_sim.pricing.scenario import _arithmetic, pairwise
from tests.ir.plans import moe_plan, stage_plan
from tests.refusals import refusal

PACES = st.sampled_from([0.25, 0.5, 2 / 3, 0.9, 1.0])
FLOWS = st.lists(
    st.tuples(PACES, st.dictionaries(st.integers(0, 4), st.sampled_from([0.1, 0.3, 0.5, 1.0, 2.0]), min_size=1)),
    min_size=1,
    max_size=7,
)


def is_max_min(paces: list[float], loads: list[dict[int, float]], rates: list[float]) -> bool:
    """No link is overfull, and every flow has a reason: its pace, or a full link on which nobody takes more."""
    near = 1e-12
    weight = [max(mine.values()) for mine in loads]
    use = {r: sum(x.get(r, 0.0) * rate for x, rate in zip(loads, rates, strict=True)) for x in loads for r in x}
    if any(u > 1 + near for u in use.values()) or any(x > p for x, p in zip(rates, paces, strict=True)):
        return False
    for f, mine in enumerate(loads):
        most = rates[f] * weight[f] * (1 + near) + near
        full = [r for r in mine if use[r] >= 1 - near]
        others = {r: [rates[g] * weight[g] for g, x in enumerate(loads) if r in x] for r in full}
        if rates[f] < paces[f] * (1 - near) and not any(max(others[r]) <= most for r in full):
            return False
    return True


@given(FLOWS)
def test_shares_are_max_min(flows: list[tuple[float, dict[int, float]]]) -> None:
    paces, loads = [p for p, _ in flows], [x for _, x in flows]
    rates = fill(paces, loads)
    assert is_max_min(paces, loads, rates)
    assert not is_max_min(paces, loads, [rates[0] * 0.9, *rates[1:]]), "a flow held back without a reason is seen"
    assert not is_max_min(paces, loads, [x * 1.01 for x in rates]), "an overfull link is seen"


@given(FLOWS, FLOWS)
def test_links_without_common_users_do_not_touch_each_other(a: list, b: list) -> None:  # type: ignore[type-arg]
    apart = [(p, {r + 10: x for r, x in loads.items()}) for p, loads in b]
    both = fill([p for p, _ in a + apart], [x for _, x in a + apart])
    assert both == fill([p for p, _ in a], [x for _, x in a]) + fill([p for p, _ in b], [x for _, x in b])


def two_sends(loads: float) -> tuple[Plan, Links]:
    """Rank 0 sends to ranks 1 (forward) and gets from it: every transfer loads one and the same link."""
    plan = stage_plan("gpipe", 2, 2)
    peers = np.where(plan.partner >= 0, 0, -1)
    send = np.where(plan.kind == OpKind.SEND, peers, -1)
    return plan, Links(send, np.array([0, 1]), np.array([0]), np.array([loads]), 1)


def test_an_oversubscribed_link_slows_a_message_alone() -> None:
    plan, links = two_sends(2.0)
    duration = np.where(plan.kind == OpKind.COMPUTE, 1.0, 0.25)
    slowed = play(EngineScenario.of(plan, links=links), duration)
    twice = play(EngineScenario.of(plan), np.where(plan.kind == OpKind.COMPUTE, 1.0, 0.5))
    assert np.array_equal(slowed.end, twice.end), "0F1 ends before 0SEND_F0 does, so no two share the link"
    free = play(EngineScenario.of(plan, links=two_sends(1.0)[1]), duration)
    assert np.array_equal(free.end, play(EngineScenario.of(plan), duration).end)


def test_a_kernel_beside_a_message_by_hand() -> None:
    """0F1 (1 s) beside 0SEND_F0 (1/2 s), then beside 0RECV_B0, which is posted early and holds its SMs.

    The message takes 0.5 · 1.25 = 0.625 s beside compute. Meanwhile 0F1 does 0.625 / 1.5 of its second, held and
    moving; the rest takes 1.25 times as long beside the receive that waits.
    """
    plan = stage_plan("gpipe", 2, 2)
    duration = np.where(plan.kind == OpKind.COMPUTE, 1.0, 0.5)
    kind = np.zeros(len(plan), dtype=np.int64)
    one = np.ones((1, 1))
    ran = play(EngineScenario.of(plan, slow=KernelInterference(kind, 0.25 * one, 0.25 * one, 0.25 * one)), duration)
    at = {plan.text(i): i for i in range(len(plan))}
    assert ran.start[0, at["0F1"]] == ran.start[0, at["0SEND_F0"]] == 1.0
    assert ran.end[0, at["0SEND_F0"]] == 1.625
    expected = 1.625 + 1.25 * (1 - 0.625 / 1.5)
    assert ran.end[0, at["0F1"]] == pytest.approx(expected, abs=1e-11)


def test_slowdowns_are_what_the_hardware_file_says() -> None:
    hw = load_hardware("h100-sxm", {"comm_sms": {"all_to_all": 33.0}, "comm_hbm": {"all_to_all": 0.2}})
    slow = KernelSlowdown.of(hw)
    assert slow.held[0][0] == 33 / 99 and slow.moving[1][0] == pytest.approx(0.25)
    assert slow.held[1] == (0, 0, 0) and slow.moving[0] == (0, 0, 0)
    assert slow.wire == ((0.43, 0, 0), (0.43, 0, 0)), "all-to-alls beside compute, whatever bounds it"


@pytest.mark.parametrize(
    ("gpu", "overrides", "held"),
    [
        ("h100-sxm", {}, 2 * 0.8 - 1),
        ("h100-sxm", {"power_W": 500}, 2 * 0.8 * (5 / 7) ** 0.7 - 1),
        ("h100-sxm", {"power_W": 300}, 16 / 116),  # never less than on so many SMs fewer
        ("h100-sxm", {"comm_sms": {"collective": 0.0}}, 0),
        ("a100-sxm-80gb", {}, 16 / 92),
        ("b200-sxm", {}, 16 / 132),
    ],
)
def test_products_that_take_all_sms_run_twice_beside_a_collective(gpu, overrides, held):  # type: ignore[no-untyped-def]
    hw = load_hardware(gpu, overrides)
    torch = structs.replace(hw, software=load_software("torchtitan"))
    plain, own = KernelSlowdown.of(hw), KernelSlowdown.of(torch)
    kind = COMM_KINDS.index("collective")
    assert own.held[0][kind] == pytest.approx(held) and own.held[1] == plain.held[1]
    assert own.held[0][:kind] + own.held[0][kind + 1 :] == plain.held[0][:kind] + plain.held[0][kind + 1 :]
    assert plain.held[0][kind] == pytest.approx(fewer_sms(hw)), "other frameworks' products leave what is held"


def test_attention_beside_a_collective_loses_its_sms_alone() -> None:
    hw = structs.replace(load_hardware("h100-sxm"), software=load_software("torchtitan"))
    attention = Kernel(KernelKind.ATTENTION, 32 * 8192**2 * 256, 10**8, DType.BF16, (1, 32, 8192, 8192, 128, 128))
    product = Kernel(KernelKind.GEMM, 2 * 8192**3, 6 * 8192**2, DType.BF16, (8192, 8192, 8192))
    moved = Kernel(KernelKind.MEMORY, 0, 10**9, DType.BF16)
    assert _arithmetic(attention, hw) * products_held(hw) == pytest.approx(fewer_sms(hw))
    assert (_arithmetic(product, hw), _arithmetic(moved, hw)) == (1, 0)
    assert _arithmetic(attention, load_hardware("h100-sxm")) == 1


def test_ops_are_classed_by_what_bounds_them() -> None:
    plan = moe_plan("1f1b", 2, 2, PlanPolicy())
    table = pairwise(plan, load_hardware("h100-sxm"))
    compute = plan.kind == OpKind.COMPUTE
    assert table.kind[compute].max() < len(table.held) and table.kind[~compute].max() < len(COMM_KINDS)
    for i in np.flatnonzero(~compute).tolist():
        text = plan.text(i)
        exchange = any(x in text for x in ("counts", "dispatch", "combine"))
        expected = "all_to_all" if exchange else "p2p" if plan.partner[i] >= 0 else ""
        assert COMM_KINDS[table.kind[i]] == (expected or "collective"), text
    update = [i for i in range(len(plan)) if "UPDATE" in plan.text(i)]
    assert update and not table.kind[update].any(), "an update is bound by memory"


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("comm_sms", {"all2all": 3}, "unknown kind of communication 'all2all'"),
        ("comm_sms", {"p2p": 132}, "leave none to compute"),
        ("comm_hbm", {"p2p": 1.0}, "below 1"),
        ("oversubscription", 0.5, "from 1 up"),
    ],
)
def test_bad_slowdowns_are_refused(key: str, value: object, says: str) -> None:
    refusal(load_hardware, "h100-sxm", {key: value}, match=says)
