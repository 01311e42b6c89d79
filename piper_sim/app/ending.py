"""How a command ends when it cannot as it should: told to, by a mistake of ours, with streams that nobody reads."""

import codecs
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from ir.core.errors import ErrorKind, PiperError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_OURS = ("ir", "cost_models", "piper_sim", "executor")


def unexpected(e: Exception, args: Sequence[str]) -> PiperError:
    """A mistake of ours, as an error that can be reported; or a package that is there, and broken. args: the command's.
    PIPER_DEBUG=1 shows the traceback.
    """
    if os.environ.get("PIPER_DEBUG") == "1":
        traceback.print_exception(e)
    frames = traceback.extract_tb(e.__traceback__)
    if _is_lost():
        message = "the folder that it was started in is gone"
        return PiperError(ErrorKind.IO, message, key="cwd", suggestion="cd to one that is there")
    if isinstance(e, ImportError) and (e.name or "").partition(".")[0] not in _OURS:
        what = (e.name or Path(frames[-1].filename).parent.name).partition(".")[0]
        message, fix = f"{what} cannot be loaded: {e.msg}", f"install {what} anew, for this Python and this machine"
        return PiperError(ErrorKind.MISSING_DEPENDENCY, message, key=what, suggestion=fix)
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    said = str(e).partition("\n")[0][:200]
    return PiperError(
        ErrorKind.JOB,
        f"piper-sim made a mistake: {type(e).__name__}: {said}{at}",
        file=next((a for a in args if a.endswith(".toml")), None),
        key="piper-sim",
        allowed="an answer, or an error that says what to mend",
        suggestion="report this line with the job to piper-sim's issues; PIPER_DEBUG=1 shows the traceback",
    )


def _is_lost() -> bool:
    """Whether the folder that we stand in has been removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


# One letter for one, so that columns stay: yes and no must differ on any terminal.
PLAIN = str.maketrans("✓✗–−…→·×µ─", "yn--.>,xu-")


def plainly(e: UnicodeError) -> tuple[str, int]:
    """A codec's error handler: what an encoding lacks by its nearest ASCII letter, else a question mark.

    >>> "2 µs · ✗ …".encode("ascii", "piper_sim.plainly")
    b'2 us , n .'
    """
    if not isinstance(e, UnicodeEncodeError):
        raise e
    lacked = e.object[e.start : e.end].translate(PLAIN)
    return "".join(x if x.isascii() else "?" for x in lacked), e.end


codecs.register_error("piper_sim.plainly", plainly)


class _Lossy(io.FileIO):
    """What cannot be written, on a full disk or to a reader that has left, is lost; the work it told of goes on."""

    def write(self, data: "ReadableBuffer") -> int:
        written: int | None = None  # nothing, where the reader of a pipe that does not block is slow
        with suppress(OSError):
            written = super().write(data)
        return memoryview(data).nbytes if written is None else written


def open_streams() -> None:
    """Streams to write on: closed ones lead nowhere, letters that a terminal lacks become plainer ones, and what is
    said of work on its way never ends it.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  (stays open)
        elif name == "stderr" and (own := sys.__stderr__) is sys.stderr and own is not None:  # no test's, or notebook's
            raw = io.BufferedWriter(_Lossy(own.fileno(), "w", closefd=False))
            sys.stderr = io.TextIOWrapper(raw, own.encoding, "piper_sim.plainly", line_buffering=True)
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="piper_sim.plainly")


def abandon(stream: TextIO) -> None:
    """Nobody reads on, or nothing more fits: what is left to write leads nowhere."""
    with suppress(OSError, ValueError):  # what is left in the buffer would fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def told(text: str, stream: TextIO) -> bool:
    """Print a last line, where that can be; whether it could."""
    try:
        print(text, file=stream, flush=True)
    except OSError:
        abandon(stream)
        return False
    return True


@contextmanager
def unwinding() -> Iterator[None]:
    """SIGTERM ends this as Ctrl-C does, so that processes and temporary files go with it; exit code 143."""

    def leave(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
