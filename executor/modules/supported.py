"""Which models have a reference module; the others are refused by name."""

from __future__ import annotations

from ir.core.errors import ErrorKind, PiperError
from ir.workload.config.spec import ModelConfig


def refuse_model(c: ModelConfig) -> None:
    """Raise PiperError for a model without a reference module."""
    if not c.rope and not c.positions:
        raise PiperError(
            ErrorKind.MODEL,
            "no reference module without rotary or learned positions: attention biases (ALiBi) are not built",
            file=c.source,
            key="attn_config.alibi",
            allowed="false, with learned_pos_emb = true",
        )
    dropouts = {"attention": c.attn_dropout, "hidden": c.hidden_dropout, "embedding": c.embed_dropout}
    if on := [name for name, p in dropouts.items() if p]:
        keys = {"gpt2": "attn_pdrop = resid_pdrop = embd_pdrop", "mpt": "emb_pdrop = resid_pdrop"}
        raise PiperError(
            ErrorKind.MODEL,
            f"dropout ({', '.join(on)}) cannot be compared between plans, so `run` has none",
            file=c.source,
            key="model.config",
            suggestion=f"model.{keys.get(c.model_type, 'attention_dropout')} = 0",
        )
