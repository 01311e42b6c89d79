"""What carries tokens to experts: SMs held, copies on the network, sorting of rows. Data in dispatchers.toml."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from ir.core.errors import ErrorKind
from ir.core.files import FileErrors, read_toml, typed

FORM = FileErrors("a table of dispatchers", ErrorKind.JOB, "costs.dispatcher", 10**5, "cost_models/software")


class ExpertDispatcher(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """sms: held by a dispatch or combine. deduplicate: a token crosses the network once per node. permute: bytes that
    sorting rows moves in kernels of its own, over those of one sort where rows arrive. sources: value -> where from.
    """

    sms: Annotated[int, msgspec.Meta(ge=0, le=128)]
    deduplicate: bool
    permute: Annotated[float, msgspec.Meta(ge=0, le=4)]
    sources: dict[str, str]


@cache
def dispatchers() -> dict[str, ExpertDispatcher]:
    """All that `[costs] dispatcher` may name.

    >>> {name: d.sms for name, d in dispatchers().items()}
    {'nccl': 16, 'deepep': 20, 'hybridep': 16}
    """
    return read_dispatchers(Path(__file__).with_name("dispatchers.toml"))


def read_dispatchers(path: Path) -> dict[str, ExpertDispatcher]:
    """A table of them. Raises PiperError (io, job): it cannot be read, or one is not described as the others are."""
    return typed(read_toml(path, FORM), dict[str, ExpertDispatcher], FORM, str(path))
