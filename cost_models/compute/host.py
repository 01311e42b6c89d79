"""What dispatching an op costs the host, and how far it may run ahead. First version: estimates, to be measured."""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.hardware import DeviceHardware
from ir.core.grid import quantise

WINDOW = 1024
UPDATE_LAUNCHES = 4
COMM_LAUNCHES = 3


def host_seconds(us: float, hw: DeviceHardware) -> float:
    """What takes an x86 host so long, on this one.

    >>> from cost_models.hardware import load_hardware
    >>> [round(1e6 * host_seconds(10, load_hardware(name))) for name in ("h100-sxm", "gb200-nvl72")]
    [10, 27]
    """
    return us * 1e-6 / hw.host_speed


def launch_seconds(hw: DeviceHardware) -> float:
    """What the host needs to launch a kernel: the hardware file's value, or the framework's on such a host."""
    own = hw.software.launch_us
    return hw.host_launch_us * 1e-6 if own is None else host_seconds(own, hw)


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds of one kernel launch and of one communication call; kernels that may be launched and not yet ended.

    launch: eager dispatch of one kernel (`launch_seconds`). comm: a call, with the events around it, as COMM_LAUNCHES
    launches. window: the CUDA launch queue holds about a thousand kernels; then a launch blocks. turn: of a framework
    that waits for the device at each transfer between stages, what it then needs before the next pass; 0: it runs
    ahead. graphs: what CUDA graphs cover, as in `[costs] cuda_graphs`.
    Multiples of 2**-40. All estimates.
    """

    launch: float
    comm: float
    window: int = WINDOW
    turn: float = 0.0
    graphs: str = "none"

    @classmethod
    def of(cls, hw: DeviceHardware, graphs: str = "none") -> HostCosts:
        """From a hardware file.

        >>> from cost_models.hardware import load_hardware
        >>> round(1e6 * HostCosts.of(load_hardware("h100-sxm")).comm, 3)
        15.0
        """
        if graphs == "step":
            return cls(0.0, 0.0, graphs=graphs)
        launch = quantise(launch_seconds(hw))
        return cls(launch, COMM_LAUNCHES * launch, turn=quantise(hw.software.turn_us * 1e-6), graphs=graphs)
