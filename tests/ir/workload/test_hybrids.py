"""Layers with a recurrence in place of attention: what each layer is, what devices share, what is made again."""

import pytest

from ir.core.work import MessageKind
from ir.job.build import prepare
from ir.job.load import job_from
from ir.verify import check_plan
from ir.workload import config_from, load_config, model_chunks
from ir.workload.part import PartLayout
from ir.workload.parts.kernels import flops
from ir.workload.setting import MicrobatchShape, ModelPrecision, check_setting
from ir.workload.work import part_work
from tests.ir.workload.models import refused, small
from tests.ir.workload.test_families import TOKENS, counted, parameters, priced
from tests.refusals import refusal

NANO, NEXT, MAMBA = "nemotron-3-nano-30b-a3b", "qwen3-next-80b-a3b", "mamba2-2.7b"
SIZES = {"seq_len": 256, "vocab_size": 256, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
TINY = {"config": NANO, **SIZES, "head_dim": 16, "hybrid_override_pattern": "ME*-ME", "num_hidden_layers": 6}
TINY |= {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 4, "n_routed_experts": 8}


def parts(name: str, **inline: object) -> list[list[str]]:
    return [[p.name for p in c.parts] for c in model_chunks(load_config(name, inline))]


def mixer_of(name: str, layout: PartLayout, seq_len: int = 4096):
    config = load_config(name)
    chunk = next(c for c in model_chunks(config) if c.parts[0].name == "mixer")
    return part_work(config, chunk, chunk.parts[0], layout, MicrobatchShape(1, seq_len), ModelPrecision())


def test_a_sign_of_a_pattern_is_one_thing_and_reads_the_stream() -> None:
    found = parts(NANO, hybrid_override_pattern="ME*-", num_hidden_layers=4)
    assert found[1:5] == [["mixer"], ["router", "experts", "shared", "add"], ["attn"], ["mlp"]]
    chunk = model_chunks(load_config(NANO, {"hybrid_override_pattern": "ME", "num_hidden_layers": 2}))[2]
    assert chunk.parts[0].inputs == ("",) and chunk.parts[-1].inputs == ("experts", "shared", "")
    assert chunk.parts[0].keeps[0].of == "", "the norm's gradient reads what came into the layer"


def test_families_whose_layers_have_both_halves() -> None:
    found = parts(NEXT)
    assert found[1] == ["mixer", "router", "experts", "shared", "add"] and found[4][0] == "attn"
    assert sum(p[0] == "attn" for p in found[1:-1]) == 12
    assert {*map(tuple, parts(MAMBA)[1:-1])} == {("mixer",)}


@pytest.mark.parametrize("name", [NANO, NEXT])
@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_devices_share_a_recurrence_evenly(name: str, axis: str) -> None:
    """Heads and their groups: products and stored bytes of both passes are an n-th, but for rounded chunks."""
    whole, cut = mixer_of(name, PartLayout()), mixer_of(name, PartLayout(**{axis: 4}))
    for work in ("forward", "input_grad", "weight_grad"):
        assert flops(getattr(whole, work)) == 4 * flops(getattr(cut, work)), work
    kept = {b.name: b.bytes for b in whole.saved}
    shared = {b.name: b.bytes for b in cut.saved}
    assert all(kept[n] == 4 * shared[n] for n in ("projected", "recurred", "context"))
    assert whole.model_flops == cut.model_flops


def test_a_group_that_heads_of_two_devices_share_is_on_both() -> None:
    def kept(cp: int) -> int:
        config = load_config(NANO, {"mamba_num_heads": 48, "n_groups": 3})
        chunk = next(c for c in model_chunks(config) if c.parts[0].name == "mixer")
        layout, shape = PartLayout(cp=cp), MicrobatchShape(1, 4096)
        conv = (k for k in part_work(config, chunk, chunk.parts[0], layout, shape, ModelPrecision()).forward)
        return next(k.bytes for k in conv if k.label == "conv") // (2 * 2 * 4096)  # read and written, two bytes

    assert (kept(1), kept(2)) == (48 * 64 + 2 * 3 * 128, 24 * 64 + 2 * 2 * 128)


def test_tokens_go_to_heads_and_back_under_context_parallelism() -> None:
    m = load_config(NANO).mixer
    assert m is not None
    sent = [c.message for c in mixer_of(NANO, PartLayout(cp=4)).inline if c.message.kind is MessageKind.ALL_TO_ALL]
    assert [x.bytes for x in sent] == [1024 * 2 * m.projected, 1024 * 2 * m.inner] * 2
    assert not mixer_of(NANO, PartLayout()).inline


def test_time_within_chunks_grows_with_the_chunk_and_not_with_the_sequence() -> None:
    one, two = mixer_of(NANO, PartLayout()), mixer_of(NANO, PartLayout(), 8192)
    assert flops(two.forward) == 2 * flops(one.forward)


@pytest.mark.parametrize(
    ("config", "layout", "key"),
    [
        (NANO, PartLayout(tp=16, sequence_parallel=True), "parallel.tp"),
        (MAMBA, PartLayout(tp=2), "parallel.tp"),  # one group serves all heads
        (MAMBA, PartLayout(cp=3), "parallel.cp"),
    ],
)
def test_a_division_that_heads_or_groups_do_not_have_is_refused(config: str, layout: PartLayout, key: str) -> None:
    assert refusal(check_setting, load_config(config), layout, MicrobatchShape(1, 4096)).key == key


@pytest.mark.parametrize(
    ("inline", "key"),
    [
        ({"hybrid_override_pattern": "MEX"}, "model.hybrid_override_pattern"),
        ({"num_hidden_layers": 4}, "hybrid_override_pattern"),
        ({"n_groups": 3}, "model.n_groups"),
        ({"num_nextn_predict_layers": 1}, "model.num_nextn_predict_layers"),
    ],
)
def test_what_is_not_built_is_refused_by_its_key(inline: dict[str, object], key: str) -> None:
    e = refusal(load_config, NANO, inline)
    assert e.key == key and e.allowed


def test_a_pattern_of_attention_alone_has_no_mlp() -> None:
    raw = {**small("nemotron_h"), "hybrid_override_pattern": "****"}
    hub, whole, _ = counted(raw, TOKENS)
    config = config_from(raw, "small")
    assert parameters(config) == sum(p.numel() for p in hub.parameters()) and priced(config, TOKENS)[0] == whole


def test_layers_are_said_once_and_the_jobs_stand_before_the_files() -> None:
    raw = small("nemotron_h")
    kinds = ["mamba", "attention", "mamba", "attention"]
    assert "one key with two values" in refused(raw | {"layers_block_type": kinds}).message
    assert config_from(raw, "x", {"layers_block_type": kinds}) == config_from(
        raw, "x", {"hybrid_override_pattern": "M*M*"}
    )
    assert config_from(raw | {"num_hidden_layers": None}, "x") == config_from(raw, "x")
    assert refused(raw | {"moe_shared_expert_intermediate_size": 0}).key == "moe_shared_expert_intermediate_size"


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p", "zbv", "dualpipe", "dualpipev", "1f1b-overlap"])
@pytest.mark.parametrize("recompute", ["none", "full", "attention"])
def test_plans_of_hybrids_are_legal(schedule: str, recompute: str) -> None:
    table = {
        "model": TINY,
        "cluster": {"gpu": "h100-sxm", "nodes": 1, "gpus_per_node": 8},
        "parallel": {"pp": 2, "ep": 2, "tp": 2, "sequence_parallel": True, "zero": 1},
        "schedule": {"name": schedule, "microbatches": 8, "recompute": recompute},
    }
    prepared = prepare(job_from(table))
    plan = prepared.plan()
    check_plan(plan)
    again = {n.part.rpartition(".")[2] for n in prepared.plan().graph.nodes if str(n.kind) == "R"}
    assert ("mixer" in again) is (recompute != "none") and ("experts" in again) is (recompute == "full")
