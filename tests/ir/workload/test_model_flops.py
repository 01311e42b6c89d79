"""FLOPs against closed forms written here from the architectures alone, in integers."""

import pytest

from ir.core.errors import PiperError
from ir.core.ops import Pass
from ir.core.work import DType, KernelKind, MessageKind
from ir.workload import load_config, model_chunks
from ir.workload.params import local_numel
from ir.workload.part import PartLayout
from ir.workload.parts.kernels import flops
from ir.workload.setting import MicrobatchShape, ModelPrecision, check_setting
from ir.workload.work import dispatch_bytes, part_work

BF16 = ModelPrecision()
FP8 = ModelPrecision(DType.FP8, dispatch=DType.FP8)


def works(config, layout=PartLayout(), shape=MicrobatchShape(), precision=BF16, attention="flash"):
    return {
        f"{c.name}.{p.name}": part_work(config, c, p, layout, shape, precision, attention)
        for c in model_chunks(config)
        for p in c.parts
    }


def total_model_flops(name, shape):
    return sum(w.model_flops for w in works(load_config(name), shape=shape).values())


def llama(layers, h, heads, kv, d, f, vocab, b, s):
    projections = h * (heads + 2 * kv) * d + heads * d * h + 3 * h * f
    causal = heads * s * d  # two products of s/2 pairs on average
    return b * s * (layers * 2 * (projections + causal) + 2 * h * vocab)


def test_llama_forward_flops():
    assert total_model_flops("llama3-8b", MicrobatchShape(2, 8192)) == llama(
        32, 4096, 32, 8, 128, 14336, 128256, 2, 8192
    )
    assert total_model_flops("llama3-70b", MicrobatchShape(1, 4096)) == llama(
        80, 8192, 64, 8, 128, 28672, 128256, 1, 4096
    )


def test_llama_is_two_flops_per_parameter_and_token_beside_attention():
    shape = MicrobatchShape(1, 2)
    got = total_model_flops("llama3-70b", shape) / shape.tokens
    used = 70.554e9 - 128256 * 8192
    assert got == pytest.approx(2 * used, rel=1e-4)


def test_gpt3_forward_flops():
    h, s, layers, vocab = 12288, 2048, 96, 51200
    # 24bsh²(1 + s/6h) of arXiv:2104.04473 counts attention whole; causal counts half: s/12h.
    want = s * (layers * (24 * h * h + 2 * s * h) + 2 * h * vocab)
    assert total_model_flops("gpt3-175b", MicrobatchShape(1, s)) == want


def test_nemotron_has_one_up_projection():
    h, f, s = 6144, 24576, 4096
    want = s * (32 * 2 * (h * (48 + 16) * 128 + h * h + 2 * h * f + 48 * s * 128) + 2 * h * 256000)
    assert total_model_flops("nemotron-15b", MicrobatchShape(1, s)) == want


def test_mixtral_counts_its_top_two_and_the_router():
    h, f, s = 4096, 14336, 4096
    want = s * (32 * 2 * (h * (32 + 16) * 128 + h * h + 2 * 3 * h * f + h * 8 + 32 * s * 128) + 2 * h * 32000)
    assert total_model_flops("mixtral-8x7b", MicrobatchShape(1, s)) == want


def test_qwen3_head_dim_is_its_own():
    h, f, s = 4096, 1536, 4096
    want = s * (94 * 2 * (h * (64 + 8) * 128 + 64 * 128 * h + 8 * 3 * h * f + h * 128 + 64 * s * 128) + 2 * h * 151936)
    assert total_model_flops("qwen3-235b-a22b", MicrobatchShape(1, s)) == want


