"""Families of models: parameters and FLOPs equal transformers', whatever the spelling; the rest is refused by name.

tests/data/families.json holds a published config of each type, as its page on the Hub spells it (rotary factors by
feature, which change no count, are ones), and the parameters of transformers' class of it, counted on the meta device.
"""

import copy
import json
from dataclasses import replace

import pytest

from ir.core.errors import ErrorKind, PiperError
from ir.workload import config_from, load_config, model_chunks
from ir.workload.config.keys import FORMS, OUTER, TYPES, UNBUILT
from ir.workload.part import PartLayout
from ir.workload.parts.kernels import flops
from ir.workload.setting import MicrobatchShape, ModelPrecision
from ir.workload.work import dispatch_bytes, part_work
from tests.executor.modules.hub import quiet
from tests.ir.workload.models import FAMILIES, small
from tests.refusals import refusal

TOKENS = 8
IN_RECURRENCE = ("scan.", "dt_proj")  # the latter a product that Mamba-1's class writes out, and no module does
TOWERS = ("t5", "mt5")  # whose decoder reads half as many tokens here as the encoder
ENCODERS = ("bert", "roberta", "camembert", "xlm-roberta", "megatron-bert", "distilbert")
# Types whose defaults transformers writes are of no model.
# Types of which transformers writes what it would itself read as another model.
WRITTEN_OTHERWISE = {"bailing_hybrid": "takes head_dim = 64"}
CORRECTION = "mlp.expert_bias"  # of AFMoE's class a parameter, which no gradient reaches; of others' a buffer
CONTRADICT = {"qwen3_moe": "one key with two values", "glm4_moe": "does not divide", "lfm2_moe": "layer_types"}


def parameters(config):
    main = [c for c in model_chunks(config) if not c.name.startswith("mtp")]
    return sum({p.name: p.numel for c in main for part in c.parts for p in (*part.params, *part.frozen)}.values())


def hub_config(raw):
    from transformers import CONFIG_MAPPING

    raw = {k: v for k, v in copy.deepcopy(raw).items() if k != "quantization_config"}
    return CONFIG_MAPPING[raw.pop("model_type")](**raw, pad_token_id=0)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_published_models_have_the_parameters_that_transformers_counts(model_type):
    row = FAMILIES[model_type]
    config = config_from(row["config"], row["hub"])
    assert parameters(config) == row["parameters"]
    wider = {**row["config"], "vocab_size": row["config"]["vocab_size"] + 1}
    grown = parameters(config_from(wider, "control")) - row["parameters"]
    assert grown == config.hidden * (2 - config.tied) + config.form.head_bias


def test_every_type_with_a_row_is_in_the_table():
    assert {*FAMILIES, "megatron"} == set(TYPES)  # transformers has no class of Megatron's GPT


SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 96}
DROPS = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 8, "n_positions": 32, "activation_function": "gelu", **DROPS}
GATED = {"gated_linear_unit": True, "hidden_act": "silu", "normalization": "RMSNorm", "add_bias_linear": False}
LLAMA = {**GATED, "position_embedding_type": "rope", "attention_dropout": 0.0, "hidden_dropout": 0.0}
LLAMA |= {"tie_word_embeddings": False, "ffn_hidden_size": 96, "num_query_groups": 2, "norm_epsilon": 1e-6}
QWEN = {"num_experts": 4, "mlp_only_layers": [0]}
GROUPED = {"intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("megatron", "other"),
    [
        ({}, {"model_type": "gpt2", "vocab_size": 96, **GPT2}),
        (LLAMA, {"model_type": "llama", **SIZES, **GROUPED}),
        (LLAMA | {"add_qkv_bias": True}, {"model_type": "qwen2", **SIZES, **GROUPED}),
        (
            LLAMA | QWEN | {"qk_layernorm": True, "kv_channels": 16, "moe_ffn_hidden_size": 24},
            {"model_type": "qwen3_moe", **SIZES, **GROUPED, **QWEN, "head_dim": 16, "norm_topk_prob": True}
            | {"num_experts_per_tok": 2, "moe_intermediate_size": 24},
        ),
    ],
    ids=["gpt2", "llama", "qwen2", "qwen3_moe"],
)
def test_megatrons_arguments_say_what_families_are(megatron, other):
    sizes = {"hidden_size": 64, "num_layers": 4, "num_attention_heads": 8, "vocab_size": 96}
    found = config_from({"model_type": "megatron", **sizes, "max_position_embeddings": 32, **megatron}, "x")
    other = config_from(other, "x")
    assert replace(found, model_type=other.model_type) == other


