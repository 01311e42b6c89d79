"""Does a plan finish on a GPU, whose streams share hardware queues and whose first launches may wait for all others?

A launch leaves its hardware queue when its kernel starts, so one that waits at the head keeps back what other streams
have behind it. A communication kernel starts without its peer and spins until the peer has started too. Where nothing
is warm, the first op of a kind is only launched once no kernel of its program spins: loading code, and connecting, may
wait for the device. The host launches as soon as it may, which is the worst that early receives can do. Members of a
collective that run the same program are taken to be where their program is.
"""

import random
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ir.core.errors import ErrorKind, PiperError
from ir.plan.host import host_reads
from ir.plan.plan import OpKind, Plan
from ir.verify.deadlock import partners


@dataclass(frozen=True)
class DeviceQueues:
    """How a GPU takes launches.

    queues: hardware queues, CUDA's `CUDA_DEVICE_MAX_CONNECTIONS` (8 unless it is set, at most 32).
    seed: streams fall on queues at random; None: in turn, as they are made.
    blocks: thread blocks that a communication kernel holds while it spins, one to a multiprocessor.
    sms: multiprocessors.
    warm: every op of the plan has run once, and every communicator is connected.
    together: kernels of different communicators run side by side. NCCL does not promise it: where it fails, a rank's
    messages are one stream, in the order they are launched in.
    """

    queues: int = 8
    seed: int | None = None
    blocks: int = 1
    sms: int = 132
    warm: bool = True
    together: bool = True

    def of_stream(self, streams: int) -> list[int]:
        """The queue of each of a rank's streams.

        >>> DeviceQueues(2).of_stream(5)
        [0, 1, 0, 1, 0]
        """
        if self.seed is None:
            return [s % self.queues for s in range(streams)]
        draw = random.Random(self.seed)
        return [draw.randrange(self.queues) for _ in range(streams)]


def check_device(plan: Plan, device: DeviceQueues) -> None:
    """Run the plan without time. Raises PiperError (deadlock): it can stop, naming who waits for whom in a circle."""
    sending = [0] * plan.programs
    for program, name in plan.streams:
        sending[program] += name != "compute"
    if (most := max(sending, default=0)) * device.blocks >= device.sms:
        message = f"{most} streams of messages with {device.blocks} thread blocks each leave none of {device.sms} SMs"
        fix = f"at most {(device.sms - 1) // most} blocks for each communicator (NCCL_MAX_CTAS)"
        raise PiperError(ErrorKind.DEADLOCK, message, suggestion=fix)
    run = _DeviceWalk(plan, device)
    run.walk()
    if stuck := next((i for i in range(len(plan)) if not run.ended[i]), None):
        message = f"the plan can stop on {device.queues} hardware queues:\n" + "\n".join(run.circle(stuck))
        fix = "CUDA_DEVICE_MAX_CONNECTIONS = 32" if device.warm else "run every op once before the first step"
        if plan.header.get("p2p") != "single":
            fix = f'{fix}, or schedule.p2p = "ordered"'
        raise PiperError(ErrorKind.DEADLOCK, message, key="CUDA_DEVICE_MAX_CONNECTIONS", suggestion=fix)


