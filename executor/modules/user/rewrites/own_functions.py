"""A user's own `torch.autograd.Function`s, kept whole in an exported graph.

torch.export goes through them: its graph has what a function's forward calls, and the derivative of these calls would
stand in the place of its backward. So while a module is exported, such a function is one operator, of which only the
shapes of its results are asked; behind it, the operator's nodes call the function itself.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import BuiltinFunctionType, FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointFunction

from executor.modules.user.annotate import functions_applied, model_error
from ir.core.errors import PiperError

OWN = torch.library.Library("piper_own", "DEF")
OWN.define("call(int number, Tensor[] xs) -> Tensor[]")
CALL = torch.ops.piper_own.call.default
Apply = Callable[..., Any]


TENSOR = object()  # stands where one was


class _OwnCall:
    """One call of a function. values: its arguments; form: how they nest."""

    def __init__(self, cls: type[Function], apply: Apply, values: list[Any], form: TreeSpec) -> None:
        self.name, self._cls, self._apply = cls.__name__, cls, apply
        self._values, self._form = _without_tensors(values), form
        self.returned: tuple[list[Any], TreeSpec] | None = None  # its results, and how they nest

    @property
    def said(self) -> tuple[object, ...]:
        """The words and numbers among its arguments, by which a reader of the graph tells calls apart."""
        return tuple(v for v in self._values if isinstance(v, bool | int | float | str))

    def run(self, xs: list[Tensor]) -> list[Tensor]:
        """The tensors that it returns, given those that it takes."""
        args, kwargs = tree_unflatten(_filled(self._values, xs), self._form)
        found, form = tree_flatten(self._apply(self._cls, *args, **kwargs))
        if self.returned is None:
            self.returned = _without_tensors(found), form
        return [v for v in found if isinstance(v, Tensor)]

    def results(self, tensors: list[Tensor]) -> Any:
        """What the function returns, of these tensors."""
        assert self.returned is not None
        values, form = self.returned
        return tree_unflatten(_filled(values, tensors), form)


def _without_tensors(values: list[Any]) -> list[Any]:
    return [TENSOR if isinstance(v, Tensor) else v for v in values]


def _filled(values: list[Any], tensors: list[Tensor]) -> list[Any]:
    given = iter(tensors)
    return [next(given) if v is TENSOR else v for v in values]


_calls: list[_OwnCall] = []  # of the export that is going on, by number


def _shapes(number: int, xs: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        found = _calls[number].run(xs)
    return [torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device) for y in found]


torch.library.register_fake("piper_own::call", _shapes, lib=OWN)


@contextmanager
def functions_kept() -> Iterator[list[_OwnCall]]:
    """While a module is exported inside, its own functions are single operators; gives their calls, by number.

    Hooks of gradients, and of what is kept for them, which no graph has, are refused: raises PiperError (model).
    """
    hook: Any = torch.Tensor.register_hook
    enter: Any = saved_tensors_hooks.__enter__
    here = get_ident()

    def refused(what: str) -> PiperError:
        message = f"forward registers a hook of {what}, which an exported graph has not"
        fix, allowed = "leave the hook out", "an autograd.Function whose backward does it"
        return model_error(message, fix, allowed, "model.module")

    def hooked(self: Tensor, called: Callable[..., Any]) -> Any:
        if get_ident() != here:
            return hook(self, called)
        raise refused("a gradient")

    def entered(self: saved_tensors_hooks) -> Any:
        if type(self) is saved_tensors_hooks and get_ident() == here:  # checkpoints' and offloading's change no value
            raise refused("what is kept for backward")
        return enter(self)

    _calls.clear()
    no_hook = patch.object(torch.Tensor, "register_hook", hooked)
    none_kept = patch.object(saved_tensors_hooks, "__enter__", entered)
    with no_hook, none_kept, functions_applied(_kept):
        yield _calls


def _kept(plain: Apply, cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    """One operator in the place of a function, where the user's code calls it."""
    if cls is CheckpointFunction:  # what it computes again, a plan keeps or computes again, as the job says
        return args[0](*args[2:])
    if cls.__module__.startswith("torch."):
        return plain(cls, *args, **kwargs)
    values, form = tree_flatten((args, kwargs))
    if held := [v for v in values if callable(v) and not isinstance(v, Tensor) and not _holds_nothing(v)]:
        message = f"{cls.__name__}.apply is given {getattr(held[0], '__qualname__', type(held[0]).__name__)}"
        fix = "hand it the tensors; or torch.utils.checkpoint.checkpoint, to compute something again"
        allowed = "tensors, numbers, and functions that hold no tensors"
        raise model_error(f"{message}, whose tensors a graph would not see", fix, allowed, "model.module")
    _calls.append(call := _OwnCall(cls, plain, values, form))
    return call.results(CALL(len(_calls) - 1, [v for v in values if isinstance(v, Tensor)]))


def _holds_nothing(f: Callable[..., Any]) -> bool:
    """Whether what can be called has tensors from its arguments alone: no module, no method, no closure."""
    return isinstance(f, type | BuiltinFunctionType) or (isinstance(f, FunctionType) and f.__closure__ is None)


def call_functions(graph: fx.Graph, calls: list[_OwnCall]) -> None:
    """Let the operators of an exported graph be calls of the functions again."""
    for node in graph.nodes:
        if node.target is CALL:
            number, xs = node.args
            call = calls[number]
            node.target, node.args = _named(call), (xs, *call.said)


def is_own(node: fx.Node) -> bool:
    """Whether a node is a call of one of them."""
    return node.op == "call_function" and getattr(node.target, "__qualname__", "").startswith(f"{_named.__name__}.")


def _named(call: _OwnCall) -> Callable[[list[Tensor]], list[Tensor]]:
    def applied(xs: list[Tensor], *said: object) -> list[Tensor]:
        return call.run(xs)

    applied.__name__ = call.name
    return applied
