"""A residual stream in fp32: bytes that parts move, keep and send, counted by hand; `run` has them, too
(tests/executor/measure/test_peak_config.py).
"""

from collections import Counter
from dataclasses import replace

import pytest

from ir.core.errors import ErrorKind
from ir.core.work import DType, Work
from ir.job import load_job
from ir.job.build import precision_of, prepare
from ir.plan.plan import OpKind
from ir.plan.text import plan_digest
from ir.workload import config_from, load_config, model_chunks
from ir.workload.part import PartLayout, PartWork
from ir.workload.setting import FUSED_STYLE, KernelStyle, MicrobatchShape, ModelPrecision
from ir.workload.work import part_work
from tests.ir.workload.models import FAMILIES, small
from tests.refusals import refusal

WIDE = ModelPrecision(residual=DType.FP32)
CAST = ModelPrecision(params=DType.FP32, residual=DType.FP32)
WRITTEN = KernelStyle(op_by_op=True)
S, B, H = 64, 2, 64  # of tiny-llama and tiny-moe
N = S * B * H


def of(
    name: str,
    precision: ModelPrecision = WIDE,
    *,
    model: str = "tiny-llama",
    style: KernelStyle = FUSED_STYLE,
    tp: int = 1,
    sp: bool = False,
) -> PartWork:
    """The work of a part of the first chunk that has it."""
    config = load_config(model)
    assert config.hidden == H
    chunk, part = next((c, p) for c in model_chunks(config) for p in c.parts if p.name == name)
    layout = PartLayout(tp=tp, sequence_parallel=sp)
    return part_work(config, chunk, part, layout, MicrobatchShape(B, S), precision, style=style)


def moved(work: Work) -> Counter[str]:
    """Bytes by label."""
    return sum((Counter({k.label: k.bytes * k.count}) for k in work), Counter[str]())


def more(name: str, pass_: str, **how: object) -> dict[str, int]:
    """Bytes per element of a token that a pass moves more than where the stream has the format of products."""
    plain = moved(getattr(of(name, ModelPrecision(), **how), pass_))  # type: ignore[arg-type]
    wide = moved(getattr(of(name, **how), pass_))  # type: ignore[arg-type]
    found = {label: (wide[label] - plain[label]) / N for label in wide.keys() | plain.keys()}
    assert all(size == int(size) for size in found.values())
    return {label: int(size) for label, size in found.items() if size}


@pytest.mark.parametrize(("name", "norm"), [("attn", "input_norm"), ("mlp", "post_norm")])
def test_of_a_branch_norms_read_the_stream_and_additions_read_and_write_it(name: str, norm: str) -> None:
    assert more(name, "forward") == {norm: 2, "residual": 4}
    # What came is cast for the branch; the norm reads its input and writes its gradient; two gradients are added.
    back = {"residual.grad.narrow": 6, f"{norm}_backward": 4, "residual_backward": 6}
    assert more(name, "input_grad") == back and more(name, "weight_grad") == {}
    assert (of(name).out_bytes, of(name, ModelPrecision()).out_bytes) == (4 * N, 2 * N)
    kept, before = ([(s.name, s.bytes) for s in of(name, p).saved] for p in (WIDE, ModelPrecision()))
    assert kept == before, "the stream is the chunk's to keep"


def test_of_experts_the_sum_alone() -> None:
    assert more("router", "forward", model="tiny-moe") == {"post_norm": 2}
    assert more("experts", "forward", model="tiny-moe") == more("experts", "input_grad", model="tiny-moe") == {}
    assert more("add", "forward", model="tiny-moe") == {"residual": 4}
    assert more("add", "input_grad", model="tiny-moe") == {"residual.grad.narrow": 6}
    sizes = [of(n, model="tiny-moe").out_bytes for n in ("router", "experts", "add")]
    assert sizes == [2 * N, 2 * N, 4 * N]


def test_of_the_ends() -> None:
    assert more("embed", "forward") == {"embedding.widen": 6}  # words are looked up in bf16, as the table has them
    assert of("embed").out_bytes == 4 * N
    looked = moved(of("embed", CAST).forward)
    assert looked == {"lookup": 8 * N}  # of a table in fp32 they are in fp32
    assert more("norm", "forward") == {"final_norm": 2} and of("norm").out_bytes == 2 * N
    assert more("head", "forward") == more("head", "input_grad") == {}


def test_messages_of_tensor_parallelism_have_the_format_of_products() -> None:
    for sp in (False, True):
        for name in ("attn", "mlp"):
            assert of(name, tp=2, sp=sp).inline == of(name, ModelPrecision(), tp=2, sp=sp).inline
        assert of("embed", tp=2, sp=sp).inline == of("embed", ModelPrecision(), tp=2, sp=sp).inline
    assert [m.message.bytes for m in of("embed", CAST, tp=2).inline] == [4 * N]


