"""A user's model, annotated: an embedding, positions made from the ids' shape, three blocks, a norm and a head."""

import torch
from torch import Tensor, nn

from executor.modules.user.annotate import annotate

WIDTH, VOCAB, BLOCKS = 32, 256, 3


class Block(nn.Module):
    """Causal mean of what came before, then an MLP; both added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        """at (tokens, 1): one-based positions."""
        x = x + self.mix(self.norm(x).cumsum(1) / at.to(x.dtype))
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    """Each block is a piece that may be placed on a stage of its own."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.embed(ids)
        at = torch.arange(1, ids.shape[1] + 1).unsqueeze(-1)
        for block in self.blocks:
            with annotate("PP"):
                x = block(x, at)
        return self.head(self.norm(x))


def build() -> Net:
    """What `[model] module` names."""
    return Net()


def build_tied() -> Net:
    """The head's weight is the embedding's."""
    return Net(tied=True)
