"""What the tests of models share: a small config, a refusal of one, and the work of one part."""

from collections.abc import Mapping
from typing import Any

import pytest

from ir.core.errors import ErrorKind, PiperError
from ir.workload import config_from, load_config, model_chunks
from ir.workload.config.spec import ModelConfig
from ir.workload.part import PartLayout, PartWork
from ir.workload.setting import MicrobatchShape, ModelPrecision
from ir.workload.work import part_work

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
