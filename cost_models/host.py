"""What dispatching an op costs the host, and how far it may run ahead. First version: estimates, to be measured."""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.compute import quantise
from cost_models.hardware import Hardware

WINDOW = 1024
UPDATE_LAUNCHES = 4
COMM_LAUNCHES = 3


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds of one kernel launch and of one communication call; kernels that may be launched and not yet ended.

    launch: eager dispatch of one kernel (hardware key host_launch_us). comm: a call, with the events around it, as
    COMM_LAUNCHES launches. window: the CUDA launch queue holds about a thousand kernels; then a launch blocks.
    Multiples of 2**-40. All estimates.
    """

    launch: float
    comm: float
    window: int = WINDOW

    @classmethod
    def of(cls, hw: Hardware) -> HostCosts:
        """From a hardware file.

        >>> from cost_models.hardware import load_hardware
        >>> round(1e6 * HostCosts.of(load_hardware("h100-sxm")).comm, 3)
        15.0
        """
        launch = quantise(hw.host_launch_us * 1e-6)
        return cls(launch, COMM_LAUNCHES * launch)
