"""Time: one clock, and how to wait for a moment of it without missing it by a scheduler's tick."""

import time
from collections.abc import Callable

SPIN_S = 0.0003  # a sleeping thread wakes this late at most, on a machine that is not overloaded
TICK_S = 1.0


now = time.monotonic  # seconds on this machine's monotonic clock, which its processes share


def sleep_until(moment_s: float, tick: Callable[[], None] = lambda: None) -> None:
    """Sleep, then spin for the last fraction of a millisecond. tick: called about once a second meanwhile.

    >>> end = now() + 0.002; sleep_until(end); now() >= end
    True
    """
    while (left := moment_s - now()) > 0:
        if left > TICK_S:
            time.sleep(TICK_S - SPIN_S)
            tick()
        else:
            time.sleep(left - SPIN_S if left > SPIN_S else 0)  # 0 lets other threads have the interpreter
