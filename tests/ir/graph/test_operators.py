"""`recompute = ["operators"]` against torch's own selective checkpointing of transformers' layers.

The policy is torchtitan's, as its documentation says it: attention and every second matrix product of a layer are kept.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from transformers import DeepseekV3Config, LlamaConfig, Qwen3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from ir.core.ops import Pass
from ir.core.work import DType, KernelKind
from ir.directives.shard import refill
from ir.graph.build import model_graph
from ir.graph.recompute import RecomputedLayers
from ir.job.build import prepare
from ir.job.load import job_from
from ir.workload.chunks import chunks
from ir.workload.config.load import load_config
from ir.workload.config.spec import ModelConfig
from ir.workload.part import PartLayout, PlacedPart
from ir.workload.setting import KernelStyle, MicrobatchShape, ModelPrecision
from ir.workload.work import ConfigModelWork, part_work

TOKENS = 128
FP32 = ModelPrecision.of(DType.FP32)
OPERATORS = RecomputedLayers(frozenset({"operators"}))
_ATEN = torch.ops.aten
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 160, "num_hidden_layers": 1, "vocab_size": 32,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24, "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}  # fmt: skip
LAYERS = {
    "llama": (LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding, {"num_key_value_heads": 2}),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer, Qwen3RotaryEmbedding, {"num_key_value_heads": 2, "head_dim": 16}),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding, LATENT | {"q_lora_rank": 40}),
    "no latent queries": (
        DeepseekV3Config, DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding, LATENT | {"q_lora_rank": None},
    ),
}  # fmt: skip


def _layer(kind: str) -> tuple[Callable[[torch.Tensor], torch.Tensor], ModelConfig]:
    """A layer of transformers as a function of the stream, and the same as our config."""
    config, layer, rotary, more = LAYERS[kind]
    theirs = config(**SIZES, **more)
    theirs._attn_implementation = "sdpa"
    torch.manual_seed(0)
    module, positions = layer(theirs, 0), torch.arange(TOKENS)[None]
    turned = rotary(theirs)(torch.zeros(1), positions)

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = module(x, position_embeddings=turned, position_ids=positions)
        return out[0] if isinstance(out, tuple) else out

    name = "deepseek-v3" if "Deepseek" in config.__name__ else {"llama": "llama3-8b", "qwen3": "qwen3-8b"}[kind]
    return forward, load_config(
        name, {**SIZES, **more, "num_nextn_predict_layers": 0} if "deep" in name else {**SIZES, **more}
    )


class _Policy:
    """Attention and every second product are kept, counting from the first."""

    def __init__(self) -> None:
        self.seen = {False: 0, True: 0}

    def __call__(self, ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func == _ATEN.mm.default or func == _ATEN.addmm.default:
            self.seen[ctx.is_recompute] += 1
            keep = self.seen[ctx.is_recompute] % 2 == 1
        else:
            keep = func == _ATEN._scaled_dot_product_flash_attention_for_cpu.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _flops(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("kind", LAYERS)
def test_the_products_made_again_are_those_of_torchs_policy(kind: str) -> None:
    forward, config = _layer(kind)
    x = torch.randn(1, TOKENS, 64, requires_grad=True)
    context = partial(create_selective_checkpoint_contexts, _Policy())
    plain = _flops(lambda: forward(x).sum().backward())
    again = _flops(lambda: checkpoint(forward, x, use_reentrant=False, context_fn=context).sum().backward())
    source = ConfigModelWork(config, MicrobatchShape(1, TOKENS), FP32)
    graph = model_graph([chunks(config)], source, OPERATORS)
    made = [k for n in graph.nodes if n.kind is Pass.R for k in n.work if k.kind is not KernelKind.MEMORY]
    assert again - plain == sum(k.flops for k in made) > 0, [k.label for k in made]


@pytest.mark.parametrize("style", [KernelStyle(), KernelStyle(op_by_op=True)], ids=["fused", "op by op"])
@pytest.mark.parametrize(("kind", "products"), [("llama", 7), ("qwen3", 7), ("deepseek_v3", 8)])
def test_what_is_kept_are_the_outputs_of_the_others(kind: str, products: int, style: KernelStyle) -> None:
    """Bytes by hand: the outputs of products 1, 3, 5, …, attention's, and the layer's input."""
    forward, config = _layer(kind)
    sizes: list[int] = []

    class Watch(_Policy):
        def __call__(self, ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            decided = super().__call__(ctx, func, *args, **kwargs)
            if decided is CheckpointPolicy.MUST_SAVE and not ctx.is_recompute and func == _ATEN.mm.default:
                sizes.append(args[0].shape[0] * args[1].shape[1] * 4)
            return decided

    watch = Watch()
    x = torch.randn(1, TOKENS, 64, requires_grad=True)
    checkpoint(forward, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, watch))
    assert watch.seen[False] == products
    attended = TOKENS * config.heads * config.v_dim * 4 + 4 * TOKENS * config.heads
    theirs = sum(sizes) + attended + x.nbytes
    chunk = chunks(config)[1]
    given = (PartLayout(), MicrobatchShape(1, TOKENS), FP32)
    works = [part_work(config, chunk, p, *given, style=style) for p in chunk.parts]
    kept = [s for w in works for s in w.saved if "operators" not in s.recompute]
    numbers = sum(s.bytes for s in kept if s.name.endswith("stats"))  # torch makes norms' numbers again
    ours = sum(s.bytes for s in kept) - numbers + works[0].out_bytes + x.nbytes
    assert ours == theirs, ({s.name: s.bytes for s in kept}, sizes)


def test_every_layer_or_some() -> None:
    config = load_config("tiny-llama", {"num_hidden_layers": 4})
    source = ConfigModelWork(config, MicrobatchShape(1, TOKENS), FP32)
    for layers, expected in ((None, {0, 1, 2, 3}), (frozenset({1, 3}), {1, 3}), (frozenset[int](), set())):
        graph = model_graph([chunks(config)], source, replace(OPERATORS, layers=layers))
        assert {n.tags["L"] for n in graph.nodes if n.kind is Pass.R} == expected


@pytest.mark.parametrize(("sequence", "kinds"), [(True, ["all_gather"]), (False, [])])
def test_messages_of_tensor_parallelism_travel_again_but_for_sums(sequence: bool, kinds: list[str]) -> None:
    config = load_config("llama3-8b", {"num_hidden_layers": 1})
    source = ConfigModelWork(config, MicrobatchShape(1, TOKENS), FP32)
    graph = model_graph([chunks(config)], source, OPERATORS)
    split = replace(
        graph,
        entries=tuple(
            PlacedPart(e.stage, e.chunk, e.part, PartLayout(tp=4, sequence_parallel=sequence)) for e in graph.entries
        ),
    )
    again = [n for n in refill(split, source).nodes if n.kind is Pass.R]
    assert [[str(m.kind) for m in n.inline] for n in again] == [kinds, kinds]


@pytest.mark.parametrize(("options", "again"), [(["up_projection"], True), (["norm", "activation"], False)])
def test_the_way_up_reads_what_the_ranks_have_once_more(options: list[str], again: bool) -> None:
    """DeepSeek-V3's narrow queries, keys and values and its rotary key, gathered over tp; by hand, 2 bytes each."""
    job = {
        "model": {"config": "deepseek-v3", "seq_len": 4096, "num_hidden_layers": 4},
        "parallel": {"tp": 2, "etp": 2},
        "schedule": {"name": "1f1b", "microbatches": 1, "recompute": options},
    }
    graph = prepare(job_from(job)).graph()
    found = {n.part: [m.bytes for m in n.inline] for n in graph.nodes if n.kind is Pass.R}
    assert found["l0.attn"] == ([4096 * features * 2 for features in (1536, 512, 64)] if again else [])
    assert not any(found[part] for part in found if not part.endswith("attn"))
