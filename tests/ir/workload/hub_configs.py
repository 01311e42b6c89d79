"""config.json as some models' pages on the Hub have it, keys in their order: tests/data/hub."""

import json
from collections.abc import Mapping
from pathlib import Path


def _read(name: str) -> Mapping[str, object]:
    found: Mapping[str, object] = json.loads((Path(__file__).parents[2] / "data" / "hub" / f"{name}.json").read_text())
    return found


LLAMA31_8B, DEEPSEEK_V3, QWEN3_30B = map(_read, ("llama31_8b", "deepseek_v3", "qwen3_30b"))
MPT_7B = _read("mpt_7b")
