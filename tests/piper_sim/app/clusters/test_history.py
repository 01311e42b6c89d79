"""`piper-sim history`: what runs left of their times becomes a table that the backtest reads."""

import struct
from pathlib import Path
from typing import Any

import pytest

MEGATRON = (
    " [2024-05-13 10:00:0{0}] iteration {0:8d}/     500 | consumed samples:         2560 | elapsed time per "
    "iteration (ms): {1} | throughput per GPU (TFLOP/s/GPU): 412.3 | learning rate: 1.000000E-04 |\n"
)
PEAK = "[Rank 0] (after 1 iterations) memory (MB) | allocated: 2048.5 | max allocated: {} | reserved: 50000.0\n"
NEMO = (
    "Training epoch 0, iteration {0}/99 | lr: 0.0003 | global_batch_size: 8 | global_step: {0} | "
    "reduced_train_loss: 11.03 | train_step_timing in s: {1}\n"
)
TITAN = (
    "[rank0]:[titan] 2025-11-02 10:{1:02d}:{2:06.3f} - root - INFO - \x1b[31mstep: {0:2d}  \x1b[32mloss:  8.0313  "
    "\x1b[38;2;54;234;195mmemory: 40.00GiB(50.0%)  \x1b[34mtps: 5,678  \x1b[36mtflops: 300.1  mfu: 30.3%\x1b[39m\n"
)
SECONDS = [60.0, 20.0, 1.25, 1.2, 1.5]


def lines(form: str, scale: float) -> str:
    return "".join(form.format(i + 1, s * scale) for i, s in enumerate(SECONDS))


def titan() -> bytes:
    """A line every second step, at times of day."""
    text, now = "", 0.0
    for i, s in enumerate([0.0, *SECONDS]):
        now += 2 * s
        text += TITAN.format(1 + 2 * i, int(now // 60), now % 60).replace(".", ",", 1)
    return text.encode()


def record(payload: bytes) -> bytes:
    return struct.pack("<QI", len(payload), 0) + payload + struct.pack("<I", 0)


def events() -> bytes:
    """TensorFlow's records of simple values, torchtitan's tags; the last one cut."""
    out = record(b"\x1a\x0dbrain.Event:2")
    tag = b"time_metrics/end_to_end(s)"
    for i, seconds in enumerate(SECONDS):
        value = b"\x0a" + bytes([len(tag)]) + tag + b"\x15" + struct.pack("<f", seconds)
        summary = b"\x0a" + bytes([len(value)]) + value
        event = b"\x09" + struct.pack("<d", 1e9) + b"\x10" + bytes([i + 1]) + b"\x2a" + bytes([len(summary)]) + summary
        out += record(event)
    return out + out[-30:-9]


@pytest.mark.parametrize(
    ("name", "framework", "content"),
    [
        ("a.log", "megatron", (lines(MEGATRON, 1e3) + PEAK.format(30000.0) + PEAK.format(40960.0)).encode()),
        ("b.log", "nemo", lines(NEMO, 1.0).encode()),
        ("bar.log", "nemo", lines(NEMO, 1.0).replace("\n", "\r").encode()),
        ("c.log", "torchtitan", titan()),
        ("events.out.tfevents.1715.node.1.0", "tensorboard", events()),
    ],
)
def test_a_log_becomes_a_row_that_the_backtest_reads(
    cli: Any, tmp_path: Path, name: str, framework: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    where = ["--set", "schedule.name=gpipe", "--out", str(tmp_path)]
    [run] = cli("history", str(tmp_path / name), *where).json["runs"]
    assert run["framework"] == framework and run["steps"] == 3
    assert run["iteration_s"] == pytest.approx(1.25)
    # What torchtitan's line calls memory is `max_reserved_gib` (components/metrics.py), more than what was allocated.
    assert run["peak_allocated_GiB"] == (40 if name == "a.log" else None)
    job = '[model]\nconfig = "tiny-llama"\nseq_len = 64\n[history]\nfile = "past_runs.csv"\n'
    (tmp_path / "job.toml").write_text(job)
    past = cli("simulate", str(tmp_path / "job.toml")).json["history"]
    assert [r["measured_s"] for r in past["runs"]] == [pytest.approx(1.25)]


def test_logs_that_tell_no_time_are_refused(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "none.log").write_text("step: 10 loss: 8.0 tps: 1,234\n")
    done = cli("history", str(tmp_path / "none.log"))
    assert done.code == 2 and done.error["file"] == str(tmp_path / "none.log")
    (tmp_path / "short.log").write_text(MEGATRON.format(1, 1000.0))
    error = cli("history", str(tmp_path / "short.log")).error
    assert error["key"] == "--skip" and error["file"].endswith("short.log")
    assert cli("history", str(tmp_path / "short.log"), "--skip", "-1").error["key"] == "--skip"
    assert cli("history", str(tmp_path / "short.log"), "--skip", "0").json["runs"][0]["iteration_s"] == 1.0
