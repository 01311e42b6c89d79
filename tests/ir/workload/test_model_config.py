import json
import math
import re
from importlib.resources import files

import pytest

from ir.core.errors import ErrorKind, PiperError
from ir.job import load_job
from ir.job.build import prepare
from ir.job.routing.described import check_routing
from ir.workload import config_from, load_config, presets
from ir.workload.config.keys import TYPES
from tests.ir.workload.models import FAMILIES, LLAMA, refused, small
from tests.ir.workload.test_families import hub_config
from tests.refusals import refusal

CONTRACT = (
    "gpt3-175b llama3-8b llama3-70b llama3-405b mixtral-8x7b qwen3-30b-a3b qwen3-235b-a22b deepseek-v3 "
    "piper-1b piper-9b tiny-llama tiny-moe"
)


def written(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", CONTRACT.split())
def test_presets_of_the_contract_load(name):
    config = load_config(name)
    assert config.source == name
    assert name in presets()


def test_presets_are_package_data_that_only_uses_known_keys():
    folder = files("ir.workload.config") / "presets"
    for name in presets():
        raw = json.loads((folder / f"{name}.json").read_text())
        tables = {"attn_config", "ffn_config"} if raw["model_type"] == "dbrx" else set()  # whose keys are checked there
        assert raw.keys() - tables <= TYPES[raw["model_type"]].keys(), name


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-moe"])
def test_tiny_models_divide_by_four(name):
    c = load_config(name)
    assert all(n % 4 == 0 for n in (c.heads, c.kv_heads, c.layers, c.moe.experts if c.moe else 4))


def test_a_path_a_folder_and_a_preset_give_the_same_model(tmp_path):
    preset = (files("ir.workload.config") / "presets" / "deepseek-v3.json").read_text()
    path = written(tmp_path, preset)
    by_file, by_folder = load_config(str(path)), load_config(str(tmp_path))
    assert by_file == by_folder
    assert by_file.source == str(path)
    assert by_file.mla == load_config("deepseek-v3").mla


def test_inline_keys_override_the_file_in_either_spelling():
    for spelling in ("n_layer", "num_hidden_layers"):
        c = load_config("gpt3-175b", {spelling: 8, "resid_pdrop": 0.0})
        assert (c.layers, c.hidden_dropout, c.attn_dropout) == (8, 0.0, 0.1)
    assert load_config("llama3-8b", {"attn_pdrop": 0.1}).attn_dropout == 0.1
    assert load_config("llama3-8b", {"attention_dropout": 0.1}).attn_dropout == 0.1
    assert load_config("llama3-8b", {"tie_word_embeddings": True}).tied


def test_left_out_keys_have_hugging_faces_defaults():
    c = config_from(LLAMA, "here.json")
    assert (c.kv_heads, c.head_dim, c.tied, c.norm_eps) == (4, 16, False, 1e-6)
    gpt = config_from({"model_type": "gpt2", "vocab_size": 64, "n_embd": 8, "n_layer": 1, "n_head": 2}, "x")
    assert (gpt.ffn, gpt.tied, gpt.attn_dropout, gpt.positions) == (32, True, 0.1, 1024)


def test_keys_without_a_meaning_for_training_are_accepted():
    c = config_from({**LLAMA, "torch_dtype": "bfloat16", "use_cache": False}, "x", {"torch_dtype": "float16"})
    assert c == config_from(LLAMA, "x")


def test_which_layers_have_experts():
    v3 = load_config("deepseek-v3")
    assert [v3.is_moe(i) for i in (0, 2, 3, 60, 61)] == [False, False, True, True, True]
    every_other = load_config("tiny-moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [every_other.is_moe(i) for i in range(4)] == [False, True, False, False]


def test_a_model_cut_down_to_its_dense_layers_has_no_experts():
    cut = {"num_hidden_layers": 3}
    assert load_config("deepseek-v3", cut).moe is not None, "its prediction module has some"
    assert load_config("deepseek-v3", {**cut, "num_nextn_predict_layers": 0}).moe is None
    assert load_config("deepseek-v3", {"num_hidden_layers": 4, "num_nextn_predict_layers": 0}).moe is not None
    job = {
        "model": {"config": "deepseek-v3", "seq_len": 64, "num_nextn_predict_layers": 0, **cut},
        "parallel": {"dp": 2},
    }
    job |= {"schedule": {"microbatches": 1}}
    for section, key, value in (("parallel", "ep", 2), ("routing", "kind", "zipf")):
        with pytest.raises(PiperError, match="no layer of deepseek-v3 has experts") as e:
            told = load_job({**job, section: {**job.get(section, {}), key: value}})
            check_routing(told, prepare(told).config)
        assert e.value.key == f"{section}.{key}"
    tensor = {"tp": 2, "sequence_parallel": False}  # which experts would not have
    assert prepare(load_job({**job, "parallel": tensor})).ranks == 2


def test_group_limited_routing():
    assert (load_config("deepseek-v3").moe.groups, load_config("deepseek-v3").moe.top_groups) == (8, 4)
    assert load_config("kimi-k2").moe.top_groups == 0
    assert load_config("mixtral-8x7b").moe.top_groups == 0


def test_a_window_counts_only_where_it_is_used():
    assert load_config("mistral-7b").window == 4096
    assert load_config("qwen2-7b").window == 0
    assert load_config("qwen2-7b", {"use_sliding_window": True}).window == 0, "transformers: from layer 28 on, of 28"
    assert load_config("qwen2-7b", {"use_sliding_window": True, "max_window_layers": 0}).window == 131072


def test_unknown_preset_names_the_nearest():
    e = refusal(load_config, "deepseek_v3")
    assert (e.kind, e.key, e.suggestion) == (ErrorKind.MODEL, "model.config", "deepseek-v3")
    assert "llama3-8b" in e.allowed


def test_unknown_inline_key_names_the_nearest_of_the_model_type():
    e = refused(LLAMA, num_hiden_layers=4)
    assert (e.key, e.suggestion) == ("model.num_hiden_layers", "num_hidden_layers")
    e = refused(LLAMA, n_routed_expert=4)
    assert e.suggestion != "n_routed_experts", "llama has no experts"


def test_missing_keys_name_file_and_key():
    e = refused({k: v for k, v in LLAMA.items() if k != "hidden_size"})
    assert (e.key, e.message) == ("hidden_size", "missing")
    assert refused({}).key == "model_type"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 64.0),
        ("hidden_size", "64"),
        ("hidden_size", True),
        ("hidden_size", 0),
        ("hidden_size", None),
        ("num_hidden_layers", -1),
        ("attention_dropout", 1.0),
        ("attention_dropout", math.nan),
        ("rms_norm_eps", 0),
        ("rope_theta", math.inf),
        ("tie_word_embeddings", 1),
        ("hidden_act", "gelu"),
        ("vocab_size", 10**18),
    ],
)
def test_impossible_values_are_refused_by_key(key, value):
    assert refused({**LLAMA, key: value}).key == key
    assert refused(LLAMA, **{key: value}).key == f"model.{key}"


