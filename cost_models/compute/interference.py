"""How much a communication kernel slows the compute beside it, and the other way round: modelled, or measured pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cost_models.hardware import DeviceHardware
from cost_models.hardware.schema import COMM_KINDS
from cost_models.profile.pairs import BOUNDS, KernelPair, pair_key
from ir.core.work import MessageKind

GRAIN = 8
Rows = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class KernelSlowdown:
    """Added slowdowns by (bound, kind): 0.2 makes a kernel take 1.2 times as long.

    held: while the communication kernel holds its SMs; moving: what its traffic adds; wire: of the message, while the
    kernel runs. Rows: kernels bound by arithmetic, kernels bound by memory; columns: COMM_KINDS.
    """

    held: Rows
    moving: Rows
    wire: Rows

    @classmethod
    def of(cls, hw: DeviceHardware, pairs: Mapping[str, KernelPair] | None = None) -> KernelSlowdown:
        """From the SMs and the share of HBM that a hardware file says a kernel takes. pairs: measured, go before.

        A kernel bound by arithmetic loses the SMs held; one bound by memory keeps its speed on fewer SMs, and loses
        the bandwidth taken. A message is slowed by what the file says of its kind.

        >>> from cost_models.hardware import load_hardware
        >>> round(KernelSlowdown.of(load_hardware("h800-sxm")).held[0][0], 4)  # 20 of 132 SMs
        0.1786
        >>> KernelSlowdown.of(load_hardware("h800-sxm"), {"memory p2p": KernelPair(0.1, 0.2, 0.3)}).wire[1]
        (0.43, 0.0, 0.3)
        """
        modelled = {}
        for kind in COMM_KINDS:
            hbm, wire = hw.comm_hbm.get(kind, 0.0), hw.comm_slowed.get(kind, 0.0)
            held = products_held(hw) if kind == "collective" else fewer_sms(hw, kind)
            modelled[pair_key("arithmetic", kind)] = KernelPair(held=held, wire=wire)
            modelled[pair_key("memory", kind)] = KernelPair(moving=hbm / (1 - hbm), wire=wire)
        found = {**modelled, **(pairs or {})}
        rows = [[found[pair_key(bound, kind)] for kind in COMM_KINDS] for bound in BOUNDS]

        def table(name: str) -> Rows:
            arithmetic, memory = (tuple(float(getattr(pair, name)) for pair in row) for row in rows)
            return arithmetic, memory

        return cls(table("held"), table("moving"), table("wire"))


def products_held(hw: DeviceHardware) -> float:
    """What a collective beside a product adds while it holds its SMs, as a share of the product's time.

    Usually as many SMs fewer. Where a product has a block for each SM, those that find none run when the others have
    ended: it takes twice as long, but while half of the SMs' time is idle the power limit does not hold.

    >>> from cost_models.hardware import load_hardware
    >>> round(products_held(load_hardware("h100-sxm")), 3)  # 16 of 132 SMs
    0.138
    """
    fewer = fewer_sms(hw)
    if not fewer or not (hw.software.persistent and hw.gemm.persistent):
        return fewer
    return max(fewer, 2 * hw.gemm.sustained.get("bf16", 1.0) * hw.power_share - 1)


def fewer_sms(hw: DeviceHardware, kind: str = "collective") -> float:
    """What a kernel bound by arithmetic takes longer on the SMs that a message leaves, as a share."""
    sms = hw.comm_sms.get(kind, 0.0)
    return sms / (hw.sms - sms)


def comm_class(kind: MessageKind) -> int:
    """Index into COMM_KINDS."""
    name = {MessageKind.ALL_TO_ALL: "all_to_all", MessageKind.P2P: "p2p"}.get(kind, "collective")
    return COMM_KINDS.index(name)
