"""Classes of transformers as they are, from tiny configs: what `[model] module` names."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.executor.modules.hub import Doubled

VOCAB = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "_experts_implementation": "batched_mm"}  # the one that takes float64
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 16, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def _made(name: str, config: str, given: dict[str, Any]) -> nn.Module:
    import transformers

    found = dict(given)
    experts = found.pop("_experts_implementation", None)
    made = getattr(transformers, config)(**found)
    if experts:
        made._experts_implementation = experts
    module: nn.Module = getattr(transformers, name)(made)
    return module


def llama() -> nn.Module:
    """Untied."""
    return _made("LlamaForCausalLM", "LlamaConfig", SIZES)


def qwen3() -> nn.Module:
    """Norms of queries and keys."""
    return _made("Qwen3ForCausalLM", "Qwen3Config", SIZES)


def gpt2() -> nn.Module:
    """Learned positions, biases, tied."""
    return _made("GPT2LMHeadModel", "GPT2Config", GPT2)


def gpt2_drops() -> nn.Module:
    """It drops out of embeddings, attention and both residuals."""
    return _made("GPT2LMHeadModel", "GPT2Config", {**GPT2, "resid_pdrop": 0.25, "embd_pdrop": 0.1, "attn_pdrop": 0.4})


def gemma3() -> nn.Module:
    """Tied, two norms more, sliding windows on some layers."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return _made(
        "Gemma3ForCausalLM", "Gemma3TextConfig", {**SIZES, "pad_token_id": 0, "sliding_window": 4, "layer_types": kinds}
    )


def mixtral() -> nn.Module:
    """Experts, undivided."""
    return _made("MixtralForCausalLM", "MixtralConfig", {**SIZES, **EXPERTS, "num_local_experts": 4})