def test_megatrons_arguments_that_no_family_has():
    grouped = {"num_query_groups": 2, "position_embedding_type": "rope", "hidden_act": "relu2", "qk_layernorm": True}
    found = config_from({"model_type": "megatron", **SIZES, **grouped}, "x")
    h, kv, ffn = 64, 2 * 8, 256
    layer = 2 * h * (h + kv) + 2 * h * ffn + (h + 2 * kv + h) + (ffn + h) + 2 * 2 * h + 2 * 2 * 8
    assert parameters(found) == 4 * layer + 2 * h + 96 * h
    experts = config_from({"model_type": "megatron", **SIZES, **grouped, "num_experts": 4}, "x")
    assert parameters(experts) - parameters(found) == 4 * (3 * (2 * h * ffn + ffn + h) + 4 * h)
    refusal(config_from, {"model_type": "megatron", **SIZES, "normalization": "BatchNorm"}, "x", match="normalization")


def counted(raw, tokens):
    """transformers' own model, and the FLOPs of its forward by torch's counter: all, and those that the recurrences do
    beside their projections. Scores are written out; products by a single number, angles, left out.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForPreTraining, AutoModelForSeq2SeqLM

    others = {**dict.fromkeys(ENCODERS, AutoModelForMaskedLM), "megatron-bert": AutoModelForPreTraining}
    others |= dict.fromkeys(TOWERS, AutoModelForSeq2SeqLM)

    def product(a, b, *_, out_shape=None, **__):
        one = 2 * a[-2] * a[-1] * b[-1] * (a[0] if len(a) == 3 else 1)
        return one if a[-1] > 1 else 0

    aten = torch.ops.aten
    products = {aten.mm: product, aten.bmm: product, aten.addmm: lambda _, a, b, *r, **k: product(a, b)}
    products |= {aten.baddbmm: products[aten.addmm], aten.convolution: lambda *_, **__: 0}
    counter = FlopCounterMode(display=False, custom_mapping=products)
    with quiet():
        how = {"attn_implementation": "eager", "experts_implementation": "eager"}
        hub = others.get(raw["model_type"], AutoModelForCausalLM).from_config(hub_config(raw), **how).eval()
        ids = torch.arange(tokens)[None] % 60
        more = {"use_cache": False} if raw["model_type"] not in ENCODERS else {}
        more |= {"decoder_input_ids": ids[:, : tokens // 2]} if raw["model_type"] in TOWERS else {}
        with counter:
            hub(ids, **more)
    each = {name.partition(".")[2]: sum(found.values()) for name, found in counter.get_flop_counts().items()}
    mixers = [name for name, module in hub.named_modules() if hasattr(module, "conv1d")]
    inside = sum(n for name, n in each.items() if name.rpartition(".")[0] in mixers)
    return hub, counter.get_total_flops(), sum(each[name] for name in mixers) - inside


def priced(config, tokens, left_out=""):
    """FLOPs of a forward, all but recurrences', and theirs, but for those of one kind of kernel."""
    shape, layout = MicrobatchShape(1, tokens), PartLayout()
    shape = MicrobatchShape(1, tokens // 2, tokens) if config.encoder else shape
    each = [(c, p) for c in model_chunks(config) for p in c.parts]
    works = [part_work(config, c, p, layout, shape, ModelPrecision(), "unfused").forward for c, p in each]
    scans = [k for work in works for k in work if k.label.startswith(IN_RECURRENCE)]
    return sum(map(flops, works)) - flops(scans), flops(k for k in scans if k.label != left_out)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_small_model_has_the_parameters_and_flops_of_transformers_own(model_type):
    raw = small(model_type)
    hub, whole, recurrent = counted(raw, TOKENS)
    config = config_from(raw, "small")
    assert parameters(config) == sum(p.numel() for n, p in hub.named_parameters() if not n.endswith(CORRECTION))
    assert priced(config, TOKENS)[0] == whole - recurrent
    assert (config.mixer is not None) >= (recurrent > 0)


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("nemotron_h", "tie_word_embeddings", True),
        ("bert", "tie_word_embeddings", False),
        ("megatron-bert", "tie_word_embeddings", False),
        ("apertus", "hidden_act", "gelu"),
        ("phimoe", "num_experts_per_tok", 4),
        ("t5", "is_gated_act", True),
        ("mt5", "dense_act_fn", "relu"),
        ("deepseek_v3", "head_dim", 8),
        ("deepseek_v2", "head_dim", 8),
    ],
)
def test_a_value_of_which_transformers_class_makes_something_else_is_refused(model_type, key, value):
    e = refusal(config_from, {**small(model_type), key: value}, "config.json")
    assert (e.key, e.kind.exit_code) == (key, 2) and e.allowed


