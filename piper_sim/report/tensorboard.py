"""A run's steps for TensorBoard, by tensorboardX: an event file that grows with every step that is told."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ir.core.errors import ErrorKind, PiperError, check_installed
from ir.core.files import writing
from piper_sim.report.metrics import GAUGES

FLUSH_S = 2.0
StepEvents = Callable[[Mapping[str, float]], None]


@contextmanager
def step_events(folder: Path) -> Iterator[StepEvents]:
    """What takes a step's line, and notes each of `GAUGES` that the line has as a scalar of its name.

    What another run has noted there of its first step and later ones is hidden: it goes on from a checkpoint.

    Raises PiperError (missing_dependency): tensorboardX is not installed; (io): the folder cannot be made, or written.
    """
    check_installed("tensorboardX", "tensorboard", "event files of TensorBoard")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        message = f"cannot be made: {e.strerror}"
        raise PiperError(ErrorKind.IO, message, file=str(folder), key="--tensorboard") from None
    file: _EventsFile | None = None  # until the first step, from which on it hides

    def note(line: Mapping[str, float]) -> None:
        nonlocal file
        with writing(folder, "--tensorboard"):
            file = file or _EventsFile(folder, int(line["step"]))
            file.add(line)

    try:
        yield note
    except BaseException:
        if file is not None:
            with suppress(OSError):  # what went wrong is on its way
                file.writer.close()
        raise
    if file is not None:
        with writing(folder, "--tensorboard"):
            file.writer.close()


class _EventsFile:
    """An event file, written by who notes: the library's own thread dies of a full disk, and its queue waits for it."""

    def __init__(self, folder: Path, first: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        # its own name has seconds alone: of two runs within one, the later would overwrite
        self.writer: Any = EventsWriter(str(folder / "events"), f".{os.getpid()}.{first}")
        self._flushed_s = 0.0
        self._put(first, file_version="brain.Event:2")
        self._put(first, session_log=SessionLog(status=SessionLog.START))

    def add(self, line: Mapping[str, float]) -> None:
        from tensorboardX.summary import scalar

        for name, (key, _) in GAUGES.items():
            if key in line and key != "step":
                self._put(int(line["step"]), summary=scalar(name, line[key]))
        if time.monotonic() - self._flushed_s > FLUSH_S:
            self.writer.flush()
            self._flushed_s = time.monotonic()

    def _put(self, step: int, **what: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self.writer.write_event(Event(wall_time=time.time(), step=step, **what))
