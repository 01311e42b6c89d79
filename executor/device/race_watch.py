"""What each op of a thread reads, writes and waits for, told to a device on which nothing else is known."""

from typing import Any, Protocol

from torch import Tensor
from torch.utils._pytree import tree_leaves

from executor.device.host_syncs import LIFTED, DeviceSyncCensus, copies, shaped_by_values
from executor.device.memory import OpWatch


class WatchedDevice(Protocol):
    """Who is told. syncs: where the host would wait."""

    syncs: DeviceSyncCensus

    @property
    def in_lane(self) -> bool:
        """Whether what is launched now runs on a lane, and is not the host's own."""

    def touch(self, what: str, read: list[Tensor], written: list[Tensor], *, host: bool = False) -> None:
        """An op of the active lane. host: it waits for the result."""

    def seen(self, tensors: list[Tensor]) -> None:
        """Views were taken of them."""

    def lifted(self, tensors: list[Tensor]) -> None:
        """They are the host's."""

    def of_host(self, tensor: Tensor, *, taken: bool = False) -> bool:
        """Whether it lies in the host's memory. taken: the device has it from now on."""


class OpRaceWatch(OpWatch):
    """Tells a device what each op of a thread reads and writes. A view touches nothing."""

    def __init__(self, device: WatchedDevice) -> None:
        super().__init__()
        self.device = device

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        read, written, aliased = _operands(func, args, kwargs)
        fresh = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if aliased and not written:
            (self.device.lifted if func is LIFTED else self.device.seen)(read)
            return out
        waits = self._waits(func, args, kwargs, read)
        inputs = {t.untyped_storage()._cdata for t in (*read, *written)}
        made = [x for x in fresh if x.untyped_storage()._cdata not in inputs]
        self.device.touch(str(func), read, [*written, *made], host=waits)
        return out

    def _waits(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], read: list[Tensor]) -> bool:
        """Whether the host would wait for a GPU here, which is noted."""
        device, (copy, behind) = self.device, copies(func, args, kwargs)
        ours = [t for t in read if device.of_host(t)]
        if shaped_by_values(func, args, kwargs):
            waits = len(ours) < len(read)
        else:  # what is given to an op as it is was copied where it was made
            waits = bool(ours) and device.in_lane and not behind
            for t in ours if waits and not copy else ():
                device.of_host(t, taken=True)
        if waits:
            device.syncs.note(str(func))
        return waits


def _operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], bool]:
    """(read, written, whether the result may be a view of an operand), by the op's own signature."""
    read, written, aliased = list[Tensor](), list[Tensor](), False
    for k, argument in enumerate(func._schema.arguments):
        value = args[k] if k < len(args) else kwargs.get(argument.name)
        tensors = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            written += tensors
        else:
            read += tensors
        aliased |= alias is not None and not alias.is_write
    return read, written, aliased