def test_deepseek_v3_forward_flops_with_mla_and_mtp():
    h, s, vocab = 7168, 4096, 129280
    mla = h * 1536 + 1536 * 128 * 192 + h * (512 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * h
    attn = 2 * mla + 128 * s * (192 + 128)
    dense = 2 * 3 * h * 18432
    moe = 2 * (9 * 3 * h * 2048 + h * 256)
    mtp = 2 * 2 * h * h + attn + moe + 2 * h * vocab
    want = s * (61 * attn + 3 * dense + 58 * moe + 2 * h * vocab + mtp)
    assert total_model_flops("deepseek-v3", MicrobatchShape(1, s)) == want


def test_a_sliding_window_leaves_fewer_pairs():
    full, window = (
        works(load_config("mistral-7b", {"sliding_window": w}), shape=MicrobatchShape(1, 8192))["l0.attn"].model_flops
        for w in (None, 2048)
    )
    pairs = 2048 * 8192 - 2048 * 2048 // 2
    assert full - window == 2 * 32 * (8192 * 8192 // 2 - pairs) * 256


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-moe", "gpt2", "deepseek-v3", "nemotron-15b"])
def test_forward_kernels_do_the_models_flops(name):
    for where, w in works(load_config(name), shape=MicrobatchShape(1, 512)).items():
        assert flops(w.forward) == w.model_flops, where


@pytest.mark.parametrize("name", ["llama3-8b", "deepseek-v3", "gpt3-175b"])
def test_backward_is_twice_forward_but_for_flash_attention(name):
    c = load_config(name)
    for where, w in works(c, shape=MicrobatchShape(1, 2048)).items():
        core = [k for k in w.forward if k.kind is KernelKind.ATTENTION]
        back = [k for k in w.input_grad if k.kind is KernelKind.ATTENTION]
        products = flops(w.forward) - flops(core)
        if where.endswith("embed"):
            assert (w.input_grad, flops(w.weight_grad)) == ((), 0)
            continue
        assert flops(w.input_grad) - flops(back) == products, where
        assert flops(w.weight_grad) == products, where
        # Five products against two: S and dQ, dK on q·k features; dP and dV on v.
        assert flops(back) * (c.qk_dim + c.v_dim) == flops(core) * (3 * c.qk_dim + 2 * c.v_dim)


def test_flash_backward_of_equal_heads_is_two_and_a_half_forwards():
    w = works(load_config("llama3-8b"))["l0.attn"]
    core = flops(k for k in w.forward if k.kind is KernelKind.ATTENTION)
    assert flops(k for k in w.input_grad if k.kind is KernelKind.ATTENTION) * 2 == core * 5


def test_unfused_attention_computes_the_whole_square():
    flash, unfused = (
        works(load_config("gpt3-175b"), attention=a, shape=MicrobatchShape(1, 2048)) for a in ("flash", "unfused")
    )
    core = 2 * 96 * 2048 * 2048 * 128
    assert flops(unfused["l0.attn"].forward) - flops(flash["l0.attn"].forward) == core
    assert unfused["l0.attn"].model_flops == flash["l0.attn"].model_flops


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama3-70b", PartLayout(tp=8, sequence_parallel=True)),
        ("llama3-70b", PartLayout(tp=8)),
        ("llama3-70b", PartLayout(tp=4, cp=4, sequence_parallel=True)),
        ("llama3-8b", PartLayout(cp=8)),
        ("llama3-8b", PartLayout(cp=8, cp_heads=True)),
        ("llama3-8b", PartLayout(cp=32, cp_heads=True)),
        ("deepseek-v3", PartLayout(cp=16, ep=64, cp_heads=True)),
        ("gpt3-175b", PartLayout(tp=8)),
        ("mixtral-8x7b", PartLayout(tp=2, ep=8, sequence_parallel=True)),
        ("mixtral-8x7b", PartLayout(tp=4, ep=4, etp=2, sequence_parallel=True)),
        ("qwen3-235b-a22b", PartLayout(tp=4, cp=2, ep=32, sequence_parallel=True)),
        ("deepseek-v3", PartLayout(ep=64)),
        ("deepseek-v3", PartLayout(tp=4, ep=8, sequence_parallel=True)),
    ],
)
def test_devices_share_the_work_exactly(name, layout):
    """tp·cp devices together do the model's FLOPs, however the experts are dealt out."""
    for where, w in works(load_config(name), layout, MicrobatchShape(1, 4096)).items():
        assert flops(w.forward) * layout.tp * layout.cp == w.model_flops, where


