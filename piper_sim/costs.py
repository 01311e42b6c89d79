"""Seconds of every op of a job's plan, and what they are made of. Modelled, from the hardware file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from cost_models import Fabric, Hardware, Recipe, kernel_seconds, message_seconds, quantise
from cost_models.optimizer import clip, grad_norm, update, zero_grads
from ir.errors import ErrorKind, PiperError
from ir.graph import Graph, Node, Once
from ir.job.build import Prepared
from ir.ops import Pass
from ir.order import FloatArray, IntArray
from ir.plan import OpKind, Plan, Shape
from ir.work import CommKind, Kernel, Message


class Share(IntEnum):
    """What a compute op's seconds are spent on."""

    COMPUTE = 0
    RECOMPUTE = 1
    TP = 2
    CP = 3
    OPTIMIZER = 4


@dataclass(frozen=True, eq=False)
class OpCosts:
    """duration: seconds per op, multiples of 2**-40. shares: [op, Share], summing to the duration of compute ops."""

    duration: FloatArray
    shares: FloatArray

    @property
    def digest(self) -> str:
        """SHA-256 of all durations."""
        return hashlib.sha256(np.ascontiguousarray(self.duration).tobytes()).hexdigest()


class CostModel:
    """Prices nodes and messages of one job. Equal kernels and messages are priced once."""

    def __init__(self, prepared: Prepared, hardware: Hardware) -> None:
        job = prepared.job
        self.job, self.mesh, self.hardware = job, prepared.mesh, hardware
        self.per_node = job.cluster.gpus_per_node or hardware.gpus_per_node
        self.fabric = Fabric.of(hardware, self.per_node)
        p = prepared.base.source.precision if prepared.base.source is not None else None  # type: ignore[attr-defined]
        assert p is not None
        self.recipe = Recipe("adamw" if job.optimizer.name == "adamw" else "sgd", p.params, p.grads, p.optimizer)
        self._kernels: dict[Kernel, float] = {}
        self._messages: dict[tuple[Message, tuple[int, ...]], float] = {}

    def price(self, plan: Plan) -> OpCosts:
        """Seconds of every op."""
        graph = plan.graph
        node = np.array([self.node_shares(n) for n in graph.nodes]).reshape(-1, len(Share))
        if self.job.costs.stage_times is not None:
            node = scaled_to_stage_times(graph, node, self.job.costs.stage_times)
        node = np.round(node * 2.0**40) / 2.0**40
        per_shape = np.zeros((len(plan.shapes), len(Share)))
        for i, s in enumerate(plan.shapes):
            if s.kind is OpKind.COMPUTE:
                for n, _ in s.covers:
                    per_shape[i] += node[n]
        shares = per_shape[plan.shape]
        shares = np.round(shares / self._speed(plan.programs)[plan.program][:, None] * 2.0**40) / 2.0**40
        duration = shares.sum(axis=1)
        comm = np.flatnonzero(plan.kind != OpKind.COMPUTE)
        duration[comm] = self._wire(plan, comm)
        return OpCosts(duration, shares)

    def _speed(self, programs: int) -> FloatArray:
        """Of each program: its slowest rank's, because the replicas of a program meet at every collective."""
        speed = np.ones(programs)
        for rank, factor in self.job.cluster.speed.items():
            p = self.mesh.coordinates(int(rank))["pp"]
            speed[p] = min(speed[p], float(factor)) if speed[p] != 1 or factor < 1 else speed[p]
        return speed

    def node_shares(self, n: Node) -> list[float]:
        """Seconds of one instance of a node, by share."""
        out = [0.0] * len(Share)
        if n.kind is Once.UPDATE:
            out[Share.OPTIMIZER] = sum(map(self._kernel, self._update(n.numel)))
        elif n.message is None:
            out[Share.RECOMPUTE if n.kind is Pass.R else Share.COMPUTE] = sum(map(self._kernel, n.work))
            for message in n.inline:
                axis = Share.CP if "cp" in message.axes else Share.TP
                out[axis] += self.message(message, (0,))
        return out

    def _update(self, numel: int) -> list[Kernel]:
        kernels = [zero_grads(numel, self.recipe), update(numel, self.recipe)]
        if self.job.optimizer.clip_norm > 0:
            kernels += [grad_norm(numel, self.recipe), clip(numel, self.recipe)]
        return kernels

    def _kernel(self, kernel: Kernel) -> float:
        if kernel not in self._kernels:
            self._kernels[kernel] = kernel_seconds(kernel, self.hardware)
        return self._kernels[kernel]

    def message(self, message: Message, programs: tuple[int, ...]) -> float:
        """Seconds of a collective over its axes, joined over pipeline ranks."""
        key = (message, programs)
        if key not in self._messages:
            shape = self.mesh.shape(message.axes, self.per_node, programs)
            self._messages[key] = message_seconds(message, shape.ranks, shape.per_node, self.fabric)
        return self._messages[key]

    def _wire(self, plan: Plan, comm: IntArray) -> FloatArray:
        seconds: dict[tuple[int, int], float] = {}
        for shape, program in {(int(s), int(p)) for s, p in zip(plan.shape[comm], plan.program[comm], strict=True)}:
            seconds[shape, program] = quantise(self._one(plan, plan.shapes[shape], program))
        columns = zip(plan.shape[comm].tolist(), plan.program[comm].tolist(), strict=True)
        return np.array([seconds[s, p] for s, p in columns])

    def _one(self, plan: Plan, s: Shape, program: int) -> float:
        if s.slot is not None:
            times = self.job.costs.stage_times
            if times is not None and "p2p" in times:
                return _numbers("p2p", times["p2p"], 1)[0]
            peer = int(s.stream[5:])
            size = plan.graph.nodes[s.slot[0]].writes[s.slot[1]].bytes
            return message_seconds(Message(CommKind.P2P, size, ("pp",)), 2, self._near(program, peer), self.fabric)
        assert s.message is not None
        groups = plan.graph.nodes[s.covers[0][0]].groups if s.covers and plan.graph.nodes[s.covers[0][0]].once else (0,)
        if "pp" in s.message.axes:
            groups = (0,)
        return self.message(s.message, groups if len(groups) > 1 else (0,))

    def _near(self, a: int, b: int) -> int:
        """2 where every replica's two ends share a node, else 1."""
        stride = self.mesh.program_stride
        inner = self.mesh.offsets([x for x in ("tp", "cp", "dp")])
        same = all((r + a * stride) // self.per_node == (r + b * stride) // self.per_node for r in inner)
        return 2 if same else 1


def scaled_to_stage_times(graph: Graph, node: FloatArray, times: Mapping[str, object]) -> FloatArray:
    """Node seconds scaled so that each stage's F, I (with recomputation) and W take the given times."""
    known = ("F", "B", "I", "W", "p2p")
    for key in times:
        if key not in known:
            raise PiperError(ErrorKind.JOB, f"unknown key {key!r}", key="costs.stage_times", allowed=", ".join(known))
    stages = graph.stages
    given = {k: _numbers(k, v, stages) for k, v in times.items() if k != "p2p"}
    if "B" in given and "I" not in given and "W" not in given:
        given["I"] = given["W"] = [b / 2 for b in given["B"]]
    out = node.copy()
    for kinds, key in (((Pass.F,), "F"), ((Pass.I, Pass.R), "I"), ((Pass.W,), "W")):
        if key not in given:
            continue
        for s in range(stages):
            rows = [i for i, n in enumerate(graph.nodes) if n.stage == s and n.kind in kinds and n.message is None]
            total = float(node[rows].sum())
            if total > 0:
                out[rows] = node[rows] * (given[key][s] / total)
            elif rows:
                out[rows[0], Share.COMPUTE] = given[key][s]
    return out


def _numbers(key: str, value: Any, count: int) -> list[float]:
    values = list(value) if isinstance(value, list | tuple) else [value] * count
    good = all(isinstance(v, int | float) and not isinstance(v, bool) and 0 <= v < float("inf") for v in values)
    if not good or len(values) != count:
        raise PiperError(
            ErrorKind.JOB, f"{key} = {value!r}", key="costs.stage_times", allowed=f"seconds, or a list of {count} of them"
        )
    return [float(v) for v in values]


