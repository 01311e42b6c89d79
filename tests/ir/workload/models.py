"""What the tests of models share: configs, a refusal of one, and the work of one part.

config.json as some models' pages on the Hub have it, keys in their order: tests/data/hub; one of each family, with what
transformers counts of it: tests/data/families.json, whose rows hold it or name the preset that is the same.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ir.core.errors import ErrorKind, PiperError
from ir.workload import config_from, load_config, model_chunks
from ir.workload.config.load import raw_config
from ir.workload.config.spec import ModelConfig
from ir.workload.part import PartLayout, PartWork
from ir.workload.setting import MicrobatchShape, ModelPrecision
from ir.workload.work import part_work

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
    with pytest.raises(PiperError) as e:
        config_from(raw, "here.json", inline)
    assert e.value.kind is ErrorKind.MODEL and e.value.kind.exit_code == 2 and e.value.file == "here.json"
    return e.value


def work(config: ModelConfig | str, at: int, name: str, layout: PartLayout = PartLayout(), **setting: Any) -> PartWork:
    """The work of a part by name in a model's chunk; setting: shape, precision, attention, style."""
    config = load_config(config) if isinstance(config, str) else config
    chunk = model_chunks(config)[at]
    part = next(p for p in chunk.parts if p.name == name)
    return part_work(
        config, chunk, part, layout, **{"shape": MicrobatchShape(), "precision": ModelPrecision(), **setting}
    )
