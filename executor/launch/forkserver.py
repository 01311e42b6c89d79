"""A small process that has imported torch once and forks ranks on demand; it never runs the user's main module.

multiprocessing's forkserver would import `__main__` again in every child, and would not tell us of a child's death
by pid. Protocol: JSON lines over one socket. When the socket closes, every child is killed and the server ends; when
the server dies, the kernel kills the children (PR_SET_PDEATHSIG). So no process outlives the one that asked for it.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1


class ForkServer:
    """The parent's end. One per process, started at first use.

    >>> server = ForkServer.get(); server is ForkServer.get()
    True
    """

    _one: ForkServer | None = None
    lock = threading.RLock()

    @classmethod
    def get(cls) -> ForkServer:
        """The server of this process, alive."""
        with cls.lock:
            if cls._one is None or cls._one.owner != os.getpid() or cls._one.process.poll() is not None:
                if cls._one is not None and cls._one.owner == os.getpid():
                    cls._one.close()
                cls._one = cls()
            return cls._one

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.socket, theirs = socket.socketpair()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        code = (
            f"import sys; sys.path.insert(0, {str(_ROOT)!r}); "
            f"from executor.launch.forkserver import serve; serve({theirs.fileno()})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,
            env=env,
            start_new_session=True,
        )
        theirs.close()
        self._buffer = b""
        atexit.register(self.close)

    def send(self, **message: Any) -> None:
        """One request."""
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def events(self, timeout_s: float) -> list[dict[str, Any]]:
        """What has happened, waiting at most so long for the first; raises EOFError when the server is gone."""
        if b"\n" not in self._buffer:
            ready, _, _ = select.select([self.socket], [], [], timeout_s)
            if not ready:
                return []
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError("the fork server has died")
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Ends the server, and whatever it has started."""
        if self.owner != os.getpid():
            return
        self.socket.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        atexit.unregister(self.close)


def serve(fd: int) -> None:
    """The server's life. Requests: {start: spec path, key} and {kill: [keys]}; events: started and exit, by key."""
    import numpy.ma  # noqa: F401
    import torch.fx.experimental.symbolic_shapes  # noqa: F401  else imported by every rank's first backward (0.6 s)

    import executor.runtime.rank  # noqa: F401  and everything a rank needs
    import executor.runtime.worker as worker

    libc = ctypes.CDLL(None, use_errno=True)
    channel = socket.socket(fileno=fd)
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children: dict[int, str] = {}
    folders: set[Path] = set()  # of the runs, which their launcher removes unless it is killed
    buffer, me = b"", os.getpid()

    def say(**event: Any) -> None:
        channel.sendall(json.dumps(event).encode() + b"\n")

    def start(key: str, spec: str) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        folders.add(Path(spec).parent)
        pid = os.fork()
        if pid:
            children[pid] = key
            say(event="started", key=key, pid=pid)
            return
        code = 1
        try:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != me:
                os._exit(1)
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for f in (channel.fileno(), wake_r, wake_w):
                os.close(f)
            code = worker.main(spec)
        finally:
            os._exit(code)

    def kill(keys: list[str] | None = None) -> None:
        for pid, key in children.items():
            if keys is None or key in keys:
                for call in (os.killpg, os.kill):  # its group, and itself if it has none yet
                    try:
                        call(pid, signal.SIGKILL)
                    except (ProcessLookupError, PermissionError):
                        continue

    try:
        while True:
            ready, _, _ = select.select([channel.fileno(), wake_r], [], [])
            if wake_r in ready:
                os.read(wake_r, 4096)
            while children:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                say(event="exit", key=children.pop(pid), pid=pid, code=os.waitstatus_to_exitcode(status))
            if channel.fileno() in ready:
                data = channel.recv(1 << 16)
                if not data:
                    break
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    request = json.loads(line)
                    if "start" in request:
                        start(request["key"], request["start"])
                    else:
                        kill(request["kill"])
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        kill()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
