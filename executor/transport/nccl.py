"""NCCL, one GPU per rank: a communicator per stream, posted on the stream's lane and never waited for by the host.

Nothing here has run yet where the project's tests run: there is no GPU. What a CPU can prove about it, tests prove with
a device that only writes down who follows whom (tests/executor/device/test_device.py).
"""

from __future__ import annotations

import os
from typing import Any

import torch

from executor.device.device import Device
from executor.transport.base import TransportTopology
from executor.transport.groups import GroupTransport, GroupTransportHandle


def blocks_each(communicators: int, sms: int) -> int:
    """Thread blocks that a communicator may hold: all of a rank's together leave SMs to kernels that compute.

    >>> blocks_each(4, 132), blocks_each(8, 132), blocks_each(200, 132), blocks_each(0, 132)
    (28, 14, 1, 32)
    """
    return max(1, min(32, sms * 7 // 8 // max(1, communicators)))


def _sms(device: Device) -> int:
    return int(torch.cuda.get_device_properties(device.torch).multi_processor_count) if device.ahead else 132


class NcclTransportHandle(GroupTransportHandle):
    """A `Work` that stands on a communicator's own stream: to wait for it, the active lane goes on behind it.

    Its tensors are let go where the plan proves that nobody reads them.
    """

    __slots__ = ()

    def done(self) -> bool:
        """To wait for it is to tell a lane to, which never blocks."""
        return True


class NcclTransport(GroupTransport):
    """Between GPUs. All communicators are made at the start: a lazy one would block the host at its first use until the
    peer uses it too, in an order that no plan promises."""

    backend = "nccl"
    handle = NcclTransportHandle

    def __init__(
        self, store: Any, rank: int, topology: TransportTopology, device: Device, timeout_s: float = 300.0
    ) -> None:
        self.device = device
        # All algorithms are connected with the communicator; else the first large message would connect its own.
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        mine = sum(rank in pair for pair in topology.channels) + sum(rank in members for _, members in topology.groups)
        os.environ.setdefault("NCCL_MAX_CTAS", str(blocks_each(mine, _sms(device))))
        super().__init__(store, rank, topology, timeout_s, device_id=device.torch)
        self._connect()

    def _connect(self) -> None:
        """Use each communicator once, in the one order all ranks made them in."""
        for (src, dst), _ in sorted(self._channels.items()):
            one = torch.zeros(1, device=self.device.torch)
            (self.send(dst, one) if src == self.rank else self.recv(src, one)).wait()
        for name in sorted(self._groups):
            self.all_reduce(name, torch.zeros(1, device=self.device.torch)).wait()
            rows, ones = torch.zeros(len(self._members[name]), device=self.device.torch), [1] * len(self._members[name])
            self.all_to_all(name, torch.zeros_like(rows), rows, ones, ones).wait()  # between every two, by themselves
        self.device.mark().wait()

    def barrier(self) -> None:
        super().barrier()
        self.device.mark().wait()
