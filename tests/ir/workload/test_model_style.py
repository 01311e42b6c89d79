"""What a framework keeps and its kernels move where a model leaves it open; plans do not depend on it."""

import pytest

from cost_models.software import load_software
from ir.core.ops import Pass
from ir.core.work import DType, MessageKind
from ir.job.build import prepare
from ir.job.load import job_from
from ir.plan.text import plan_digest
from ir.workload import load_config, model_chunks
from ir.workload.part import PartLayout
from ir.workload.setting import KernelStyle, MicrobatchShape, ModelPrecision, TokenLossKind
from piper_sim.memory.timeline import memory, state
from piper_sim.pricing.prepare import hardware_of, prepare_priced
from piper_sim.study.planned import PlannedJob
from tests.ir.workload import models

LLAMA = load_config("llama3-8b", {"num_hidden_layers": 1, "num_key_value_heads": 32})
TOKENS, H, FFN, VOCAB = 4096, 4096, 14336, 128256


def work(at, part, style, layout=PartLayout()):
    return models.work(LLAMA, at, part, layout, style=style)


def kept(at, part, style, layout=PartLayout()):
    return sum(s.bytes for s in work(at, part, style, layout).saved)


@pytest.mark.parametrize(
    ("loss", "keeps", "beside", "after"),
    [
        (TokenLossKind.PARALLEL, 4, 2, 2),
        (TokenLossKind.PLAIN, 4, 2 + 4, 2),
        (TokenLossKind.TORCH, 4, 2 + 4, 2),
        (TokenLossKind.FUSED, 2, 0, 2),
        (TokenLossKind.RETURNED, 2, 0, 2),
    ],
)
def test_bytes_of_a_logit(loss, keeps, beside, after):
    logits = TOKENS * VOCAB
    head = work(-1, "head", KernelStyle(loss))
    assert kept(-1, "head", KernelStyle(loss)) == keeps * logits + 8 * TOKENS, "and the labels"
    assert head.forward_workspace == beside * logits
    assert head.stash_bytes == after * logits, "their gradient"
    wide = head.stash_bytes + head.input_grad_workspace
    beside_back = {TokenLossKind.TORCH: 2 * 4, TokenLossKind.RETURNED: 2 + 2}
    assert wide == beside_back.get(loss, after) * logits


def test_a_fused_loss_moves_least_and_a_plain_one_most():
    heads = [
        work(-1, "head", KernelStyle(x)) for x in (TokenLossKind.FUSED, TokenLossKind.PARALLEL, TokenLossKind.PLAIN)
    ]
    fused, parallel, plain = (sum(k.bytes for k in (*w.forward, *w.input_grad)) for w in heads)
    assert fused < parallel < plain


def test_logits_that_are_given_back_have_a_gradient_of_zeros():
    fused, returned = (work(-1, "head", KernelStyle(x)) for x in (TokenLossKind.FUSED, TokenLossKind.RETURNED))
    moved = [sum(k.bytes for k in w.input_grad) for w in (fused, returned)]
    assert moved[1] - moved[0] == 2 * 2 * TOKENS * VOCAB, "written once, read once"
    assert returned.forward == fused.forward


def test_attention_beside_a_mask_works_on_whole_squares_with_keys_for_each_head():
    grouped = load_config("llama3-8b", {"num_hidden_layers": 1})  # 8 KV heads of 32
    causal, masked = (models.work(grouped, 1, "attn", style=KernelStyle(masked=m)) for m in (False, True))
    for when in ("forward", "input_grad"):
        one, two = (sum(k.flops for k in getattr(w, when) if len(k.shape) == 6) for w in (causal, masked))
        assert two == 2 * one > 0, when
    key_value = 2 * 2 * TOKENS * 8 * 128
    repeats = [k.bytes for k in (*masked.forward, *masked.input_grad) if k.label == "repeat_kv"]
    assert repeats == [(4 + 1) * key_value] * 2
    assert sum(s.bytes for s in masked.saved) - sum(s.bytes for s in causal.saved) == 3 * key_value
    assert masked.model_flops == causal.model_flops, "what the model needs is the same"


def test_eager_keeps_the_gate_s_activation_and_the_fused_product_beside_rope_s():
    fused, eager = KernelStyle(), KernelStyle(eager=True)
    assert kept(1, "mlp", eager) - kept(1, "mlp", fused) == 2 * TOKENS * FFN
    assert kept(1, "attn", eager) - kept(1, "attn", fused) == 2 * TOKENS * 2 * H
    gpt, shape = load_config("gpt3-175b", {"n_layer": 1}), MicrobatchShape(1, 2048)
    for part in model_chunks(gpt)[1].parts:  # no gate, no rope
        one, two = (models.work(gpt, 1, part.name, shape=shape, style=x) for x in (fused, eager))
        assert one == two


