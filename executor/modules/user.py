"""A user's own model: `[model] module = "my_model.py:build"`, cut at its annotations."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from executor.annotate import cut
from executor.modules.base import Built, TokenLoss
from ir.errors import ErrorKind, PiperError, nearest


class UserModel:
    """An annotated module with its own initialisation, made under one seed, so every rank makes the same.

    >>> from executor.annotate import annotate
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embed, self.layer = nn.Embedding(4, 2), nn.Linear(2, 4)
    ...     def forward(self, ids):
    ...         x = self.embed(ids)
    ...         with annotate("PP"):
    ...             return self.layer(x)
    >>> UserModel(Net).chunks
    ('embed', 'l0')
    """

    def __init__(self, build: object, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        assert callable(build)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = build()
        if not isinstance(module, nn.Module):
            raise PiperError(ErrorKind.MODEL, f"build() returned {type(module).__name__}", allowed="a torch.nn.Module")
        self.module = module.to(dtype)
        self._names = {id(p): n for n, p in self.module.named_parameters()}
        self._cut = cut(self.module)

    @property
    def chunks(self) -> tuple[str, ...]:
        """In the order of the forward."""
        return tuple(self._cut.chunks)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """In the module's own order."""
        return {n: tuple(p.shape) for n, p in self.module.named_parameters()}

    def build(self, chunks: Sequence[str]) -> Built:
        """The chunks asked for; the last one of the model ends in the loss."""
        units: dict[str, nn.Module] = {}
        extras: dict[str, tuple[str, ...]] = {}
        params: dict[str, nn.Parameter] = {}
        for name in chunks:
            unit = self._cut.chunks[name]
            params.update((self._names[id(p)], p) for p in unit.parameters())
            wants: tuple[str, ...] = ("ids",) if name in self._cut.wants_ids else ()
            if name == self.chunks[-1]:
                unit, wants = TokenLoss(unit), (*wants, "labels", "scale")
            units[name], extras[name] = unit, wants
        return Built(units, {n: params[n] for n in self.shapes if n in params}, extras)


def load_callable(reference: str) -> object:
    """The object that `path/file.py:name` refers to. Runs that file: only ever one the user named.

    >>> load_callable("nowhere.py:build")
    Traceback (most recent call last):
    ...
    ir.errors.PiperError: nowhere.py: no such file
    """
    path, _, name = reference.rpartition(":")
    file = Path(path)
    if not path or not name:
        raise PiperError(ErrorKind.MODEL, f"not a callable: {reference!r}", key="model.module", allowed="file.py:name")
    if not file.is_file():
        raise PiperError(ErrorKind.IO, "no such file", file=path)
    label = f"piper_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(label, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[label] = module
    spec.loader.exec_module(module)
    if not callable(found := getattr(module, name, None)):
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise PiperError(
            ErrorKind.MODEL, f"no callable {name!r}", file=path, allowed=known, suggestion=nearest(name, known)
        )
    return found
