"""What a framework copies beside messages of divided weights: out of what was gathered, and into what is reduced.

FSDP2 gathers a layer into one buffer, and copies each parameter out of it before the layer runs; it copies the layer's
gradients into another, in the format that is reduced. Both are kernels of the compute stream, and cost HBM.
"""

import numpy as np

from cost_models.compute.roofline import memory_seconds
from cost_models.hardware import DeviceHardware
from ir.core.order import FloatArray, IntArray
from ir.core.work import DType, Message, MessageKind
from ir.plan.kept import once_per_plan
from ir.plan.plan import OpKind, Plan


def copy_seconds(plan: Plan, hw: DeviceHardware, made: DType, reduced: DType) -> FloatArray:
    """[op] seconds that a compute op takes longer by the copies beside it.

    made, reduced: formats of gradients as backward makes them, and as they travel.
    """
    ops, which, messages = _copied(plan)
    each = np.array([_seconds(m, hw, made, reduced) for m in messages])
    return np.asarray(np.bincount(ops, each[which] if len(ops) else None, minlength=len(plan)), dtype=np.float64)


def _seconds(message: Message, hw: DeviceHardware, made: DType, reduced: DType) -> float:
    gathers = message.kind is MessageKind.ALL_GATHER
    casts = not gathers and made is not reduced
    read = message.bytes if gathers else message.bytes * made.bytes // reduced.bytes
    return memory_seconds(read + message.bytes, hw) / (hw.cast_efficiency if casts else hw.software.copies)


@once_per_plan
def _copied(plan: Plan) -> tuple[IntArray, IntArray, list[Message]]:
    """(compute ops that copy, of which message each, messages that differ).

    Gathered weights are copied by whoever waits for them first, or where nobody does in this step by the op before, as
    gradients are.
    """
    kinds = (MessageKind.ALL_GATHER, MessageKind.REDUCE_SCATTER)
    found = {k: s.message for k, s in enumerate(plan.shapes) if s.bucket and s.message and s.message.kind in kinds}
    number = {m: k for k, m in enumerate(dict.fromkeys(found.values()))}
    ops = np.flatnonzero(np.isin(plan.shape, list(found)))
    compute = np.flatnonzero(plan.kind == OpKind.COMPUTE)
    before = compute[np.maximum(np.searchsorted(compute, ops) - 1, 0)]
    waiting = np.full(len(plan), len(plan), dtype=np.int64)
    rows = plan.waits.rows()
    mine = plan.kind[rows] == OpKind.COMPUTE
    np.minimum.at(waiting, plan.waits.items[mine], rows[mine])
    gathers = np.array([found[s].kind is MessageKind.ALL_GATHER for s in plan.shape[ops].tolist()], dtype=np.bool_)
    at = np.where(gathers & (waiting[ops] < len(plan)), waiting[ops], before)
    return at, np.array([number[found[s]] for s in plan.shape[ops].tolist()], dtype=np.int64), list(number)