def test_sizes_that_do_not_divide_are_refused():
    e = refused({**LLAMA, "num_attention_heads": 5})
    assert (e.key, e.suggestion) == ("num_attention_heads", "4")
    assert refused({**LLAMA, "num_key_value_heads": 3}).suggestion == "2"
    assert config_from({**LLAMA, "num_attention_heads": 5, "head_dim": 16}, "x").head_dim == 16
    refusal(load_config, "tiny-moe", {"num_experts_per_tok": 9}, match="9 experts per token")
    refusal(load_config, "deepseek-v3", {"n_group": 7}, match="n_group")
    refusal(load_config, "deepseek-v3", {"topk_group": 9}, match="topk_group")
    refusal(load_config, "deepseek-v3", {"num_nextn_predict_layers": -1}, match="num_nextn_predict_layers")


def test_two_spellings_with_two_values_are_refused():
    refusal(load_config, "gpt2", {"n_layer": 4, "num_hidden_layers": 5}, match="one key with two values")
    assert load_config("gpt2", {"n_layer": 4, "num_hidden_layers": 4}).layers == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"model_type": "llama", "model_type": "gpt2"}', "given twice"),
        ('{"model_type": "llama", "rope_theta": NaN}', "rope_theta: NaN is no number"),
        ('{"model_type": "llama", "rope_theta": -Infinity}', "-Infinity is no number"),
        ('{"model_type": "llama",}', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "is no table"),
        ("", "not JSON"),
    ],
)
def test_files_are_strict_json(tmp_path, text, says):
    path = written(tmp_path, text)
    assert refusal(load_config, str(path), match=says).file == str(path)


def test_an_unreadable_file_is_an_io_error(tmp_path):
    assert refusal(load_config, str(tmp_path / "none.json")).kind is ErrorKind.IO
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    assert refusal(load_config, str(tmp_path / "bytes.json")).kind is ErrorKind.MODEL


