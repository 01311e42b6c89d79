"""What an op reads and writes, by its own signature, and whether it takes what it is given to the host."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from executor.device.memory import tensors_of

HOST = torch.device("cpu")
_READS_SHAPES = {"zeros_like", "ones_like", "empty_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full"}


def to_host(
    device: Any = None, dtype: Any = None, non_blocking: bool = False, *_: Any, **more: Any
) -> tuple[bool, bool]:
    """(whether the host is meant, whether it goes on meanwhile), as `Tensor.to` reads what it is given."""
    return isinstance(device, str | torch.device) and torch.device(device) == HOST, non_blocking


def operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], bool]:
    """(read, written, whether the result may be a view of an operand), by the op's own signature."""
    read, written = list[Tensor](), list[Tensor]()
    arguments, aliased = _signature(func)
    for k, (name, writes) in enumerate(arguments):
        value = args[k] if k < len(args) else kwargs.get(name)
        if value is not None:
            (written if writes else read).extend(tensors_of(value))
    return ([] if func.overloadpacket.__name__ in _READS_SHAPES else read), written, aliased


@cache
def _signature(func: Any) -> tuple[tuple[tuple[str, bool], ...], bool]:
    """Of each argument its name and whether it is written; whether the result may be a view of one. Slow to ask for."""
    found = [(a.name, a.alias_info) for a in func._schema.arguments]
    written = tuple((name, alias is not None and alias.is_write) for name, alias in found)
    return written, any(alias is not None and not alias.is_write for _, alias in found)
