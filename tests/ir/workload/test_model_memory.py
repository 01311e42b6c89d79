"""Bytes that live from forward to backward, against Korthikanti et al. (arXiv:2205.05198) and by hand."""

import csv
from math import prod
from pathlib import Path

import pytest

from ir.core.ops import Pass
from ir.core.work import DType
from ir.workload import load_config, local_numel, model_chunks
from ir.workload.params import local_shape
from ir.workload.part import PartLayout
from ir.workload.partition import partition
from ir.workload.setting import MicrobatchShape, ModelPrecision, check_setting
from ir.workload.work import part_work
from tests.ir.workload.models import work
from tests.refusals import refusal

TABLE = Path(__file__).parents[2] / "data" / "korthikanti_activation.csv"
BF16 = ModelPrecision()
FP8 = ModelPrecision(DType.FP8, dispatch=DType.FP8)
NORM_STATS = 1e-3


def alive(config, chunk, layout, shape, precision=BF16, attention="flash", recompute=()):
    """Bytes of one chunk that backward needs: what parts save, and the part outputs (and the input) they claim."""
    total = 0
    works = {p.name: part_work(config, chunk, p, layout, shape, precision, attention) for p in chunk.parts}
    stream = next(reversed(works.values())).out_bytes
    for part in chunk.parts:
        total += sum(s.bytes for s in works[part.name].saved if not set(s.recompute) & set(recompute))
        total += sum(works[k.of].out_bytes if k.of else stream for k in part.keeps)
    return total


def gpt(h, heads, **more):
    return load_config("gpt3-175b", {"n_embd": h, "n_head": heads, "n_layer": 1, **more})


def layer_bytes(config, layout, b=1, s=2048, attention="unfused", recompute=(), precision=BF16):
    chunk = model_chunks(config)[1]
    return alive(config, chunk, layout, MicrobatchShape(b, s), precision, attention, recompute)


@pytest.mark.parametrize(("h", "a"), [(6144, 64), (12288, 96), (20480, 128), (25600, 160)])
@pytest.mark.parametrize("b", [1, 4])
def test_a_gpt_layer_keeps_what_korthikanti_counts(h, a, b):
    c, s, t = gpt(h, a), 2048, 8
    scores = 5 * a * s / h
    tp, sp = PartLayout(tp=t), PartLayout(tp=t, sequence_parallel=True)
    for layout, attention, recompute, per_sbh in [
        (PartLayout(), "unfused", (), 34 + scores),
        (tp, "unfused", (), 10 + 24 / t + scores / t),
        (sp, "unfused", (), (34 + scores) / t),
        (tp, "unfused", ("scores",), 10 + 24 / t),
        (sp, "unfused", ("scores",), 34 / t),
        (tp, "flash", (), 10 + 24 / t),
        (sp, "flash", (), 34 / t),
    ]:
        got = layer_bytes(c, layout, b, s, attention, recompute)
        # Beyond the paper: a norm's statistics, flash's log-sum-exp.
        assert 1 <= got / (s * b * h * per_sbh) < 1 + 2 * NORM_STATS, (layout, attention, recompute)


@pytest.mark.parametrize("row", list(csv.DictReader(TABLE.read_text().splitlines()[1:])), ids=lambda r: str(r["mode"]))
def test_shares_are_those_of_korthikantis_figure(row):
    c = gpt(int(row["hidden"]), int(row["heads"]))
    tp, sp = PartLayout(tp=8), PartLayout(tp=8, sequence_parallel=True)
    got = {
        "none": layer_bytes(c, tp),
        "seq": layer_bytes(c, sp),
        "sel": layer_bytes(c, tp, recompute=("scores",)),
        "seqsel": layer_bytes(c, sp, recompute=("scores",)),
        "full": 2 * 2048 * c.hidden,
    }
    # In points of the baseline; the figure's bars were read to about a tenth of one.
    assert 100 * got[row["mode"]] / got["none"] == pytest.approx(float(row["percent_of_none"]), abs=0.15)


def test_without_dropout_the_paper_is_missed():
    """Negative control: three masks and a second copy of the scores are 2sbh + 3as²b."""
    c, s, h, a = gpt(6144, 64, attn_pdrop=0.0, resid_pdrop=0.0), 2048, 6144, 64
    assert layer_bytes(c, PartLayout()) == pytest.approx(s * h * (32 + 2 * a * s / h), rel=NORM_STATS)
    assert layer_bytes(c, PartLayout()) < 0.8 * s * h * (34 + 5 * a * s / h)


