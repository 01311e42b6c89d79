"""Every model family at sizes a test can train: tests/data/tiny_families.toml."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ir.workload.config.load import ModelConfig, load_config

_FILE = tomllib.loads((Path(__file__).parents[1] / "data" / "tiny_families.toml").read_text())


def _overrides(row: Mapping[str, Any]) -> dict[str, object]:
    sizes = {key: value for name in row["sizes"].split() for key, value in _FILE["sizes"][name].items()}
    return sizes | row.get("with", {})


TINY: Mapping[str, tuple[str, Mapping[str, object]]] = {
    name: (row["preset"], _overrides(row)) for name, row in _FILE["families"].items()
}


def tiny(family: str, **more: object) -> ModelConfig:
    """A family's small model."""
    preset, overrides = TINY[family]
    return load_config(preset, {**overrides, **more})
