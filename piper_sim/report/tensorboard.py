"""A run's steps for TensorBoard, by tensorboardX: an event file that grows with every step that is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ir.core.errors import ErrorKind, PiperError
from piper_sim.report.metrics import GAUGES

FLUSH_S = 2
StepEvents = Callable[[Mapping[str, float]], None]


@contextmanager
def step_events(folder: Path) -> Iterator[StepEvents]:
    """What takes a step's line, and notes each of `GAUGES` that the line has as a scalar of its name, and `eval_loss`.

    What another run has noted there of its first step and later ones is hidden: it goes on from a checkpoint.

    Raises PiperError (missing_dependency): tensorboardX is not installed; (io): the folder cannot be made.
    """
    if find_spec("tensorboardX") is None:
        message, fix = "event files of TensorBoard need tensorboardX", "pip install 'piper-sim[tensorboard]'"
        raise PiperError(ErrorKind.MISSING_DEPENDENCY, message, key="tensorboardX", suggestion=fix)
    from tensorboardX import SummaryWriter

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        message = f"cannot be made: {e.strerror}"
        raise PiperError(ErrorKind.IO, message, file=str(folder), key="--tensorboard") from None
    writers: list[Any] = []

    def note(line: Mapping[str, float]) -> None:
        step = int(line["step"])
        if not writers:
            writers.append(SummaryWriter(str(folder), purge_step=step, flush_secs=FLUSH_S))
        names = {name: key for name, (key, _) in GAUGES.items() if name != "step"} | {"eval_loss": "eval_loss"}
        for name, key in names.items():
            if key in line:
                writers[0].add_scalar(name, line[key], step)

    try:
        yield note
    finally:
        for writer in writers:
            writer.close()
