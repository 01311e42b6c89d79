"""What other tools call a key: the fix is ours, in the table where it stands, and can be obeyed."""

import json
import tomllib
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

import ir.core.synonyms
from cost_models.hardware import load_hardware
from ir.core.errors import PiperError, nearest
from ir.core.synonyms import synonym
from ir.job import load_job
from ir.job.schema import OPEN, SECTIONS
from ir.workload.config.keys import TYPES
from piper_sim import predict

GROUPS = tomllib.loads(Path(ir.core.synonyms.__file__).with_suffix(".toml").read_text(encoding="utf-8"))["group"]
OURS = {f.name: section for section, cls in SECTIONS.items() for f in fields(cls) if f.name != "overrides"}
WORDS = {
    "precision.compute": ("bf16", "fp16", "fp32", "fp64", "fp8"),
    "optimizer.name": ("adamw",),
    "optimizer.schedule": ("wsd",),
    "costs.dispatcher": ("nccl", "deepep", "hybridep"),
    "model.attention": ("flash", "unfused"),
}
VALUES = {"recompute": "full", "sequence_parallel": True, "lr": 0.1, "clip_norm": 0.5, "zero": 1, "cp": 1}
VALUES |= {"compute": "bf16", "ep": 1, "etp": 1, "dp_replicate": 1, "pp": 2, "stages_per_rank": 1, "tp": 2}
SIZES = [(key, word) for g in GROUPS for key in g.get("keys", ()) if key in OURS for word in g["words"]]


def _predicted(section: str, key: str, value: object) -> object:
    table: dict[str, dict[str, object]] = {"model": {"config": "tiny-llama"}, "schedule": {"microbatches": 4}}
    table.setdefault(section, {})[key] = value
    if key == "global_batch":
        del table["schedule"]["microbatches"]
    return predict(load_job(table))


def _fix(section: str, key: str, value: object) -> str | None:
    with pytest.raises(PiperError) as e:
        _predicted(section, key, value)
    return e.value.suggestion


def test_a_word_means_one_thing_and_what_it_means_exists() -> None:
    words = Counter(w for g in GROUPS for w in g["words"])
    assert max(words.values()) == 1 and all(w == w.lower() for w in words)
    known = {*OURS, *(v for kind in WORDS.values() for v in kind), *(k for keys in TYPES.values() for k in keys)}
    assert {k for g in GROUPS for k in g.get("keys", ())} <= known
    assert {w for w in words if w in OURS} == {"layers"}  # of [parallel] a key; of a model, how many there are


@pytest.mark.parametrize(
    ("section", "word", "told"),
    [
        ("run", "steps", "piper-sim run JOB --steps N"),
        ("cluster", "gpus", "cluster.nodes and cluster.gpus_per_node, whose product they are"),
        ("schedule", "batch_size", "schedule.microbatch_size, or schedule.global_batch of all replicas"),
        ("parallel", "fsdp", "parallel.zero = 3"),
        ("parallel", "gpu", "cluster.gpu"),  # a key of another table, no advice
        ("run", "colour", None),
    ],
)
def test_a_word_without_a_key_of_its_own_is_told_what_to_say(section: str, word: str, told: str | None) -> None:
    assert _fix(section, word, 2) == told


@pytest.mark.parametrize(("key", "word"), SIZES)
def test_the_fix_of_another_tools_key_is_ours_and_can_be_obeyed(key: str, word: str) -> None:
    section = OURS[key]
    assert (_fix(section, word, 2) or "").rpartition(".")[2] == key
    if section not in OPEN:  # whose keys are no one's but its file's
        assert _fix("run", word, 2) == f"{section}.{key}"
    if key not in ("encoder_seq_len", "recompute_layers"):  # of an encoder, and beside recompute
        _predicted(section, key, VALUES.get(key, 8))


@pytest.mark.parametrize(("key", "known"), WORDS.items())
def test_the_fix_of_another_tools_value_is_ours(key: str, known: tuple[str, ...]) -> None:
    section, _, name = key.partition(".")
    for meant, word in ((k, w) for g in GROUPS for k in g.get("keys", ()) if k in known for w in g["words"]):
        assert _fix(section, name, word) == f'{key} = "{meant}"', word


def test_what_no_single_key_means_has_no_fix() -> None:
    for word in ("gpus", "batch_size", "world_size"):
        assert synonym(word, ["gpu", "global_batch", "microbatches"]) == ()
        assert nearest(word, ["gpu", "global_batch", "microbatches"]) is None
    assert synonym("tensor_paralel", ["tp"]) is None  # a typo of another tool's word is not guessed at
    assert synonym("num_layers", ["num_hidden_layers", "n_layer"]) == ("num_hidden_layers", "n_layer")
    assert nearest("num_layers", ["num_hidden_layers", "n_layer"]) is None  # two are as good


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        ("tail_waves", "attention.tail_waves"),
        ("product_ns", "recurrence.product_ns"),  # of a table that may be left out
        ("gemm.tail_waves", "attention.tail_waves"),
        ("sustained", None),  # of two tables
    ],
)
def test_a_key_of_a_table_inside_is_named_from_the_top_of_its_file(key: str, fix: str | None, tmp_path: Path) -> None:
    job = {"model": {"config": "tiny-llama"}, "cluster": {"gpu": "h100-sxm"}}
    with pytest.raises(PiperError) as e:
        predict(load_job(job, [f"cluster.{key}=1"]))
    assert e.value.key == f"cluster.{key}" and e.value.suggestion == (fix and f"cluster.{fix}")
    outer, _, inner = key.rpartition(".")
    (tmp_path / "hw.json").write_text(
        json.dumps({"base": "h100-sxm", **({outer: {inner: 1}} if outer else {inner: 1})})
    )
    with pytest.raises(PiperError) as e:
        load_hardware(str(tmp_path / "hw.json"))
    assert e.value.suggestion == fix


@pytest.mark.parametrize(("name", "fix"), [("gb300", "gb300-nvl72"), ("B200", "b200-sxm"), ("a100", None)])
def test_a_gpu_by_its_first_word(name: str, fix: str | None) -> None:
    with pytest.raises(PiperError) as e:
        load_hardware(name)
    assert e.value.suggestion == fix
