"""An encoder beside a decoder: who reads whom over stages, what attention to the encoder costs and keeps, refusals."""

from typing import Any

import pytest

from ir.core.errors import ErrorKind, PiperError
from ir.core.ops import Pass
from ir.graph.graph import GraphNode
from ir.job.build import PreparedJob, prepare
from ir.job.cache import PLANS
from ir.job.load import job_from
from ir.plan.plan import OpKind
from ir.workload import config_from, model_chunks
from ir.workload.part import PartLayout
from ir.workload.parts.kernels import flops
from ir.workload.setting import MicrobatchShape, ModelPrecision
from ir.workload.work import part_work
from tests.refusals import refusal

ENCODED, DECODED, HIDDEN, HEADS, EACH = 48, 16, 64, 4, 24
T5: dict[str, Any] = {
    "model_type": "t5", "num_layers": 4, "num_decoder_layers": 6, "d_model": HIDDEN, "d_kv": EACH, "num_heads": HEADS,
    "d_ff": 96, "vocab_size": 64,
}  # fmt: skip


def _job(
    name: str = "1f1b", pp: int = 5, zero: int = 1, model: dict[str, Any] | None = None, **parallel: Any
) -> PreparedJob:
    own = {**T5, "seq_len": DECODED, "encoder_seq_len": ENCODED, "attention": "unfused", **(model or {})}
    recompute = parallel.pop("recompute", "none")
    table = {
        "model": own,
        "parallel": {"pp": pp, "dp": 2, "zero": zero, "layers": "even", **parallel},
        "schedule": {"name": name, "microbatches": 8, "recompute": recompute},
    }
    return prepare(job_from(table))


def _crossings(job: PreparedJob, when: Pass) -> set[tuple[int, int, str]]:
    return {(a.stage, b.stage, a.part) for a, b in _pairs(job) if a.kind is b.kind is when and a.stage != b.stage}


def _pairs(job: PreparedJob) -> list[tuple[GraphNode, GraphNode]]:
    return [(job.base.nodes[e.src], job.base.nodes[e.dst]) for e in job.base.edges]


def test_every_stage_of_the_decoder_reads_the_encoder() -> None:
    """Two layers a stage: the encoder is on the first two, the decoder on three, the first of which starts anew."""
    job = _job()
    chain = {(0, 1, "l1.mlp"), (2, 3, "l5.mlp"), (3, 4, "l7.mlp")}
    assert _crossings(job, Pass.F) == chain | {(1, s, "l3.norm") for s in (2, 3, 4)}
    back = {(1, 0, "l2.attn"), (3, 2, "l6.attn"), (4, 3, "l8.attn")}
    assert _crossings(job, Pass.I) == back | {(2, 1, "l4.cross"), (3, 1, "l6.cross"), (4, 1, "l8.cross")}
    both = [(a.part, b.part) for a, b in _pairs(job) if a.kind is b.kind is Pass.I and a.part.endswith("cross")]
    sums = {pair for pair in both if pair[1].endswith("cross")}
    assert sums == {("l5.cross", "l4.cross"), ("l7.cross", "l6.cross"), ("l9.cross", "l8.cross")}


