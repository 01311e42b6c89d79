"""Dense parts of the reference decoder, but for attention: embedding, MLP, norms, head, with Hugging Face's names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from executor.device.device import HostDevice
from executor.modules.base import initial
from executor.modules.functions import formatted, relu2, swiglu
from executor.modules.hub_weights import HubCheckpoint
from executor.modules.norms import layer_norm, rms_norm
from executor.modules.parallel import columns, leave, words
from executor.modules.remade import remade, remade_as
from executor.parallel.inline import RankRegion
from executor.parallel.shares import ParamShard
from ir.workload.config.spec import LayerActivation, ModelConfig, NormLayerKind


@dataclass(eq=False)
class Params:
    """Makes each parameter once per stage, by its global name; a second request for a name is a tie.

    dtype None: only names and shapes are wanted, nothing is allocated. shares: what is held of those that are cut. All
    are asked for with their global shapes; every layout starts from the same numbers.
    region: the ranks that hold the other shares, whom modules meet. weights: first values, instead of drawn ones.
    where: who draws them. compute: in which format linears read what norms give; None: in theirs.
    """

    seed: int
    std: float
    dtype: torch.dtype | None
    shares: Mapping[str, ParamShard] = field(default_factory=dict)
    region: RankRegion = field(default_factory=RankRegion)
    weights: HubCheckpoint | None = None
    where: torch.device = HostDevice.torch
    compute: torch.dtype | None = None
    made: dict[str, nn.Parameter] = field(default_factory=dict)

    def __call__(self, name: str, *shape: int, start: float | None = None) -> nn.Parameter:
        """The parameter of this name. start: its first value everywhere, else drawn."""
        if name not in self.made:
            share = self.shares.get(name, ParamShard(shape))
            if self.dtype is None:
                value = torch.empty(shape, device="meta")
            elif self.weights is not None and not self.weights.lacks(name, shape):
                value = self.weights.read(name, share, self.dtype)
            else:
                value = initial(name, share, self.seed, self.std, self.dtype, start, self.where)
            self.made[name] = nn.Parameter(value)
        return self.made[name]

    def buffer(self, name: str, size: int) -> Tensor | None:
        """What stands in a checkpoint and is not trained: zeros without one, None where names alone are wanted."""
        if self.dtype is None:
            return None
        if self.weights is None:
            return torch.zeros(size, device="cpu")
        return self.weights.read(name, ParamShard((size,)), torch.float32)


class LinearLayer(nn.Module):
    """A linear layer in the dtype of its input, whatever its parameters are stored in.

    flipped: the weight is stored (into, out), as GPT-2's Conv1D does. leaves: it is cut by its input, so that what it
    makes is a part of a sum over ranks, to which the bias comes once.
    """

    def __init__(
        self,
        make: Params,
        name: str,
        rows: int,
        cols: int,
        *,
        bias: bool = False,
        flipped: bool = False,
        leaves: bool = False,
    ) -> None:
        super().__init__()
        self.flipped, self.region = flipped, make.region if leaves and make.region.tp.size > 1 else None
        self.weight = make(f"{name}.weight", *((cols, rows) if flipped else (rows, cols)))
        self.bias = make(f"{name}.bias", rows, start=0.0) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else formatted(self.bias, x)
        if self.region is None:
            return self._product(x, bias)
        y = leave(self._product(x, None), self.region)
        return y if bias is None else y + bias

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = formatted(self.weight, x)
        if not self.flipped:
            return F.linear(x, weight, bias)
        flat = x.flatten(0, -2)
        y = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
        return y.view(*x.shape[:-1], -1)


def each(x: Tensor, linears: Sequence[LinearLayer], region: RankRegion) -> list[Tensor]:
    """x through several linears that are cut by output."""
    if region.tp.size == 1:
        return [m(x) for m in linears]
    weights = [formatted(m.weight, x) for m in linears]
    biases = [None if m.bias is None else formatted(m.bias, x) for m in linears]
    return columns(x, weights, biases, region, flipped=linears[0].flipped)


class NormLayer(nn.Module):
    """The config's norm over the last dim, for linears to read. eps: if it is not the config's."""

    def __init__(self, c: ModelConfig, make: Params, name: str, size: int, eps: float | None = None) -> None:
        super().__init__()
        self.eps, self.layer, self.out = eps or c.norm_eps, c.norm is NormLayerKind.LAYER, make.compute
        self.plus = 1.0 if c.model_type == "nemotron" else 0.0
        self.weight = make(f"{name}.weight", size, start=1.0 - self.plus)
        self.bias = make(f"{name}.bias", size, start=0.0) if self.layer and c.norm_bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.layer:
            return layer_norm(x, self.weight, self.bias, self.eps, self.plus, self.out)
        return rms_norm(x, self.weight, self.eps, self.out)


class EmbedPart(nn.Module):
    """Part `embed`: token ids → the residual stream, with learned positions where the config has them.

    Ranks sum words in the stream's format, unless it is wider than the table's and the products'.
    """

    def __init__(self, c: ModelConfig, make: Params, stream: torch.dtype) -> None:
        super().__init__()
        self.stream, self.region, self.padding = stream, make.region, c.padding
        self.weight = make(f"{c.names.embed}.weight", c.vocab, c.hidden)
        known = torch.promote_types(self.weight.dtype, make.compute or stream)
        self.summed = min(stream, known, key=lambda d: d.itemsize)
        self.positions = make("transformer.wpe.weight", c.positions, c.hidden) if c.positions else None

    def forward(self, ids: Tensor) -> Tensor:
        """Look up. ids: (sequences, length), whole; out come this rank's tokens."""
        mine = self.region.inner(ids)
        if self.region.tp.size == 1:
            x = F.embedding(mine, self.weight, self.padding).to(self.stream)
        else:
            x = words(mine, self.weight, self.region, self.summed, padding=self.padding).to(self.stream)
        if self.positions is None:
            return x
        at = self.region.stream(torch.arange(ids.shape[-1], device=ids.device))
        return x + F.embedding(at, self.positions).to(self.stream)