def test_replicated_parts_cost_every_device_the_same():
    """Negative control of the test above: without sequence parallelism MLA's down-projections are not shared."""
    w = works(load_config("deepseek-v3"), PartLayout(tp=4))["l0.attn"]
    assert flops(w.forward) * 4 > w.model_flops


def test_gemm_shapes_are_transposed_by_pass():
    w = works(load_config("llama3-8b"), PartLayout(tp=2), MicrobatchShape(1, 4096))["l0.mlp"]
    shapes = {(p, k.label): k.shape for p in ("forward", "input_grad", "weight_grad") for k in getattr(w, p) if k.shape}
    assert shapes["forward", "gate_up_proj"] == (4096, 14336, 4096)
    assert shapes["input_grad", "gate_up_proj"] == (4096, 4096, 14336)
    assert shapes["weight_grad", "gate_up_proj.weight_grad"] == (14336, 4096, 4096)
    assert shapes["weight_grad", "down_proj.weight_grad"] == (4096, 7168, 4096)


def test_rows_per_expert_are_balanced_and_rounded_up():
    w = works(load_config("deepseek-v3"), PartLayout(ep=64), MicrobatchShape(1, 4096), FP8)["l10.experts"]
    up, down = (k for k in w.forward if k.kind is KernelKind.GROUPED_GEMM)
    assert up.shape == (4, 8192, 4096, 7168)
    assert down.shape == (4, 8192, 7168, 2048)
    assert up.dtype is DType.FP8
    ragged = works(load_config("tiny-moe"), PartLayout(ep=1), MicrobatchShape(1, 9))["l0.experts"]
    assert next(k.shape for k in ragged.forward if k.shape)[:2] == (8, 3)


def test_fp8_is_for_linears_alone():
    w = works(load_config("deepseek-v3", {"num_hidden_layers": 4}), precision=FP8)
    kinds = {(n.split(".")[1], k.label, k.dtype) for n, x in w.items() for k in x.forward if k.flops}
    high = {(part, label) for part, label, dtype in kinds if dtype is not DType.FP8}
    assert high == {("attn", "attention"), ("router", "gate"), ("head", "lm_head")}


def test_dispatch_and_combine_carry_every_copy():
    c, shape = load_config("deepseek-v3"), MicrobatchShape(1, 4096)
    x = dispatch_bytes(c, PartLayout(ep=64), shape, FP8)
    rows = 4096 * 8
    assert (x.dispatch.kind, x.dispatch.axes) == (MessageKind.ALL_TO_ALL, ("ep",))
    assert (x.dispatch.fanout, x.dispatch.nodes_limit) == (8, 4)
    assert x.dispatch.bytes == rows * 7168 * 33 // 32 == x.dispatched_bytes
    assert x.combine.bytes == rows * 7168 * 2
    assert x.combined_bytes == 4096 * 7168 * 2
    halved = dispatch_bytes(c, PartLayout(tp=2, ep=64, sequence_parallel=True), shape, FP8)
    assert halved.dispatch.bytes * 2 == x.dispatch.bytes
    assert dispatch_bytes(load_config("mixtral-8x7b"), PartLayout(ep=8), shape, BF16).dispatch.nodes_limit == 0


def messages(work, when):
    return [(i.message.kind.value, i.message.axes[0], i.message.bytes) for i in work.inline if i.when is when]


