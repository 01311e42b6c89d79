"""config.json as some models' pages on the Hub have it, keys in their order: tests/data/hub; one of each family, with
what transformers counts of it: tests/data/families.json, whose rows hold it or name the preset that is the same.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ir.workload.config.load import raw_config

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