class _DeviceWalk:
    """Every program's host, hardware queues and kernels, as far as they come."""

    def __init__(self, plan: Plan, device: DeviceQueues) -> None:
        n = len(plan)
        self.plan, self.device = plan, device
        self.program, self.stream, self.shape = plan.program.tolist(), plan.stream.tolist(), plan.shape.tolist()
        self.at, self.items = plan.waits.at.tolist(), plan.waits.items.tolist()
        meetings = partners(plan)
        self.mates = [meetings.get(i, (p,) if p >= 0 else ()) for i, p in enumerate(plan.partner.tolist())]
        one = plan.kind != OpKind.COMPUTE
        lines = plan.stream if device.together else np.where(one, len(plan.streams) + plan.program, plan.stream)
        self.before = _before(lines.tolist())
        ops, on = host_reads(plan)
        self.reads = dict(zip(ops.tolist(), on.tolist(), strict=True))
        counts = [sum(p == program for p, _ in plan.streams) for program in range(plan.programs)]
        firsts = [next(k for k, (p, _) in enumerate(plan.streams) if p == q) for q in range(plan.programs)]
        of = [device.of_stream(c) for c in counts]
        self.queue = [(p, of[p][s - firsts[p]]) for p, s in zip(self.program, self.stream, strict=True)]
        self.waiting: dict[tuple[int, int], deque[int]] = {q: deque() for q in self.queue}
        self.of_program = [[q for q in self.waiting if q[0] == p] for p in range(plan.programs)]
        self.bounds = list(pairwise(plan.bounds.tolist()))
        self.host = [a for a, _ in self.bounds]
        self.spinning: list[set[int]] = [set() for _ in range(plan.programs)]
        self.seen: set[tuple[int, int]] = set()
        self.started, self.ended = bytearray(n), bytearray(n)

    def walk(self) -> None:
        """Until nothing moves. Devices go as far as they can before any host launches another op."""
        ready = dict.fromkeys(range(self.plan.programs))
        hosts = list(range(self.plan.programs))
        while True:
            while ready:
                program, _ = ready.popitem()
                ready |= dict.fromkeys(self._device(program))
            moved = [p for p in hosts if self._launch(p)]
            if not moved:
                return
            ready = dict.fromkeys(moved)

    def _launch(self, program: int) -> bool:
        """The host's next op goes to its queue, if the host may come to it."""
        op, end = self.host[program], self.bounds[program][1]
        if op == end or self._held(op):
            return False
        self.seen.add((program, self.shape[op]))
        self.waiting[self.queue[op]].append(op)
        self.host[program] += 1
        return True

    def _held(self, op: int) -> list[int]:
        """What the host waits for before it can launch an op."""
        read = [r for r in (self.reads.get(op, -1),) if r >= 0 and not self.ended[r]]
        cold = not self.device.warm and (self.program[op], self.shape[op]) not in self.seen
        return read + (sorted(self.spinning[self.program[op]]) if cold else [])

    def _device(self, program: int) -> set[int]:
        """Start what can start. Returns the programs whose kernels have ended by it."""
        touched = set[int]()
        moved = True
        while moved:
            moved = False
            for q in self.of_program[program]:
                line = self.waiting[q]
                while line and not self._needs(line[0]):
                    touched |= self._start(line.popleft())
                    moved = True
        return touched - {program}

    def _needs(self, op: int) -> list[int]:
        """What has to end before an op can start."""
        found = [w for w in self.items[self.at[op] : self.at[op + 1]] if not self.ended[w]]
        b = self.before[op]
        return found + ([b] if b >= 0 and not self.ended[b] else [])

    def _start(self, op: int) -> set[int]:
        self.started[op] = 1
        group = (op, *self.mates[op])
        if not all(self.started[m] for m in group):
            self.spinning[self.program[op]].add(op)
            return set()
        for m in group:
            self.ended[m] = 1
            self.spinning[self.program[m]].discard(m)
        return {self.program[m] for m in group}

    # -- why --------------------------------------------------------------------------------------------------------

    def circle(self, op: int) -> list[str]:
        """Who waits for whom, from an op that has not ended, until it comes round."""
        path, lines = list[int](), list[str]()
        while op not in path:
            path.append(op)
            why, op = self._why(op)
            lines.append(f"  program {self.program[path[-1]]} {self.plan.text(path[-1])} {why} {self._name(op)}")
        return lines[path.index(op) :]

    def _name(self, op: int) -> str:
        return f"{self.plan.text(op)} of program {self.program[op]}"

    def _why(self, op: int) -> tuple[str, int]:
        if self.started[op]:
            return "spins until the start of", next(m for m in self.mates[op] if not self.started[m])
        if op >= (at := self.host[self.program[op]]):
            return ("is not launched before", at) if op > at else ("is held by the host for", self._held(op)[0])
        head = self.waiting[self.queue[op]][0]
        if op != head:
            return f"stands in hardware queue {self.queue[op][1]} behind", head
        return "waits for the end of", self._needs(op)[0]


def _before(stream: list[int]) -> list[int]:
    """The op before each on its stream, or -1."""
    last: dict[int, int] = {}
    out = []
    for op, s in enumerate(stream):
        out.append(last.get(s, -1))
        last[s] = op
    return out
