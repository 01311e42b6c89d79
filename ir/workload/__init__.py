"""Model graphs at layer level, from a Hugging Face config, without torch."""

from ir.workload.chunks import chunks as model_chunks
from ir.workload.config.load import config_from, load_config, presets
from ir.workload.config.spec import ModelConfig
from ir.workload.params import local_numel, local_shape

__all__ = [
    "ModelConfig",
    "config_from",
    "load_config",
    "local_numel",
    "local_shape",
    "model_chunks",
    "presets",
]
