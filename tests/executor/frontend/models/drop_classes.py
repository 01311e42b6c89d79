"""Models that drop out everywhere: of embeddings, scores, what tp divides, tokens before experts and behind them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.executor.frontend.models import hub_classes

VOCAB, WIDTH, HEAD, EXPERTS = hub_classes.VOCAB, 16, 4, 4
EP = hub_classes.EP
LAYERS = dict.fromkeys(("drops", "routed_drops", "llama_drops"), "model.layers.*")
ROWS = (".o", ".down")


class Attention(nn.Module):
    """Four heads, two of keys and values; probabilities drop."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)

    def forward(self, x: Tensor) -> Tensor:
        """x (sequences, tokens, features)."""
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True, enable_gqa=True)
        return F.dropout(self.o(y.transpose(1, 2).flatten(2)), 0.2)


class Wide(nn.Module):
    """An MLP that drops inside of what tp divides, and behind."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        """x (sequences, tokens, features)."""
        return self.drop(self.down(self.drop(F.gelu(self.up(x)))))


class Experts(nn.Module):
    """A matrix each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)

    def grouped(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Rows sorted by expert."""
        return torch.cat([r.tanh() @ w for r, w in zip(rows.split(counts), self.weight, strict=True)])

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """tokens (n, features); index, weights (n, k)."""
        every = torch.einsum("nf,efg->neg", tokens.tanh(), self.weight)
        return (every.gather(1, index.unsqueeze(-1).expand(-1, -1, WIDTH)) * weights.unsqueeze(-1)).sum(1)


class Routed(nn.Module):
    """Experts, whose tokens drop before they are routed, and behind."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()

    def forward(self, x: Tensor) -> Tensor:
        """x (sequences, tokens, features)."""
        tokens = F.dropout(x, 0.1).flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(2, -1)
        return F.dropout(self.experts(tokens, index, weights), 0.3).view_as(x)


class Layer(nn.Module):
    """Both on the stream."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), mlp

    def forward(self, x: Tensor) -> Tensor:
        """x (sequences, tokens, features)."""
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Decoder(nn.Module):
    """Embedding, layers and head."""

    def __init__(self, *mlps: nn.Module) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"embed": nn.Embedding(VOCAB, WIDTH), "layers": nn.ModuleList(map(Layer, mlps))})
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.tp_plan = {
            f"model.layers.*.{path}": "rowwise" if path.endswith(ROWS) else "colwise"
            for path, part in self.model.get_submodule("layers.0").named_modules()
            if isinstance(part, nn.Linear) and not path.endswith("router")
        }

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = F.dropout(self.model["embed"](ids), 0.1)
        layers: Any = self.model["layers"]
        for layer in layers:
            x = layer(x)
        return self.head(x)


def drops() -> nn.Module:
    """Three layers with an MLP."""
    return Decoder(*(Wide() for _ in range(3)))


def routed_drops() -> nn.Module:
    """Two layers with experts."""
    return Decoder(*(Routed() for _ in range(2)))


def llama_drops() -> nn.Module:
    """transformers' class, with dropout of its probabilities."""
    return hub_classes._made("LlamaForCausalLM", "LlamaConfig", {**hub_classes.SIZES, "attention_dropout": 0.4})
