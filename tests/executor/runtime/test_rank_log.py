"""What a rank asks of its transport, its device, its stages and its progress, in order: each rank alone, step by step.

The others are not there: what would come from them is zeros, or what this rank gave. Streams go on where somebody waits
for them, and a clock ticks once when it is asked, so that a log is the same every time.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from torch import Tensor

from executor.device import clock
from executor.device.device import HostDevice
from executor.runtime import interpreter as interpreter_module
from executor.runtime import rank as rank_module
from executor.runtime.program import RankPlan
from executor.runtime.rank import topology, train_rank
from executor.runtime.spec import PlanRun
from executor.runtime.worker import LocalRanks
from executor.transport.streams import StreamOp
from ir.job.run_options import CheckpointOptions, JobRunOptions
from tests.executor.runs import judged

Note = Callable[[str], None]


def shown(x: object) -> str:
    """An argument, short: of tensors the shape."""
    if isinstance(x, Tensor):
        return str([*x.shape])
    if isinstance(x, list | tuple):
        return f"({', '.join(map(shown, x))})"
    return f"{x:.6g}" if isinstance(x, float) else str(x) if isinstance(x, str | int | None) else type(x).__name__


class Noted:
    """Whatever is asked of an object."""

    def __init__(self, name: str, real: Any, note: Note) -> None:
        vars(self).update(name=name, real=real, note=note)

    def __getattr__(self, key: str) -> Any:
        found = getattr(self.real, key, None) if self.real is not None else (lambda *_, **__: None)
        if not callable(found) or key.startswith("_"):
            return found

        def asked(*given: Any, **named: Any) -> Any:
            words = [*map(shown, given), *(f"{k}={shown(v)}" for k, v in named.items())]
            self.note(f"{self.name}.{key} {', '.join(words)}".rstrip())
            return found(*given, **named)

        return asked

    def __setattr__(self, key: str, value: Any) -> None:
        self.note(f"{self.name}.{key} = {shown(value)}")
        setattr(self.real, key, value)


class Others:
    """A transport of a rank whose others send zeros, or what it sends."""

    def __init__(self, rank: int, note: Note) -> None:
        self.rank, self.note = rank, note

    def _handle(self, what: str) -> Any:
        return SimpleNamespace(done=lambda: False, wait=lambda: self.note(f"    ended: {what}"))

    def send(self, dst: int, tensor: Tensor) -> Any:
        return self._handle(f"send to {dst}")

    def recv(self, src: int, into: Tensor) -> Any:
        into.zero_()
        return self._handle(f"receive from {src}")

    def all_reduce(self, group: str, tensor: Tensor, *, largest: bool = False) -> Any:
        return self._handle(f"sum over {group}")

    def reduce_scatter(self, group: str, into: Tensor, tensor: Tensor) -> Any:
        into.copy_(tensor.clone().reshape(-1)[: into.numel()].view(into.shape))
        return self._handle(f"shares over {group}")

    def all_gather(self, group: str, into: Tensor, tensor: Tensor) -> Any:
        into.copy_(tensor.clone().repeat(into.numel() // tensor.numel()).view(into.shape))
        return self._handle(f"gather over {group}")

    def all_to_all(self, group: str, into: Tensor, tensor: Tensor, into_sizes: Any, sizes: Any) -> Any:
        into.copy_(tensor) if into.shape == tensor.shape else into.zero_()
        return self._handle(f"exchange over {group}")

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


class Late(StreamOp):
    """An op that its stream comes to where somebody waits for it."""

    lane: Any = None

    def wait(self) -> None:
        while not self.done():
            self.lane.step()
        super().wait()


class Lane:
    """A stream without a thread."""

    def __init__(self, name: str, device: Any) -> None:
        self.device, self.last, self.queue = device, None, deque[Late]()
        self.lane = device.lane(name)
        self.name = name

    def put(self, op: Late) -> None:
        self.device.note(f"  {self.name} takes an op behind {len(op.needs)}")
        op.lane = self
        self.queue.append(op)

    def step(self) -> None:
        op = self.queue[0]
        op.finish(self.device, self.last)
        self.last = self.queue.popleft()

    def close(self) -> None:
        assert not self.queue


class Marked(HostDevice):
    """A host, or something that runs ahead of it, whose marks are noted."""

    def __init__(self, note: Note, ahead: bool) -> None:
        self.note, self.ahead, self.count = note, ahead, 0

    def mark(self) -> Any:
        self.count += 1
        at, number, over = clock.now(), self.count, [not self.ahead]
        wait = lambda: (over or self.note(f"  host waits for mark {number}"), over.insert(0, True))  # noqa: E731
        return SimpleNamespace(done=lambda: over[0], wait=wait, seconds=lambda: at, number=number)

    def follow(self, mark: Any) -> None:
        self.note(f"  lane follows mark {mark.number} of {self.count}")

    def at(self, op: str) -> None:
        self.note(f"at {op or 'nothing'}")


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    now = [0.0]

    def tick() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(clock, "now", tick)
    monkeypatch.setattr(clock, "sleep_until", lambda at, tick=None: now.__setitem__(0, max(now[0], at)))
    monkeypatch.setattr(interpreter_module, "Stream", Lane)
    monkeypatch.setattr(interpreter_module, "StreamOp", Late)
    yield


EVAL = "run.eval_every=2", "run.eval_source=synthetic", "run.log_every=2"
RUNS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "1f1b": (("model.tie_word_embeddings=true", *EVAL), {}),
    "zbv, ZeRO-2, no norm": (
        ("schedule.name=zbv", "parallel.dp=2", "parallel.zero=2", "optimizer.clip_norm=0", "model.num_hidden_layers=4"),
        {},
    ),
    "dualpipe, ZeRO-3": (("schedule.name=dualpipe", "parallel.dp=2", "parallel.zero=3"), {"ahead": True}),
    "experts": (("model.config=tiny-moe", "parallel.dp=2", "parallel.ep=2", "schedule.recompute=full"), {"parts": 1}),
    "tp": (("parallel.tp=2", "parallel.dp=2", "parallel.zero=1", "schedule.name=gpipe"), {}),
    "emulated": (("parallel.dp=2", "parallel.zero=3"), {"emulate": 0.25, "emulate_comm": 0.125}),
    "emulated experts": (("model.config=tiny-moe", "parallel.dp=2", "parallel.ep=2"), {"emulate": 0.5}),
    "saved": (("parallel.pp=1",), {"save": 1}),
}


def rounded(text: str) -> str:
    """Long fractions to nine digits: the last are each machine's own."""
    return re.sub(r"\d+\.\d{9,}(e-?\d+)?", lambda x: f"{float(x[0]):.9g}", text)


