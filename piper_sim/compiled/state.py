"""What the event loop works on: its tables, and the state of streams, meetings and programs."""

from typing import NamedTuple

import numpy as np

from ir.core.order import BoolArray, FloatArray, IntArray
from piper_sim.compiled.net import OpNet
from piper_sim.engine.scenario import KernelInterference


class OpRates(NamedTuple):
    """Who slows whom, by op class: `KernelInterference` as the kernels take it."""

    kind: IntArray
    held: FloatArray
    moving: FloatArray
    wire: FloatArray


class StreamState(NamedTuple):
    """By stream. meeting: the one under way, -1 for none. pace: the rate its own program allows it.

    clock: of a host, when its last dispatch was or will be.
    """

    meeting: IntArray
    pace: FloatArray
    clock: FloatArray


class CollectiveState(NamedTuple):
    """By meeting; until, heap and where are the heap of ends. touched: its pace changed in this settling.

    In the heap stand the meetings under way, and the dispatches, known in advance, that streams wait for.
    """

    come: IntArray
    left: FloatArray
    since: FloatArray
    rate: FloatArray
    until: FloatArray
    heap: IntArray
    where: IntArray
    touched: BoolArray


class RankEngineState(NamedTuple):
    """How many ops of each class are in flight on each program, and whether its rates must be looked at."""

    held: IntArray
    moving: IntArray
    computing: IntArray
    dirty: BoolArray


class EngineWorkLists(NamedTuple):
    """Streams to look at, programs that are dirty, meetings touched; size: of these and of the heap."""

    todo: IntArray
    dirty: IntArray
    touched: IntArray
    size: IntArray


TODO, DIRTY, TOUCHED, HEAP = 0, 1, 2, 3


def rates(slow: KernelInterference | None, ops: int) -> OpRates:
    """The tables; without any, one class of each kind and no slowdown."""
    if slow is None:
        return OpRates(np.zeros(ops, dtype=np.int64), *np.zeros((3, 1, 1)))
    held, moving, wire = (np.ascontiguousarray(x, dtype=np.float64) for x in (slow.held, slow.moving, slow.wire))
    return OpRates(np.ascontiguousarray(slow.kind, dtype=np.int64), held, moving, wire)


def fresh(net: OpNet, rates: OpRates) -> tuple[StreamState, CollectiveState, RankEngineState, EngineWorkLists]:
    """Nothing has happened."""
    streams, meetings, programs = len(net.queue_at) - 1, len(net.work), len(net.lane_at) - 1
    computes, comms = rates.held.shape

    def ints(size: int, value: int = 0) -> IntArray:
        return np.full(size, value)

    def counts(classes: int) -> IntArray:
        return np.zeros((programs, classes), dtype=np.int64)

    left, since, rate, until = np.zeros((4, meetings))
    return (
        StreamState(ints(streams, -1), *np.zeros((2, streams))),
        CollectiveState(
            ints(meetings), left, since, rate, until, ints(streams), ints(meetings, -1), np.zeros(meetings, np.bool_)
        ),
        RankEngineState(counts(comms), counts(comms), counts(computes), np.zeros(programs, np.bool_)),
        EngineWorkLists(np.arange(streams)[::-1].copy(), ints(programs), ints(streams), np.array([streams, 0, 0, 0])),
    )
