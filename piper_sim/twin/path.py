"""Where nothing is shared, a plan's times are longest paths: one pass over its ops for each duration vector."""

from __future__ import annotations

import numpy as np

from ir.order import FloatArray
from ir.plan import Plan
from piper_sim.engine.loop import Run, Wire
from piper_sim.twin.compiled import Compiled
from piper_sim.twin.jit import jit
from piper_sim.twin.net import Net
from piper_sim.twin.order import GROUP, LATE, LONE, Path


def longest_path(plan: Plan | Compiled, duration: FloatArray, wire: Wire = Wire.RENDEZVOUS, steps: int = 1) -> Run:
    """Run `steps` repetitions of the plan, or of its structure (whose wire then counts).

    duration: [op], or [vector, op] for many runs of one structure. The run's arrays have shape (steps, ops), or
    (vectors, steps, ops).
    """
    c = Compiled.of(plan, wire)
    durations = np.ascontiguousarray(np.atleast_2d(duration), dtype=np.float64)
    value = np.empty((len(durations), steps, 2 * c.ops + len(c.path.left)))
    for d, v in zip(durations, value, strict=True):
        one(c.net, c.path, d, v)
    if duration.ndim == 1:
        value = value[0]
    return Run(value[..., c.ops : 2 * c.ops], value[..., : c.ops])


def step_ends(plan: Plan | Compiled, durations: FloatArray, wire: Wire = Wire.RENDEZVOUS, steps: int = 1) -> FloatArray:
    """[vector, step] when the last op of each step ends: what a search asks, without every op's times."""
    c = Compiled.of(plan, wire)
    out = np.empty((len(durations), steps))
    value = np.empty((steps, 2 * c.ops + len(c.path.left)))
    for k, d in enumerate(np.ascontiguousarray(durations, dtype=np.float64)):
        one(c.net, c.path, d, value)
        out[k] = value[:, : c.ops].max(axis=1)
    return out


@jit
def one(net: Net, path: Path, duration: FloatArray, value: FloatArray) -> None:
    """Fill value[step], laid out as `Path` says."""
    n = len(path.order)
    for step in range(len(value)):
        v = value[step]
        for s in range(len(path.left)):
            v[2 * n + s] = value[step - 1, path.left[s]] if step else 0.0
        e = 0
        for x in range(n):
            i = path.order[x]
            t = v[path.before[e]]
            e += 1
            while e < path.before_at[x + 1]:
                t = max(t, v[path.before[e]])
                e += 1
            v[n + i] = t
            act = path.act[x]
            if act == LONE:
                v[i] = t + duration[i]
            elif act >= 0:
                t = max(t, v[n + act]) + duration[net.work[net.meeting[i]]]
                v[i] = t
                v[act] = t
            elif act == LATE:
                v[i] = max(t, v[net.gate[i]])
            elif act == GROUP:
                _meet(net, net.meeting[i], duration, v)


@jit
def _meet(net: Net, m: int, duration: FloatArray, v: FloatArray) -> None:
    n, t, longest = len(net.stream), 0.0, 0.0
    for k in range(net.member_at[m], net.member_at[m + 1]):
        t = max(t, v[n + net.member[k]])
        longest = max(longest, duration[net.member[k]])
    t += longest
    for k in range(net.member_at[m], net.member_at[m + 1]):
        v[net.member[k]] = t