def test_under_autocast_each_linear_has_its_own_copy_of_what_a_norm_gives() -> None:
    """transformers' classes, operation by operation: three linears read attention's norm, two the MLP's."""
    plain = replace(CAST, residual=None)
    for name, linears in (("attn", 3), ("mlp", 2)):
        work = of(name, CAST, style=WRITTEN)
        assert moved(work.forward)["normed.narrow"] == linears * 6 * N
        assert moved(work.input_grad)["normed.grad.narrow"] == linears * 6 * N
        assert moved(work.input_grad)["normed.sum"] == (linears - 1) * 12 * N
        kept, before = ({s.name: s.bytes for s in w.saved} for w in (work, of(name, plain, style=WRITTEN)))
        assert (before["normed"], kept["normed"]) == (2 * N, linears * 2 * N)
        assert (before["norm_fp32"], kept["norm_fp32"]) == (2 * N, 0), "the stream itself"
        assert (before["norm_scaled"], kept["norm_scaled"]) == (2 * N, 4 * N)


def test_a_stage_sends_it_as_it_is() -> None:
    """And a plan's digest is that of before where the key says what is so anyway."""
    sets = ["model.config=tiny-llama", "model.num_hidden_layers=4", f"model.seq_len={S}", "parallel.pp=2"]
    sets += [f"schedule.microbatch_size={B}", "schedule.name=1f1b", "schedule.microbatches=4"]
    sizes, digests = [], []
    for residual in ("", "precision.residual=bf16", "precision.residual=fp32"):
        plan = prepare(load_job({}, [*sets, *([residual] if residual else [])])).plan()
        sent = [s.slot for s in plan.shapes if s.kind is OpKind.SEND and s.slot is not None]
        sizes.append({plan.graph.nodes[node].writes[slot].bytes for node, slot in sent})
        digests.append(plan_digest(plan))
    assert sizes == [{2 * N}, {2 * N}, {4 * N}] and len(set(digests)) == 1


@pytest.mark.parametrize(
    ("compute", "residual", "allowed"),
    [
        ("bf16", "fp16", "bf16, fp32"),
        ("fp16", "bf16", "fp16, fp32"),
        ("fp8", "fp8", "bf16, fp32"),
        ("bf16", "fp64", "bf16, fp32"),
        ("fp32", "bf16", "fp32"),
        ("fp64", "fp32", "fp64"),
    ],
)
def test_a_narrower_stream_is_refused(compute: str, residual: str, allowed: str) -> None:
    job = load_job({"model": {"config": "tiny-llama"}, "precision": {"compute": compute, "residual": residual}})
    found = refusal(precision_of, job)
    assert found.kind is ErrorKind.JOB and found.key == "precision.residual" and found.allowed == allowed
    assert str(found.suggestion) == f'precision.residual = "{allowed.split(", ")[-1]}"'


def test_what_classes_of_profiles_are_named_by_is_as_before_where_nothing_is_said() -> None:
    assert repr(ModelPrecision()).count("=") == 8 and repr(WIDE) != repr(ModelPrecision())


@pytest.mark.parametrize("family", FAMILIES)
def test_under_autocast_every_family_moves_something_more_and_nothing_less(family: str) -> None:
    config = config_from(small(family), "x")
    plain = replace(CAST, residual=None)
    shape = MicrobatchShape(1, 8, 8) if config.encoder else MicrobatchShape(1, 8)
    for chunk in model_chunks(config):
        for part in chunk.parts:
            wide, narrow = (
                part_work(config, chunk, part, PartLayout(), shape, p, style=WRITTEN) for p in (CAST, plain)
            )
            assert all(k.count > 0 and k.bytes > 0 for k in (*wide.forward, *wide.input_grad, *wide.weight_grad))
            assert wide.out_bytes in (narrow.out_bytes, 2 * narrow.out_bytes)
            assert sum(s.bytes for s in wide.saved) >= sum(s.bytes for s in narrow.saved)


def test_under_autocast_linears_beside_attention_and_without_a_norm_before_them_cast_too() -> None:
    """Falcon's MLP reads attention's norm; OLMo-2's linears the stream itself."""
    for family, part, linears in (("falcon", "mlp", 1), ("olmo2", "attn", 3), ("olmo2", "mlp", 2)):
        config = config_from(small(family), "x")
        chunk = model_chunks(config)[1]
        found = next(p for p in chunk.parts if p.name == part)
        work = part_work(config, chunk, found, PartLayout(), MicrobatchShape(1, 8), CAST, style=WRITTEN)
        one = 8 * config.hidden
        assert moved(work.forward)["normed.narrow"] == moved(work.input_grad)["normed.grad.narrow"] == linears * 6 * one
        kept = {s.name: s.bytes for s in work.saved}
        assert kept["input" if family == "olmo2" else "normed"] == linears * 2 * one
