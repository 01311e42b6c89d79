"""What the tests of models share: configs, a refusal of one, and the work of one part.

config.json as some models' pages on the Hub have it, keys in their order: tests/data/hub; one of each family, with what
transformers counts of it: tests/data/families.json, whose rows hold it or name the preset that is the same.
"""

import copy
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ir.core.errors import ErrorKind, PiperError
from ir.workload import config_from, load_config, model_chunks
from ir.workload.config.load import raw_config
from ir.workload.config.spec import ModelConfig
from ir.workload.part import PartLayout, PartWork
from ir.workload.setting import MicrobatchShape, ModelPrecision
from ir.workload.work import part_work
from tests.refusals import refusal

DATA = Path(__file__).parents[2] / "data"


def _read(name: str) -> Mapping[str, object]:
    found: Mapping[str, object] = json.loads((DATA / "hub" / f"{name}.json").read_text())
    return found


LLAMA31_8B, DEEPSEEK_V3, QWEN3_30B = map(_read, ("llama31_8b", "deepseek_v3", "qwen3_30b"))
MPT_7B = _read("mpt_7b")
_ROWS: Mapping[str, Mapping[str, Any]] = json.loads((DATA / "families.json").read_text())
FAMILIES = {
    name: {"config": raw_config(str(row.get("preset"))), **row} if "preset" in row else {**row}
    for name, row in _ROWS.items()
}
# Sizes of the small models, by key: every one differs from what would also fit in its place.
SMALL: Mapping[str, Any] = tomllib.loads((DATA / "small_families.toml").read_text())
KEYS = {key: value for keys, value in SMALL.items() for key in keys.split()}
LLAMA: Mapping[str, object] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def refused(raw: Mapping[str, object], **inline: object) -> PiperError:
    """What a config's refusal says; inline: keys that a job sets."""
    e = refusal(config_from, raw, "here.json", inline)
    assert e.kind is ErrorKind.MODEL and e.kind.exit_code == 2 and e.file == "here.json"
    return e


def work(config: ModelConfig | str, at: int, name: str, layout: PartLayout = PartLayout(), **setting: Any) -> PartWork:
    """The work of a part by name in a model's chunk; setting: shape, precision, attention, style."""
    config = load_config(config) if isinstance(config, str) else config
    chunk = model_chunks(config)[at]
    part = next(p for p in chunk.parts if p.name == name)
    return part_work(
        config, chunk, part, layout, **{"shape": MicrobatchShape(), "precision": ModelPrecision(), **setting}
    )


def small(model_type: str) -> dict[str, Any]:
    """A published config with everything small: layers of each kind stay."""

    def size(name: str, value: Any) -> Any:
        found = KEYS.get(f"{model_type}.{name}", KEYS.get(name, value))
        if value in (None, 0):
            return value
        if name == "num_key_value_heads" and value == FAMILIES[model_type]["config"].get("num_attention_heads"):
            return KEYS["num_attention_heads"]
        if isinstance(value, dict):
            return {k: size(f"{name}.{k}" if "config" in name else k, v) for k, v in value.items()}
        if isinstance(value, list) and name != "attention_types" and len(value) > 4:
            return (found if found is not value else value[:4]) if isinstance(found, list) else found
        return found

    return {k: size(k, v) for k, v in copy.deepcopy(FAMILIES[model_type]["config"]).items()}