@pytest.mark.parametrize(("model_type", "key"), [("helium", "attention_bias"), ("ernie4_5_moe", "use_bias")])
def test_heliums_output_projection_has_no_bias_and_ernies_head_has_one(model_type, key):
    raw = {**small(model_type), key: True}
    hub, whole, _ = counted(raw, TOKENS)
    config = config_from(raw, "small")
    assert parameters(config) == sum(p.numel() for p in hub.parameters()) and priced(config, TOKENS)[0] == whole


@pytest.mark.parametrize("other", [{}, {"rms_norm_eps": 1e-6}, {"expert_selection_fn": "sigmoid"}])
def test_experts_beside_attention_behind_dense_layers_are_transformers_own(other):
    """Command A+: all read attention's norm, with a mean or not; shared experts and MLPs have their own widths."""
    raw = {k: v for k, v in small("cohere2_moe").items() if k not in ("layer_types", "mlp_layer_types")}
    raw |= {"first_k_dense_replace": 2, "prefix_dense_intermediate_size": 48, "num_shared_experts": 2, **other}
    hub, whole, _ = counted(raw, TOKENS)
    config = config_from(raw, "x")
    assert parameters(config) == sum(p.numel() for p in hub.parameters()) and priced(config, TOKENS)[0] == whole
    windows = [getattr(layer.self_attn, "sliding_window", None) or 0 for layer in hub.model.layers]
    turned = [bool(layer.self_attn.sliding_window or layer.self_attn.force_rope) for layer in hub.model.layers]
    assert [config.at(i).window for i in range(4)] == windows and [config.at(i).rope for i in range(4)] == turned


def test_experts_beside_attention_have_no_norm_of_their_own():
    raw = small("cohere2_moe")
    config = config_from(raw, "x")
    chunk = model_chunks(config)[1]
    assert [p.name for p in chunk.parts] == ["attn", "router", "experts", "add"] and not chunk.parts[1].keeps
    each = [
        part_work(config, chunk, p, PartLayout(), MicrobatchShape(1, TOKENS), ModelPrecision()) for p in chunk.parts
    ]
    norms = [k.label for w in each for k in (*w.forward, *w.input_grad) if "norm" in k.label]
    assert norms == ["input_norm", "input_norm_backward"]
    assert sum("normed" in b.name for w in each for b in w.saved) == 1, "attention's"


def test_experts_in_a_space_of_their_own_are_transformers_own():
    raw = {**small("nemotron_h"), "moe_latent_size": 28}
    hub, whole, recurrent = counted(raw, TOKENS)
    config = config_from(raw, "small")
    assert parameters(config) == sum(p.numel() for p in hub.parameters())
    assert priced(config, TOKENS)[0] == whole - recurrent
    sent = [
        dispatch_bytes(c, PartLayout(ep=2), MicrobatchShape(1, TOKENS), ModelPrecision()).dispatch.bytes
        for c in (config, config_from({**raw, "moe_latent_size": None}, "wide"))
    ]
    assert sent[0] * config.hidden == sent[1] * 28


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text"])
def test_the_delta_rule_has_the_products_of_transformers_own_in_whole_chunks(model_type):
    """But for those with the inverse: there a system is solved."""
    raw = {**small(model_type), "max_position_embeddings": 128}
    _, _, recurrent = counted(raw, 128)
    assert priced(config_from(raw, "small"), 128, "scan.written")[1] == recurrent > 0
    assert priced(config_from({**raw, "linear_key_head_dim": 11}, "control"), 128, "scan.written")[1] != recurrent


