"""A config.json trained by transformers' own classes in float64, and how far our reference modules are from it.

The two share the config's text, the values of the parameters and the tokens; no code. Where transformers' class leaves
out what a model's authors have, it is put back here in words of its own: MPT's learned positions and biases,
DeepSeek's `moe_layer_freq` and its module that predicts the token after the next.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from executor.modules.base import BuiltChunks
from executor.modules.decoder import DecoderModel
from executor.runtime.batch import MicrobatchLoader
from ir.job.schema import JobOptimizer
from ir.workload.config.keys import FORMS
from ir.workload.config.load import ModelConfig, config_from, presets, raw_config
from tests.executor.reference import train

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LENGTH, STEPS = 12, 3
OPTIMIZER = JobOptimizer()
NEXT_WEIGHT = 0.3


class Doubled(TorchFunctionMode):
    """What is asked for in float32 is made in float64: transformers takes norms, angles and softmaxes down to it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Any call of torch."""
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        given = {k: _wide(v) for k, v in (kwargs or {}).items()}
        return func(*(_wide(a) for a in args), **given)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def quiet() -> Iterator[None]:
    """transformers warns of what it does with configs, and of its own dependencies; its errors stay."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        before = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()
        try:
            yield
        finally:
            transformers.logging.set_verbosity(before)


def built() -> list[str]:
    """The presets that have a reference module; the others are predicted alone."""
    return [p for p in presets() if raw_config(p)["model_type"] not in FORMS]


@dataclass(frozen=True)
class Perturbed(DecoderModel):
    """A decoder whose norms and biases do not start at ones and zeros."""

    def build(self, chunks: Sequence[str]) -> BuiltChunks:
        """The values depend on the seed alone."""
        built = super().build(chunks)
        made = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in built.params.values():
                p += 0.2 * torch.randn(p.shape, generator=made, dtype=torch.float64)
        return built


@dataclass(frozen=True)
class Gap:
    """Largest differences: of losses and norms relative to theirs, of parameters relative to the largest of a tensor
    (or to 1)."""

    losses: float
    norms: float
    params: float

    @property
    def largest(self) -> float:
        """Of the three."""
        return max(self.losses, self.norms, self.params)


def gap(raw: Mapping[str, Any], config: ModelConfig | None = None) -> Gap:
    """Train both for `STEPS` steps. config: read otherwise than `raw` says, for a control.

    Raises PiperError where ours refuses.
    """
    config = config or config_from(raw, "drawn")
    model = Perturbed(config, dtype=torch.float64)
    start = {n: p.detach().clone() for n, p in model.build(model.chunks).params.items()}
    data = MicrobatchLoader("synthetic", vocab=config.vocab, length=LENGTH, microbatches=2, size=2)
    ours = train(model, data, STEPS, optimizer=OPTIMIZER, moments=torch.float64, split=True)
    with quiet():
        losses, norms, params = _trained(raw, start, data)
    far = [float((ours.params[n].detach() - p).abs().max() / p.abs().max().clamp_min(1.0)) for n, p in params.items()]
    return Gap(_relative(ours.losses, losses), _relative(ours.grad_norms, norms), max(far))


