"""Work to seconds and bytes: hardware files, compute, links, optimizer, memory. No SimPy, no torch.

Every number from here is **modelled**, but for profiles: none was measured on the machine of the job. One file per GPU,
fitted once, each value with its source; nothing is tuned per model, cluster or row. The fits are checked in
tests/cost_models; docs/COSTS.md says what they are grounded in.
"""

from cost_models.compute.optimizer import OptimizerMemory, OptimizerPrecision, state_bytes
from cost_models.compute.roofline import kernel_seconds, work_seconds
from cost_models.hardware import DeviceHardware, load_hardware, presets
from cost_models.links.fabric import LinkFabric, message_seconds

__all__ = [
    "DeviceHardware",
    "LinkFabric",
    "OptimizerMemory",
    "OptimizerPrecision",
    "kernel_seconds",
    "load_hardware",
    "message_seconds",
    "presets",
    "state_bytes",
    "work_seconds",
]