def test_a_llama_layer_by_hand():
    c, t = load_config("llama3-8b"), 4096
    h, f, q, kv = 4096, 14336, 4096, 2048
    want = t * (2 * (2 * h + 2 * h + q + kv + q + 2 * f + f) + 4 * 32 + 2 * 4)
    assert layer_bytes(c, PartLayout(), s=t, attention="flash") == want
    assert layer_bytes(c, PartLayout(), s=t, attention="flash", recompute=("norm",)) == want - t * 2 * 2 * h
    assert layer_bytes(c, PartLayout(), s=t, attention="flash", recompute=("activation",)) == want - t * 2 * f
    assert layer_bytes(c, PartLayout(), s=t, attention="flash", recompute=("up_projection", "scores")) == want
    assert layer_bytes(c, PartLayout(cp=4), s=t, attention="flash") * 4 == want
    by_heads = PartLayout(cp=4, cp_heads=True)  # attention's output, before and behind its way home
    assert layer_bytes(c, by_heads, s=t, attention="flash") * 4 == want + t * 2 * q


def test_grouped_heads_shrink_scores_of_queries_only():
    c = load_config("llama3-8b")
    saved = {s.name: s.bytes for s in work(c, 1, "attn", attention="unfused").saved}
    assert saved["scores"] == 32 * 4096 * 4096 * 2
    assert saved["v"] == 4096 * 8 * 128 * 2


DEEPSEEK = ("norm", "up_projection", "activation")


def test_a_deepseek_v3_layer_as_it_was_trained():
    """fp8 products and dispatch, E5M6 attention output, recomputed norms, up-projections and SwiGLU; 4096 tokens."""
    c = load_config("deepseek-v3")
    layout, t = PartLayout(ep=64), 4096
    rows = t * 8
    fp8 = 33 / 32
    want = (
        2 * (t * 7168 * 2 + t * 4)  # input and attention output, with their norms' statistics
        + t * (1536 + 576) * 2 + t * 2 * 4  # latents, with their norms' statistics
        + t * 16384 * 1.5 + t * 128 * 4  # attention output, its scales
        + t * 128 * 4  # log-sum-exp
        + t * (256 * 4 + 8 * 12 + 4)  # router
        + t * 2 * 2048 * fp8  # shared experts' SwiGLU input
        + rows * (7168 + 2 * 2048) * fp8 + rows * 8  # experts' input, SwiGLU input, weights
    )  # fmt: skip
    chunk = model_chunks(c)[10]
    got = alive(c, chunk, layout, MicrobatchShape(), FP8, recompute=DEEPSEEK)
    assert got == want
    assert 0.6e9 < got < 0.9e9
    assert alive(c, chunk, layout, MicrobatchShape(), FP8) > 2 * got


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("norm", {"normed", "latent_normed", "gate_input"}),
        ("up_projection", {"qkv"}),
        ("activation", {"activated"}),
        ("scores", set()),
    ],
)
def test_recompute_labels_drop_what_they_say(option, names):
    c = load_config("deepseek-v3")
    chunk = model_chunks(c)[10]
    dropped = set()
    for part in chunk.parts:
        for s in part_work(c, chunk, part, PartLayout(ep=64), MicrobatchShape(), FP8).saved:
            if option in s.recompute:
                dropped.add(s.name)
                assert s.rebuild, s.name
            assert bool(s.rebuild) == bool(s.recompute)
    assert dropped == names


def test_up_projections_are_rebuilt_by_their_two_products():
    saved = {s.name: s for s in work(load_config("deepseek-v3"), 10, "attn").saved}
    qkv = saved["qkv"]
    assert [k.label for k in qkv.rebuild] == ["q_b_proj", "kv_b_proj", "rope", "join_keys"]
    assert qkv.bytes == 4096 * 128 * (192 + 192 + 128) * 2
    assert qkv.until is Pass.I


