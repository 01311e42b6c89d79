"""DeepSeek-V3's multi-token prediction: a further decoder layer that predicts the token after the next one.

It reads the last layer's hidden state and the next token's embedding (arXiv:2412.19437, section 2.2); its loss is added
to the model's, times `WEIGHT`, and divided by the same count of valid tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from executor.modules.base import TokenLoss
from executor.modules.layers import EmbedPart, LinearLayer, NormLayer, Params
from executor.parallel.inline import RankRegion
from ir.workload.config.spec import ModelConfig

WEIGHT = 0.3  # λ of the paper's first 10 T tokens


class NextTokenEmbed(nn.Module):
    """Part `embed` of an MTP module: embeddings of the labels, which are the next tokens."""

    def __init__(self, c: ModelConfig, make: Params, compute: torch.dtype) -> None:
        super().__init__()
        self.inner = EmbedPart(c, make, compute)

    def forward(self, labels: Tensor) -> Tensor:
        """A masked label reads token 0, whose prediction is masked too."""
        found: Tensor = self.inner(labels.clamp_min(0))
        return found


class NextTokenProjection(nn.Module):
    """Part `proj`: the hidden state and the next token's embedding, each normed, projected together from 2h to h."""

    def __init__(self, c: ModelConfig, make: Params, prefix: str) -> None:
        super().__init__()
        self.embed_norm = NormLayer(c, make, f"{prefix}enorm", c.hidden)
        self.hidden_norm = NormLayer(c, make, f"{prefix}hnorm", c.hidden)
        self.proj = LinearLayer(make, f"{prefix}eh_proj", c.hidden, 2 * c.hidden)

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        """DeepSeek's order: the embedding first."""
        found: Tensor = self.proj(torch.cat((self.embed_norm(embedded), self.hidden_norm(x)), -1))
        return found


class NextTokenLoss(nn.Module):
    """The head's loss on the tokens after the next: labels moved by one, times `WEIGHT`."""

    def __init__(self, head: nn.Module, region: RankRegion | None = None) -> None:
        super().__init__()
        self.loss = TokenLoss(head, region)

    def forward(self, x: Tensor, labels: Tensor, scale: float) -> Tensor:
        """The last position has nothing to predict, nor has one whose next token is masked."""
        further = F.pad(labels[:, 1:], (0, 1), value=TokenLoss.IGNORE)
        further = further.masked_fill(labels < 0, TokenLoss.IGNORE)
        found: Tensor = self.loss(x, further, scale * WEIGHT)
        return found