def test_tensor_parallel_messages_are_megatrons():
    c, size = load_config("llama3-8b"), 4096 * 4096 * 2
    assert works(c)["l0.attn"].inline == ()
    plain, sp = (works(c, PartLayout(tp=2, sequence_parallel=sp)) for sp in (False, True))
    for part in ("l0.attn", "l0.mlp"):
        assert messages(plain[part], Pass.F) == [("all_reduce", "tp", size)]
        assert messages(plain[part], Pass.I) == [("all_reduce", "tp", size)]
        assert messages(plain[part], Pass.W) == []
        assert messages(sp[part], Pass.F) == [("all_gather", "tp", size), ("reduce_scatter", "tp", size)]
        assert sorted(messages(sp[part], Pass.I)) == [("all_gather", "tp", size), ("reduce_scatter", "tp", size)]
        assert messages(sp[part], Pass.W) == [("all_gather", "tp", size)]
    assert messages(plain["head.head"], Pass.F) == [("all_reduce", "tp", 4096 * 4)] * 3
    assert messages(plain["embed.embed"], Pass.F) == [("all_reduce", "tp", size)]
    assert messages(sp["embed.embed"], Pass.F) == [("reduce_scatter", "tp", size)]


def test_latents_enter_the_region_one_by_one_and_the_rotary_key_is_not_gathered_again():
    c = load_config("deepseek-v3")
    sp, plain = (works(c, PartLayout(tp=4, sequence_parallel=sp))["l0.attn"] for sp in (True, False))
    latents, rope, out = [4096 * rank * 2 for rank in (1536, 512)], 4096 * 64 * 2, 4096 * 7168 * 2
    gathers = [("all_gather", "tp", size) for size in (*latents, rope)]
    assert messages(sp, Pass.F) == [*gathers, ("reduce_scatter", "tp", out)]
    assert messages(sp, Pass.W) == gathers[:2]
    scatters = [("reduce_scatter", "tp", size) for size in (*latents, rope)]
    assert messages(sp, Pass.I) == [*scatters, ("all_gather", "tp", out)]
    assert messages(plain, Pass.I) == [("all_reduce", "tp", size) for size in (*latents, rope)]


def test_context_parallel_messages_carry_keys_and_values():
    w = works(load_config("llama3-8b"), PartLayout(cp=4))["l0.attn"]
    size = 4096 * 2 * 8 * 128 * 2
    assert messages(w, Pass.F) == [("all_gather", "cp", size)]
    assert messages(w, Pass.I) == [("all_gather", "cp", size), ("reduce_scatter", "cp", size)]


def test_by_heads_queries_keys_values_and_the_output_are_exchanged():
    """Keys and values of 8 heads beside queries of 32: at cp = 4 less than they would gather, and ever less beyond."""
    attn = works(load_config("llama3-8b"), PartLayout(cp=4, cp_heads=True))["l0.attn"]
    sizes = [1024 * heads * 128 * 2 for heads in (32, 8, 8, 32)]
    assert messages(attn, Pass.F) == messages(attn, Pass.I) == [("all_to_all", "cp", size) for size in sizes]
    (kernel,) = (k for k in attn.forward if k.label == "attention")
    assert kernel.shape == (1, 8, 4096, 4096, 128, 128)


def test_fewer_heads_of_keys_than_ranks_are_sent_to_several():
    """8 KV heads at cp = 16: each goes to two ranks, and what backward reads of them is kept as often."""
    config = load_config("llama3-8b")
    attn, two = (works(config, PartLayout(cp=16, cp_heads=h))["l0.attn"] for h in (True, False))
    sizes = [256 * heads * 128 * 2 for heads in (32, 16, 16, 32)]
    assert messages(attn, Pass.F) == messages(attn, Pass.I) == [("all_to_all", "cp", size) for size in sizes]
    kept = {b.name: b.bytes for b in attn.saved}
    assert kept["repeated_kv"] == 256 * 2 * 8 * 128 * 2 and "repeated_kv" not in {b.name for b in two.saved}
    with pytest.raises(PiperError, match="cp = 3 does not divide llama3-8b's KV heads"):
        check_setting(config, PartLayout(cp=3, cp_heads=True), MicrobatchShape(1, 4098))