def told(found: dict[str, Any], folder: Path) -> Iterator[str]:
    """What a rank hands back, and leaves in files."""
    for key, value in found.items():
        text = json.dumps(value, default=float) if key not in ("rows", "saved") else str(value)
        yield f"{key}: {text}" if len(text) < 2000 else f"{key}: {len(value)} {text[:1500]}"
    for file in sorted(folder.rglob("*-[0-9]*")):
        if file.match("*-[0-9].safetensors"):  # not a checkpoint's, of five digits
            for name, a in sorted(load_file(file).items()):
                total, whole = np.nansum(a), np.nansum(np.abs(a))  # a sum that cancels is rounding, each machine's own
                total = total if abs(total) > 1e-9 * whole else 0.0
                yield f"{file.name} {name} {a.shape} {total:.6g} {whole:.6g} {np.isnan(a).sum()}"
        elif file.is_file() and file.suffix != ".safetensors":
            yield f"{file.name} {file.read_text()}"


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize("name", RUNS)
def test_a_rank_does_what_it_did(
    name: str, golden: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets, more = RUNS[name]
    prepared, plan = judged(tmp_path, "model.num_hidden_layers=2", "schedule.microbatches=2", "model.seq_len=4", *sets)
    lines = list[str]()
    for rank in sorted({0, prepared.ranks - 1}):
        note, program = lines.append, RankPlan.of(plan, rank)
        (out := tmp_path / f"out{rank}").mkdir()
        note(f"rank {rank}")
        for f in fields(RankPlan):
            if isinstance(value := getattr(program, f.name), dict | int):
                note(f"  {f.name}: {value}")
        device = Marked(note, "ahead" in more)
        monkeypatch.setattr(rank_module, "device_of", lambda o, ctx, d=device: d)
        build = rank_module.RankModel.of

        def noted(*given: Any, log: Note = note, build: Any = build, **named: Any) -> Any:
            local = build(*given, **named)
            stages = {s: Noted(f"stage {s}", stage, log) for s, stage in local.stages.items()}
            return rank_module.RankModel(**{**vars(local), "stages": stages, "sync": Noted("sync", local.sync, log)})

        given = {"emulate": more.get("emulate"), "emulate_comm": more.get("emulate_comm", 0.0)}
        given |= {"parts": out} if "parts" in more else {}
        steps = 2 if "save" in more or EVAL[0] in sets else 1
        options = JobRunOptions(prepared.ranks, steps=steps, dump=out, memory=False, **given)
        saving = CheckpointOptions(str(out / "saved"), every=1) if "save" in more else CheckpointOptions()
        pen, transport = Noted("progress", None, note), Noted("transport", Others(rank, note), note)
        store = SimpleNamespace(check=lambda keys: False)
        ctx: Any = SimpleNamespace(
            hub=LocalRanks(), rank=rank, progress=pen, connect=lambda backend, streams, device, t=transport: t,
            store=lambda name, s=store: s, given=lambda p=(prepared, plan): p,
        )  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(rank_module.RankModel, "of", staticmethod(noted))
            spec = PlanRun(options, saving, note=rank == 0, log=out if "run.log_every=2" in sets else None)
            lines += told(train_rank(ctx, **spec.told()), out)
    lines.append(str(topology(plan)))
    golden(f"rank, {name}.txt", rounded("\n".join(lines)).replace(str(tmp_path), ".") + "\n")
