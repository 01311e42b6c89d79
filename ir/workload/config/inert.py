"""Keys of a config.json that change nothing in the training graph, each with the reason: accepted, never read."""

from __future__ import annotations

from collections.abc import Mapping

from ir.workload.config.key import ModelKey, only

_REASONS: Mapping[str, str] = {
    "where the file came from": "_name_or_path _commit_hash name_or_path architectures auto_map transformers_version",
    "how transformers runs it, with the same results": """
        _attn_implementation _attn_implementation_autoset attn_implementation _experts_implementation use_cache
        pretraining_tp ep_size chunk_size_feed_forward torchscript tf_legacy_loss gradient_checkpointing
        """,
    "what transformers returns": "return_dict output_attentions output_hidden_states return_dict_in_generate",
    "the checkpoint's format; a job has [precision]": "torch_dtype dtype use_bfloat16",
    "ids of tokens": """
        bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id forced_bos_token_id
        forced_eos_token_id tokenizer_class tokenizer_name prefix
        """,
    "other tasks": """
        finetuning_task id2label label2id num_labels problem_type task_specific_params classifier_dropout
        summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
        """,
    "generation": """
        bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
        exponential_decay_length_penalty length_penalty max_length min_length no_repeat_ngram_size num_beam_groups
        num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty suppress_tokens
        temperature top_k top_p typical_p
        """,
}
INERT: Mapping[str, str] = {name: why for why, names in _REASONS.items() for name in names.split()}
INERT_GPT2: Mapping[str, str] = {
    "n_ctx": "transformers reads n_positions alone",
    "reorder_and_upcast_attn": "softmaxes are in at least float32 as it is",
}
INERT_MPT: Mapping[str, str] = {
    "init_config": "first values only",
    "init_device": "first values only",
    "verbose": "what is printed",
}

# Every class of transformers has these; what a decoder of ours is, in one value each.
ALONE: Mapping[str, ModelKey] = {
    **only("a decoder alone is built", is_encoder_decoder=False, add_cross_attention=False, tie_encoder_decoder=False),
    **only("a decoder alone is built", cross_attention_hidden_size=None),
    **{
        n: ModelKey(k.holds, k.default, only=(None, {}), why=k.why)
        for n, k in only(
            "layers that differ by a table are not built", pruned_heads=None, per_layer_config=None
        ).items()
    },
}