def qwen3_moe() -> nn.Module:
    """Experts behind a router, in transformers' own loop, which torch cannot export."""
    sizes = {**SIZES, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    return _made("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**sizes, "_experts_implementation": "eager"})


def gpt_oss() -> nn.Module:
    """Attention sinks, sliding windows, experts with biases and weights the other way round."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "_experts_implementation": "eager"}
    return _made("GptOssForCausalLM", "GptOssConfig", {**SIZES, **experts, "sliding_window": 4, "pad_token_id": 0})


def deepseek_v3() -> nn.Module:
    """Latent attention with values narrower than keys, a dense layer, experts in groups and one that all tokens use."""
    sizes = {k: v for k, v in SIZES.items() if k != "head_dim"} | {"num_key_value_heads": 4}
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    routed = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 8}
    more = {**EXPERTS, "first_k_dense_replace": 1, "rope_scaling": None}
    return _made("DeepseekV3ForCausalLM", "DeepseekV3Config", {**sizes, **heads, **routed, **more})


def bart() -> nn.Module:
    """A decoder without an encoder: nothing reads its attention to one."""
    sizes = {"d_model": 16, "decoder_layers": 3, "decoder_ffn_dim": 32, "decoder_attention_heads": 4}
    ends = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    drops = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "decoder_layerdrop"), 0.0)
    return _made("BartForCausalLM", "BartConfig", {**sizes, **ends, **drops, "max_position_embeddings": 16})


def cpmant() -> nn.Module:
    """Its first table is of kinds of tokens, of which there are fewer than words."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_attention_heads": 4, "dim_head": 4, "dim_ff": 32}
    kinds = {"prompt_length": 2, "prompt_types": 4, "segment_types": 4, "num_hidden_layers": 3}
    return _made("CpmAntForCausalLM", "CpmAntConfig", {**sizes, **kinds, "dropout_p": 0.0})


def _indexed(name: str, config: str, **more: Any) -> nn.Module:
    """Latent attention, an indexer, a dense layer and experts."""
    sizes = {k: v for k, v in SIZES.items() if k != "head_dim"} | {"num_key_value_heads": 4}
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    routed = {"n_routed_experts": 8, "moe_intermediate_size": 8, "first_k_dense_replace": 1, **EXPERTS}
    picked = {"index_topk": 3, "index_head_dim": 8, "index_n_heads": 2}
    return _made(name, config, {**sizes, **heads, **routed, **picked, **more})


def deepseek_v32() -> nn.Module:
    """Attention to the tokens that an indexer picks, whose weights no loss trains."""
    return _indexed("DeepseekV32ForCausalLM", "DeepseekV32Config", n_group=4, topk_group=2)


def glm_5() -> nn.Module:
    """The same; a layer attends to what the one before it picked, whose numbers cross a seam beside the stream."""
    kinds = ["full", "shared", "full"]
    return _indexed("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", n_group=1, topk_group=1, indexer_types=kinds)


def deepseek_v4() -> nn.Module:
    """Several residual streams; a window, compressed keys of two kinds behind it; the first layer's experts by word."""
    sizes = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "intermediate_size")}
    heads = {"q_lora_rank": 8, "o_groups": 2, "o_lora_rank": 4, "partial_rotary_factor": 0.5, "sliding_window": 3}
    picked = {"index_topk": 2, "index_head_dim": 8, "index_n_heads": 2, "hc_mult": 2, "hc_sinkhorn_iters": 3}
    kinds = ["heavily_compressed_attention", "sliding_attention", "compressed_sparse_attention"]
    rates = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}
    layers = {"layer_types": kinds, "compress_rates": rates, "mlp_layer_types": ["hash_moe", "moe", "moe"]}
    routed = {"n_routed_experts": 4, "moe_intermediate_size": 8, **EXPERTS}
    made = _made("DeepseekV4ForCausalLM", "DeepseekV4Config", {**sizes, **heads, **picked, **layers, **routed})
    words = torch.arange(VOCAB)  # a checkpoint's; two different ones each
    made.get_buffer("model.layers.0.mlp.gate.tid2eid").copy_(
        torch.stack((words % 4, (words + 1 + words // 8 % 3) % 4), -1)
    )
    return made


class InDouble(nn.Module):
    """A class as it is, with what its recurrences take down to float32 left in float64, traced or run."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        """Its own forward."""
        with Doubled():
            return self.inner(input_ids=input_ids, use_cache=use_cache)


def nemotron_h() -> nn.Module:
    """Layers that are one thing each: state spaces, attention, an MLP, experts."""
    kinds = ["linear_attention", "mlp", "full_attention", "linear_attention", "moe"]
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 4, "chunk_size": 4}
    routed = {"n_routed_experts": 4, "moe_intermediate_size": 8, "moe_shared_expert_intermediate_size": 8}
    sizes = {k: v for k, v in SIZES.items() if k != "num_hidden_layers"} | {"layers_block_type": kinds}
    return InDouble(_made("NemotronHForCausalLM", "NemotronHConfig", {**sizes, **mamba, **routed, **EXPERTS}))


def qwen3_next() -> nn.Module:
    """The gated delta rule in three layers of four, gated attention in one, an MLP in each."""
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    linear |= {"linear_key_head_dim": 4, "linear_value_head_dim": 4, "mlp_only_layers": [0, 1, 2, 3]}
    return InDouble(_made("Qwen3NextForCausalLM", "Qwen3NextConfig", {**SIZES, **linear, "num_hidden_layers": 4}))


class Both(nn.Module):
    """T5 with one text for encoder and decoder: two streams and two tables of positions cross its seams."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
        ends = {"vocab_size": VOCAB, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
        self.t5 = _made("T5ForConditionalGeneration", "T5Config", {**sizes, **ends})

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        """Both read the same tokens."""
        return self.t5(input_ids=input_ids, decoder_input_ids=input_ids, use_cache=use_cache)


LAYERS = {name: "model.layers.*" for name in ("llama", "qwen3", "gemma3", "mixtral")}
LAYERS |= dict.fromkeys(("nemotron_h", "qwen3_next"), "inner.model.layers.*")
EXPERTS_OF = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "deepseek_v32", "glm_5", "deepseek_v4")
LAYERS |= dict.fromkeys(EXPERTS_OF, "model.layers.*")
EP = {"PP": "model.layers.*", "EP": "model.layers.*.mlp.experts"}
LAYERS |= {"bart": "model.decoder.layers.*", "cpmant": "cpmant.encoder.layers.*"}
LAYERS |= {"gpt2": "transformer.h.*", "gpt2_drops": "transformer.h.*", "Both": "t5.*coder.block.*"}
