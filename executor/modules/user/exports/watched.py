"""What a forward does beside its graph, while torch.export runs it: it assigns buffers, counts, draws numbers.

An exported graph has what one call gave, as constants, so every microbatch would have it again.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, fx, nn

from executor.modules.user.annotate import model_error
from executor.modules.user.exports.writes import storages, written
from executor.modules.user.purity import numpy_state
from ir.core.errors import PiperError

Assigned = tuple[str, nn.Module, str, float]
Unregistered = tuple[nn.Module, str, Tensor]  # a tensor that is an attribute, and no buffer
UNSEEN = {
    "cond": ("torch.cond", "torch.where of both"),
    "_vmap_increment_nesting": ("torch.vmap", "a dim more: broadcasting, or einsum"),
    **{name: (name, "a loop over sizes") for name in ("scan", "associative_scan", "while_loop", "map_impl")},
}


@contextmanager
def forward_watched(module: nn.Module) -> Iterator[tuple[list[Assigned], list[Unregistered]]]:
    """Gives the numbers that forward has assigned to attributes, which torch.export takes back; and tensors that it
    would put where they are, as `self.table = self.table.to(device)`, though nobody has registered them.

    Raises PiperError (model): it assigns buffers, or draws numbers on the host.
    """
    names, plain, counted = {id(m): n for n, m in module.named_modules()}, nn.Module.__setattr__, list[Assigned]()
    unregistered = list[Unregistered]()

    def assigned(self: nn.Module, name: str, value: Any) -> None:
        if id(self) in names:
            path, held = f"{names[id(self)]}.{name}".lstrip("."), vars(self)
            if isinstance(old := held["_buffers"].get(name), Tensor) and isinstance(value, Tensor):
                if _same(old, value):  # itself, as `self.table = self.table.to(device)` has it
                    return
                if _new(old, value):
                    raise _beside(f"writes {path}")
            if isinstance(value, int | float) and held.get(name) != value:
                counted.append((path, self, name, value))
            if isinstance(old := held.get(name), Tensor) and isinstance(value, Tensor) and _is_constant(old, value):
                unregistered.append((self, name, old))
                return  # what an export makes has no values
        plain(self, name, value)

    before = random.getstate(), numpy_state()
    with patch.object(nn.Module, "__setattr__", assigned):
        yield counted, unregistered
    if before != (random.getstate(), numpy_state()):
        raise _beside("draws random numbers on the host")


def count_on(assigned: list[Assigned]) -> None:
    """Let attributes be as a call has left them."""
    for _, module, name, value in assigned:
        setattr(module, name, value)


def refuse_counter(assigned: list[Assigned], once: fx.Graph, twice: fx.Graph) -> None:
    """Raise PiperError (model) where a number that the second call has assigned, too, is in the graph."""
    if assigned and str(once) != str(twice):
        raise _beside(f"changes {assigned[0][0]} with each call, and what it computes")


def refuse_hidden_writes(root: fx.GraphModule) -> None:
    """Raise PiperError (model) for writes in place, inside of `no_grad` and the like, to what is not made there."""
    base = storages(root.graph.nodes)
    for node in root.graph.nodes:
        parts = [k for k, a in enumerate(node.args) if isinstance(_held(root, a), fx.GraphModule)]
        if node.op != "call_function" or not parts:
            continue
        inner, outer = _held(root, node.args[parts[-1]]).graph, node.args[parts[-1] + 1 :]
        given = dict(zip((n for n in inner.nodes if n.op == "placeholder"), outer, strict=False))
        inside = storages(inner.nodes)
        for target in [t for n in inner.nodes for t in written(n)]:
            what = given.get(inside[target])
            if isinstance(what, fx.Node) and (base[what].op in ("get_attr", "placeholder") or not node.users):
                raise _beside(f"writes {base[what].target}")


def refuse_unseen(root: fx.GraphModule) -> None:
    """Raise PiperError (model) for what calls code of the user's in a way that no pass sees into."""
    for node in root.graph.nodes:
        if how := UNSEEN.get(getattr(node.target, "__name__", "")):
            paths = [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
            path = "".join(paths[-1:]) or "forward"
            message, allowed = f"{path} calls {how[0]}, whose inside no plan measures or divides", "torch's plain ops"
            raise model_error(message, how[1], allowed, "model.module")


def _held(root: fx.GraphModule, node: object) -> Any:
    return getattr(root, str(node.target), None) if isinstance(node, fx.Node) and node.op == "get_attr" else None


def register(found: list[Unregistered]) -> None:
    """As buffers that no checkpoint has."""
    for module, name, value in found:
        if name in vars(module):
            delattr(module, name)
            module.register_buffer(name, value, persistent=False)


def _is_constant(old: Tensor, value: Tensor) -> bool:
    return not (old.requires_grad or value.requires_grad) and old.shape == value.shape


def _new(old: Tensor, value: Tensor) -> bool:
    """Whether it is another value, not the old one in another place or format."""
    alike = old.dtype == value.dtype and old.shape == value.shape
    return alike and old.untyped_storage()._cdata != value.untyped_storage()._cdata


def _same(old: Tensor, value: Tensor) -> bool:
    """Whether it is the old one itself, or a view of all of it."""
    one, other = ((t.dtype, t.shape, t.stride(), t.storage_offset(), t.untyped_storage()._cdata) for t in (old, value))
    return one == other


def _beside(what: str) -> PiperError:
    message = f"forward {what}, which no plan could repeat exactly"
    return model_error(message, "leave it out of forward", "a forward of parameters and inputs alone", "model.module")
