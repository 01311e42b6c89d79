"""What carries tokens to experts (dispatchers.toml), and what the casts of fp8 move (casts.toml)."""

from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from ir.core.errors import ErrorKind
from ir.core.files import FileErrors, read_toml, typed, words

FORM = FileErrors("a table of dispatchers", ErrorKind.JOB, "costs.dispatcher", 10**5, "cost_models/software")
CASTS = FileErrors("a table of casts", ErrorKind.JOB, "cluster.fp8_recipe", 10**5, "cost_models/software")
Fp8Recipe = Annotated[str, words("blocks", "tensor", "mxfp8", said="fp8 recipe")]


@cache
def fp8_casts() -> dict[str, dict[str, float]]:
    """Recipe -> end of a cast's label -> bytes it moves over those of DeepSeek's.

    >>> {name: casts.get("transpose", 1.0) for name, casts in fp8_casts().items()}
    {'blocks': 1.0, 'tensor': 0.0, 'mxfp8': 0.0}
    """
    path = Path(__file__).with_name("casts.toml")
    return typed(read_toml(path, CASTS), dict[str, dict[str, float]], CASTS, str(path))


class ExpertDispatcher(msgspec.Struct, frozen=True, kw_only=True):
    """sms: held by a dispatch or combine. deduplicate: a token crosses the network once per node. permute: bytes that
    sorting rows moves in kernels of its own, over those of one sort where rows arrive. inside, across, network:
    shares of NVLink's rate in one node, of it where tokens come from other nodes, too, and of the NIC's; None: the
    hardware file's. sources: value -> where from.
    """

    sms: Annotated[int, msgspec.Meta(ge=0, le=128)]
    deduplicate: bool
    permute: Annotated[float, msgspec.Meta(ge=0, le=4)]
    inside: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    across: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    network: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
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
