"""Ranks that are threads of one process have one forward exported once: the others take its graph, and give it their
own tensors.

torch.export takes as long as many steps of a small model do, and only one thread at a time may be in it.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from threading import local
from typing import Any
from unittest.mock import patch

from torch import Tensor, fx, nn

Of = tuple[object, ...]
NAMES = ("get_attr", "call_module")
_here = local()


@dataclass(frozen=True)
class _Exported:
    """A graph as it was exported, and what it names. held: the tensors of the module it was exported from, by name."""

    graph: fx.Graph
    named: dict[str, Any]
    held: dict[str, Tensor]


@dataclass(frozen=True)
class RankExports:
    """What the ranks of one launch have exported: all are given one job, so each build() makes what the others make."""

    found: dict[Of, _Exported] = field(default_factory=dict)

    def put(self, module: nn.Module, of: Of, root: fx.GraphModule) -> None:
        """Keep a copy of a graph before anything is rewritten in it. What cannot be told, or copied, is not kept."""
        with suppress(Exception):
            held = _tensors(module)
            mine = {id(t): t for t in held.values()}
            if all(id(p) in mine for p in root.parameters()):
                named = {n.target: attrgetter(n.target)(root) for n in root.graph.nodes if n.op in NAMES}
                self.found[*_form(module), *of] = _Exported(*_copied(root.graph, named, mine), held)

    def take(self, module: nn.Module, of: Of) -> fx.GraphModule | None:
        """The graph of a module that another rank has exported, with the tensors of this one; None if none has."""
        with suppress(Exception):
            known, own = self.found[*_form(module), *of], _tensors(module)
            graph, named = _copied(known.graph, known.named, {id(t): own[n] for n, t in known.held.items()})
            return fx.GraphModule(named, graph)
        return None


def exports_shared(forwards: RankExports | None) -> AbstractContextManager[object]:
    """Inside, this thread exports what is not among these, and puts it there. None: it exports for itself."""
    return patch.object(_here, "forwards", forwards, create=True)


def shared_exports() -> RankExports | None:
    """Those of this thread, inside of `exports_shared`."""
    return getattr(_here, "forwards", None)


def _copied(
    graph: fx.Graph, named: Mapping[str, Any], tensors: Mapping[int, Tensor]
) -> tuple[fx.Graph, dict[str, Any]]:
    """A graph, and what it names, with these in the place of tensors, by id."""
    copied, known = fx.Graph(), dict[int, Any](tensors)
    copied.output(copied.graph_copy(graph, {}))
    return copied, {n: deepcopy(x, known) for n, x in named.items()}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    named = dict[str, Tensor](module.named_parameters(remove_duplicate=False))
    return named | dict(module.named_buffers(remove_duplicate=False))


def _form(module: nn.Module) -> Of:
    """What of a module its graph is seen to depend on: its parts, what tp has them do (whose words it holds), and its
    tensors, of which some may be one.
    """
    first: dict[int, str] = {}
    tensors = (
        (n, first.setdefault(id(t), n), type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad)
        for n, t in _tensors(module).items()
    )
    called = ((n, f) for n, m in module.named_modules() if isinstance(f := vars(m).get("forward"), partial))
    ends = ((n, getattr(f.func, "__qualname__", ""), *(a for a in f.args if isinstance(a, int))) for n, f in called)
    return repr(module), tuple(m.training for m in module.modules()), tuple(ends), tuple(tensors)
