"""Layers with a recurrence in place of attention: what each layer is, what devices share, what is made again."""

from dataclasses import replace
from typing import Any

import pytest

from ir.core.ops import Pass
from ir.core.work import MessageKind
from ir.job.build import prepare
from ir.job.load import job_from
from ir.verify import check_plan
from ir.workload import config_from, load_config, model_chunks
from ir.workload.config.spec import ModelConfig
from ir.workload.part import PartLayout
from ir.workload.parts.kernels import flops
from ir.workload.setting import MicrobatchShape, ModelPrecision, check_setting
from ir.workload.work import part_work
from tests.ir.workload.models import FAMILIES, refused, small
from tests.ir.workload.test_families import TOKENS, counted, parameters, priced
from tests.refusals import refusal

NANO, NEXT, MAMBA = "nemotron-3-nano-30b-a3b", "qwen3-next-80b-a3b", "mamba2-2.7b"
SIZES = {"seq_len": 256, "vocab_size": 256, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
TINY = {"config": NANO, **SIZES, "head_dim": 16, "hybrid_override_pattern": "ME*-ME", "num_hidden_layers": 6}
ONE: dict[str, Any] = {"cluster": {"gpu": "h100-sxm", "nodes": 1, "gpus_per_node": 8}}
TINY |= {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 4, "n_routed_experts": 8}
AHEAD, KINDS = ("mtp_hybrid_override_pattern", "mtp_layers_block_type"), ["attention", "moe"]


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


KIMI, LING = (config_from(FAMILIES[name]["config"], "x") for name in ("kimi_linear", "bailing_hybrid"))


def test_kimis_gates_come_through_a_few_features_that_every_device_has() -> None:
    def found(**layout: Any) -> tuple[dict[str, tuple[int, ...]], list[int]]:
        chunk = model_chunks(KIMI)[1]
        assert [p.name for p in chunk.parts] == ["mixer", "mlp"]
        setting = (PartLayout(**layout), MicrobatchShape(1, 4096), ModelPrecision())
        work = part_work(KIMI, chunk, chunk.parts[0], *setting)
        sent = [c.message.bytes for c in work.inline if c.when is Pass.F]
        return {k.label: k.shape for k in work.forward if k.label.endswith(("_down", "_up"))}, sent

    h, inner = KIMI.hidden, 32 * 128
    assert found()[0] == {"gates_down": (4096, 256, h), "decays_up": (4096, inner, 128), "gate_up": (4096, inner, 128)}
    cut, sent = found(tp=4, sequence_parallel=True)
    assert cut == {"gates_down": (1024, 256, h), "decays_up": (4096, 1024, 128), "gate_up": (4096, 1024, 128)}
    assert sent[:2] == [4096 * h * 2, 4096 * 256 * 2], "the stream, and what the gates come through"


def test_ling_weighs_each_head_of_latent_attention() -> None:
    """A number for each head and token: one product more, which reads what queries read, and its own gradient."""

    def found(gate: bool) -> dict[str, tuple[int, ...]]:
        config = replace(LING, form=replace(LING.form, head_gate=gate))
        chunk = model_chunks(config)[6]
        assert chunk.parts[0].name == "attn" and LING.mixer is not None and LING.mixer.rank == 0
        work = part_work(config, chunk, chunk.parts[0], PartLayout(tp=4), MicrobatchShape(1, 4096), ModelPrecision())
        kernels = (*work.forward, *work.input_grad, *work.weight_grad)
        return {k.label: k.shape or (k.bytes,) for k in kernels} | {b.name: (b.bytes,) for b in work.saved}

    with_gate, without = found(True), found(False)
    new = {k: x for k, x in with_gate.items() if k not in without}
    out, heads = 4096 * 8 * 128 * 2, 8
    assert new["gate_proj.weight_grad"] == (heads, LING.hidden, 4096) and new["attention_gate"] == (4 * out,)
    assert (new["gate"], new["ungated"]) == ((4096 * heads * 2,), (out,))


@pytest.mark.parametrize(
    ("inline", "key"),
    [
        ({"num_expert_group": 7}, "num_expert_group"),
        ({"num_expert_group": 512}, "num_expert_group"),
        ({"topk_group": 9}, "topk_group"),
        ({"num_experts_per_token": 300}, "num_experts_per_token"),
    ],
)
def test_groups_of_experts_that_a_token_s_do_not_lie_in_are_refused_by_lings_keys(
    inline: dict[str, object], key: str
) -> None:
    assert LING.moe is not None and (LING.moe.groups, LING.moe.top_groups) == (8, 4)
    assert refusal(config_from, {**FAMILIES["bailing_hybrid"]["config"], **inline}, "x").key == key


def test_kimis_layers_are_counted_from_one() -> None:
    def read(**table: object) -> ModelConfig:
        raw = dict(FAMILIES["kimi_linear"]["config"], layer_types=None, num_hidden_layers=4, mlp_layer_types=None)
        return config_from({**raw, "linear_attn_config": {"num_heads": 16, "head_dim": 64, **table}}, "here.json")

    lists = read(full_attn_layers=[2, 4], kda_layers=[1, 3])
    assert [lists.is_recurrent(i) for i in range(4)] == [True, False, True, False]
    assert lists.mixer is not None and (lists.mixer.heads, lists.mixer.state, lists.mixer.conv) == (16, 64, 4)
    assert [read().is_recurrent(i) for i in range(4)] == [True] * 4, "the first layer never attends"
    for full in ([2], [2, 4, 4], [0, 2, 4], [2, 5]):
        e = refusal(read, full_attn_layers=full, kda_layers=[1, 3])
        assert e.key == "linear_attn_config.kda_layers" and "1 to 4" in str(e.allowed)


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
        ({"num_nextn_predict_layers": -1}, "model.num_nextn_predict_layers"),
        *(
            ({"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": x}, "model.mtp_hybrid_override_pattern")
            for x in ("M", "E*", "*EE", "*X")
        ),
        ({"num_nextn_predict_layers": 1, **dict(zip(AHEAD, ("*-", KINDS), strict=True))}, f"model.{AHEAD[1]}"),
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


@pytest.mark.parametrize(
    ("preset", "elements", "routers"),
    [(NANO, 32_913_266_240, 24), ("nemotron-3-super-120b-a12b", 123_611_033_088, 41)],
)
def test_prediction_modules_have_the_weights_that_the_cards_count(preset: str, elements: int, routers: int) -> None:
    """NVIDIA-NeMo/Megatron-Bridge, model_verification_cards: Nemotron 3.5 Lightning, which is Nano with one module that
    predicts twice, and Nemotron 3 Super; with the routers' biases, which nobody trains."""
    twice = {"num_nextn_predict_layers": 2, "mtp_use_repeated_layer": True}
    config = load_config(preset, twice)
    assert config.moe is not None
    assert elements_of(config) + routers * config.moe.experts == elements
    assert elements_of(config) == elements_of(load_config(preset, {"num_nextn_predict_layers": 1}))
    own = elements_of(load_config(preset, twice | {"mtp_use_repeated_layer": False}))
    assert own - elements_of(config) == elements_of(config) - elements_of(load_config(preset)) > 0


def elements_of(config: ModelConfig) -> int:
    """Of each tensor once, prediction modules' among them."""
    return sum({q.name: q.numel for c in model_chunks(config) for p in c.parts for q in p.params}.values())


def test_prediction_modules_stand_behind_each_other() -> None:
    *_, first, second, head = model_chunks(load_config(NANO, {"num_nextn_predict_layers": 2}))
    assert (first.reads, second.reads, head.reads) == ("l51", "mtp0", "l51")
    assert first.output == "norm" and head.output == "head", "what its own head reads goes on"
    graph = prepare(job_from({"model": TINY | {"num_nextn_predict_layers": 2}, **ONE})).base
    edges = {(graph.nodes[e.src].part, graph.nodes[e.dst].part, str(graph.nodes[e.dst].kind)) for e in graph.edges}
    assert ("mtp0.norm", "mtp1.proj", "F") in edges and ("mtp1.proj", "mtp0.norm", "I") in edges
    assert not any(a == "mtp0.head" and b.startswith(("mtp1", "head")) for a, b, _ in edges)


@pytest.mark.parametrize(
    ("pattern", "mixing", "other"), [("*E", "attn", "add"), ("M-", "mixer", "mlp"), ("ME", "mixer", "add")]
)
def test_a_prediction_module_has_what_its_pattern_says(pattern: str, mixing: str, other: str) -> None:
    config = load_config(NANO, {"num_nextn_predict_layers": 1, AHEAD[0]: pattern})
    found = [p.name for p in model_chunks(config)[-2].parts]
    assert (found[2], found[-3]) == (mixing, other)
    layers = range(config.layers)
    plain = load_config(NANO)
    assert [*map(config.is_moe, layers)] == [*map(plain.is_moe, layers)]
    assert [*map(config.is_recurrent, layers)] == [*map(plain.is_recurrent, layers)]


def test_a_module_of_megatrons_type_is_as_its_last_layer() -> None:
    """`get_gpt_mtp_block_spec` takes the last layer's."""
    sizes = {"model_type": "megatron", "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    sizes |= {"num_experts": 4, "moe_intermediate_size": 64, "mtp_num_layers": 1, "max_position_embeddings": 64}
    for every, last in ((1, "add"), (2, "add"), (3, "mlp")):
        config = config_from(sizes | {"decoder_sparse_step": every}, "small")
        module = model_chunks(config)[-2]
        assert module.name == "mtp0" and module.parts[-3].name == last == model_chunks(config)[-3].parts[-1].name
    assert len(module.parts[0].params) == 2, "words and positions, as the model's own"


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("layout", ["EttttttmmL", "Ettt|tttmmL", "Ettt|ttt|m|mL", "Etttttt|m|m|L"])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_plans_of_prediction_modules_are_legal(repeated: bool, layout: str, zero: int) -> None:
    stages = layout.count("|") + 1
    model = TINY | {"num_nextn_predict_layers": 2, "mtp_use_repeated_layer": repeated}
    table = {
        "model": model,
        "cluster": {"gpu": "h100-sxm", "nodes": 1, "gpus_per_node": 2 * stages},
        "parallel": {"pp": stages, "ep": 2, "dp": 2, "zero": zero},
        "schedule": {"name": "1f1b", "microbatches": 4, "layout": layout},
    }
    check_plan(prepare(job_from(table)).plan())


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
