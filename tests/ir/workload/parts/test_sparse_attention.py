"""Attention to keys that an indexer picks (DeepSeek-V3.2, GLM-5): its products, bytes, messages, and who has it."""

from dataclasses import replace

import pytest

from ir.core.ops import Pass
from ir.graph.sync import buckets
from ir.job import load_job
from ir.job.build import prepare
from ir.workload import config_from, load_config, model_chunks
from ir.workload.part import PartLayout
from ir.workload.parts.attention.indexer import AttentionIndexerWork
from ir.workload.parts.kernels import flops
from ir.workload.setting import AttentionKind, KernelStyle, MicrobatchShape, ModelPrecision, PartSetting, check_setting
from piper_sim import predict
from tests.ir.workload.models import small, work
from tests.refusals import refusal

V32, V3 = load_config("deepseek-v3.2"), load_config("deepseek-v3")
MLA, INDEXER = V32.mla, V32.indexer
assert MLA is not None and INDEXER is not None
HEADS, LONG = V32.heads, 32768


def attn(config=V32, tokens=LONG, layout=PartLayout(), **setting):
    return work(config, 5, "attn", layout, shape=MicrobatchShape(1, tokens), **setting)


def kernel(found, label):
    (one,) = (k for k in found if k.label == label)
    return one


def picked(tokens, most):
    """(query, key) pairs of one sequence, counted query by query; half of its own key, as causal squares are."""
    return sum(min(t + 1, most) for t in range(tokens)) - sum(0.5 if t < most else 0 for t in range(tokens))


@pytest.mark.parametrize("tokens", [512, 2048, 4096, LONG])
def test_kernels_read_picked_keys_and_the_indexer_all_of_them(tokens):
    found = attn(tokens=tokens)
    pairs = picked(tokens, INDEXER.top_k)
    shared = MLA.kv_rank + MLA.rope_dim + MLA.kv_rank  # features of the one key and the one value of all heads
    assert kernel(found.forward, "attention").flops == 2 * pairs * HEADS * shared
    assert kernel(found.forward, "index_scores").flops == tokens**2 * INDEXER.heads * (INDEXER.dim + 1)
    back = 3 * (MLA.kv_rank + MLA.rope_dim) + 2 * MLA.kv_rank
    assert kernel(found.input_grad, "attention_backward").flops == 2 * pairs * HEADS * back


@pytest.mark.parametrize(("mbs", "cp"), [(1, 4), (3, 1), (3, 2)])
def test_sequences_add_up_and_ranks_share_their_queries(mbs, cp):
    shape, layout = MicrobatchShape(mbs, 8192), PartLayout(cp=cp)
    one, some = attn(tokens=8192), work(V32, 5, "attn", layout, shape=shape)
    for label in ("attention", "index_scores", "index_query", "absorbed_keys"):
        assert kernel(some.forward, label).flops * cp == mbs * kernel(one.forward, label).flops
    kept = [{b.name: b.bytes for b in x.saved} for x in (one, some)]
    assert kept[1]["picked"] * cp == mbs * kept[0]["picked"]
    assert some.model_flops == mbs * one.model_flops  # over all devices


def test_scores_are_there_in_stretches_and_gradients_of_shared_keys_in_fp32():
    """What is beside a part in forward, beyond what is left of it, grows with the keys alone from a stretch on."""
    at = {
        n: AttentionIndexerWork.of(PartSetting(V32, PartLayout(), MicrobatchShape(2, n), ModelPrecision()))
        for n in (2048, 4096, 8192)
    }
    assert [at[n].workspace for n in at] == [4 * n * min(n, 4096) for n in at]
    heads = AttentionIndexerWork.of(
        PartSetting(V32, PartLayout(), MicrobatchShape(2, 64), ModelPrecision(), AttentionKind.UNFUSED)
    )
    assert heads.workspace == 2 * 4 * 2 * 64 * 64 * INDEXER.heads
    latent = MLA.kv_rank + MLA.rope_dim
    read = (HEADS * (latent + MLA.kv_rank) + latent) * 2  # queries and output of each head, the key of all; both ways
    moved = 2 * read + 2 * 4 * latent + 4 * HEADS  # and sums of the key's gradient, read and written
    assert kernel(attn(tokens=4096).input_grad, "attention_backward").bytes == 4096 * moved


