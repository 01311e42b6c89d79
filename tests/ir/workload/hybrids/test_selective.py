"""Mamba-1: a selective scan in each layer, its sizes, what it sends, what backward makes again."""

from typing import Any

import pytest

from ir.core.ops import Pass
from ir.workload import config_from, model_chunks
from ir.workload.part import PartLayout
from ir.workload.parts.kernels import flops
from ir.workload.setting import MicrobatchShape, check_setting, shares_kv_heads
from tests.ir.workload.hybrids.test_halves import same
from tests.ir.workload.models import FAMILIES, small, work
from tests.refusals import refusal

FALCON = config_from(FAMILIES["falcon_mamba"]["config"], "x")


@pytest.mark.parametrize(
    "inline",
    [
        {"num_hidden_layers": 1, "time_step_rank": "auto", "use_bias": True, "tie_word_embeddings": False},
        {"state_size": 6, "conv_kernel": 2, "use_conv_bias": False, "time_step_rank": 7},
        {"intermediate_size": 90, "expand": 3},
    ],
)
@pytest.mark.parametrize("name", ["mamba", "falcon_mamba"])
def test_the_selective_scan_is_transformers_own(name: str, inline: dict[str, Any]) -> None:
    same({**small(name), **inline})
    plain = {k: v for k, v in {**small(name), **inline}.items() if k != "intermediate_size"}
    same(plain)


def test_features_all_read_one_key_that_devices_add_up() -> None:
    assert {tuple(p.name for p in c.parts) for c in model_chunks(FALCON)[1:-1]} == {("mixer",)}
    whole, cut = (work(FALCON, 1, "mixer", PartLayout(tp=tp)) for tp in (1, 4))
    for name in ("forward", "input_grad", "weight_grad"):
        assert flops(getattr(whole, name)) == 4 * flops(getattr(cut, name)), name
    sent = [(str(c.message.kind), c.message.bytes) for c in cut.inline if c.when is Pass.F]
    selected = 4096 * (256 + 2 * 16) * 2
    assert sent[0] == ("all_reduce", selected) and not whole.inline
    across = [c.message.bytes for c in work(FALCON, 1, "mixer", PartLayout(cp=4)).inline]
    assert across == [2 * 1024 * 8192 * 2, 1024 * 8192 * 2] * 2


def test_features_are_no_kv_head_that_ranks_share() -> None:
    """Frameworks that share none are refused by that name; the config has one head and one KV head in place of none."""
    assert (FALCON.heads, FALCON.kv_heads) == (1, 1)
    assert not any(shares_kv_heads(FALCON, tp) for tp in (2, 4, 8))


def test_what_is_convolved_and_step_sizes_are_made_again() -> None:
    w, one = work(FALCON, 1, "mixer"), 4096 * 8192 * 2
    assert {b.name: b.bytes / one for b in w.saved if b.bytes >= one} == {"projected": 2, "recurred": 1}
    back = [k.label for k in w.input_grad]
    assert back.count("conv") == 2 and "dt_proj.again" in back
    scan = next(k for k in w.forward if k.label == "scan.selective")
    assert scan.bytes == 5 * one + 4096 * 288 * 2 and not scan.flops


@pytest.mark.parametrize(
    ("layout", "inline", "key"),
    [
        (PartLayout(tp=3), {"vocab_size": 48}, "parallel.tp"),
        (PartLayout(cp=3), {}, "parallel.cp"),
    ],
)
def test_features_that_ranks_do_not_share_are_refused(layout: PartLayout, inline: dict[str, Any], key: str) -> None:
    config = config_from({**small("mamba"), **inline}, "x")
    assert refusal(check_setting, config, layout, MicrobatchShape(1, 4096)).key == key


def test_a_rank_of_step_sizes_is_a_number_or_auto() -> None:
    e = refusal(config_from, {**small("mamba"), "time_step_rank": "half"}, "x")
    assert e.key == "time_step_rank" and e.allowed == "auto"
