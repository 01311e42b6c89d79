"""A small process that has imported torch once and forks ranks on demand; it never runs the user's main module.

What all ranks of a run are given, it reads once, and they inherit. Requests and events are JSON lines over one socket.
When the socket closes, every child is killed and the server ends; when the server dies, the kernel kills the children
(PR_SET_PDEATHSIG). So no process outlives the one that asked for it. Why it is not torch's own, says ARCHITECTURE.md.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Container
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

_ROOT = str(Path(__file__).resolve().parents[2])
_PR_SET_PDEATHSIG = 1
_KEEP = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class RankServerGone(ConnectionError):
    """The fork server has died, and its children with it."""


class RankServerLines:
    """One end of the socket: a JSON object a line."""

    def __init__(self, end: socket.socket) -> None:
        self.end, self._rest = end, b""

    def send(self, **message: Any) -> None:
        """One object. Raises RankServerGone: nobody is at the other end."""
        try:
            self.end.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise RankServerGone("the fork server has died") from error

    def receive(self) -> list[dict[str, Any]]:
        """Those that have come, waiting for some. Raises RankServerGone: nobody is at the other end."""
        try:
            data = self.end.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            raise RankServerGone("the fork server has died")
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


def search_path() -> list[str]:
    """Where this process finds modules, without the working directory, which holds the user's files."""
    return [whole for p in sys.path if p and (whole := os.path.abspath(p)) != os.getcwd()]


def _stderr() -> int:
    """Where this process' errors go, by its number: one that was closed at the start is opened, and not inherited."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


class RankForkServer(RankServerLines):
    """The parent's end. One per process, started at first use: who will launch something asks before it imports torch,
    which the server then imports meanwhile.

    >>> server = RankForkServer.get(); server is RankForkServer.get()
    True
    """

    _one: RankForkServer | None = None
    lock = threading.RLock()

    @classmethod
    def get(cls) -> RankForkServer:
        with cls.lock:
            if cls._one is None or cls._one.owner != os.getpid() or cls._one.process.poll() is not None:
                if cls._one is not None:
                    cls._one.close()
                cls._one = cls()
            return cls._one

    def __init__(self) -> None:
        self.owner, self._asked = os.getpid(), False
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        # Isolated (-I): neither the working directory nor PYTHONPATH comes before Python's own library. Behind that is
        # all where this process looks, in its order: what is found in two places is the same one. The collector is let
        # in behind the imports, whose time it would make a third longer.
        code = (
            "import gc, os, sys; gc.disable(); own = os.path.dirname(os.__file__); "
            "mine = [p for p in sys.path if p == own or p.endswith(('.zip', 'lib-dynload'))]; "
            f"theirs = {search_path()!r}; theirs[:0] = [] if {_ROOT!r} in theirs else [{_ROOT!r}]; "
            "sys.path[:] = dict.fromkeys([*mine, *theirs, *sys.path]); "
            f"from executor.launch.forkserver import RankServer; RankServer({theirs.fileno()}).serve()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=(said := _stderr()),
            stderr=said,
            env={**os.environ, **_KEEP},
            start_new_session=True,
        )
        theirs.close()
        atexit.register(self.close)

    def send(self, **message: Any) -> None:
        """See `RankServerLines`."""
        self._asked = True
        super().send(**message)

    def events(self, timeout_s: float) -> list[dict[str, Any]]:
        """What has happened, waiting at most so long for the first. Raises RankServerGone."""
        ready, _, _ = select.select([self.end], [], [], timeout_s)
        return self.receive() if ready else []

    def close(self) -> None:
        """Ends the server, and whatever it has started."""
        if self.owner != os.getpid():
            return
        if not self._asked:
            self.process.kill()  # it may be importing, and is nobody's
        self.end.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        atexit.unregister(self.close)


class RankServer:
    """The server itself. Requests: {start: folder of a launch, env: variables}, {kill: [keys]}, {ask: [keys]}, {owns:
    folder of the launcher's own, to be removed if it is killed}; events, by key: started and exit."""

    def __init__(self, fd: int) -> None:
        import numpy.ma
        import numpy.random  # noqa: F401
        import torch.fx.experimental.symbolic_shapes  # noqa: F401  else imported by every first backward (0.6 s)

        import executor.runtime.rank  # noqa: F401  and everything a rank needs

        gc.freeze()
        gc.enable()
        self.lines = RankServerLines(socket.socket(fileno=fd))
        self.children: dict[int, str] = {}
        self.folders: set[str] = set()  # of the runs, which their launcher removes unless it is killed
        self.wake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)

    def serve(self) -> None:
        """Until the socket closes."""
        end = self.lines.end.fileno()
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._answer(end)
        except RankServerGone:  # our launcher has, and removes nothing any more
            for folder in self.folders:
                shutil.rmtree(folder, ignore_errors=True)

    def _answer(self, end: int) -> None:
        from executor.runtime.flight import SIGNAL

        try:
            while True:
                ready, _, _ = select.select([end, self.wake], [], [])
                if self.wake in ready:
                    os.read(self.wake, 4096)
                self._reap()
                for request in self.lines.receive() if end in ready else ():
                    if "start" in request:
                        self._start(request["start"], request["env"])
                    elif "owns" in request:
                        self.folders.add(request["owns"])
                    elif "ask" in request:
                        self._send(SIGNAL, request["ask"], os.kill)
                    else:
                        self._kill(request["kill"])
        finally:
            self._kill(self.children.values())

    def _start(self, folder: str, env: dict[str, str]) -> None:
        """All processes of a launch, behind what they are given. env: the launcher's, which may have changed since."""
        from executor.device.memory import resolve_operators
        from executor.runtime.given import forget, given_name, read_given
        from executor.runtime.worker import main

        def life(spec: dict[str, Any], ranks: list[int]) -> int:
            os.environ.clear()
            os.environ.update(env | _KEEP)
            return main(spec, ranks)

        self.folders.add(folder)
        with suppress(FileNotFoundError):  # the launcher was killed meanwhile
            spec = json.loads(Path(folder, "spec").read_text(encoding="utf-8"))
            with suppress(Exception):  # the ranks run into it too, and can say so
                for number in range(spec["given"]):
                    job = read_given(Path(folder, given_name(number)))[0].job
                    if job.model.module and job.model.tags:
                        import torch.export._trace  # noqa: F401  else imported by every rank (2 s of a core)
            if any(len(ranks) > 1 for ranks in spec["processes"].values()):
                resolve_operators()  # which threads will ask for
            for key, ranks in spec["processes"].items():
                self._fork(key, partial(life, spec, ranks))
            resolve_operators()  # for the ranks of the next launch, while these begin
        forget()

    def _fork(self, key: str, life: Callable[[], int]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        me = os.getpid()
        if pid := os.fork():
            self.children[pid] = key
            self.lines.send(event="started", key=key, pid=pid)
            return
        code = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == me:
                os.setpgid(0, 0)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for fd in (self.lines.end.fileno(), self.wake, self._waker):
                    os.close(fd)
                code = life()
        finally:
            os._exit(code)

    def _reap(self) -> None:
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            self.lines.send(event="exit", key=self.children.pop(pid), pid=pid, code=code)

    def _kill(self, keys: Container[str]) -> None:
        self._send(signal.SIGKILL, keys, os.killpg, os.kill)  # its group, and itself if it has none yet

    def _send(self, sign: int, keys: Container[str], *calls: Callable[[int, int], None]) -> None:
        for pid in [pid for pid, key in self.children.items() if key in keys]:
            for call in calls:
                with suppress(ProcessLookupError, PermissionError):
                    call(pid, sign)