def activation(c: ModelConfig) -> Callable[[Tensor], Tensor]:
    """The config's activation, where it has one up-projection."""
    if c.activation is LayerActivation.RELU2:
        return relu2
    if c.act == "relu":
        return F.relu
    return partial(F.gelu, approximate="none" if c.act == "gelu" else "tanh")


class FeedForwardLayer(nn.Module):
    """down(activation(up(x))), gated where the config's activation is."""

    def __init__(self, c: ModelConfig, make: Params, prefix: str, width: int) -> None:
        super().__init__()
        names = c.names
        self.act, self.region = activation(c), make.region
        linear = partial(LinearLayer, make, bias=c.mlp_bias, flipped=names.flipped)
        self.ups = [linear(prefix + n, width, c.hidden) for n in (["gate_proj"] if c.activation.ups == 2 else [])]
        self.ups.append(linear(prefix + names.up, width, c.hidden))
        self.linears = nn.ModuleList(self.ups)
        self.down = linear(prefix + names.down, c.hidden, width, leaves=True)

    def forward(self, x: Tensor) -> Tensor:
        up = each(x, self.ups, self.region)
        if len(up) == 2:
            remade_as("operators", lambda x: each(x, self.ups[1:], self.region), (x,), up[1])
        found: Tensor = self.down(remade("activation", swiglu if len(up) == 2 else self.act, *up))
        return found


class MlpPart(nn.Module):
    """Part `mlp`: x + mlp(norm(x))."""

    def __init__(self, c: ModelConfig, make: Params, prefix: str) -> None:
        super().__init__()
        names = c.names
        self.norm = NormLayer(c, make, prefix + names.mlp_norm, c.hidden)
        self.inner = FeedForwardLayer(c, make, f"{prefix}{names.mlp}.", c.ffn)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.inner(remade("norm", self.norm, x))
        return x + added


class HeadPart(nn.Module):
    """Part `head`: logits, of this rank's words."""

    def __init__(self, c: ModelConfig, make: Params) -> None:
        super().__init__()
        self.region = make.region
        self.linear = LinearLayer(make, c.names.embed if c.tied else "lm_head", c.vocab, c.hidden)

    def forward(self, x: Tensor) -> Tensor:
        (found,) = each(x, [self.linear], self.region)
        return found
