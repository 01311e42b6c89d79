"""DeepSeek-V4's layers: several residual streams, a window of keys, compressed ones behind it.

Parameters and products of a published config against transformers' class: test_families.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

from ir.core.ops import Pass
from ir.core.work import DType, Work
from ir.graph.sync import buckets
from ir.job import load_job
from ir.job.build import prepare
from ir.workload import config_from, load_config, model_chunks
from ir.workload.config.compressed import CompressedAttentionKeys
from ir.workload.config.spec import ModelConfig
from ir.workload.part import PartLayout, PartWork
from ir.workload.setting import MicrobatchShape, ModelPrecision, check_setting
from ir.workload.work import part_work
from piper_sim import predict
from tests.executor.modules.hub import quiet
from tests.ir.workload.models import small
from tests.ir.workload.test_families import counted, priced
from tests.refusals import refusal

FLASH, PRO = load_config("deepseek-v4-flash"), load_config("deepseek-v4-pro")
WINDOW, SPARSE, HEAVY = 0, 2, 3  # layers of V4-Flash
S = 4096
SHORT = {"compress_rate_csa": 2, "compress_rate_hca": 4}


def work(
    layer: int,
    part: str = "attn",
    config: ModelConfig = FLASH,
    layout: PartLayout = PartLayout(),
    shape: MicrobatchShape = MicrobatchShape(1, S),
    attention: str = "flash",
) -> PartWork:
    chunk = model_chunks(config)[layer + 1]
    found = next(p for p in chunk.parts if p.name == part)
    return part_work(config, chunk, found, layout, shape, ModelPrecision(), attention)


def moved(works: Work) -> dict[str, int]:
    out = dict[str, int]()
    for k in works:
        out[k.label] = out.get(k.label, 0) + k.bytes * k.count
    return out


def seen(tokens: int, keys: CompressedAttentionKeys) -> Iterator[int]:
    """Of each query, one by one: stretches that end at or before it, the picked ones of them."""
    for t in range(tokens):
        whole = sum((i + 1) * keys.rate - 1 <= t for i in range(keys.entries(tokens)))
        yield min(whole, keys.top_k) if keys.top_k else whole


@pytest.mark.parametrize("rate", [1, 2, 4, 7, 128])
@pytest.mark.parametrize("top_k", [0, 1, 3, 50])
def test_pairs_are_those_counted_query_by_query(rate: int, top_k: int) -> None:
    keys = CompressedAttentionKeys(rate, top_k)
    for tokens in (1, 2, 5, 8, 29, 128, 131, 257):
        assert keys.pairs(tokens) == sum(seen(tokens, keys)), tokens
    assert CompressedAttentionKeys().pairs(99) == 0


def test_queries_see_as_many_keys_as_transformers_class_lets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = small("deepseek_v4") | {"compress_ratios": [0, 4, 128, 4], "index_topk": 2, **SHORT}
    config, masks, plain = config_from(raw, "x"), list[Any](), theirs.eager_attention_forward
    assert config.compressed is not None

    def watched(module: Any, q: Any, k: Any, v: Any, mask: Any, *args: Any, **named: Any) -> Any:
        masks.append(mask)
        return plain(module, q, k, v, mask, *args, **named)

    monkeypatch.setattr(theirs, "eager_attention_forward", watched)
    tokens = 13
    with quiet(), torch.no_grad():
        hub = CONFIG_MAPPING["deepseek_v4"].from_dict(dict(raw))
        model = AutoModelForCausalLM.from_config(hub, attn_implementation="eager").eval()
        model(torch.arange(tokens)[None] % 60, use_cache=False)
    assert len(masks) == 4 and {keys.rate for keys in config.compressed.layers} == {0, 2, 4}
    for mask, keys in zip(masks, config.compressed.layers, strict=True):
        behind = mask[..., tokens:] > -1
        assert behind.shape[-1] == keys.entries(tokens) and int(behind.sum()) == keys.pairs(tokens)
        assert int((mask[..., :tokens] > -1).sum()) == sum(min(t + 1, config.window) for t in range(tokens))


def test_a_mixture_of_one_stream_has_its_weights_all_the_same() -> None:
    raw = small("deepseek_v4") | {"hc_mult": 1}
    with quiet():
        hub = AutoModelForCausalLM.from_config(CONFIG_MAPPING["deepseek_v4"].from_dict(dict(raw)))
    config = config_from(raw, "x")
    found = {q.name: q.shape for c in model_chunks(config) for p in c.parts for q in (*p.params, *p.frozen)}
    assert config.streams == 1 and found == {n: tuple(p.shape) for n, p in hub.named_parameters()}


@pytest.mark.parametrize("streams", [2, 4])
def test_products_of_short_stretches_are_those_that_torch_counts(streams: int) -> None:
    raw = small("deepseek_v4") | {"compress_ratios": [4, 128, 0, 128], "hc_mult": streams, **SHORT}
    for tokens in (8, 16):
        assert counted(raw, tokens)[1] == priced(config_from(raw, "x"), tokens)[0]


def test_kinds_of_layers_are_read_as_transformers_reads_them() -> None:
    names = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    raws = [
        {},
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 7, "compress_ratios": [4, 0, 0, 128, 4, 128, 0, 0]},
        {"num_hidden_layers": 3, "layer_types": [names[4], names[128], names[0]], "compress_rate_csa": 8},
        {"num_hidden_layers": 3, "compress_rates": {names[4]: 16, names[128]: 64}},
        {"num_hidden_layers": 2, "compress_rates": {names[4]: 16, names[128]: 64}, "compress_rate_hca": 256},
    ]
    for raw in raws:
        hub = CONFIG_MAPPING["deepseek_v4"].from_dict(raw)
        ours = config_from({"model_type": "deepseek_v4", **raw}, "x").compressed
        assert ours is not None
        rates = {**hub.compress_rates, names[0]: 0}
        top = {names[4]: hub.index_topk}
        assert ours.layers == tuple(CompressedAttentionKeys(rates[k], top.get(k, 0)) for k in hub.layer_types), raw
        assert ours.rope_dim == hub.qk_rope_head_dim


def test_a_layer_attends_to_its_window_and_what_is_compressed() -> None:
    """Products of forward: 64 heads, keys and values of 512 features; half a window's corner is cut off."""
    window = 2 * 128 * S - 128 * 128
    picked = 2 * sum(seen(S, CompressedAttentionKeys(4, 512)))
    for layer, more in ((WINDOW, 0), (SPARSE, picked), (HEAVY, 2 * sum(seen(S, CompressedAttentionKeys(128))))):
        found = next(k for k in work(layer).forward if k.label == "attention")
        assert found.flops == 64 * (window + more) * (512 + 512)
        assert found.shape == (1, 64, S, S + (0, 0, S // 4, S // 128)[layer], 512, 512)
    unfused = {k.label: k.flops for k in work(SPARSE, attention="unfused").forward}
    assert unfused["scores"] == unfused["context"] == 2 * 64 * S * (S + S // 4) * 512


def test_what_picks_keys_has_no_backward_and_nobody_trains_it() -> None:
    labels = [{k.label for k in w} for w in (work(SPARSE).forward, work(SPARSE).input_grad, work(SPARSE).weight_grad)]
    assert {"index_scores", "index_top_k"} <= labels[0] and not any("index" in x for x in labels[1] | labels[2])
    assert not any("index" in k.label for k in work(HEAVY).forward)
    table = {"model": {**small("deepseek_v4"), "seq_len": 16}, "cluster": {"gpu": "h100-sxm"}}
    prepared = prepare(load_job({**table, "parallel": {"dp": 2, "zero": 3}, "schedule": {"microbatches": 2}}))
    trained = {name for b in buckets(prepared.plan().graph) for name in b.params}
    still = {p.name for e in prepared.base.entries for p in e.part.frozen}
    assert len(still) == 2 * 6 and all(".indexer." in n for n in still) and not trained & still


def test_streams_are_read_and_written_as_often_as_the_papers_kernels_do() -> None:
    """arXiv:2512.24880, section 4.3: four streams of C elements; reads and writes of one token in bf16."""
    m, c = 4, FLASH.hidden
    for part, last in (("attn", "attn"), ("router", "add")):
        forward = moved((*work(0, part).forward, *(work(0, last).forward if last != part else ())))
        assert forward["streams.read"] == S * 2 * (m + 1) * c
        assert forward["streams.write"] == S * 2 * (m + 1 + m) * c
        back = moved((*work(0, part).input_grad, *(work(0, last).input_grad if last != part else ())))
        assert back["streams.write_backward"] == S * 2 * (3 * m + 2) * c
        assert {"streams.read_backward", "streams.sum", "stream_coefficients"} <= back.keys()
        assert "residual" not in forward and "residual_backward" not in back
    assert work(0).out_bytes == work(0, "add").out_bytes == m * 2 * S * c and work(0, "experts").out_bytes == 2 * S * c
    one = replace(FLASH, streams=0)
    labels = {
        k.label for p in ("attn", "router", "add") for k in (*work(0, p, one).forward, *work(0, p, one).input_grad)
    }
    assert {"residual", "residual_backward"} <= labels and not any(x.startswith("stream") for x in labels)


def test_stages_send_all_streams() -> None:
    ends = [model_chunks(c)[-1].parts for c in (FLASH, PRO)]
    assert [p.name for p in ends[0]] == [p.name for p in ends[1]] == ["norm", "head"]
    names = {q.name: q.numel for q in ends[0][0].params}
    assert names["model.hc_head.hc_fn"] == 4 * 4 * 4096 and names["model.hc_head.hc_scale"] == 1
    chunk = model_chunks(FLASH)[0]
    embed = part_work(FLASH, chunk, chunk.parts[0], PartLayout(), MicrobatchShape(1, S), ModelPrecision())
    assert embed.out_bytes == 4 * 2 * S * 4096


def test_devices_share_compressed_keys_and_divide_heads_and_their_groups() -> None:
    gathers = {
        layer: [x.message.bytes for x in work(layer, layout=PartLayout(cp=4)).inline if x.when is Pass.F]
        for layer in (WINDOW, SPARSE, HEAVY)
    }
    window = 128 * 512 * 2
    assert gathers[WINDOW] == [window] and gathers[HEAVY] == [S // 128 * 512 * 2 + window]
    assert sorted(gathers[SPARSE]) == sorted([S // 4 * 128 * 2, S // 4 * 512 * 2 + window])
    whole, half = (
        {k.label: k.flops for k in work(SPARSE, layout=PartLayout(tp=n, sequence_parallel=True)).forward}
        for n in (1, 2)
    )
    for label in ("q_b_proj", "o_a_proj", "o_proj", "attention"):
        assert whole[label] == 2 * half[label], label
    assert whole["index_scores"] == half["index_scores"], "each rank picks for itself"
    layout, own = PartLayout(tp=2, sequence_parallel=True), S // 4 * 128 + S * 64
    sizes = [
        x.message.bytes for x in work(SPARSE, layout=layout).inline if x.when is Pass.F and x.message.axes == ("tp",)
    ]
    assert own * 2 in sizes and own * 2 not in [
        x.message.bytes for x in work(HEAVY, layout=layout).inline if x.when is Pass.F
    ], "index keys, and weights of their heads"
    for key, layout in (
        ("parallel.tp", PartLayout(tp=16, sequence_parallel=True)),
        ("parallel.cp_comm", PartLayout(cp=2, cp_heads=True)),
    ):
        assert refusal(check_setting, FLASH, layout, MicrobatchShape(1, S)).key == key
    check_setting(PRO, PartLayout(tp=16, sequence_parallel=True), MicrobatchShape(1, S))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("compress_ratios", [4, 0, 3, 4]),
        ("compress_ratios", [4, 0]),
        ("layer_types", ["full_attention"] * 4),
        ("layer_types", ["sliding_attention"]),
        ("compress_rates", {"full_attention": 4}),
        ("compress_rates", {"compressed_sparse_attention": 0}),
        ("compress_rates", {"compressed_sparse_attention": "4"}),
        ("o_groups", 3),
        ("qk_rope_head_dim", 17),
        ("num_key_value_heads", 4),
        ("n_shared_experts", 2),
        ("scoring_func", "tanh"),
        ("num_experts_per_tok", 9),
    ],
)
def test_what_goes_with_no_such_model_is_refused(key: str, value: object) -> None:
    assert refusal(config_from, {**small("deepseek_v4"), key: value}, "x").key == key


def test_a_wider_stream_is_each_of_them() -> None:
    chunk = model_chunks(FLASH)[1]
    wide = ModelPrecision(residual=DType.FP32)
    found = part_work(FLASH, chunk, chunk.parts[0], PartLayout(), MicrobatchShape(1, S), wide)
    assert found.out_bytes == 4 * 4 * S * 4096


@pytest.mark.parametrize("recompute", ["none", "full", ["norm"], ["operators"], ["up_projection"]])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe"])
def test_plans_of_it_are_predicted(recompute: object, schedule: str) -> None:
    table: dict[str, Any] = {"model": {**small("deepseek_v4"), "num_hidden_layers": 8, "seq_len": 64}}
    table["model"]["compress_ratios"] = [0, 4, 128, 4, 128, 4, 128, 4]
    table |= {"cluster": {"gpu": "h100-sxm"}, "schedule": {"name": schedule, "microbatches": 4, "recompute": recompute}}
    table["parallel"] = {"pp": 2, "tp": 2, "sequence_parallel": True, "dp": 2, "ep": 2, "zero": 1}
    assert predict(load_job(table)).to_dict()["iteration_s"] > 0