def test_what_mfu_counts_is_the_models_whatever_kernels_do():
    """As many pairs as are picked, of heads as they are; the same for kernels that read all."""
    extra = work(V32, 5, "attn", shape=MicrobatchShape(1, LONG)).model_flops - attn(V3).model_flops
    scores = 2 * (picked(LONG, INDEXER.top_k) - LONG**2 / 2) * HEADS * (MLA.qk_dim + MLA.v_dim)
    narrow = INDEXER.heads * INDEXER.dim * MLA.q_rank + (INDEXER.dim + INDEXER.heads) * V32.hidden
    index = 2 * LONG * narrow + LONG**2 * INDEXER.heads * (INDEXER.dim + 1)
    assert extra == scores + index
    assert (
        attn().model_flops == attn(attention="unfused").model_flops == attn(style=KernelStyle(masked=True)).model_flops
    )


def test_absorbed_projections_are_the_one_to_keys_and_values_in_two():
    sparse, dense = attn(tokens=4096), attn(V3, 4096)
    for side in ("forward", "input_grad", "weight_grad"):
        mine, theirs = getattr(sparse, side), getattr(dense, side)
        whole = flops(k for k in theirs if k.label.startswith("kv_b_proj"))
        assert flops(k for k in mine if k.label.startswith("absorbed_")) == whole > 0
        rest = ("kv_b_proj", "absorbed_", "attention", "index_")
        left = [flops(k for k in x if not k.label.startswith(rest)) for x in (mine, theirs)]
        assert left[0] == left[1]


def test_what_stays_for_backward():
    """Of a token: queries in the keys' space and what comes back from it for each head, one key, the picked numbers."""
    kept = {b.name: b for b in attn(tokens=4096).saved}
    bf16 = 2
    assert kept["qk"].bytes == 4096 * (HEADS + 1) * (MLA.kv_rank + MLA.rope_dim) * bf16
    assert kept["attended"].bytes == 4096 * HEADS * MLA.kv_rank * bf16 and kept["attended"].until is Pass.W
    assert kept["picked"].bytes == 4096 * INDEXER.top_k * 4 and kept["picked"].until is Pass.I
    short = {b.name: b for b in attn(tokens=512).saved}
    assert short["picked"].bytes == 512 * 512 * 4
    masked = {b.name: b.bytes for b in attn(tokens=4096, style=KernelStyle(masked=True)).saved}
    assert masked["picked_mask"] == 4096**2 and "picked" not in masked and "attended" not in masked


def test_who_is_told_of_keys():
    """Whole sequences' index keys over cp; under sequence parallelism what the narrow products made, over tp."""

    def gathers(layout):
        return [(x.message.axes, x.message.bytes) for x in attn(layout=layout).inline if x.when is Pass.F]

    latent = MLA.kv_rank + MLA.rope_dim
    assert gathers(PartLayout(cp=4)) == [(("cp",), LONG * INDEXER.dim * 2), (("cp",), LONG * latent * 2)]
    more = (("tp",), LONG * (INDEXER.dim + INDEXER.heads) * 2)
    layout = PartLayout(tp=4, sequence_parallel=True)
    ours, theirs = (
        gathers(layout),
        [(x.message.axes, x.message.bytes) for x in attn(V3, layout=layout).inline if x.when is Pass.F],
    )
    assert sorted([*theirs, more]) == sorted(ours)
    heads = PartLayout(cp=4, cp_heads=True)
    assert refusal(check_setting, V32, heads, MicrobatchShape(1, LONG)).key == "parallel.cp_comm"
    check_setting(V3, heads, MicrobatchShape(1, LONG))


def test_the_indexer_has_no_backward_and_nobody_trains_it():
    found = attn()
    assert not [k.label for k in (*found.input_grad, *found.weight_grad) if k.label.startswith("index_")]
    job = load_job(
        {
            "model": {**small("deepseek_v32"), "num_hidden_layers": 4, "seq_len": 16},
            "cluster": {"gpu": "h100-sxm"},
            "parallel": {"pp": 2, "dp": 2, "zero": 3},
            "schedule": {"microbatches": 2},
        }
    )
    prepared = prepare(job)
    trained = {name for b in buckets(prepared.plan().graph) for name in b.params}
    still = {p.name for e in prepared.base.entries for p in e.part.frozen}
    assert len(still) == 4 * 5 and all(".indexer." in name for name in still)
    assert not trained & still and any("kv_b_proj" in name for name in trained)


