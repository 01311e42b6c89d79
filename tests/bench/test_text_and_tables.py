"""What writing a trace, reading it and emitting a schedule cost, as ratios to plain loops on the same machine."""

import json
import math
import time
from collections.abc import Callable

import numpy as np

from ir.schedules.registry import build
from ir.trace.text import parse_trace, write_trace
from ir.trace.trace import Trace


def ratio(one: Callable[[], object], yardstick: Callable[[], object], rounds: int = 3) -> float:
    """Processor seconds of the one in those of the other; they take turns, and each one's least counts."""
    least = [math.inf, math.inf]
    for _ in range(rounds):
        for i, work in enumerate((one, yardstick)):
            begun = time.process_time()
            work()
            least[i] = min(least[i], time.process_time() - begun)
    return least[0] / least[1]


def test_a_large_table_costs_less_than_a_list_of_its_cells() -> None:
    def table() -> None:
        assert sum(map(len, build("1f1b", 64, 1024).orders)) == 131_072

    assert ratio(table, lambda: [f"{s}{p}{m}" for s in range(64) for m in range(1024) for p in "FB"]) < 1.0


def test_a_trace_is_written_and_read_at_a_few_times_what_json_needs() -> None:
    n = 50_000
    start, zeros = np.arange(n) * math.pi, np.zeros(n, np.int64)
    trace = Trace({}, zeros, zeros, ["compute"] * n, [f"0F{i}" for i in range(n)], start, start, start + 1 / 3)
    rows = [[0, 0, "compute", f"0F{i}", s, s, s + 1 / 3] for i, s in enumerate(start.tolist())]
    assert ratio(lambda: parse_trace(write_trace(trace)), lambda: json.loads(json.dumps(rows))) < 5
