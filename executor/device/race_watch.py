"""What each op of a thread reads, writes and waits for, told to a device on which nothing else is known."""

from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from executor.device.host_syncs import LIFTED, DeviceSyncCensus, copies, shaped_by_values
from executor.device.memory import OpWatch, tensors_of
from ir.core.errors import ErrorKind, PiperError

HOST = torch.device("cpu")
_READS_SHAPES = {"zeros_like", "ones_like", "empty_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full"}


class WatchedDevice(Protocol):
    """Who is told. syncs: where the host would wait. torch: never the host's."""

    syncs: DeviceSyncCensus
    torch: torch.device

    @property
    def in_lane(self) -> bool:
        """Whether what is launched now runs on a lane, and is not the host's own."""

    def place(self) -> str:
        """The active lane, for people."""

    def touch(self, what: str, read: list[Tensor], written: list[Tensor], *, read_back: bool = False) -> None:
        """An op of the active lane. read_back: the host waits for the result."""

    def seen(self, tensors: list[Tensor]) -> None:
        """Views were taken of them."""

    def lifted(self, tensors: list[Tensor]) -> None:
        """They are the host's."""

    def of_host(self, tensor: Tensor, *, taken: bool = False) -> bool:
        """Whether it lies in the host's memory. taken: the device has it from now on."""


class OpRaceWatch(OpWatch):
    """Tells a device what each op of a thread reads and writes. Neither a view nor who asks for a shape touches any."""

    def __init__(self, device: WatchedDevice) -> None:
        super().__init__()
        self.device = device

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `OpWatch`. Raises PiperError: an operand's memory was given back."""
        read, written, aliased = _operands(func, args, kwargs)
        if not aliased and any(t.numel() and not t.untyped_storage().nbytes() for t in (*read, *written)):
            # Here it would end the process.
            message = f"{func} on {self.device.place()} touches memory that was given back"
            raise PiperError(ErrorKind.ILLEGAL_PLAN, message, suggestion="free it behind the last op that reads it")
        out = func(*args, **kwargs)
        fresh = tensors_of(out)
        if aliased and not written:
            (self.device.lifted if func is LIFTED else self.device.seen)(read)
            return out
        waits = self._waits(func, args, kwargs, read)
        inputs = {t.untyped_storage()._cdata for t in (*read, *written)}
        made = [x for x in fresh if x.untyped_storage()._cdata not in inputs]
        self.device.touch(str(func), read, [*written, *made], read_back=waits)
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


class DeviceReadWatch(TorchFunctionMode):
    """Tells a device where the host takes a tensor's values unseen by torch's dispatcher, for which on a GPU it waits:
    `tolist`, `numpy`, `cpu`, and `to` the host. The last two give copies; one that is not waited for is no wait.

    The device is a CPU, too, so a tensor's is told by its index, which the host's has not.
    """

    def __init__(self, device: WatchedDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, copied, behind = kwargs or {}, func is Tensor.cpu, False
        if func == Tensor.device.__get__:
            found = func(*args)
            return self.device.torch if found == HOST and not self.device.of_host(args[0]) else found
        if func is Tensor.to:
            copied, behind = _to_host(*args[1:], **kwargs)
            args = tuple(HOST if x == self.device.torch else x for x in args)
            kwargs = {k: HOST if x == self.device.torch else x for k, x in kwargs.items()}
        if not (copied or func in (Tensor.tolist, Tensor.numpy)) or self.device.of_host(args[0]):
            return func(*args, **kwargs)
        out, what = func(*args, **kwargs), f"Tensor.{func.__name__}"
        if copied and out.untyped_storage()._cdata == args[0].untyped_storage()._cdata:
            out = out.clone()
        if not behind:
            self.device.syncs.note(what)
        self.device.touch(what, [out if copied else args[0]], [], read_back=not behind)
        if copied:
            self.device.lifted([out])
        return out


def _to_host(
    device: Any = None, dtype: Any = None, non_blocking: bool = False, *_: Any, **more: Any
) -> tuple[bool, bool]:
    """(whether the host is meant, whether it goes on meanwhile), as `Tensor.to` reads what it is given."""
    return isinstance(device, str | torch.device) and torch.device(device) == HOST, non_blocking


def _operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], bool]:
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
