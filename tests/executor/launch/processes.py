"""Processes that tests start and look after: Python beside this repository, torchrun's agents, the ranks of a run."""

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
COMMAND = ("-m", "piper_sim.app.cli")


def started(*args: str, cwd: Path = ROOT, **env: str) -> subprocess.Popen[str]:
    """Python, with whatever it says kept. env: beside this process's own."""
    whole = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *args], cwd=cwd, env=whole, stdout=pipe, stderr=pipe, text=True)


def python(*args: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Python, run to its end."""
    with started(*args, cwd=cwd, **env) as process:
        try:
            out, errors = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


FORKED = """
import json, os, sys
exec(sys.argv[1])
found = []
for program in sys.argv[2:]:
    read, write = os.pipe()
    if not (child := os.fork()):
        os.dup2(write, 1)
        os.close(read)
        os.close(write)
        exec(program, {"__name__": "__main__"})
        break  # to the interpreter's own end
    os.close(write)
    with open(read) as said:
        text = said.read()
    found.append([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text])
else:
    print(json.dumps(found))
"""


def forked(imports: str, *programs: str) -> list[tuple[int, str]]:
    """How each of these programs ends, and what it says: children of one Python, which has imported for all of them."""
    done = python("-c", FORKED, imports, *programs)
    assert done.returncode == 0, done.stderr
    return [(code, said) for code, said in json.loads(done.stdout)]


def agent(
    nodes: int, per_node: int, port: int, *args: str, module: str = "executor", **env: str
) -> subprocess.Popen[str]:
    """One of torchrun's, of as many as there are nodes."""
    sizes = ["--nnodes", str(nodes), "--nproc-per-node", str(per_node)]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", str(port)]
    line = ["-m", "torch.distributed.run", *sizes, *meeting, "-m", module, *args]
    return started(*line, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **env)


def free_port() -> int:
    """One that nobody listens on, below those that a kernel gives to whoever connects: none of them takes it first."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no port is free")


def objects(text: str) -> list[dict[str, Any]]:
    """The lines that are JSON objects."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def pids(out: Path) -> list[int]:
    """Of the ranks of a run, by its `--out`."""
    return [r["pid"] for r in json.loads((out / "ranks.json").read_text())["ranks"].values()]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
