"""config.json as some models' pages on the Hub have it, keys in their order: tests/data/hub; one of each family, with
what transformers counts of it: tests/data/families.json, whose rows hold it or name the preset that is the same.
"""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ir.workload.config.load import raw_config


def _read(name: str) -> Mapping[str, object]:
    found: Mapping[str, object] = json.loads((Path(__file__).parents[2] / "data" / "hub" / f"{name}.json").read_text())
    return found


LLAMA31_8B, DEEPSEEK_V3, QWEN3_30B = map(_read, ("llama31_8b", "deepseek_v3", "qwen3_30b"))
MPT_7B = _read("mpt_7b")
_ROWS: Mapping[str, Mapping[str, Any]] = json.loads((Path(__file__).parents[2] / "data" / "families.json").read_text())
FAMILIES = {
    name: {"config": raw_config(str(row.get("preset"))), **row} if "preset" in row else {**row}
    for name, row in _ROWS.items()
}
# Sizes of the small models, by key: every one differs from what would also fit in its place.
SMALL: Mapping[str, Any] = {
    "hidden_size n_embd n_embed d_model word_embed_proj_dim dim": 64,
    "num_hidden_layers n_layer n_layers num_layers": 4,
    "num_attention_heads n_head n_heads num_heads": 8,
    "num_key_value_heads num_kv_heads attn_config.kv_n_heads": 4,
    "intermediate_size n_inner ffn_dim hidden_dim d_ff ffn_config.ffn_hidden_size intermediate_size_mlp": 40,
    "moe_intermediate_size shared_intermediate_size shared_expert_intermediate_size": 20,
    "num_experts num_local_experts n_routed_experts moe_num_experts ffn_config.moe_num_experts": 4,
    "num_experts_per_tok experts_per_token moe_k moe_topk ffn_config.moe_top_k": 2,
    "n_group topk_group first_k_dense_replace moe_layer_start_index num_shared_expert n_shared_experts": 1,
    "head_dim d_kv": 16,
    "t5.num_layers": 3,
    "mt5.num_decoder_layers": 3,
    "helium.head_dim": 8,
    "partial_rotary_factor": 0.5,
    "short_factor long_factor": [1.0] * 4,
    "vocab_size": 64,
    "max_position_embeddings n_positions max_seq_len seq_length": 32,
    "sliding_window attention_chunk_size window_size": 5,
    "rotary_dim": 6,
    "kv_lora_rank q_lora_rank": 10,
    "qk_nope_head_dim v_head_dim": 14,
    "qk_rope_head_dim": 4,
    "moe_layer_end_index": 3,
    "num_nextn_predict_layers": 0,
    "attention_types": [[["global", "local"], 2]],
    "mamba_num_heads mamba_n_heads num_heads linear_num_value_heads": 8,
    "mamba_head_dim mamba_d_head": 16,
    "n_groups mamba_n_groups linear_num_key_heads": 2,
    "ssm_state_size mamba_d_state state_size linear_value_head_dim": 12,
    "linear_key_head_dim": 10,
    "chunk_size mamba_chunk_size": 4,
    "hybrid_override_pattern": "ME*-",
    "attn_layer_indices": [2],
    "granitemoehybrid.layer_types": ["mamba", "mamba", "attention", "mamba"],
    "moe_shared_expert_intermediate_size": 24,
    # transformers' class sends every token to every expert of these
    "llama4_text.num_local_experts llama4_text.num_experts_per_tok": 1,
}
KEYS = {key: value for keys, value in SMALL.items() for key in keys.split()}


def small(model_type: str) -> dict[str, Any]:
    """A published config with everything small: layers of each kind stay."""

    def size(name: str, value: Any) -> Any:
        found = KEYS.get(f"{model_type}.{name}", KEYS.get(name, value))
        if value in (None, 0):
            return value
        if name == "num_key_value_heads" and value == FAMILIES[model_type]["config"].get("num_attention_heads"):
            return KEYS["num_attention_heads"]
        if isinstance(value, dict):
            return {k: size(f"{name}.{k}" if "config" in name else k, v) for k, v in value.items()}
        if isinstance(value, list) and name != "attention_types" and len(value) > 4:
            return (found if found is not value else value[:4]) if isinstance(found, list) else found
        return found

    return {k: size(k, v) for k, v in copy.deepcopy(FAMILIES[model_type]["config"]).items()}
