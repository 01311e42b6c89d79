"""Every op of a thread, as it is called: what those who follow storages, kernels or lanes are made of."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class OpWatch(TorchDispatchMode):
    """A dispatch mode. Else torch would import its compiler at the first op, a second for every rank."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
