"""Classes of transformers whose experts are frozen, all or some: attention and routers, or adapters, are trained."""

from typing import Any

from torch import nn

from tests.executor.frontend.models import frozen_classes, hub_classes
from tests.executor.frontend.models.ahead_classes import ahead

EP, VOCAB = hub_classes.EP, hub_classes.VOCAB
LAYERS = dict.fromkeys(("mixtral_adapted", "qwen3_moe_frozen", "qwen3_moe_half", "qwen3_moe_ahead"), "model.layers.*")
LAYERS |= {"qwen3_moe_one": "model.layers.*"}
mixtral_adapted = frozen_classes.mixtral_adapted


def _frozen(word: str, made: nn.Module) -> nn.Module:
    for name, p in made.named_parameters():
        if word in name:
            p.requires_grad_(False)
    return made


def qwen3_moe_frozen() -> nn.Module:
    """All experts."""
    return _frozen(".experts.", hub_classes.qwen3_moe())


def qwen3_moe_half() -> nn.Module:
    """One of the two products of each."""
    return _frozen("experts.gate_up_proj", hub_classes.qwen3_moe())


def qwen3_moe_one() -> nn.Module:
    """Those of one layer."""
    return _frozen("layers.1.mlp.experts.", hub_classes.qwen3_moe())


def qwen3_moe_ahead() -> nn.Module:
    """All of the first layer, which has no backward."""
    made: Any = hub_classes.qwen3_moe()
    return ahead(made, "model.layers", 1, "model.embed_tokens")
