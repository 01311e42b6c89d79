"""Machines of a cluster on one: each with processes, a network, a name and an /etc/hosts of its own, by namespaces."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.executor.launch.events import until

ROOT = Path(__file__).parents[2]
NAMESPACES = ("--net", "--uts", "--mount", "--pid")
Process = subprocess.Popen[str]


@dataclass
class Node:
    """One machine. init: the process that holds it; when that is killed, so is all that runs there."""

    name: str
    address: str
    holder: Process
    init: int
    started: list[Process] = field(default_factory=list)

    def start(self, *command: str, cwd: Path = ROOT, log: Path | None = None, **env: str) -> Process:
        """Start a command there. log: a file for all that it says."""
        line = ["nsenter", "-t", str(self.init), *NAMESPACES, f"--wd={cwd}", "--", *command]
        with contextlib.ExitStack() as stack:
            to = stack.enter_context(log.open("a")) if log is not None else subprocess.PIPE
            self.started.append(subprocess.Popen(line, env={**environment(), **env}, stdout=to, stderr=to, text=True))
        return self.started[-1]

    def run(self, *command: str, code: int | None = 0, seconds: float = 120.0, **env: str) -> str:
        """Run a command there to its end; what it printed. code: that it must end with, if any."""
        process = self.start(*command, **env)
        out, errors = process.communicate(timeout=seconds)
        self.started.remove(process)
        assert code in (None, process.returncode), (command, process.returncode, out, errors)
        return out + errors

    def cut(self) -> None:
        """Pull its cable: nothing comes or goes, and nobody is told."""
        self.run("ip", "link", "set", "eth0", "down")

    def kill(self) -> None:
        """As when its power fails; its connections are never closed."""
        with contextlib.suppress(AssertionError):
            self.cut()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)
        self.holder.wait(30)
        for process in self.started:
            process.communicate(timeout=30)

    def processes(self) -> list[str]:
        """What runs there, but for what holds it and asks."""
        out = self.run("ps", "-A", "-o", "args=").splitlines()
        return [line for line in out if not line.startswith(("ps -A", "sleep infinity", "bash -c mount"))]


def environment() -> dict[str, str]:
    """A process's environment: this interpreter's commands, this tree."""
    path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@dataclass
class Machines:
    """A head, which holds the switch, and nodes n1, n2, …"""

    folder: Path
    made: list[Node] = field(default_factory=list)

    @property
    def head(self) -> Node:
        return self.made[0]

    @property
    def nodes(self) -> Sequence[Node]:
        return self.made[1:]

    def boot(self, number: int) -> Node:
        """Start machine `number`; 0 is the head."""
        name, address = (f"n{number}" if number else "head"), f"10.77.0.{number + 1}"
        mounts = f"mount --bind {self.folder}/hosts /etc/hosts; hostname {name}; ip link set lo up"
        setup = f"ip link add sw type bridge; ip addr add {address}/24 dev sw; ip link set sw up" if not number else ":"
        line = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "bash", "-c"]
        ready = self.folder / f"up-{name}"
        ready.unlink(missing_ok=True)
        script = f"{mounts}; {setup}; touch {ready}; sleep infinity & while :; do wait; done"
        holder = subprocess.Popen([*line, script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
        until(ready.exists)
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        node = Node(name, address, holder, int(children[0]))
        if number:
            self._plug(node)
        self.made[number:] = [node, *self.made[number + 1 :]]
        return node

    def _plug(self, node: Node) -> None:
        """A cable from the switch to the node."""
        head, port = self.head, f"to-{node.name}"
        head.run("ip", "link", "del", port, code=None)  # of a node before, of that name
        ends = f"ip link add {port} netns {head.init} type veth peer name eth0 netns {node.init}"
        subprocess.run(ends.split(), check=True)
        head.run("ip", "link", "set", port, "master", "sw", "up")
        node.run("ip", "addr", "add", f"{node.address}/24", "dev", "eth0")
        node.run("ip", "link", "set", "eth0", "up")


def why_not() -> str | None:
    """Why this machine cannot play several, if so."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "namespaces of processes and networks take root on Linux"
    if missing := [c for c in ("unshare", "nsenter", "ip", "ps", "mount") if shutil.which(c) is None]:
        return f"{', '.join(missing)} is not installed"
    line = ["unshare", *NAMESPACES, "--fork", "ip", "link", "add", "sw", "type", "bridge"]
    tried = subprocess.run(line, capture_output=True, text=True, check=False)
    return f"no namespaces or bridges here: {tried.stderr.strip()}" if tried.returncode else None


@contextlib.contextmanager
def machines(folder: Path, count: int) -> Iterator[Machines]:
    """A head and `count` nodes, which go when this ends, with all that runs there."""
    names = "".join(f"10.77.0.{k + 1} {f'n{k}' if k else 'head'}\n" for k in range(count + 1))
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
    found = Machines(folder)
    try:
        for number in range(count + 1):
            found.boot(number)
        yield found
    finally:
        for node in reversed(found.made):
            node.kill()
