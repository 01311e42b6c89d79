"""Seconds of every op of a job's plan, and what they are made of. Modelled, from the hardware file."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from cost_models import Fabric, Hardware, Recipe, kernel_seconds, message_seconds, quantise
from cost_models.optimizer import clip, grad_norm, update, zero_grads
from ir.errors import ErrorKind, PiperError, nearest
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
        node = np.array([self.node_shares(n) for n in plan.graph.nodes]).reshape(-1, len(Share))
        wire = np.array([self.node_message(n) for n in plan.graph.nodes])
        times = self.job.costs.stage_times
        if times is not None:
            node, wire = scaled_to_stage_times(plan.graph, node, wire, times)
        node = _quantised(node)
        per_shape = np.zeros((len(plan.shapes), len(Share)))
        for i, s in enumerate(plan.shapes):
            if s.kind is OpKind.COMPUTE:
                per_shape[i] = node[[n for n, _ in s.covers]].sum(axis=0)
        shares = _quantised(per_shape[plan.shape] / self._speed(plan.programs)[plan.program][:, None])
        duration = shares.sum(axis=1)
        comm = np.flatnonzero(plan.kind != OpKind.COMPUTE)
        duration[comm] = self._comm(plan, comm, wire)
        return OpCosts(duration, shares)

    def _speed(self, programs: int) -> FloatArray:
        """Of each program: its slowest rank's, because the replicas of a program meet at every collective."""
        named: dict[int, list[float]] = defaultdict(list)
        for rank, factor in self.job.cluster.speed.items():
            named[self.mesh.coordinates(int(rank))["pp"]].append(float(factor))
        replicas = self.mesh.ranks // self.mesh.sizes["pp"]
        slowest = [min(named[p] + [1.0] * (replicas > len(named[p]))) for p in range(programs)]
        return np.array(slowest)

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

    def node_message(self, n: Node) -> float:
        """Seconds of the message that one instance of a node is; 0 for compute."""
        if n.message is None:
            return 0.0
        joint = n.once and "pp" not in n.message.axes and len(n.groups) > 1
        return self.message(n.message, n.groups if joint else (0,))

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

    def _comm(self, plan: Plan, comm: IntArray, wire: FloatArray) -> FloatArray:
        """Seconds of communication ops. A transfer's depend on where its two ends are."""
        columns = list(zip(plan.shape[comm].tolist(), plan.program[comm].tolist(), strict=True))
        seconds = {(s, p): quantise(self._one(plan, plan.shapes[s], p, wire)) for s, p in set(columns)}
        return np.array([seconds[c] for c in columns])

    def _one(self, plan: Plan, s: Shape, program: int, wire: FloatArray) -> float:
        if s.slot is None:
            assert s.message is not None
            return float(wire[s.covers[0][0]]) if s.covers else self.message(s.message, (0,))
        times = self.job.costs.stage_times
        if times is not None and "p2p" in times:
            return _numbers("p2p", times["p2p"], 1)[0]
        size = plan.graph.nodes[s.slot[0]].writes[s.slot[1]].bytes
        return message_seconds(Message(CommKind.P2P, size, ("pp",)), 2, self._near(program, s.peer), self.fabric)

    def _near(self, a: int, b: int) -> int:
        """2 where every replica's two ends share a node, else 1."""
        stride = self.mesh.program_stride
        inner = self.mesh.offsets([x for x in ("tp", "cp", "dp")])
        same = all((r + a * stride) // self.per_node == (r + b * stride) // self.per_node for r in inner)
        return 2 if same else 1


def scaled_to_stage_times(
    graph: Graph, node: FloatArray, wire: FloatArray, times: Mapping[str, object]
) -> tuple[FloatArray, FloatArray]:
    """Node and message seconds scaled so that each stage's F, I (with recomputation) and W take the given times.

    A stage's time is what it takes by itself, its all-to-alls included: they are scaled along.
    """
    stages = graph.stages
    node, wire = node.copy(), wire.copy()
    for key, seconds in _given(times, stages).items():
        for s in range(stages):
            rows = [i for i, n in enumerate(graph.nodes) if n.stage == s and n.kind in _PASSES[key]]
            total = float(node[rows].sum() + wire[rows].sum())
            if total > 0:
                node[rows] *= seconds[s] / total
                wire[rows] *= seconds[s] / total
            compute = [i for i in rows if graph.nodes[i].message is None]
            if compute:  # the largest takes what rounding leaves over, or all where the model has nothing to do
                most = max(compute, key=lambda i: node[i, : Share.TP].sum())
                share = Share.COMPUTE if node[most, Share.COMPUTE] >= node[most, Share.RECOMPUTE] else Share.RECOMPUTE
                rest = seconds[s] - float(_quantised(node[rows]).sum() + _quantised(wire[rows]).sum())
                node[most, share] = max(0.0, float(_quantised(node[most, share])) + rest)
    return node, wire


_PASSES = {"F": (Pass.F,), "I": (Pass.I, Pass.R), "W": (Pass.W,)}


def _given(times: Mapping[str, object], stages: int) -> dict[str, list[float]]:
    """Seconds by pass and stage. B alone is half I, half W; beside one of them it says the other."""
    known = ("F", "B", "I", "W", "p2p")
    for key in times:
        if key not in known:
            raise PiperError(
                ErrorKind.JOB,
                f"unknown key {key!r}",
                key="costs.stage_times",
                allowed=", ".join(known),
                suggestion=nearest(key, known),
            )
    out = {k: _numbers(k, v, stages) for k, v in times.items() if k != "p2p"}
    whole = out.pop("B", None)
    if whole is not None:
        i = out.get("I") or [b - w for b, w in zip(whole, out.get("W", [b / 2 for b in whole]), strict=True)]
        w = out.get("W") or [b - x for b, x in zip(whole, i, strict=True)]
        if min(i + w) < 0 or any(abs(x + y - b) > 1e-9 * b for x, y, b in zip(i, w, whole, strict=True)):
            raise PiperError(
                ErrorKind.JOB, "B is not I + W", key="costs.stage_times", suggestion="drop B, or let I + W = B"
            )
        out |= {"I": i, "W": w}
    return out


def _quantised(seconds: FloatArray | float) -> FloatArray:
    return np.asarray(np.round(np.asarray(seconds) * 2.0**40) / 2.0**40)


def _numbers(key: str, value: Any, count: int) -> list[float]:
    values = list(value) if isinstance(value, list | tuple) else [value] * count
    good = all(isinstance(v, int | float) and not isinstance(v, bool) and 0 <= v < float("inf") for v in values)
    if not good or len(values) != count:
        allowed = f"seconds, or a list of {count} of them"
        raise PiperError(ErrorKind.JOB, f"{key} = {value!r}", key="costs.stage_times", allowed=allowed)
    return [float(v) for v in values]
