"""Writes traces as torch.profiler exports them, of a made-up training on a made-up GPU: every time in it is known."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOST, MAIN, AUTOGRAD = 71, 71, 99  # process, and two of its threads


@dataclass
class Trace:
    """Events in microseconds. Kernels run long after their launch, as on a GPU that the host runs ahead of."""

    rank: int | None = None
    world: int = 1
    events: list[dict[str, Any]] = field(default_factory=list)
    now: float = 1000.0
    gpu: float = 50_000.0
    last: int = 100

    def range(self, name: str, kernels: tuple[float, ...] = (), thread: int = MAIN, *inner: tuple[str, float]) -> None:
        """A range that launches kernels of these microseconds, and ranges inside it of one kernel each."""
        begin = self.now
        self.now += 1
        for us in kernels:
            self.kernel(us, thread=thread)
        for inside, us in inner:
            self.range(inside, (us,), thread)
        self.now += 1
        self.add("user_annotation", name, begin, self.now - begin, MAIN, {"External id": 7})
        self.add("gpu_user_annotation", name, self.gpu - 5, 5, "gpu", {})

    def kernel(self, us: float, name: str = "gemm", thread: int = MAIN, **args: Any) -> None:
        """One launch, and what it launched; then a gap, which nobody is to count."""
        self.last += 1
        self.add("cuda_runtime", "cudaLaunchKernel", self.now, 2, thread, {"correlation": self.last})
        self.add("cpu_op", "aten::mm", self.now - 0.1, 3, thread, {"External id": self.last})
        self.add("kernel", name, self.gpu, us, "gpu", {"correlation": self.last, "stream": 7, **args})
        self.now += 3
        self.gpu += us + 11

    def add(self, cat: str, name: str, ts: float, dur: float, tid: object, args: dict[str, Any]) -> None:
        """One complete event."""
        pid = 0 if tid == "gpu" else HOST
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    def table(self) -> dict[str, Any]:
        """The whole file."""
        others = [
            {"ph": "M", "name": "process_name", "pid": HOST, "args": {"name": "python"}},
            {"ph": "f", "cat": "ac2g", "name": "ac2g", "id": 3, "ts": 1, "pid": 0, "tid": 7, "bp": "e"},
        ]
        top: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]}
        if self.rank is not None:
            top["distributedInfo"] = {"backend": "nccl", "rank": self.rank, "world_size": self.world}
        return {**top, "traceEvents": [*others, *reversed(self.events)]}

    def write(self, path: Path) -> str:
        """As a file."""
        path.write_text(json.dumps(self.table()))
        return str(path)


def nccl(collective: str, count: int, ranks: str, seq: int, **more: Any) -> dict[str, Any]:
    """What PyTorch writes beside an NCCL kernel."""
    size = ranks.count(",") + 1
    args = {"Collective name": collective, "dtype": "Float", "In msg nelems": count, "Out msg nelems": count}
    return {**args, "Group size": size, "Process Group Name": "3", "Process Group Ranks": ranks, "Seq": seq, **more}
