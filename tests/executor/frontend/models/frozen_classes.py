"""Classes of transformers of which something is frozen: adapters on linears, first layers, all but norms and biases."""

from typing import Any

from torch import Tensor, nn

from tests.executor.frontend.models import hub_classes

EP, VOCAB = hub_classes.EP, hub_classes.VOCAB
ADAPTED = ("llama_adapted", "qwen3_adapted", "mixtral_adapted")
LAYERS = dict.fromkeys((*ADAPTED, "llama_with_adapters", "gemma3_first"), "model.layers.*")
LAYERS |= dict.fromkeys(("gpt2_last", "gpt2_biases"), "transformer.h.*")
COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


class LowRankAdapter(nn.Module):
    """A frozen linear, and what is learnt beside it (LoRA): x W + 2 x A B. B is not 0: all gradients are some."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, features)."""
        found: Tensor = self.base(x) + 2.0 * self.up(self.down(x))
        return found


def adapted(made: nn.Module, rank: int = 2) -> nn.Module:
    """All frozen; adapters at every linear of the layers, and how tp divides them."""
    made.requires_grad_(False)
    plan: dict[str, str] = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
    for layer in made.get_submodule("model.layers").children():
        for path, part in list(layer.named_modules()):
            name = path.rpartition(".")[2]
            if name in (*COLUMNS, *ROWS) and isinstance(part, nn.Linear):
                layer.set_submodule(path, LowRankAdapter(part, rank))
                column = name in COLUMNS
                plan[f"model.layers.*.{path}.base"] = "colwise" if column else "rowwise"
                plan[f"model.layers.*.{path}.{'up' if column else 'down'}"] = "colwise" if column else "rowwise"
    vars(made)["_tp_plan"] = plan
    return made


def llama_adapted() -> nn.Module:
    """Embedding, norms, linears and head are frozen."""
    return adapted(hub_classes.llama())


def llama_with_adapters() -> nn.Module:
    """All of it is trained."""
    return llama_adapted().requires_grad_(True)


def qwen3_adapted() -> nn.Module:
    """Norms of queries and keys, frozen too: read inside of what tp divides."""
    return adapted(hub_classes.qwen3())


def mixtral_adapted() -> nn.Module:
    """Routers and experts are frozen, attention adapts."""
    return adapted(hub_classes.mixtral())


def gpt2_last() -> nn.Module:
    """The tables, and with them the tied head, and the first two layers are frozen."""
    made: Any = hub_classes.gpt2()
    for part in (made.transformer.wte, made.transformer.wpe, *made.transformer.h[:2]):
        part.requires_grad_(False)
    return made


def gpt2_biases() -> nn.Module:
    """BitFit: only what has one dimension is trained."""
    made = hub_classes.gpt2()
    for p in made.parameters():
        p.requires_grad_(p.dim() == 1)
    return made


def gemma3_first() -> nn.Module:
    """Only the first layer is trained: a stage behind it has nothing to train."""
    made: Any = hub_classes.gemma3()
    made.requires_grad_(False)
    made.model.layers[0].requires_grad_(True)
    return made
