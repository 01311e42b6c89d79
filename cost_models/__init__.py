"""Work to seconds and bytes: hardware files, compute, links, optimizer, memory. No SimPy, no torch.

Every number from here is **modelled**: none was measured on the machine of the job. What it is modelled from:

| module | from what to what | grounded in |
|---|---|---|
| `hardware` | a preset or file to a checked `DeviceHardware` | datasheets; each value names its source |
| `compute` | a kernel to seconds: roofline, tiles, waves | DeepSeek-V3's profile (H800), Zero Bubble's Table 6 (A100) |
| `protocols`, `links` | a message to seconds: alpha-beta, two tiers | NCCL's tuner, nccl-tests, DeepEP's README |
| `optimizer` | a precision recipe to bytes per parameter and the update's traffic | exact sizes; one fused pass |
| `memory` | allocated bytes to reserved and device bytes | rounding rules of the CUDA allocator; a band |

One file per GPU, fitted once; nothing is tuned per model, cluster or row. The fits are checked in tests/cost_models.
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
