"""A run's steps for TensorBoard, by tensorboardX: an event file that grows with every step that is told."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ir.core.errors import ErrorKind, PiperError, check_installed
from piper_sim.report.metrics import GAUGES

FLUSH_S = 2
StepEvents = Callable[[Mapping[str, float]], None]


@contextmanager
def step_events(folder: Path) -> Iterator[StepEvents]:
    """What takes a step's line, and notes each of `GAUGES` that the line has as a scalar of its name.

    What another run has noted there of its first step and later ones is hidden: it goes on from a checkpoint.

    Raises PiperError (missing_dependency): tensorboardX is not installed; (io): the folder cannot be made.
    """
    check_installed("tensorboardX", "tensorboard", "event files of TensorBoard")
    from tensorboardX import SummaryWriter

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        message = f"cannot be made: {e.strerror}"
        raise PiperError(ErrorKind.IO, message, file=str(folder), key="--tensorboard") from None
    writer: Any = None  # until the first step, from which on it hides

    def note(line: Mapping[str, float]) -> None:
        nonlocal writer
        step = int(line["step"])
        if writer is None:  # its own name has seconds alone: of two runs within one, the later would overwrite
            mine = f".{os.getpid()}.{step}"
            writer = SummaryWriter(str(folder), purge_step=step, flush_secs=FLUSH_S, filename_suffix=mine)
        for name, (key, _) in GAUGES.items():
            if key in line and key != "step":
                writer.add_scalar(name, line[key], step)

    try:
        yield note
    finally:
        if writer is not None:
            writer.close()
