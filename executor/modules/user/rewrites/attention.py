"""Attention as fused kernels take it: a mask that only hides the future is a flag, values are as wide as keys.

transformers' classes make such a mask wherever they are traced, though they hand over none where they just run. Values
narrower than keys (DeepSeek's) would have all scores stored on a CPU.
"""

from collections.abc import Set
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from executor.modules.user.exports.writes import made_of

MOST_ELEMENTS = 2**30  # of a mask that is looked at
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # of its arguments that may stand in place


def flag_causal(root: fx.GraphModule) -> int:
    """Replace masks that hide the future alone by `is_causal`, and those that hide nothing by none. Returns how many.

    >>> class Net(torch.nn.Module):
    ...     def forward(self, x):
    ...         at = torch.arange(x.shape[1])
    ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=at[:, None] >= at)
    >>> flag_causal(torch.export.export(Net(), (torch.ones(2, 4, 8),)).module())
    1
    """
    seen: dict[fx.Node, bool | None] = {}
    found = 0
    for node in [n for n in root.graph.nodes if n.target is ATTENTION]:
        given = dict(zip(NAMES, node.args, strict=False)) | node.kwargs
        mask = given.get("attn_mask")
        if not isinstance(mask, fx.Node) or given.get("is_causal"):
            continue
        if mask not in seen:
            seen[mask] = _hides_future(root, mask, node)
        if (hides := seen[mask]) is not None:
            node.args = tuple(given.pop(n) for n in NAMES[:3])
            node.kwargs = given | {"attn_mask": None, "is_causal": hides}
            found += 1
    root.graph.eliminate_dead_code()
    return found


def widen_values(root: fx.GraphModule) -> int:
    """Where values are narrower than keys, add zeros to them, and take them off the result. Returns how often.

    >>> class Net(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x[..., :4])
    >>> widen_values(torch.export.export(Net(), (torch.ones(2, 1, 4, 8),)).module())
    1
    """
    found = 0
    for node in [n for n in root.graph.nodes if n.target is ATTENTION]:
        query, key, value, *rest = node.args
        wide, narrow = query.meta["val"].shape[-1], value.meta["val"].shape[-1]
        if narrow >= wide:
            continue
        with root.graph.inserting_before(node):
            padded = root.graph.call_function(torch.ops.aten.constant_pad_nd.default, (value, [0, wide - narrow]))
        with root.graph.inserting_after(node):
            cut = root.graph.call_function(torch.ops.aten.slice.Tensor, (node, -1, 0, narrow))
        node.replace_all_uses_with(cut, delete_user_cb=lambda user, cut=cut: user is not cut)
        cut.meta = dict(node.meta)
        padded.meta = node.meta | {"val": _padded(value.meta["val"], wide - narrow)}
        node.meta["val"] = _padded(cut.meta["val"], wide - narrow)
        node.args = (query, key, padded, *rest)
        found += 1
    return found


def _padded(value: Tensor, by: int) -> Tensor:
    """A tensor without values, in the mode it was made in."""
    mode: Any = getattr(value, "fake_mode", nullcontext())
    with _disable_current_modes(), mode:
        return torch.nn.functional.pad(value, (0, by))


def _hides_future(root: fx.GraphModule, mask: fx.Node, at: fx.Node) -> bool | None:
    """Whether a mask, as attention `at` reads it, hides the future alone; False: it hides nothing; None: other things,
    or unknown."""
    nodes = list(root.graph.nodes)
    needed = made_of([mask], nodes[: nodes.index(at)])
    if mask.meta["val"].numel() > MOST_ELEMENTS or not all(_of_sizes(n) for n in needed):
        return None
    with _disable_current_modes(), torch.no_grad(), torch.device("cpu"):
        value = _once(_value(root, mask, needed))
        if value.dtype is not torch.bool:
            hidden = value <= torch.finfo(value.dtype).min
            if not (hidden | (value == 0)).all():
                return None
            value = ~hidden
        if value.all():
            return False
        square = value.dim() >= 2 and value.shape[-1] == value.shape[-2]
        return True if square and torch.equal(value, torch.ones_like(value).tril()) else None


def _of_sizes(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and torch.Tag.nondeterministic_seeded not in tags


def _value(root: fx.GraphModule, wanted: fx.Node, needed: Set[fx.Node]) -> Tensor:
    """A node computed, from nothing."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in root.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if "device" in node.kwargs:  # perhaps one of tensors without values
                copies[node].kwargs = copies[node].kwargs | {"device": torch.device("cpu")}
    graph.output(copies[wanted])
    found: Any = fx.Interpreter(fx.GraphModule(root, graph)).run()
    assert isinstance(found, Tensor)
    return found


def _once(value: Tensor) -> Tensor:
    """Without what is merely repeated: sequences, heads."""
    for dim, (size, stride) in enumerate(zip(value.shape[:-2], value.stride()[:-2], strict=True)):
        if size > 1 and stride == 0:
            value = value.narrow(dim, 0, 1)
    return value
