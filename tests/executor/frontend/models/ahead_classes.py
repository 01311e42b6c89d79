"""Classes of transformers whose first layers are wholly frozen, tables included: plain torch has no backward there."""

from typing import Any

from torch import nn

from tests.executor.frontend.models import frozen_classes, hub_classes

EP, VOCAB = hub_classes.EP, hub_classes.VOCAB
NAMES = "llama_1", "llama_2", "llama_3", "mixtral_1", "qwen3_adapted_1", "qwen3_adapted_2"
LAYERS = dict.fromkeys(NAMES, "model.layers.*") | {"gpt2_1": "transformer.h.*", "llama_0": "model.layers.*"}


def ahead(made: nn.Module, layers: str, count: int, first: str) -> nn.Module:
    """The table and so many layers are frozen."""
    for part in (made.get_submodule(first), *list(made.get_submodule(layers).children())[:count]):
        part.requires_grad_(False)
    return made


def llama_0() -> nn.Module:
    """The table alone."""
    return ahead(hub_classes.llama(), "model.layers", 0, "model.embed_tokens")


def llama_1() -> nn.Module:
    """One layer of three."""
    return ahead(hub_classes.llama(), "model.layers", 1, "model.embed_tokens")


def llama_2() -> nn.Module:
    """Two."""
    return ahead(hub_classes.llama(), "model.layers", 2, "model.embed_tokens")


def llama_3() -> nn.Module:
    """All: norm and head are trained."""
    return ahead(hub_classes.llama(), "model.layers", 3, "model.embed_tokens")


def mixtral_1() -> nn.Module:
    """With experts."""
    return ahead(hub_classes.mixtral(), "model.layers", 1, "model.embed_tokens")


def gpt2_1() -> nn.Module:
    """Its table is its head's, too."""
    made: Any = hub_classes.gpt2()
    made.transformer.wpe.requires_grad_(False)
    return ahead(made, "transformer.h", 1, "transformer.wte")


def qwen3_adapted_1() -> nn.Module:
    """Adapters behind one layer that has none trained."""
    return ahead(frozen_classes.qwen3_adapted(), "model.layers", 1, "model.embed_tokens")


def qwen3_adapted_2() -> nn.Module:
    """Behind two."""
    return ahead(frozen_classes.qwen3_adapted(), "model.layers", 2, "model.embed_tokens")
