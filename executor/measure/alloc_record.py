"""Follows storages and gives them names, so that what one unit takes and lets go of can be written down."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from executor.device.memory import Storages
from ir.core.alloc import NONE, Birth, Release


class Recorder(Storages):
    """Notes births inside `noting`, and the end of everything that has a name, whenever it comes.

    >>> import torch
    >>> x = torch.ones(2)
    >>> with (recorder := Recorder()):
    ...     recorder.name(x, "x0")
    ...     with recorder.noting("F"):
    ...         y = x + 1
    ...         y = y.double()
    ...         del x
    ...     (recorder.of(y), " ".join(e.text() for e in recorder.take()))
    ('F1', '+8 +16 -F0 -x0')
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        self.names: dict[int, str] = {}
        self.events: list[Birth | Release] = []
        self._letter: str | None = None
        self._made = 0
        super().__init__(held)

    @contextmanager
    def noting(self, letter: str) -> Iterator[None]:
        """What is born from here on is called by this letter and its number."""
        self.settle()
        self._letter, self._made = letter, 0
        yield
        self.settle()
        self._letter = None

    def rename(self, name: str) -> None:
        """All that is alive gets this name; numbers start again."""
        self.settle()
        self.names, self._made = dict.fromkeys(self.names, name), 0

    def name(self, tensor: Tensor, name: str) -> None:
        """What an outside storage is called."""
        self.names[self.see(tensor)] = name

    def of(self, tensor: Tensor | None) -> str:
        """The name of a tensor's storage; "none" where it has none."""
        return NONE if tensor is None else self.names.get(self.see(tensor), NONE)

    def take(self) -> tuple[Birth | Release, ...]:
        """The events since the last call."""
        self.settle()
        events, self.events = tuple(self.events), []
        return events

    def born(self, key: int, size: int) -> None:
        """A birth."""
        if self._letter is not None:
            self.names[key] = f"{self._letter}{self._made}"
            self._made += 1
            self.events.append(Birth(size))

    def died(self, key: int, size: int) -> None:
        """An end."""
        if (name := self.names.pop(key, None)) is not None:
            self.events.append(Release(name))
