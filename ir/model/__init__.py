"""Model graphs at layer level, from a Hugging Face config, without torch."""

from ir.model.chunks import chunks as model_chunks
from ir.model.config import config_from, load_config, presets
from ir.model.params import count_params, local_numel, local_shape
from ir.model.spec import ModelConfig

__all__ = [
    "ModelConfig",
    "config_from",
    "count_params",
    "load_config",
    "local_numel",
    "local_shape",
    "model_chunks",
    "presets",
]