def _relative(found: Sequence[float], wanted: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def _trained(
    raw: Mapping[str, Any], start: Mapping[str, Tensor], data: MicrobatchLoader
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """torch's own AdamW and clipping. Parameters come back by the names they were given by."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Doubled():
            theirs = Theirs(raw)
            theirs.load(start)
            params = theirs.params()
            o = OPTIMIZER
            adamw = torch.optim.AdamW(params.values(), lr=o.lr, betas=o.betas, eps=o.eps)  # decays as ours by default
            losses, norms = list[float](), list[float]()
            for step in range(STEPS):
                batches = [data.batch(step, 0, mb) for mb in range(data.microbatches)]
                loss = sum((theirs.loss(b.ids, b.labels) * b.scale for b in batches), torch.zeros(()))
                adamw.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                norms.append(float(torch.nn.utils.clip_grad_norm_(params.values(), o.clip_norm)))
                adamw.step()
                losses.append(float(loss.detach()))
    finally:
        torch.set_default_dtype(default)
    return losses, norms, {n: p.detach() for n, p in params.items()}


class Theirs:
    """The class that transformers has for a config, under the names of its checkpoints."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        raw = {k: v for k, v in raw.items() if k != "quantization_config"}  # how a checkpoint is stored
        if "kv_lora_rank" in raw:  # ours has a key and a value for every head anyway
            raw["num_key_value_heads"] = raw["num_attention_heads"]
        self.raw, self.kind = raw, str(raw["model_type"])
        if self.kind == "mpt":  # a dropout of 0 is an integer there
            raw["attn_config"] = {k: v or int(v) if k == "attn_pdrop" else v for k, v in raw["attn_config"].items()}
        self.config = CONFIG_MAPPING[self.kind].from_dict(dict(raw))
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self.inner = AutoModelForCausalLM.from_config(self.config, **eager).double()
        self.next: nn.Module | None = None
        if self.kind == "mpt":
            _positions_and_biases(self.inner, raw)
        if self.kind.startswith("deepseek"):
            _dense(self.inner, self.config, int(raw.get("moe_layer_freq", 1)))
        if self.kind in ("deepseek_v3", "glm4_moe_lite") and raw.get("num_nextn_predict_layers"):
            self.next = Next(self.inner, self.config)

    def params(self) -> dict[str, nn.Parameter]:
        """As in a checkpoint, ties once."""
        found = dict(self.inner.named_parameters())
        if self.next is not None:
            layer = f"model.layers.{self.config.num_hidden_layers}."
            found |= {layer + n: p for n, p in self.next.named_parameters()}
        return found

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Every value must have a place and every place a value."""
        mine = self.params()
        assert mine.keys() == values.keys(), mine.keys() ^ values.keys()
        with torch.no_grad():
            for n, p in mine.items():
                assert p.shape == values[n].shape and p.dtype == torch.float64, n
                p.copy_(values[n])

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Summed over tokens. A label may be masked (−100)."""
        given: dict[str, Tensor] = {"input_ids": ids}
        if self.kind == "mpt":
            t = self.inner.transformer
            given = {"inputs_embeds": t.wte(ids) + t.wpe(torch.arange(ids.shape[1]))}
        seen: list[Tensor] = []
        norm = getattr(getattr(self.inner, "model", None), "norm", None)
        hook = norm.register_forward_pre_hook(lambda _, args: seen.append(args[0])) if self.next else None
        total = _summed(self.inner(**given, use_cache=False).logits, labels)
        if self.next is not None and hook is not None:
            hook.remove()
            further, last = F.pad(labels[:, 1:], (0, 1), value=-100), labels[:, -1:].clamp_min(0)
            following = torch.cat((ids[:, 1:], last), 1)
            total = total + NEXT_WEIGHT * _summed(self.next(self.inner, seen[0], following), further)
        return total


def _summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)


def _positions_and_biases(model: Any, raw: Mapping[str, Any]) -> None:
    """llm-foundry's MPT without ALiBi, where transformers' class has nothing else."""
    t = model.transformer
    t.wpe = nn.Embedding(int(raw.get("max_seq_len", 2048)), int(raw["d_model"]))
    t.build_mpt_alibi_tensor = lambda heads, length, device=None: torch.zeros(heads, 1, length)
    if raw.get("no_bias", True):
        return
    for module in t.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.bias = nn.Parameter(torch.zeros(module.weight.shape[0]))


def _dense(model: Any, config: Any, every: int) -> None:
    """DeepSeek's own code: layer i has experts where i >= first_k_dense_replace and i % moe_layer_freq == 0."""
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2MLP
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MLP

    for i, layer in enumerate(model.model.layers):
        if i >= config.first_k_dense_replace and i % every:
            layer.mlp = (DeepseekV2MLP if config.model_type == "deepseek_v2" else DeepseekV3MLP)(config)


class Next(nn.Module):
    """DeepSeek-V3's multi-token prediction (arXiv:2412.19437, section 2.2) out of a model's own layer and norm."""

    def __init__(self, model: Any, config: Any) -> None:
        super().__init__()
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

        h, eps, number = config.hidden_size, config.rms_norm_eps, config.num_hidden_layers
        if hasattr(config, "mlp_layer_types"):
            config = copy.deepcopy(config)
            config.mlp_layer_types = [*config.mlp_layer_types, "sparse"]
        layer = type(model.model.layers[0])(config, number)
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.enorm, self.hnorm = DeepseekV3RMSNorm(h, eps), DeepseekV3RMSNorm(h, eps)
        self.eh_proj = nn.Linear(2 * h, h, bias=False)
        self.shared_head = nn.ModuleDict({"norm": DeepseekV3RMSNorm(h, eps)})

    def forward(self, model: Any, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Logits of the token after `tokens`, from the last layer's output; both know no padding."""
        embedded = model.model.embed_tokens(tokens)
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        length = x.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        angles = model.model.rotary_emb(x, torch.arange(length)[None])
        x = x + self.self_attn(self.input_layernorm(x), position_embeddings=angles, attention_mask=mask)[0]
        x = x + self.mlp(self.post_attention_layernorm(x))
        found: Tensor = model.lm_head(self.shared_head["norm"](x))
        return found
