"""Building a module whose values come from files: parameters that nobody writes to take no memory until they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._pytree import tree_map

from executor.device.memory import OpWatch, overwritten, tensors_of
from ir.core.errors import ErrorKind, PiperError

_NEW = ("_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")  # of sizes, not of values
_TRUNCATED = "_no_grad_trunc_normal_"


class ValuelessModel(OpWatch):
    """What is written into a module's parameters inside is not, and what is computed from them is not, either: memory
    that the operating system has given, and nobody has touched, is none.

    >>> with ValuelessModel().building() as mode:
    ...     net = nn.Linear(4, 4)
    ...     narrow = net.weight.to(torch.bfloat16)
    >>> mode.without(net.weight), mode.without(narrow), mode.without(torch.ones(2))
    (True, True, False)
    """

    def __init__(self, drawn: Collection[int] = ()) -> None:
        """drawn: which registrations of parameters have values all the same, counted as they come."""
        super().__init__()
        self._drawn, self._registered = frozenset(drawn), list[tuple[nn.Module, str]]()
        self._storages: dict[int, StorageWeakRef] = {}  # weak: their addresses are not given again while these live

    @contextmanager
    def building(self) -> Iterator[Self]:
        """Modules are made, cut and cast inside."""
        with patch.object(_BUILDS, "mode", self, create=True), self:
            yield self

    def register(self, module: nn.Module, name: str, param: Tensor) -> None:
        """A module is given a parameter."""
        if len(self._registered) not in self._drawn:
            self.note(param)
        self._registered.append((module, name))

    def registered(self, module: nn.Module, names: Collection[str]) -> list[int]:
        """Which registrations made parameters of what was built, by their names in it."""
        places = {(id(module.get_submodule(n.rpartition(".")[0])), n.rpartition(".")[2]) for n in names}
        return [k for k, (part, name) in enumerate(self._registered) if (id(part), name) in places]

    def note(self, tensor: Tensor) -> None:
        """Its values are not there."""
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = StorageWeakRef(storage)

    def without(self, tensor: Tensor) -> bool:
        """Whether its values mean nothing."""
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._storages

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(map(self.without, tensors_of([args, kwargs]))) or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        schema, name = func._schema, func._schema.name.partition("::")[2]
        if name.endswith(_NEW) or any(r.alias_info and not r.alias_info.is_write for r in schema.returns):
            return func(*args, **kwargs)
        written = overwritten(func, args, kwargs)
        for tensor in tensors_of(written):
            self.note(tensor)
        if written:
            return None if not schema.returns else written[0] if len(schema.returns) == 1 else tuple(written)
        return self._sized(func, name, args, kwargs)

    def _sized(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Results of the sizes that they would have."""
        try:
            made = func(*tree_map(_meta, args), **tree_map(_meta, dict(kwargs)))
        except RuntimeError as error:  # what has no sizes without values, or no kernel for them
            raise _asks(name) from error
        return tree_map(lambda x: self._blank(x, name), made)

    def _blank(self, like: object, name: str) -> Tensor:
        if not isinstance(like, Tensor):  # a number
            raise _asks(name)
        blank = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="cpu")
        self.note(blank)
        return blank

    def refuse_made(self, module: nn.Module) -> None:
        """Raise PiperError (model): what a module holds beside its parameters was computed from them."""
        params = {id(p) for p in module.parameters()}
        for path, part in module.named_modules():
            for name, t in {**vars(part), **part._buffers}.items():
                if isinstance(t, Tensor) and id(t) not in params and self.without(t):
                    raise _asks(f"{path}.{name}".lstrip("."))


_BUILDS = threading.local()  # mode: of the thread that builds


def _registered(module: nn.Module, name: str, param: Tensor | None) -> None:
    mode: ValuelessModel | None = getattr(_BUILDS, "mode", None)
    if mode is not None and param is not None:
        mode.register(module, name, param)


register_module_parameter_registration_hook(_registered)  # once: threads that make modules walk through torch's table


def _truncated(plain: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`trunc_normal_`, which draws until it sees none outside of its bounds; where nothing is drawn there is none."""
    mode: ValuelessModel | None = getattr(_BUILDS, "mode", None)
    blank = isinstance(tensor, FakeTensor) or (mode is not None and mode.without(tensor))
    return tensor if blank else plain(tensor, *args, **kwargs)


if _TRUNCATED in vars(nn.init):  # which classes have by other names of the function that calls it
    vars(nn.init)[_TRUNCATED] = partial(_truncated, vars(nn.init)[_TRUNCATED])


def _meta(x: Any) -> Any:
    if isinstance(x, Tensor):
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
    return torch.device("meta") if isinstance(x, torch.device) else x


def _asks(what: str) -> PiperError:
    message = f"build() reads the values of parameters ({what}), which model.weights has"
    fix = "from_pretrained in build(), and no model.weights"
    allowed = "a build() that goes by sizes alone"
    return PiperError(ErrorKind.MODEL, message, key="model.weights", allowed=allowed, suggestion=fix)
