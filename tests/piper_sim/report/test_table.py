"""Tables: fastest first, what does not fit last, nothing read as markup."""

import io
import math

from rich.console import Console

from piper_sim.report.table import compare_cells, compare_table, memory_cells, memory_table
from piper_sim.report.units import count, gib, percent, seconds, size

GIB = 2**30


def shown(table: object, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(table)
    return out.getvalue()


ROWS = [
    {"schedule": "zb1p", "iteration_s": 9.0, "fits": False, "reason": "rank 0 needs 91.0 GiB of [bold]78.0 GiB"},
    {"schedule": "zbv", "iteration_s": None, "fits": False, "reason": "61 layers on 64 stages"},
    {"schedule": "1f1b", "iteration_s": 16.21, "fits": True, "mfu": 0.312, "bubble_fraction": 0.2},
    {
        "schedule": "interleaved-1f1b",
        "iteration_s": 12.9,
        "fits": True,
        "tokens_per_s_per_gpu": 2240.7,
        "exposed_comm_s": 0.125,
        "memory": {"device_peak_bytes": {"0": 60 * GIB, "7": 70.25 * GIB, "15": 70.25 * GIB}},
    },
]


def test_rows_stand_by_step_time_and_infeasible_ones_last() -> None:
    cells = compare_cells(ROWS)
    assert [c["schedule"] for c in cells] == ["interleaved-1f1b", "1f1b", "zb1p", "zbv"]
    assert cells[0]["peak GiB (rank)"] == "70.2 (7)"
    assert [c["step s"] for c in cells] == ["12.900", "16.210", "9.000", "–"]


def test_what_a_search_changed_is_wrapped_and_no_number_is_cut() -> None:
    text = shown(compare_table([ROWS[3] | {"schedule": " ".join(f"key{i}=value" for i in range(9))}]))
    assert "key8=value" in text and "12.90" in text and "70.2 (7)" in text and "…" not in text


def test_the_comparison_fits_80_columns_and_keeps_brackets() -> None:
    text = shown(compare_table(ROWS))
    assert "interleaved-1f1b" in text
    assert "2 241" in text
    assert "zb1p: rank 0 needs 91.0 GiB of [bold]78.0 GiB" in text
    assert "…" not in text


def test_memory_shows_who_does_not_fit() -> None:
    memory = {
        "capacity_bytes": 80 * GIB,
        "margin_bytes": 2 * GIB,
        "device_peak_bytes": {"0": 79 * GIB, "10": 40 * GIB, "2": 60 * GIB},
        "breakdown_bytes": {r: {"parameters": 20 * GIB, "activations": 20 * GIB} for r in ("0", "10", "2")},
    }
    cells = memory_cells(memory)
    assert [(c["rank"], c["headroom"]) for c in cells] == [("0", "-1.0"), ("2", "18.0"), ("10", "38.0")]
    text = shown(memory_table(memory, "memory"), 100)
    assert "PPPPPPAAAAAA............" in text
    assert "grads" not in text, "empty columns are left out"
    assert memory_cells({}) == []
    assert shown(memory_table({"breakdown_bytes": None}))


def test_numbers_as_people_read_them() -> None:
    assert [seconds(x) for x in (0.9996, 0.99949, 1e-9, -2.5e-5, 123.4)] == ["1 s", "999 ms", "1 ns", "-25 µs", "123 s"]
    assert seconds(math.inf) == count(math.nan) == percent(math.nan) == "–"
    assert [size(x) for x in (1023, 2**20, 3.5 * 2**40)] == ["1023 B", "1.0 MiB", "3.5 TiB"]
    assert gib(0) == "0.0"


def test_a_table_of_memory_is_whole_at_80_columns() -> None:
    parts = ("parameters", "gradients", "optimizer", "activations", "buffers", "workspace", "context")
    row = {name: 10.5 * GIB for name in parts}
    memory = {"breakdown_bytes": {"127": row}, "cache_bytes": {"127": 0.33 * GIB}, "capacity_bytes": 79 * GIB}
    text = shown(memory_table(memory))
    assert "…" not in text and text.count("10.5") == len(parts) and "headroom" in text
