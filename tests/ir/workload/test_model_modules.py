"""Small tensors that parts keep or give, by hand; torch's modules agree in tests/executor."""

import pytest

from ir.core.ops import Pass
from ir.job.build import prepare
from ir.job.load import job_from
from ir.workload.part import PartLayout
from ir.workload.setting import MicrobatchShape
from tests.ir.workload.models import work


def test_norms_inside_attention_keep_statistics_too() -> None:
    def kept(config: str, layout: PartLayout) -> dict[str, tuple[int, Pass]]:
        return {s.name: (s.bytes, s.until) for s in work(config, 1, "attn", layout).saved}

    # qwen3-30b-a3b: 32 query and 4 key heads, cut by tp. Latents are normed before tp's region: sp alone cuts them.
    assert kept("qwen3-30b-a3b", PartLayout())["qk_norm_stats"] == (4096 * (32 + 4) * 4, Pass.I)
    assert kept("qwen3-30b-a3b", PartLayout(tp=4))["qk_norm_stats"] == (4096 * (8 + 1) * 4, Pass.I)
    assert kept("deepseek-v3", PartLayout(tp=4))["latent_norm_stats"] == (4096 * 2 * 4, Pass.I)
    assert kept("deepseek-v3", PartLayout(tp=4, sequence_parallel=True))["latent_norm_stats"] == (1024 * 2 * 4, Pass.I)
    assert kept("deepseek-v2-lite", PartLayout())["latent_norm_stats"] == (4096 * 4, Pass.I)  # queries have no latent
    assert not {"qk_norm_stats", "latent_norm_stats"} & kept("llama3-8b", PartLayout()).keys()


def test_an_mtp_module_norms_both_of_its_inputs() -> None:
    w = work("deepseek-v3", -2, "proj")
    assert [(s.name, s.bytes) for s in w.saved] == [("joined", 4096 * 2 * 7168 * 2), ("norm_stats", 4096 * 2 * 4)]


def test_a_router_keeps_weights_only_where_it_divides_them_by_their_sum() -> None:
    def kept(config: str) -> int:
        return next(s.bytes for s in work(config, 10, "router").saved if s.name == "router_scores")

    assert kept("deepseek-v3") == 4096 * (256 * 4 + 8 * 8 + 8 * 4 + 4)
    assert kept("deepseek-v2") == 4096 * (160 * 4 + 6 * 8)


def test_experts_give_rows_to_combine_and_sums_where_there_is_none() -> None:
    layouts = (PartLayout(), PartLayout(ep=4), PartLayout(etp=2))
    got = [work("mixtral-8x7b", 1, "experts", layout).out_bytes for layout in layouts]
    assert got == [4096 * 4096 * 2, 2 * 4096 * 4096 * 2, 2 * 4096 * 4096 * 2]


def test_learned_positions_get_a_gradient_summed_over_sequences() -> None:
    assert work("gpt2", 0, "embed", shape=MicrobatchShape(4, 1024)).stash_bytes == (4 + 1) * 1024 * 768 * 2
    layout = PartLayout(tp=2, cp=2, sequence_parallel=True)
    assert work("gpt2", 0, "embed", layout, shape=MicrobatchShape(4, 1024)).stash_bytes == (4 + 1) * 256 * 768 * 2


@pytest.mark.parametrize(("ep", "rows", "token"), [(1, 1, 2), (4, 2, 2)])
def test_gradients_around_exchanged_experts_travel_as_tokens_then_as_rows(ep: int, rows: int, token: int) -> None:
    """add hands back one row per token, experts top_k of them: combine's mirror copies, dispatch's mirror sums."""
    table = {"model": {"config": "tiny-moe", "seq_len": 64}, "parallel": {"dp": 4, "ep": ep}}
    prepared = prepare(job_from(table | {"schedule": {"microbatches": 2}, "cluster": {"gpu": "h100-sxm"}}))
    moe = prepared.config.moe
    assert moe is not None and moe.top_k == 2
    wide = 64 * prepared.config.hidden * token
    found = {n.part: n.writes for n in prepared.graph().nodes if n.kind is Pass.I}
    part = next(p for p in found if p.endswith(".experts"))
    assert found[part][0].bytes == rows * wide
    assert found[part.replace("experts", "add")][0].bytes == wide
