"""Where nothing is shared, a plan's times are longest paths: one pass over its ops."""

import numpy as np

from cost_models.jit import jit
from ir.core.order import FloatArray
from piper_sim.compiled.net import OpNet
from piper_sim.compiled.order import GROUP, LATE, LONE, OpOrder, stuck
from piper_sim.compiled.structure import CompiledEngine
from piper_sim.engine.scenario import EngineRun, EngineScenario


def longest_path(scenario: EngineScenario, duration: FloatArray, steps: int = 1) -> EngineRun:
    """Run `steps` repetitions of a scenario as if nothing were shared.

    duration: seconds of each op.
    """
    c = CompiledEngine.of(scenario)
    if c.path is None:
        raise stuck(scenario, c.net, steps)
    launch = scenario.host.launch if scenario.host else np.zeros(0)
    both, n = len(c.net.stream), c.net.ops
    value = np.empty((steps, 2 * both + len(c.path.left)))
    one(c.net, c.path, np.append(np.asarray(duration, dtype=np.float64), launch), value)
    return EngineRun(value[:, both : both + n], value[:, :n], value[:, n:both] if scenario.host else None)


@jit
def one(net: OpNet, path: OpOrder, duration: FloatArray, value: FloatArray) -> None:
    """Fill value[step], laid out as `OpOrder` says."""
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
def _meet(net: OpNet, m: int, duration: FloatArray, v: FloatArray) -> None:
    n, t = len(net.stream), 0.0
    for k in range(net.member_at[m], net.member_at[m + 1]):
        t = max(t, v[n + net.member[k]])
    t += longest(net, m, duration)
    for k in range(net.member_at[m], net.member_at[m + 1]):
        v[net.member[k]] = t


@jit
def longest(net: OpNet, m: int, duration: FloatArray) -> float:
    """A collective's duration: its longest member's."""
    out = 0.0
    for k in range(net.member_at[m], net.member_at[m + 1]):
        out = max(out, duration[net.member[k]])
    return out
