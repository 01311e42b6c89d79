import csv

import pytest

from ir.core.ops import Pass
from ir.workload import load_config, local_numel, local_shape, model_chunks, presets
from ir.workload.part import PartLayout
from tests.ir.workload.models import DATA


def billions(name, **overrides):
    return [n / 1e9 for n in numbers(load_config(name, overrides))]


def numbers(config):
    """Parameters: all that are trained, ties once; those of the main model that a token uses; those of MTP alone."""
    main, mtp = {}, {}
    for chunk in model_chunks(config):
        for part in chunk.parts:
            (mtp if chunk.name.startswith("mtp") else main).update({p.name: p for p in part.params})
    extra = sum(p.numel for p in mtp.values() if p.name not in main)
    total, moe = sum(p.numel for p in main.values()), config.moe
    idle = sum(p.numel * (moe.experts - moe.top_k) // moe.experts for p in main.values() if p.expert) if moe else 0
    return total + extra, total - idle, extra


PUBLISHED = list(csv.DictReader((DATA / "published_parameters.csv").read_text().splitlines()[1:]))


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["name"])
def test_parameter_counts_are_the_published_ones(row):
    total, active, rel, near = (float(row[k] or 0) for k in ("total", "active", "rel", "abs"))
    assert billions(row["name"]) == pytest.approx([total, active, 0], rel=rel, abs=near)


# DeepSeek-V3: 671B and 37B active (arXiv:2412.19437), 685B on Hugging Face with the MTP module, whose own copies of
# embedding and head (2 x 0.93B) and of its norms a tie counts once.
def test_deepseek_v3_is_671b_beside_its_mtp_module():
    total, active, mtp = billions("deepseek-v3")
    assert total - mtp == pytest.approx(671.03, rel=1e-4)
    assert active == pytest.approx(37.55, rel=1e-3)
    assert total + 2 * 129280 * 7168 / 1e9 == pytest.approx(684.49, rel=1e-3)
    assert mtp == pytest.approx(11.61, rel=1e-3)


def test_a_tie_is_one_parameter_in_two_chunks():
    tied, free = (load_config("llama3-8b", {"tie_word_embeddings": t}) for t in (True, False))
    saved = numbers(free)[0] - numbers(tied)[0]
    assert saved == 128256 * 4096
    chunks = model_chunks(tied)
    assert chunks[0].parts[0].params == chunks[-1].parts[-1].params


def test_mtp_ties_embedding_and_head_and_reads_the_last_layer():
    chunks = {c.name: c for c in model_chunks(load_config("deepseek-v3"))}
    mtp = chunks["mtp0"]
    parts = {p.name: p for p in mtp.parts}
    assert list(parts) == ["embed", "proj", "attn", "router", "experts", "shared", "add", "norm", "head"]
    assert parts["embed"].params == chunks["embed"].parts[0].params
    assert parts["head"].params == chunks["head"].parts[1].params
    assert parts["proj"].inputs == ("", "embed")
    assert {p.name: p.shape for p in parts["proj"].params}["model.layers.61.eh_proj.weight"] == (7168, 14336)
    assert (mtp.reads, chunks["head"].reads) == ("l60", "l60")
    assert mtp.tags == {"MTP": 0, "MOE": 58}
    plain = model_chunks(load_config("deepseek-v3", {"num_nextn_predict_layers": 0}))
    assert plain[-1].reads is None
    assert [c.name for c in plain[-2:]] == ["l60", "head"]


@pytest.mark.parametrize("name", presets())
def test_every_part_reads_earlier_parts_and_keeps_only_what_it_reads(name):
    for chunk in model_chunks(load_config(name)):
        seen = {""}
        for part in chunk.parts:
            assert set(part.inputs) <= seen, (chunk.name, part.name)
            assert {k.of for k in part.keeps} <= set(part.inputs)
            seen.add(part.name)


