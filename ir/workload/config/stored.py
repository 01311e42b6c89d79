"""The format that a config's checkpoint is quantised to: of its storage, not of the model."""

from __future__ import annotations

from collections.abc import Mapping

from ir.workload.config.values import ModelValues

FP8 = "fp8"


def stored_in(v: ModelValues) -> str:
    """ "fp8" as in DeepSeek-V3's config.json, whose weights are stored so; "" for none.

    Raises PiperError (model): a format that training does not start from.
    """
    table = v.get("quantization_config")
    if not table:
        return ""
    assert isinstance(table, Mapping)
    method = table.get("quant_method")
    if method != FP8:
        message = f"a checkpoint quantised by {method!r} is not one to train from"
        v.refuse("quantization_config.quant_method", message, allowed=f"{FP8}, or quantization_config = null")
    return FP8
