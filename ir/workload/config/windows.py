"""Which layers of a config slide a window over their keys, as transformers' class of its model type has it."""

from ir.core.errors import nearest
from ir.workload.config.values import ModelValues

FULL, SLIDING = "full_attention", "sliding_attention"
_OLD = {"attention": FULL}


def layer_windows(v: ModelValues) -> tuple[int, ...]:
    """The window of every layer (0: none) by `layer_types`, or by `max_window_layers` where it is left out (Qwen's).

    Raises PiperError (model): kinds of layers that are not built, or not as many as there are layers.
    """
    layers = v.size("num_hidden_layers")
    window = v.size_or("sliding_window", 0) if v.flag("use_sliding_window") else 0
    types = _types(v)
    if types is None:
        first = v.size("max_window_layers")
        return tuple(window if i >= first else 0 for i in range(layers))
    if SLIDING in types and not window:
        # transformers' mask of a window that is null sees all, or fails, from version to version.
        v.refuse("layer_types", f"{SLIDING}, but no window", allowed="use_sliding_window = true and a sliding_window")
    return tuple(window if t == SLIDING else 0 for t in types)


def check_uniform(v: ModelValues, window: int) -> None:
    """Refuse `layer_types` that say otherwise than the one window that transformers' class gives all layers."""
    own = SLIDING if window else FULL
    if other := [t for t in _types(v) or () if t != own]:
        message = f"{other[0]}, but transformers' {v.get('model_type')} has {own} in every layer"
        v.refuse("layer_types", message, allowed=own)


def _types(v: ModelValues) -> list[str] | None:
    return layer_kinds(v, v.size("num_hidden_layers"), (FULL, SLIDING))


def layer_kinds(v: ModelValues, layers: int, known: tuple[str, ...]) -> list[str] | None:
    """`layer_types`, where it is given.

    Raises PiperError (model): kinds that are not among those `known`, or not as many as there are layers.
    """
    given = v.get("layer_types")
    if given is None:
        return None
    assert isinstance(given, (list, tuple))
    types = [_OLD.get(str(t), str(t)) for t in given]
    if len(types) != layers:
        v.refuse("layer_types", f"{len(types)} kinds for {layers} layers", allowed=f"{layers} of them")
    if odd := [t for t in types if t not in known]:
        near = nearest(odd[0], known)
        v.refuse("layer_types", f"{odd[0]!r} is not built", allowed=", ".join(known), fix=near)
    return types