# Keys that the Hub's own files have and transformers' classes nowhere read: of SmolLM2, Vicuna, Falcon 3, unsloth's
# copies; GPT-2 medium and XL, DistilGPT2; GPT-NeoX, Dolly; BLOOM; Falcon 2; StableLM 2; multilingual BERT; CamemBERT;
# DistilBERT.
GEMMAS = (("gemma2", "hidden_activation"), ("gemma3_text", "hidden_activation"))
READ_BY_NOBODY = {
    "llama": {"is_llama_config": True, "rope_interleaved": False, "max_sequence_length": 2048, "activation": "swiglu"}
    | {"unsloth_version": "2024.9", "unsloth_fixed": True, "transformers.js_config": {"kv_cache_dtype": {"fp16": "f"}}},
    "gpt2": {"n_special": 0, "predict_special_tokens": True, "output_past": True, "_num_labels": 1},
    "gpt_neox": {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0, "custom_pipelines": {"x": {}}},
    "bloom": {"n_inner": None},
    "falcon": {"ff_factor": 4},
    "stablelm": {"rotary_scaling_factor": 1.0},
    "bert": {"directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12}
    | {"pooler_num_fc_layers": 3, "pooler_size_per_head": 128, "pooler_type": "first_token_transform"},
    "camembert": {"output_past": True},
    "distilbert": {"tie_weights_": True},
}


@pytest.mark.parametrize("model_type", READ_BY_NOBODY)
def test_what_the_hubs_files_have_and_no_class_reads_is_accepted(model_type):
    raw, more = FAMILIES[model_type]["config"], READ_BY_NOBODY[model_type]
    assert config_from({**raw, **more}, "x") == config_from(raw, "x")
    modelling = f"models.{model_type.replace('-', '_')}.modeling_{model_type.replace('-', '_')}"
    source = files("transformers").joinpath(modelling.replace(".", "/") + ".py").read_text()
    assert not [key for key in more if re.search(rf"config\.{re.escape(key)}\b", source)]
    if model_type == "llama":
        for odd in ({"rope_interleaved": True}, {"activation": "gelu"}, {"transformers": {"js_config": 1}}):
            assert refused(raw | odd).key == next(iter(odd))


def test_gpt_neos_list_of_layers_stands_before_its_pairs():
    """As in transformers' class, which keeps what a file says of `attention_layers`."""
    raw = {k: v for k, v in small("gpt_neo").items() if k != "attention_layers"}
    layers = ["local", "global", "global", "local"]
    both = raw | {"attention_layers": layers}
    assert hub_config(both).attention_layers == layers and hub_config(raw).attention_layers != layers
    assert config_from(both, "x").windows == (5, 0, 0, 5) and config_from(raw, "x").windows == (0, 5, 0, 5)
    assert config_from(both, "x", {"attention_types": [[["global"], 4]]}).windows == (), "the job's"
    assert refused(both | {"attention_layers": layers[:3]}).key == "attention_layers"


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("gemma3_text", "attn_logit_softcapping", 50.0),
        ("phi3", "embd_pdrop", 0.1),
        ("dbrx", "emb_pdrop", 0.1),
        ("ernie4_5", "attention_dropout", 0.1),
        ("ernie4_5_moe", "attention_dropout", 0.1),
    ],
)
def test_what_a_class_holds_and_does_not_apply_changes_nothing(model_type, key, value):
    raw = small(model_type)
    assert config_from(raw | {key: value}, "x") == config_from(raw, "x")


def test_gelu_is_gemmas_own_in_the_first_generation_alone():
    acts = [config_from(small(t) | {k: "gelu"}, "x").act for t, k in (("gemma", "hidden_act"), *GEMMAS)]
    assert acts == ["gelu_pytorch_tanh", "gelu", "gelu"]


def test_experts_reach_to_the_last_layer_where_ernie_says_minus_one_or_nothing():
    """ERNIE-4.5-21B-A3B's own file has -1, transformers' default."""
    raw = {k: v for k, v in small("ernie4_5_moe").items() if k != "moe_layer_end_index"} | {"num_hidden_layers": 30}
    assert (
        config_from(raw, "x").moe.dense_layers
        == {0}
        == config_from(raw | {"moe_layer_end_index": -1}, "x").moe.dense_layers
    )
    assert config_from(raw | {"moe_layer_end_index": 27}, "x").moe.dense_layers == {0, 28, 29}
    assert hub_config(raw).moe_layer_end_index == 29


def test_megatrons_layers_have_to_be_said():
    sizes = {"model_type": "megatron", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    for more in ({}, {"num_layers": None}, {"encoder_num_layers": 2}):
        assert refused(sizes | {"max_position_embeddings": 8} | more).key == "num_hidden_layers"


@pytest.mark.parametrize(
    ("model_type", "key", "value", "where"),
    [
        ("phi", "rope_scaling", {"rope_type": "dynamic", "factor": "x"}, "rope_scaling.factor"),
        ("phi3", "rope_scaling", {"type": "longrope", "factor": 0}, "rope_scaling.factor"),
        ("exaone4", "sliding_window_pattern", "", "sliding_window_pattern"),
        ("t5", "num_decoder_layers", 10**14, "num_decoder_layers"),
        ("gpt_neo", "attention_types", [[["global"], 10**14]], "attention_types"),
    ],
)
def test_values_that_no_layers_come_of_are_refused_by_their_key(model_type, key, value, where):
    raw = {k: v for k, v in small(model_type).items() if k not in ("attention_layers", "layer_types")}
    assert refused(raw | {key: value}).key == where