def test_mambas_scan_has_the_products_of_its_paper():
    """arXiv:2405.21060, section 6: scores of a group and outputs of a head in chunks, states made and read."""
    config = config_from(small("mamba2"), "small")
    m, tokens = config.mixer, 16
    within = 2 * tokens * m.chunk * (m.groups * m.state + m.inner)
    assert priced(config, tokens)[1] == config.layers * (within + 2 * 2 * tokens * m.inner * m.state)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_transformers_writes_is_the_same_model(model_type):
    """Today's spelling of transformers, every key written out, beside the Hub's."""
    raw = {k: v for k, v in FAMILIES[model_type]["config"].items() if k != "quantization_config"}
    with quiet():
        written = json.loads(hub_config(raw).to_json_string(use_diff=False))
    if model_type in WRITTEN_OTHERWISE:
        refusal(config_from, written, "x", match=WRITTEN_OTHERWISE[model_type])
        return
    assert config_from(written, "x") == config_from({**raw, "pad_token_id": 0}, "x")  # which `hub_config` gives to all


@pytest.mark.parametrize(
    ("model_type", "old", "today"),
    [
        ("cohere2", {"_sliding_window_pattern": 2}, {"sliding_window_pattern": 2}),  # 4.51 to 5.15
        ("granitemoe", {"position_embedding_type": "rope"}, {}),  # to 5.15
        ("granitemoeshared", {"position_embedding_type": "rope"}, {}),
        ("llama4_text", {"attn_temperature_tuning": 4}, {"attn_temperature_tuning": True}),  # 4.51
        ("llama4_text", {"attn_temperature_tuning": 0}, {"attn_temperature_tuning": False}),
        ("phi3", {"ignore_keys_at_rope_validation": None}, {}),  # 5.0
        ("llama", {"is_decoder": False}, {}),  # whole configs to 4.57
    ],
)
def test_what_older_transformers_wrote_is_read_as_they_meant_it(model_type, old, today):
    raw = {k: v for k, v in small(model_type).items() if k not in today}
    assert config_from({**raw, **old}, "x") == config_from({**raw, **today}, "x")


def test_what_older_transformers_wrote_and_nobody_builds_is_refused():
    for model_type, old in (("granitemoe", {"position_embedding_type": "alibi"}), ("bert", {"is_decoder": True})):
        refusal(config_from, {**small(model_type), **old}, "x", match=next(iter(old)))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_keys_that_are_left_out_have_transformers_defaults(model_type):
    from transformers import CONFIG_MAPPING

    with quiet():
        written = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    needed = {k for k, key in TYPES[model_type].items() if key.required}
    given = {k: written[k] if written.get(k) else 4 for k in needed}
    if model_type == "deepseek_v3":  # its class has no prediction module, whatever it writes: none unless it is said
        written["num_nextn_predict_layers"] = 0
    if why := {**CONTRADICT, **WRITTEN_OTHERWISE}.get(model_type):
        refusal(config_from, {**written, **given}, "x", match=why)
    else:
        assert config_from(given, "x") == config_from({**written, **given}, "x")


@pytest.mark.parametrize("model_type", UNBUILT)
def test_other_architectures_are_refused_by_what_they_have(model_type):
    e = refusal(config_from, {"model_type": model_type, "hidden_size": 8}, "config.json")
    assert (e.kind, e.kind.exit_code, e.key) == (ErrorKind.MODEL, 2, "model_type")
    assert model_type in e.message and UNBUILT[model_type] in e.message and model_type not in TYPES


