"""What a training run left of its steps' times: logs of Megatron-LM, NeMo and torchtitan, TensorBoard's event files."""

import math
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

from ir.core.errors import ErrorKind, job_error
from ir.core.files import FileErrors, read_bytes

LOG = FileErrors("a log or an event file of a training run", ErrorKind.JOB, "LOG", 2 * 10**9, "what the run printed")
_NUMBER = r"(\d{1,15}(?:\.\d{0,15})?(?:[eE][-+]?\d{1,2})?)"
# (framework, a line of it, seconds of its unit). Megatron: training_log of its training.py; NeMo: its progress bar.
_MEGATRON = rf"iteration\s+(\d{{1,9}})\s*/.{{0,200}}elapsed time per iteration \(ms\): {_NUMBER}"
_NEMO = rf"global_step[:=]\s*(\d{{1,9}})[^\r\n]{{0,400}}train_step_timing in s[:=]\s*{_NUMBER}"
_LINES = (("megatron", re.compile(_MEGATRON), 1e-3), ("nemo", re.compile(_NEMO), 1.0))
# torchtitan's logger writes when; its metrics line tells no seconds of a step, so they lie between two lines. What that
# calls memory is reserved, not allocated.
_TITAN = re.compile(r"\[titan\] (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) .{0,200}step:\s{0,9}(\d{1,9})\s.{0,200}tps:")
_PEAK = re.compile(rf"memory \(MB\).{{0,200}}max allocated: {_NUMBER}")
_TAGS = {
    "iteration-time": 1.0,
    "time_metrics/end_to_end(s)": 1.0,
    "train_step_timing in s": 1.0,
    "step_seconds": 1.0,  # of our own `run --tensorboard`
}
_PEAK_TAGS = {"mem-max-allocated-bytes": 2.0**-30, "memory/max_active(GiB)": 1.0}


@dataclass(frozen=True)
class LoggedSteps:
    """Seconds of the steps that a run told of, in order, and its peak where it says it. framework: whose words."""

    framework: str
    steps: tuple[tuple[int, float], ...]
    peak_GiB: float | None = None

    def usual(self, skip: int) -> tuple[float, int]:
        """Median seconds, and how many steps it is of: all but the first `skip`.

        Raises PiperError (job): none is left.
        """
        kept = [s for _, s in self.steps[skip:]]
        if not kept:
            message, allowed = f"{len(self.steps)} steps told of, {skip} left out", "more steps than --skip"
            raise job_error("--skip", message, "--skip 0", allowed)
        return median(kept), len(kept)


def read_log(path: str) -> LoggedSteps:
    """A text log or a TensorBoard event file. Raises PiperError (io, job): it says no step's time."""
    raw = read_bytes(path, LOG)
    binary = "tfevents" in Path(path).name
    found = _events(raw) if binary else _text(raw.decode("utf-8", "replace"))
    if not found.steps:
        texts = ["elapsed time per iteration (ms): …", "train_step_timing in s: …"]
        allowed = ", ".join(list(_TAGS) if binary else texts)
        raise LOG.wrong("no step's time in it", path, None, allowed, "its TensorBoard event file")
    return found


def _text(text: str) -> LoggedSteps:
    """The framework whose lines are most; a step told by several ranks counts once.

    >>> _text(" iteration        7/     500 | elapsed time per iteration (ms): 1250.0 | lm loss").steps
    ((7, 1.25),)
    """
    told = {name: {int(m[1]): float(m[2]) * unit for m in form.finditer(text)} for name, form, unit in _LINES}
    told["torchtitan"] = _between(text)
    name = max(told, key=lambda n: len(told[n]))
    peaks = [float(m[1]) / 1024 for m in _PEAK.finditer(text)]  # MB there are MiB
    steps = {k: s for k, s in told[name].items() if math.isfinite(s) and s > 0}
    return LoggedSteps(name, tuple(sorted(steps.items())), max(peaks, default=None))


def _between(text: str) -> dict[int, float]:
    """Mean seconds of the steps since the line before, by step: what else they waited for, a checkpoint, is in them."""
    at: dict[int, datetime] = {}
    for m in _TITAN.finditer(text):
        with suppress(ValueError):  # no such day
            at.setdefault(int(m[2]), datetime.strptime(m[1], "%Y-%m-%d %H:%M:%S,%f"))
    pairs = pairwise(sorted(at.items()))
    return {b: (end - start).total_seconds() / (b - a) for (a, start), (b, end) in pairs}


def _events(raw: bytes) -> LoggedSteps:
    steps: dict[int, float] = {}
    peaks: list[float] = []
    for step, tag, value in _scalars(raw):
        if tag in _TAGS and math.isfinite(value) and value > 0:
            steps[step] = value * _TAGS[tag]
        elif tag in _PEAK_TAGS and math.isfinite(value):
            peaks.append(value * _PEAK_TAGS[tag])
    return LoggedSteps("tensorboard", tuple(sorted(steps.items())), max(peaks, default=None))


def _scalars(raw: bytes) -> Iterator[tuple[int, str, float]]:
    """(step, tag, value) of TensorFlow's records: length, checksum, Event, checksum. A cut last record is left out."""
    at = 0
    while at + 12 <= len(raw):
        (size,) = struct.unpack_from("<Q", raw, at)
        event = raw[at + 12 : at + 12 + size]
        if len(event) < size:
            return
        at += size + 16
        fields = list(_fields(event))
        step = next((v for k, v in fields if k == 2 and isinstance(v, int)), 0)
        for summary in (v for k, v in fields if k == 5 and isinstance(v, bytes)):
            for value in (v for k, v in _fields(summary) if k == 1 and isinstance(v, bytes)):
                if (found := _scalar(value)) is not None:
                    yield step, *found


def _scalar(value: bytes) -> tuple[str, float] | None:
    """Summary.Value: tag 1, simple_value 2, or tensor 8 with float_val 5 or tensor_content 4."""
    fields = dict(_fields(value))
    tag, plain, tensor = fields.get(1), fields.get(2), fields.get(8)
    if isinstance(tensor, bytes):
        inner = dict(_fields(tensor))
        plain = inner.get(5, inner.get(4))
    if not isinstance(tag, bytes) or not isinstance(plain, bytes) or len(plain) != 4:
        return None
    return tag.decode("utf-8", "replace"), float(struct.unpack("<f", plain)[0])


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of a protobuf message: whole numbers, else bytes. It ends where the message is none."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            size, at = _varint(data, at)
        if size is None or at + size > len(data):
            return
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            break
    return value, at