def test_frozen_weights_weigh_what_they_weigh_and_nothing_more():
    """Wider index heads cost their weights' bytes on each rank: no gradient, no moments, no shares."""

    def bytes_of(heads):
        table = {"model": {"config": "deepseek-v3.2", "num_hidden_layers": 4, "num_nextn_predict_layers": 0}}
        table["model"] |= {"index_n_heads": heads, "seq_len": 512}
        table |= {"cluster": {"gpu": "h200-sxm"}, "parallel": {"ep": 8, "dp": 8, "zero": 1}}
        found = predict(load_job(table, ["schedule.microbatches=1"])).to_dict()["memory"]["breakdown_bytes"]["0"]
        return {k: found[k] for k in ("parameters", "gradients", "optimizer")}

    few, many = bytes_of(64), bytes_of(96)
    more = 32 * (INDEXER.dim * MLA.q_rank + V32.hidden) * 4 * 2  # in four layers, two bytes each
    assert many["parameters"] - few["parameters"] == more
    assert (many["gradients"], many["optimizer"]) == (few["gradients"], few["optimizer"])


def test_layers_that_share_picks_have_no_indexer():
    raw = small("glm_moe_dsa")
    every = config_from(raw, "x")
    some = config_from({**raw, "indexer_types": ["full", "shared", "shared", "full"]}, "x")
    chunks = [model_chunks(c)[1:5] for c in (every, some)]
    have = [[bool(c.parts[0].frozen) for c in each] for each in chunks]
    assert have == [[True] * 4, [True, False, False, True]]
    layers = [work(some, i + 1, "attn", shape=MicrobatchShape(1, 16)) for i in range(4)]
    assert [any(k.label.startswith("index_") for k in x.forward) for x in layers] == have[1]
    assert layers[0].saved != layers[1].saved and not [b for b in layers[1].saved if b.name == "picked"]
    assert kernel(layers[1].forward, "attention") == kernel(layers[0].forward, "attention")


@pytest.mark.parametrize("freq", [1, 2, 3, 4])
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_who_shares_is_as_transformers_reads_it(freq, offset):
    from transformers import GlmMoeDsaConfig

    how = {"index_topk_freq": freq, "index_skip_topk_offset": offset}
    theirs = GlmMoeDsaConfig(num_hidden_layers=11, **how).indexer_types
    raw = {**small("glm_moe_dsa"), "num_hidden_layers": 11, **how}
    if theirs[0] == "shared":
        assert refusal(config_from, raw, "x").key == "indexer_types"
    else:
        found = config_from(raw, "x").indexer
        assert found is not None and found.shared == {i for i, kind in enumerate(theirs) if kind == "shared"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("indexer_types", ["shared", "full", "full", "full"]),
        ("indexer_types", ["full"]),
        ("indexer_types", ["full", "half", "full", "full"]),
        ("index_head_dim", 2),
        ("index_topk", 0),
        ("q_lora_rank", None),
        ("mlp_layer_types", ["dense"]),
        ("mlp_layer_types", ["dense", "sparse", "sparse", "wide"]),
    ],
)
def test_what_no_class_could_be_made_of_is_refused(key, value):
    e = refusal(config_from, {**small("glm_moe_dsa"), key: value}, "x")
    assert e.key == key and e.allowed


def test_dense_layers_are_those_that_are_named():
    raw = {k: v for k, v in small("glm4_moe_lite").items() if k != "first_k_dense_replace"}
    kinds = ["sparse", "dense", "sparse", "dense"]
    named, usual = config_from({**raw, "mlp_layer_types": kinds}, "x"), config_from(raw, "x")
    assert named.moe is not None and usual.moe is not None
    assert (named.moe.dense_layers, usual.moe.dense_layers) == ({1, 3}, {0})
    assert replace(named, moe=usual.moe) == usual