@pytest.mark.parametrize(("name", "tp"), [("qwen3-30b-a3b", 8), ("qwen3-30b-a3b", 16), ("llama3-8b", 32)])
def test_a_kv_head_of_several_ranks_is_made_in_shares_that_are_gathered(name, tp):
    """Megatron-Core's SelfAttention with num_query_groups < tp: each rank has 1/tp of the fused weight's rows, gathers
    what all make of it, and takes its heads and one of keys and values; on the way back gradients are summed."""
    config, tokens, layout = load_config(name), 4096, PartLayout(tp=tp, sequence_parallel=True)
    check_setting(config, layout, MicrobatchShape())
    attn, alone = works(config, layout)["l0.attn"], works(config)["l0.attn"]
    heads, kv, d, h = config.heads, config.kv_heads, config.head_dim, config.hidden
    fused, stream = (heads + 2 * kv) * d, 2 * tokens * h
    both = [("all_gather", "tp", stream), ("all_gather", "tp", 2 * tokens * fused), ("reduce_scatter", "tp", stream)]
    assert sorted(messages(attn, Pass.F)) == sorted(both)
    back = [
        ("reduce_scatter", "tp", stream),
        ("reduce_scatter", "tp", 2 * tokens * fused),
        ("all_gather", "tp", stream),
    ]
    assert sorted(messages(attn, Pass.I)) == sorted(back)
    qkv, core = (next(k for k in attn.forward if k.label == label) for label in ("qkv_proj", "attention"))
    assert qkv.flops == 2 * tokens * h * fused // tp and core.shape == (1, heads // tp, tokens, tokens, d, d)
    assert sum(k.label == "gathered_qkv" for k in (*attn.forward, *attn.input_grad)) == 2
    assert {b.name: b.bytes for b in attn.saved}["v"] == 2 * tokens * d
    assert attn.model_flops == alone.model_flops
    (part,) = (p for c in model_chunks(config) if c.name == "l0" for p in c.parts if p.name == "attn")
    assert sum(local_numel(q, layout) for q in part.params if "tp" in q.sharded) == (fused * h + heads * d * h) // tp


def test_experts_cut_by_etp_gather_and_scatter_rows():
    w = works(load_config("mixtral-8x7b"), PartLayout(tp=2, ep=4, etp=2, sequence_parallel=True))["l0.experts"]
    size = 2048 * 2 * 2 * 4096 * 2
    for when in (Pass.F, Pass.I):
        assert messages(w, when) == [("all_gather", "etp", size), ("reduce_scatter", "etp", size)]


def test_what_attention_and_sums_of_the_stream_move():
    """Every tensor once each way, two bytes an element; flash's statistics and its sums of dq are fp32."""
    s, heads, q, kv = 2048, 32, 32 * 128, 2 * 8 * 128
    attn = works(load_config("llama3-8b"), shape=MicrobatchShape(1, s))["l0.attn"]
    (there,) = (x.bytes for x in attn.forward if x.kind is KernelKind.ATTENTION)
    (back,) = (x.bytes for x in attn.input_grad if x.kind is KernelKind.ATTENTION)
    assert there == 2 * s * (2 * q + kv) + 4 * s * heads
    assert back == 2 * 2 * s * (2 * q + kv) + 2 * 4 * s * q + 4 * s * heads
    for name, hidden, terms in (("mixtral-8x7b", 4096, 2), ("deepseek-v3", 7168, 3)):  # the latter with a shared expert
        add = works(load_config(name), shape=MicrobatchShape(1, s))["l5.add"]
        assert [x.bytes for x in add.forward] == [2 * (terms + 1) * s * hidden]
