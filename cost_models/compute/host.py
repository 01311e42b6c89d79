"""What dispatching an op costs the host, and how far it may run ahead. First version: estimates, to be measured."""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.hardware import DeviceHardware
from ir.core.grid import quantise

WINDOW = 1024
UPDATE_LAUNCHES = 4
COMM_LAUNCHES = 3


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds of one kernel launch and of one communication call; kernels that may be launched and not yet ended.

    launch: eager dispatch of one kernel (hardware key host_launch_us, or the framework's). comm: a call, with the
    events around it, as COMM_LAUNCHES launches. window: the CUDA launch queue holds about a thousand kernels; then a
    launch blocks. turn: of a framework that waits for the device at each transfer between stages, what it then needs
    before the next pass; 0: it runs ahead. graphs: what CUDA graphs cover, as in `[costs] cuda_graphs`.
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
        software = hw.software
        launch = quantise((hw.host_launch_us if software.launch_us is None else software.launch_us) * 1e-6)
        if graphs == "step":
            return cls(0.0, 0.0, graphs=graphs)
        return cls(launch, COMM_LAUNCHES * launch, turn=quantise(software.turn_us * 1e-6), graphs=graphs)