@pytest.mark.parametrize("name", presets())
def test_parameter_names_are_unique_but_for_ties(name):
    config = load_config(name)
    names = [p.name for c in model_chunks(config) for part in c.parts for p in part.params]
    twice = {n for n in names if names.count(n) > 1}
    assert len(twice) == config.tied + 2 * config.mtp


def test_parameters_carry_hugging_faces_names_and_shapes():
    def shapes(name, at):
        return {p.name: p.shape for part in model_chunks(load_config(name))[at].parts for p in part.params}

    llama = shapes("llama3-8b", 8)
    assert llama["model.layers.7.self_attn.k_proj.weight"] == (1024, 4096)
    assert llama["model.layers.7.mlp.down_proj.weight"] == (4096, 14336)
    assert "model.layers.7.self_attn.q_proj.bias" not in llama
    qwen2 = shapes("qwen2-7b", 1)
    assert qwen2["model.layers.0.self_attn.q_proj.bias"] == (3584,)
    assert "model.layers.0.self_attn.o_proj.bias" not in qwen2
    assert shapes("qwen3-8b", 1)["model.layers.0.self_attn.q_norm.weight"] == (128,)
    gpt2 = shapes("gpt2", 1)
    assert gpt2["transformer.h.0.attn.c_attn.weight"] == (768, 2304)
    assert gpt2["transformer.h.0.mlp.c_proj.bias"] == (768,)
    v3 = shapes("deepseek-v3", 4)
    assert v3["model.layers.3.self_attn.kv_a_proj_with_mqa.weight"] == (576, 7168)
    assert v3["model.layers.3.self_attn.kv_b_proj.weight"] == (32768, 512)
    assert v3["model.layers.3.mlp.experts.gate_up_proj"] == (256, 4096, 7168)
    assert v3["model.layers.3.mlp.shared_experts.up_proj.weight"] == (2048, 7168)
    assert shapes("nemotron-15b", 1)["model.layers.0.input_layernorm.bias"] == (6144,)


@pytest.mark.parametrize("name", ["gpt3-175b", "llama3-70b", "deepseek-v3", "mixtral-8x7b", "nemotron-15b"])
def test_shards_of_a_parameter_add_up_to_it(name):
    layout = PartLayout(tp=8, ep=4, etp=2, sequence_parallel=True)
    sizes = {"tp": 8, "ep": 4, "etp": 2}
    for chunk in model_chunks(load_config(name)):
        for param in (p for part in chunk.parts for p in part.params):
            ways = 1
            for axis in param.sharded:
                ways *= sizes[axis]
            assert local_numel(param, layout) * ways == param.numel, param
            assert len(local_shape(param, layout)) == len(param.shape)
            assert param.expert == ("ep" in param.sharded)


def test_tensor_parallelism_cuts_columns_then_rows_and_replicates_norms():
    parts = {p.name: p for part in model_chunks(load_config("gpt2"))[1].parts for p in part.params}
    cut = {n.removeprefix("transformer.h.0."): p.dims for n, p in parts.items()}
    # GPT-2 stores [in, out].
    assert {n for n, dims in cut.items() if not dims} == {
        *("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias", "attn.c_proj.bias", "mlp.c_proj.bias")
    }
    assert {n: dims for n, dims in cut.items() if dims} == {
        **dict.fromkeys(("attn.c_attn.weight", "mlp.c_fc.weight"), (1,)),
        **dict.fromkeys(("attn.c_attn.bias", "mlp.c_fc.bias", "attn.c_proj.weight", "mlp.c_proj.weight"), (0,)),
    }


def test_backward_keeps_no_stream_beyond_its_input_gradient():
    """A norm's input is read by I alone; only the head's weight gradient reads a part's output."""
    for chunk in model_chunks(load_config("deepseek-v3")):
        for part in chunk.parts:
            for keep in part.keeps:
                assert (keep.until is Pass.W) == (part.name == "head")
