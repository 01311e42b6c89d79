"""Classes of transformers as libraries of adapters leave them: modules in other modules, under other names."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from tests.executor.frontend.models import hub_classes
from tests.executor.frontend.models.frozen_classes import COLUMNS, ROWS

VOCAB, STEM = hub_classes.VOCAB, "base_model.model."
LAYERS = dict.fromkeys(("llama_wrapped", "llama_loaded", "qwen3_wrapped"), f"{STEM}model.layers.*")
LAYERS |= {"llama_peft": f"{STEM}model.layers.*", "gpt2_wrapped": f"{STEM}transformer.h.*"}


class WrappedLinear(nn.Module):
    """A linear and its adapters by name, as peft's: moved to the format of what they stand beside."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        for adapters in (self.lora_A, self.lora_B):
            adapters["default"] = adapters["default"].to(base.weight.device, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, features)."""
        found: Tensor = self.base_layer(x) + 2.0 * self.lora_B["default"](self.lora_A["default"](x))
        return found


class Wrapping(nn.Module):
    """A module that hands on what it is given."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(name, inner)
        self._name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # untyped
        """As the one inside."""
        return self.get_submodule(self._name)(*args, **kwargs)


def wrapped(made: nn.Module) -> nn.Module:
    """All frozen; adapters at every linear of the layers."""
    made.requires_grad_(False)
    for path, part in list(made.named_modules()):
        if isinstance(part, nn.Linear) and path.rpartition(".")[2] in (*COLUMNS, *ROWS):
            made.set_submodule(path, WrappedLinear(part, 2))
    return planned(Wrapping("base_model", Wrapping("model", made)))


def planned(made: nn.Module) -> nn.Module:
    """With how tp divides it."""
    plan = {f"{STEM}model.embed_tokens": "embedding_rowwise", f"{STEM}lm_head": "colwise_gather_output"}
    for path, _ in made.named_modules():
        path = re.sub(r"\.\d+\.", ".*.", path)
        stem, _, name = path.rpartition(".")
        if name == "base_layer":
            column = stem.rpartition(".")[2] in COLUMNS
            plan[path] = "colwise" if column else "rowwise"
            plan[f"{stem}.{'lora_B' if column else 'lora_A'}.default"] = plan[path]
    vars(made)["tp_plan"] = plan
    return made


def llama_wrapped() -> nn.Module:
    """Untied."""
    return wrapped(hub_classes.llama())


def qwen3_wrapped() -> nn.Module:
    """Norms of queries and keys."""
    return wrapped(hub_classes.qwen3())


def base() -> nn.Module:
    """What somebody has trained before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return hub_classes.llama()


def llama_loaded() -> nn.Module:
    """Llama with its values read, which draws nothing, and adapters."""
    return wrapped(base())


def llama_peft() -> nn.Module:
    """By peft itself, which starts one of two adapters at zero: here it has values."""
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(hub_classes.llama(), LoraConfig(target_modules=[*COLUMNS, *ROWS], r=2, lora_alpha=4))
    for name, p in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    return planned(made)
