"""How much a communication kernel slows the compute beside it, and the other way round. First version, modelled."""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.hardware import Hardware
from cost_models.hardware.schema import COMM_KINDS
from ir.work import CommKind

GRAIN = 8


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Added slowdowns by (bound, kind): 0.2 makes a kernel take 1.2 times as long.

    held: while the communication kernel holds its SMs; moving: what its traffic adds. Rows: kernels bound by
    arithmetic, kernels bound by memory; columns: COMM_KINDS.
    """

    held: tuple[tuple[float, ...], tuple[float, ...]]
    moving: tuple[tuple[float, ...], tuple[float, ...]]

    @classmethod
    def of(cls, hw: Hardware) -> Slowdown:
        """From the SMs and the share of HBM that a hardware file says a kernel takes.

        A kernel bound by arithmetic loses the SMs held; one bound by memory keeps its speed on fewer SMs, and loses
        the bandwidth taken. What compute does to messages is not modelled yet: no table of it, no slowdown.

        >>> from cost_models.hardware import load_hardware
        >>> round(Slowdown.of(load_hardware("h800-sxm")).held[0][0], 4)  # 20 of 132 SMs
        0.1786
        """
        sms = [hw.comm_sms.get(k, 0.0) for k in COMM_KINDS]
        hbm = [hw.comm_hbm.get(k, 0.0) for k in COMM_KINDS]
        none = (0.0,) * len(COMM_KINDS)
        return cls((tuple(s / (hw.sms - s) for s in sms), none), (none, tuple(x / (1 - x) for x in hbm)))


def comm_class(kind: CommKind) -> int:
    """Index into COMM_KINDS."""
    name = {CommKind.ALL_TO_ALL: "all_to_all", CommKind.P2P: "p2p"}.get(kind, "collective")
    return COMM_KINDS.index(name)