def test_op_by_op_norms_rope_and_activations_are_many_kernels():
    fused, apart = KernelStyle(), KernelStyle(op_by_op=True)
    for part, launches, moved in (("attn", 8 + 10 - 2, 36 - 4 + 2 * 16), ("mlp", 8 + 2 - 2, 36 - 4 + 4 * FFN / H)):
        one, two = (work(1, part, style).forward for style in (fused, apart))
        assert sum(k.count for k in two) - sum(k.count for k in one) == launches
        extra = sum(k.bytes * k.count for k in two) - sum(k.bytes * k.count for k in one)
        assert extra == pytest.approx(moved * TOKENS * H, rel=0.01), part
    assert work(1, "attn", fused).weight_grad == work(1, "attn", apart).weight_grad, "no biases"


def test_what_was_gathered_is_kept_whole():
    sp, tp = PartLayout(tp=8, sequence_parallel=True), PartLayout(tp=8)
    whole, plain = KernelStyle(keep_gathered=True), KernelStyle()
    for part in ("attn", "mlp"):
        assert kept(1, part, whole, sp) - kept(1, part, plain, sp) == 2 * TOKENS * H * 7 // 8, part
        assert kept(1, part, whole, tp) == kept(1, part, plain, tp)


@pytest.mark.parametrize("loss", list(TokenLossKind))
def test_whole_logits_are_on_every_rank_and_come_by_one_message(loss):
    tp = PartLayout(tp=4, sequence_parallel=True)
    one, whole, divided = (
        work(-1, "head", KernelStyle(loss, whole_logits=x), layout)
        for x, layout in ((True, PartLayout()), (True, tp), (False, tp))
    )
    assert one == work(-1, "head", KernelStyle(loss)), "nothing to gather"
    sent = [[m.message for m in w.inline if m.when is Pass.F] for w in (divided, whole)]
    assert [m.kind for m in sent[0]] == [MessageKind.ALL_GATHER, *[MessageKind.ALL_REDUCE] * 3]
    assert [m.bytes for m in sent[1]] == [2 * TOKENS * H, 2 * TOKENS * VOCAB]
    kept_of = [next(x.bytes for x in w.saved if x.name == "softmax") for w in (one, whole, divided)]
    assert kept_of[0] == kept_of[1] == 4 * kept_of[2]
    # A rank's gradient is its own columns'; that of all words stands beside it before.
    assert whole.input_grad_workspace - one.input_grad_workspace == 2 * TOKENS * (VOCAB + H)
    assert whole.model_flops == divided.model_flops


TABLE = {
    "model": {"config": "tiny-llama", "seq_len": 256},
    "parallel": {"pp": 2, "tp": 2, "dp": 1},
    "schedule": {"name": "1f1b", "microbatches": 4},
}


def test_a_plan_does_not_depend_on_the_framework():
    job = job_from(TABLE)
    digests = {
        plan_digest(prepare(job, 8, style=load_software(x).style).plan()) for x in (None, "nanotron", "llm-foundry")
    }
    assert len(digests) == 1


def test_memory_does():
    peaks = {}
    for name in ("megatron", "nanotron"):
        job = job_from({**TABLE, "costs": {"software": name}})
        hw = hardware_of(job)
        planned = PlannedJob.of(prepare_priced(job, hw), hw)
        peaks[name] = int(planned.memory.peak.max())
        without = memory(planned.sized, state(planned.plan, planned.model.recipe))
        assert int(without.peak.max()) == peaks[name]
    assert peaks["nanotron"] > 1.1 * peaks["megatron"]


def test_fp8_goes_in_and_out_of_what_it_keeps():
    """DeepSeek-V3 keeps attention's output in 12 bits, experts' activation input in fp8: kernels take them there."""
    config = load_config("deepseek-v3")
    at = next(i for i, c in enumerate(model_chunks(config)) if any(p.name == "experts" for p in c.parts))
    precision = ModelPrecision(DType.FP8, dispatch=DType.FP8)
    for part, label in (("attn", "context"), ("experts", "pre_activation"), ("shared", "pre_activation")):
        w = models.work(config, at, part, PartLayout(ep=64), precision=precision)
        plain = models.work(config, at, part, PartLayout(ep=64))
        assert [k.label for k in w.forward if k.label.startswith(f"{label}.store")]
        assert [k.label for k in w.input_grad if k.label.startswith(f"{label}.load")]
        assert not [k for k in (*plain.forward, *plain.input_grad) if k.label.endswith(".fp8")]