def test_a_language_model_among_other_towers_is_read():
    """google/gemma-3-4b-pt: what its text_config leaves out has transformers' defaults."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024, "vocab_size": 262208}
    raw = {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 1152},
        "eoi_token_index": 256000,
    }
    config = config_from(raw, "x", {"num_hidden_layers": 34})
    assert config == config_from(text, "x") and parameters(config) == 3_880_263_168
    assert config.windows.count(0) == 5 and config.rope_scaling is not None
    e = refusal(config_from, {**raw, "mm_odd": 1}, "x", match="is not understood")
    assert e.key == "mm_odd" and "mm_odd" not in OUTER
    with pytest.raises(PiperError, match="encoder") as e:
        config_from({**raw, "text_config": {"model_type": "bart"}}, "x")
    assert e.value.key == "model_type"


def test_layers_differ_where_their_keys_say_so():
    def read(model_type, **inline):
        return config_from(FAMILIES[model_type]["config"], "x", inline)

    gemma = read("gemma2")
    assert (gemma.at(0).window, gemma.at(1).window, gemma.form.score_cap) == (4096, 0, 50.0)
    llama = read("llama4_text")
    assert [(llama.at(i).rope, llama.at(i).window) for i in (2, 3)] == [(True, 8192), (False, 0)]
    assert [read("cohere2").at(i).rope for i in range(4)] == [True, True, True, False]
    assert read("falcon").form.parallel == 2 and read("falcon", num_ln_in_parallel_attn=1).form.parallel == 1
    assert read("falcon", new_decoder_architecture=False).kv_heads == 1
    assert read("gpt_bigcode").kv_heads == 1 and read("gpt_bigcode", multi_query=False).kv_heads == 48
    assert read("ernie4_5_moe").moe.dense_layers == {0} and read("qwen2_moe", mlp_only_layers=[3]).moe.dense_layers == {
        3
    }
    trinity = read("afmoe", num_dense_layers=2)
    assert [(trinity.at(i).rope, trinity.at(i).window) for i in (2, 3)] == [(True, 1024), (False, 0)]
    assert trinity.moe.dense_layers == {0, 1} and read("afmoe", mup_enabled=True).form.multiplied("embedding")
    swash = read("granite_swa", layer_rope_theta=[0, *[1e4] * 23])
    assert [(swash.at(i).rope, swash.at(i).window) for i in (0, 1, 4)] == [(False, 0), (True, 128), (True, 0)]
    assert refusal(read, "granite_swa", layer_rope_theta=[0]).key == "model.layer_rope_theta"
    assert read("minicpm3", v_head_dim=None).mla.v_dim == 64
    assert refusal(read, "opt", do_layer_norm_before=False).key == "model.do_layer_norm_before"
    assert set(FORMS) < set(TYPES)


PRESETS = (  # spelled otherwise than their pages
    "gemma2:gemma2-9b gemma3_text:gemma3-1b gpt_oss:gpt-oss-120b llama4_text:llama4-scout gpt_neox:gpt-neox-20b "
    "bloom:bloom minimax_m2:minimax-m2"
)


@pytest.mark.parametrize("pair", PRESETS.split())
def test_a_preset_of_a_family_is_its_published_config(pair):
    """But for the format of its weights: what is trained is wide."""
    model_type, _, preset = pair.partition(":")
    raw = {k: v for k, v in FAMILIES[model_type]["config"].items() if k != "quantization_config"}
    assert replace(load_config(preset), source="x") == config_from(raw, "x")


def test_a_key_that_a_kind_of_angles_does_not_have_is_refused_with_those_it_has():
    raw = FAMILIES["phi3"]["config"]
    e = refusal(config_from, {**raw, "rope_scaling": {**raw["rope_scaling"], "low_freq_factor": 4.0}}, "x")
    assert e.key == "rope_scaling.low_freq_factor" and "longrope" in e.message
    assert {"short_factor", "long_factor", "type"} <= {*str(e.allowed).split(", ")}


@pytest.mark.parametrize("model_type", ENCODERS)
def test_an_encoder_sees_both_ways(model_type):
    """Attention that is not written out has twice a decoder's products; scores that are have as many."""
    config, shape = config_from(small(model_type), "small"), MicrobatchShape(1, TOKENS)
    chunk = model_chunks(config)[1]
    attn, causal = (
        [
            part_work(c, chunk, chunk.parts[0], PartLayout(), shape, ModelPrecision(), how)
            for how in ("flash", "unfused")
        ]
        for c in (config, replace(config, form=replace(config.form, bidirectional=False)))
    )
    scores = 2 * 2 * 8 * TOKENS * TOKENS * 8
    assert flops(attn[0].forward) - flops(causal[0].forward) == scores // 2
    assert flops(attn[0].forward) == flops(attn[1].forward) == flops(causal[1].forward)
    assert attn[0].model_flops == flops(attn[0].forward) == attn[1].model_flops


def test_robertas_first_two_positions_are_of_padding():
    config = config_from(FAMILIES["roberta"]["config"], "x")
    assert (config.max_positions, config.positions) == (512, 514)
    refusal(config_from, FAMILIES["roberta"]["config"], "x", {"max_position_embeddings": 2}, match="padding")