@pytest.mark.parametrize("name", ["1f1b", "zb1p", "gpipe"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_the_encoder_gives_is_sent_once_to_each_stage(name: str, recompute: str) -> None:
    job = _job(name, recompute=recompute)
    plan = job.plan()
    PLANS.check(plan)
    wide, nodes = 2 * ENCODED * HIDDEN, plan.graph.nodes
    sent = [
        (nodes[s.slot[0]].part, str(nodes[s.slot[0]].kind), s.peer)
        for s in plan.shapes
        if s.slot and s.kind is OpKind.SEND
    ]
    chain = [("l1.mlp", "F", 1), ("l5.mlp", "F", 3), ("l7.mlp", "F", 4)]
    chain += [("l2.attn", "I", 0), ("l6.attn", "I", 2), ("l8.attn", "I", 3)]
    home = [(f"l{n}.cross", "I", 1) for n in (4, 6, 8)]
    assert sorted(sent) == sorted([*chain, *home, *(("l3.norm", "F", n) for n in (2, 3, 4))])
    outs = {n.part: n.writes[0].bytes for n in job.base.nodes if n.kind is Pass.F}
    assert outs["l3.norm"] == outs["l0.mlp"] == wide and outs["l4.mlp"] == outs["l9.cross"] == 2 * DECODED * HIDDEN


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zbv", "dualpipe", "dualpipev", "looped-bfs", "v-half"])
@pytest.mark.parametrize(("zero", "recompute"), [(1, "none"), (3, ["norm", "activation"]), (2, "full")])
def test_every_schedule_has_a_legal_plan(name: str, zero: int, recompute: Any) -> None:
    job = _job(name, 2, zero, {"num_layers": 4, "num_decoder_layers": 4}, recompute=recompute, tp=2)
    PLANS.check(job.plan())


def test_attention_to_the_encoder_by_hand() -> None:
    config, q, b = config_from(T5, "t5"), HEADS * EACH, 3
    chunk, shape = model_chunks(config)[6], MicrobatchShape(b, DECODED, ENCODED)
    part = next(p for p in chunk.parts if p.name == "cross")
    for tp, how in ((1, "unfused"), (2, "unfused"), (1, "flash")):
        w = part_work(config, chunk, part, PartLayout(tp=tp), shape, ModelPrecision(), how)
        own, far = b * DECODED, b * ENCODED
        linears = 2 * HIDDEN * q * (2 * own + 2 * far)
        scores = 2 * 2 * own * ENCODED * q
        assert flops(w.forward) * tp == linears + scores == w.model_flops
        assert flops(w.weight_grad) * tp == linears
        saved = {s.name: s.bytes for s in w.saved}
        assert (saved["q"] * tp, saved["kv"] * tp, saved["context"] * tp) == (2 * own * q, 2 * far * 2 * q, 2 * own * q)
        if how == "unfused":  # softmax, its dropped copy, a mask of a byte
            assert saved["scores"] * tp == 5 * own * ENCODED * HEADS
        assert [k.of for k in part.keeps] == ["attn", "encoder"]


def test_two_tables_of_distances_and_one_of_words() -> None:
    names = [p.name for c in model_chunks(config_from(T5, "t5")) for part in c.parts for p in part.params]
    assert [n for n in names if "distances" in n] == [
        "model.layers.0.self_attn.distances.weight",
        "model.layers.4.self_attn.distances.weight",
    ]
    assert names.count("model.embed_tokens.weight") == 3  # encoder, decoder, head


@pytest.mark.parametrize(
    ("sets", "key"),
    [
        ({"cp": 2, "pp": 1}, "parallel.cp"),
        ({"tp": 4, "pp": 1, "model": {"encoder_seq_len": 50}}, "parallel.tp"),
        ({"pp": 1, "model": {"feed_forward_proj": "gated-relu"}}, "model.feed_forward_proj"),
        ({"pp": 1, "model": {"is_encoder_decoder": False}}, "model.is_encoder_decoder"),
    ],
)  # fmt: skip
def test_refused(sets: dict[str, Any], key: str) -> None:
    e = refusal(_job, **sets)
    assert e.key == key and e.kind in (ErrorKind.JOB, ErrorKind.MODEL)


def test_a_decoder_alone_has_no_encoder_to_say_the_length_of() -> None:
    e = refusal(prepare, job_from({"model": {"config": "tiny-llama", "encoder_seq_len": 8}, "parallel": {"dp": 1}}))
    assert e.key == "model.encoder_seq_len"


def test_megatrons_arguments_say_two_towers() -> None:
    raw = {
        "model_type": "megatron",
        "num_layers": 3,
        "encoder_num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
    }
    config = config_from({**raw, "vocab_size": 96, "max_position_embeddings": 48}, "x")
    assert (config.layers, config.encoder, config.form.head_bias, config.positions) == (5, 2, True, 48)
    h, attn, mlp = 64, 4 * (64 * 64 + 64) + 2 * 64, 2 * 64 * 256 + 256 + 64 + 2 * 64
    count = sum({p.name: p.numel for c in model_chunks(config) for part in c.parts for p in part.params}.values())
    assert count == 96 * h + 48 * h + 96 + 5 * (attn + mlp) + 3 * attn + 2 * 2 * h
    for more in ({"num_experts": 4}, {"qk_layernorm": True}):
        with pytest.raises(PiperError, match="encoder_num_layers"):
            config_from({**raw, "vocab_size": 96, "max_position_embeddings": 48, **more}, "x")
