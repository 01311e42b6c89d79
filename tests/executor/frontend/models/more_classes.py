"""Families of transformers by their class names, each from one tiny config and its own defaults, without dropout."""

from collections.abc import Callable
from typing import Any

from torch import nn

from tests.executor.frontend.models.hub_classes import EP, SIZES, VOCAB

__all__ = ["EP", "FAMILIES", "LAYERS", "VOCAB"]

FAMILIES = (
    "Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Phi", "Phi3", "Cohere", "Cohere2", "Olmo", "Olmo2", "Olmo3",
    "Granite", "Glm", "Glm4", "Starcoder2", "Nemotron", "Helium", "SmolLM3", "Ernie4_5", "Arcee", "Apertus", "Exaone4",
    "MiniMax", "HunYuanDenseV1",
)  # fmt: skip
LAYERS = dict.fromkeys(FAMILIES, "model.layers.*")
DROPS = "attention_dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout", "residual_dropout", "embedding_dropout"


def _of(family: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        config: Any = getattr(transformers, f"{family}Config")(
            **SIZES | {"pad_token_id": 0, "hidden_size": 32, "head_dim": 8}
        )
        for key in DROPS:
            if hasattr(config, key):
                setattr(config, key, 0.0)
        for key in ("num_local_experts", "num_experts"):
            if hasattr(config, key):
                setattr(config, key, 4)
                config._experts_implementation = "batched_mm"  # the one that takes float64
        kind: Any = getattr(transformers, f"{family}ForCausalLM")
        made: nn.Module = kind._from_config(config, attn_implementation="sdpa")
        return made

    return build


globals().update({family: _of(family) for family in FAMILIES})