def test_fp8_halves_linear_inputs_and_nothing_else():
    c = load_config("llama3-8b")
    wide, narrow = ({s.name: s.bytes for s in work(c, 1, p, precision=x).saved} for x in (BF16, FP8) for p in ("mlp",))
    assert narrow["normed"] * 64 == wide["normed"] * 33
    assert narrow["activated"] * 64 == wide["activated"] * 33
    assert narrow["pre_activation"] == wide["pre_activation"]
    attn = {s.name: (s.bytes, s.until) for s in work(c, 1, "attn", precision=FP8).saved}
    assert attn["context"] == (4096 * 4096 * 2, Pass.I)
    assert attn["context_fp8"] == (4096 * 4096 * 33 // 32, Pass.W)
    assert work(c, 1, "mlp", precision=FP8).out_bytes == work(c, 1, "mlp").out_bytes


def test_the_head_keeps_fp32_probabilities_and_stashes_their_gradient():
    c = load_config("llama3-8b")
    w = work(c, -1, "head", PartLayout(tp=2))
    kept = [(s.name, s.bytes, s.until) for s in w.saved]
    assert kept == [("softmax", 4096 * 64128 * 4, Pass.I), ("labels", 4096 * 8, Pass.I)]
    assert (w.stash_bytes, w.forward_workspace) == (4096 * 64128 * 2, 4096 * 64128 * 2)


# Peak allocated MiB of the last stage, SimuMax docs/b200 (Megatron-LM 23e00ed, TE 2.11), bf16, fp32 gradients, ZeRO-1.
def placeholder_grad_bytes(chunks, layout, element_bytes=2):
    """What Transformer Engine leaves on a device for good where it adds weight gradients straight to the main ones:
    one placeholder for autograd per shape of weight (of a decoder layer's linears, of one expert).

    SimuMax's B200 rows (TE 2.11) are short by about this without it: 1.6 GiB for a stage of Llama-70B.
    """
    roles = {}
    for param in (p for c in chunks if c.tags for part in c.parts for p in part.params):
        if len(param.shape) > 1 and "gate.weight" not in param.name and "embed" not in param.name:
            role = ".".join(word for word in param.name.split(".") if not word.isdigit())
            local = local_shape(param, layout)
            roles[role] = prod(local[1:] if param.expert else local)
    return element_bytes * sum(roles.values())


@pytest.mark.parametrize(
    ("name", "layers", "tp", "pp", "dp", "ep", "measured"),
    [
        ("llama3-70b", 12, 8, 1, 1, 1, 28965.4),
        ("llama3-70b", 12, 4, 1, 2, 1, 40009.8),
        ("llama3-70b", 12, 2, 1, 4, 1, 62136.3),
        ("llama3-70b", 12, 1, 2, 4, 1, 64479.5),
        ("deepseek-v2", 4, 1, 1, 8, 8, 46726.2),
        ("deepseek-v2", 4, 1, 2, 4, 4, 45774.6),
    ],
)
def test_measured_peaks_are_state_activations_and_logits(name, layers, tp, pp, dp, ep, measured):
    c = load_config(name, {"num_hidden_layers": layers})
    stage = partition(model_chunks(c), pp, "even")[-1]
    layout, shape = PartLayout(tp=tp, ep=ep, sequence_parallel=True), MicrobatchShape(1, 4096)
    held = {p.name: (local_numel(p, layout), p.expert) for x in stage for part in x.parts for p in part.params}
    replicas = {False: dp, True: tp * dp // ep}
    state = sum(n * (6 + 12 / replicas[expert]) for n, expert in held.values())
    norm, head = (part_work(c, stage[-1], part, layout, shape, BF16) for part in stage[-1].parts)
    logits = sum(s.bytes for s in head.saved) + head.forward_workspace
    acts = sum(alive(c, x, layout, shape) for x in stage if x.tags) + 2 * norm.out_bytes
    got = state + acts + logits + placeholder_grad_bytes(stage, layout)
    assert got / 2**20 == pytest.approx(measured, rel=0.006)


def test_placeholder_gradients_are_one_per_weight_shape():
    chunks = model_chunks(load_config("llama3-70b", {"num_hidden_layers": 6}))
    h, f = 8192, 28672
    layer = (h + 2 * 1024) * h + h * h + 3 * h * f
    assert placeholder_grad_bytes(chunks[1:4], PartLayout()) == 2 * layer
    assert placeholder_grad_bytes(chunks[1:4], PartLayout(tp=4)) == 2 * layer // 4
    v3 = model_chunks(load_config("deepseek-v3"))
    one = 3 * 7168 * 2048
    mla = 7168 * (1536 + 576) + 1536 * 24576 + 512 * 32768 + 16384 * 7168
    assert placeholder_grad_bytes(v3[10:14], PartLayout(ep=64)) == 2 * (mla + 2 * one)


def test_the_embeddings_gradient_is_a_transient_of_its_own():
    w = work(load_config("llama3-8b"), 0, "embed", PartLayout(tp=2))
    assert w.weight_grad_workspace == 64128 * 4096 * 2
    assert w.stash_bytes == 4096 * 4096 * 2


def test_output_gradients_are_stashed_for_every_linear():
    c = load_config("llama3-8b")
    assert work(c, 1, "mlp").stash_bytes == 4096 * (2 * 14336 + 4096) * 2
    assert work(c, 1, "attn").stash_bytes == 4096 * (4096 + 2048 + 4096) * 2
    assert work(c, 1, "mlp", PartLayout(tp=4)).stash_bytes == 4096 * (2 * 14336 // 4 + 4096) * 2


def test_shared_experts_and_router_share_one_normed_input():
    """In bf16 one tensor serves both; in fp8 the gate needs its own, wide one; without shared experts it keeps it."""
    v3, moe = load_config("deepseek-v3"), load_config("mixtral-8x7b")

    def kept(config, at, part, precision):
        return [s.name for s in work(config, at, part, precision=precision).saved if "norm" in s.recompute]

    assert kept(v3, 10, "router", BF16) == []
    assert kept(v3, 10, "shared", BF16) == ["normed"]
    assert kept(v3, 10, "router", FP8) == ["gate_input"]
    assert kept(moe, 1, "router", BF16) == ["normed"]


@pytest.mark.parametrize(
    ("name", "layout", "shape", "key", "fix"),
    [
        ("llama3-8b", PartLayout(tp=64), MicrobatchShape(), "parallel.tp", "tp = 32"),
        ("tiny-moe", PartLayout(ep=3), MicrobatchShape(), "parallel.ep", "ep = 2"),
        ("tiny-moe", PartLayout(tp=2), MicrobatchShape(), "parallel.sequence_parallel", "true"),
        ("tiny-llama", PartLayout(ep=2), MicrobatchShape(), "parallel.ep", "ep = 1, etp = 1"),
        ("gpt2", PartLayout(tp=2), MicrobatchShape(1, 1024), "parallel.tp", "vocab_size = 50258"),
        ("gpt2", PartLayout(), MicrobatchShape(1, 2048), "model.seq_len", "seq_len = 1024"),
        ("llama3-8b", PartLayout(cp=3), MicrobatchShape(), "parallel.cp", "cp = 2"),
        ("llama3-8b", PartLayout(cp=4), MicrobatchShape(1, 12), "parallel.cp", "cp = 3"),  # eight stretches
        ("llama3-8b", PartLayout(cp=2), MicrobatchShape(1, 7), "parallel.cp", "cp = 1"),
        ("llama3-8b", PartLayout(tp=2, cp=6, cp_heads=True), MicrobatchShape(), "parallel.cp", "cp = 4"),
        ("llama3-8b", PartLayout(tp=2, cp=32, cp_heads=True), MicrobatchShape(), "parallel.cp", "cp = 16"),
        (
            "llama3-8b",
            PartLayout(tp=4, sequence_parallel=True),
            MicrobatchShape(1, 6),
            "parallel.tp",
            "tp = 2",
        ),  # nor 3
        ("llama3-8b", PartLayout(tp=2, sequence_parallel=True), MicrobatchShape(2, 7), "parallel.tp", "tp = 1"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(name, layout, shape, key, fix):
    e = refusal(check_setting, load_config(name), layout, shape)
    assert (e.key, e.kind.exit_code) == (key, 2)
    assert fix in e.suggestion


def test_layouts_in_use_pass():
    check_setting(load_config("deepseek-v3"), PartLayout(ep=64), MicrobatchShape())
    check_setting(load_config("llama3-70b"), PartLayout(tp=8, cp=2, sequence_parallel=True), MicrobatchShape(1, 8192))
    check_setting(load_config("qwen3-30b-a3b"), PartLayout(tp=4, ep=8, sequence_parallel=True), MicrobatchShape())
