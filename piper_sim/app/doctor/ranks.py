"""The ranks of an allocation. Rank 0 asks, the others follow; each run is in processes of its own, so that one that
fails, or is made to, takes no rank's doctor with it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from executor.checkpoint.settings import settled, verified
from executor.device import clock
from executor.device.progress import RankProgress
from executor.launch.launch import launch
from executor.launch.run import RANK, check, gathered
from executor.launch.store import clocks, meeting, put, take
from executor.launch.torchrun import TorchrunRank, port_taken
from executor.launch.watch.sights import host
from executor.launch.watch.verdict import RankFailed
from executor.launch.watch.watchdog import FAILED, GONE_S, STARTUP_S, RankWatchdog
from executor.runtime.given import given_text
from executor.runtime.spec import PlanRun
from executor.runtime.target import Target, describe, find, write_whole
from executor.runtime.worker import RankContext
from ir.core.errors import ErrorKind, PiperError
from ir.job.build import PreparedJob
from ir.job.run_options import CheckpointOptions, JobRunOptions
from ir.plan.plan import Plan
from ir.trace.trace import Trace
from piper_sim.app.doctor.runs import MachineRanks

PATIENCE_S = 30.0  # between a run's end here and its end elsewhere: what is stopped there has to be killed
AT_ONCE_S = 10.0  # in which a rank that has nothing to do answers
LAST_WORDS_S = 10.0  # from a launcher's order to end to the end of what has not ended; torchrun kills after 30
WATCHDOG_S = 15.0
IDLE_S = 900.0  # in which rank 0 asks for nothing: it is gone, and nobody has said so
Told = Mapping[str, Any]


class AllocationRanks(MachineRanks):
    """One rank's doctor among those of an allocation.

    store: of this meeting alone. told_to_end: the launcher has seen a rank elsewhere end.
    """

    def __init__(self, place: TorchrunRank, store: Store, name: str) -> None:
        super().__init__(place.world, int(os.environ.get("LOCAL_WORLD_SIZE", place.world)))
        self.place, self.name, self.store = place, name, PrefixStore(name, store)
        self.at = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.told_to_end, self._running, self._asked = False, False, 0
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._to_end)
            signal.signal(signal.SIGALRM, self._at_last)

    @classmethod
    def meet(cls, patience_s: float = STARTUP_S) -> AllocationRanks:
        """All are there. Raises PiperError: who is not."""
        place, kept = TorchrunRank.here(), None
        try:
            kept, _, _ = next(rendezvous("env://", place.rank, place.world, timeout=timedelta(seconds=patience_s)))
            return cls(place, kept, meeting(kept, place.rank, place.world, patience_s))
        except (RuntimeError, TimeoutError) as error:
            absent = [r for r in range(place.world) if kept is None or not kept.check([f"word/{r}"])]
            at = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            who = f"not all ranks came to {at}" if kept is None else f"{numbered(absent)} did not come"
            fix = f"start the launcher on every node; see that each can reach {at}"
            message, may = f"{who} in {patience_s:.0f} s", f"{place.world} ranks"
            absence = PiperError(ErrorKind.RANK_FAILED, message, allowed=may, suggestion=fix)
            raise port_taken(error) or absence from error

    # -- rank 0 -------------------------------------------------------------------------------------------------------

    def run(
        self,
        prepared: PreparedJob,
        plan: Plan,
        options: JobRunOptions,
        saving: CheckpointOptions = CheckpointOptions(),
        fault: Told | None = None,
    ) -> tuple[dict[str, Any], Trace]:
        """As `executor.launch.run.run`, on all ranks. fault: what befalls which rank. Raises PiperError, RankFailed."""
        if options.backend == "local":
            return super().run(prepared, plan, options, saving)
        options.check()
        drawn = check(prepared, plan, options)
        spec = PlanRun(options, verified(settled(saving, prepared, options.steps, real=options.real)))
        told = {"given": [given_text(prepared, plan, drawn)], "watchdog_s": options.watchdog_s, "fault": fault}
        ends = self._run({"target": describe(RANK), "args": spec.told(), **told})
        return gathered(prepared, plan, [{**end["result"], "clock": end["clock"]} for end in ends])

    def call(self, fn: Target, args: Told) -> list[tuple[Any, float]]:
        """What a function returns on every rank, and by how many seconds its clock is ahead."""
        told = {"given": [], "watchdog_s": WATCHDOG_S, "fault": None}
        ends = self._run({"target": describe(fn), "args": dict(args), **told})
        return [(end["result"], end["clock"][0]) for end in ends]

    def everywhere(self, fn: Callable[..., object], *args: str) -> list[Any]:
        """What each rank's doctor finds by itself. Raises PiperError: of the first that something is wrong with."""
        return self._ask({"target": describe(fn), "here": args})

    def _run(self, told: Told) -> list[Any]:
        """What a run's ranks return. All are asked for first: those that have begun wait long for one that is gone."""
        self._ask({"target": describe(host), "here": ()}, AT_ONCE_S)
        found: list[Any] = self._ask(told)[0]
        return found

    def over(self, code: int) -> None:
        """Nothing more is asked."""
        with suppress(RuntimeError):  # the store is gone, and with it whoever followed
            put(self.store, f"ask/{self._asked}", json.dumps({"code": code}))

    def _ask(self, told: Told, patience_s: float = PATIENCE_S) -> list[Any]:
        if self.told_to_end:
            raise _ended()
        number, self._asked = self._asked, self._asked + 1
        try:
            put(self.store, f"ask/{number}", json.dumps(told))
            ends, limit = [self._answer(number, told)], clock.now() + patience_s
            for key in (f"end/{number}/{rank}" for rank in range(1, self.ranks)):
                while not (there := self.store.check([key])) and clock.now() < limit:
                    limit = min(limit, clock.now() + GONE_S) if self.told_to_end else limit
                    clock.sleep_until(clock.now() + 0.01)
                ends.append(json.loads(take(self.store, key)) if there else {})
        except RuntimeError as error:
            raise PiperError(ErrorKind.RANK_FAILED, f"the launcher's store is gone: {error}") from error
        _refuse(ends)
        return [end["result"] for end in ends]

    # -- every rank ---------------------------------------------------------------------------------------------------

    def _to_end(self, *_: object) -> None:
        self.told_to_end = True
        signal.setitimer(signal.ITIMER_REAL, LAST_WORDS_S)

    def _at_last(self, *_: object) -> None:
        if self._running:
            raise _ended()

    def follow(self) -> int:
        """Do what rank 0 asks for until it asks no more; returns the exit code."""
        limit = clock.now() + IDLE_S
        while not self.told_to_end and clock.now() < limit:
            with suppress(RuntimeError):  # the store is gone
                if not self.store.check([f"ask/{self._asked}"]):
                    clock.sleep_until(clock.now() + 0.02)
                    continue
                told = json.loads(take(self.store, f"ask/{self._asked}"))
                if "code" in told:
                    return int(told["code"])
                answer = self._answer(self._asked, told)
                put(self.store, f"end/{self._asked}/{self.place.rank}", json.dumps(answer))
                self._asked, limit = self._asked + 1, clock.now() + IDLE_S
                continue
            break
        return FAILED

    def _answer(self, number: int, told: Told) -> dict[str, Any]:
        """This rank's part of what is asked. said: what a run's ranks say of its end, where this one is to say it."""
        with tempfile.TemporaryDirectory(prefix="piper-doctor-") as folder:
            said = Path(folder) / "said"
            try:
                if "here" in told:
                    return {"result": find(told["target"])(*told["here"])}
                where: dict[str, Any] = {"rank": self.place.rank, "world": self.ranks}
                where |= {"local_rank": self.place.local_rank, "interface": os.getenv(INTERFACE), "said": str(said)}
                where |= {"at": self.at, "name": f"{self.name}/{number}"}
                args = {"where": where, **{k: told[k] for k in ("target", "args", "watchdog_s", "fault")}}
                late_s = told["watchdog_s"] + GONE_S  # by which those who watch each other have said who it is
                self._running = True
                (found,) = launch(live, 1, args, given=told["given"], watchdog_s=late_s, startup_s=2 * STARTUP_S)
                return {"result": found}
            except PiperError as error:
                spoken = json.loads(said.read_text("utf-8")) if said.exists() else None
                return {"said": spoken} if spoken else {"error": error.to_dict(), "host": socket.gethostname()}
            finally:
                self._running = False


def _ended() -> PiperError:
    return PiperError(ErrorKind.RANK_FAILED, "the launcher ends all: a rank has ended", suggestion="see its log")


def _refuse(ends: Sequence[Told]) -> None:
    """Raise what has gone wrong: as the run's ranks say, else as one of them ended."""
    for said in (end["said"] for end in ends if "said" in end):
        if "rank" in said:
            reason = said["message"].partition(": ")[2].partition("; rank")[0]
            waiting = {int(r): op for r, op in said["waiting"].items()}
            raise RankFailed(reason, rank=said["rank"], op=said["op"], waiting=waiting)
        raise _error(said, "")
    if lost := [rank for rank, end in enumerate(ends) if not end]:
        raise RankFailed(f"no word from {numbered(lost)}", rank=lost[0], op=None, waiting={})
    for rank, end in enumerate(ends):
        if "error" in end:
            raise _error(end["error"], f"rank {rank} on {end['host']}: ")


def _error(said: Told, before: str) -> PiperError:
    known = {k: said.get(k) for k in ("file", "key", "allowed", "suggestion")}
    return PiperError(ErrorKind(said["kind"]), f"{before}{said['message']}", **known)


def numbered(ranks: Sequence[int]) -> str:
    """For people.

    >>> numbered([2, 3])
    'ranks 2, 3'
    """
    return f"ranks {', '.join(map(str, ranks))}"


# -- in a process of its own ------------------------------------------------------------------------------------------

INTERFACE = "GLOO_SOCKET_IFNAME"


def live(
    ctx: RankContext, target: dict[str, str], args: Told, where: Told, watchdog_s: float, fault: Told | None
) -> list[Any]:
    """One rank of a run: a target of `launch`, which knows this rank alone. Returns, on rank 0, what all ranks did."""
    os.environ.pop(INTERFACE)  # its own machine, as `launch` has it
    if where["interface"] is not None:
        os.environ[INTERFACE] = where["interface"]
    patience = timedelta(seconds=STARTUP_S)
    address, port = where["at"]
    store = PrefixStore(where["name"], TCPStore(address, port, None, False, patience, wait_for_workers=False))
    rank, progress = where["rank"], ctx.dir / "rank" / "progress"
    progress.parent.mkdir()  # which whoever buries this rank removes; `launch` needs its own
    progress.symlink_to(ctx.dir / "progress")

    def report(error: PiperError) -> None:
        write_whole(Path(where["said"]), json.dumps(error.to_dict()))

    mine = PrefixStore("piper", store)
    lookout = RankWatchdog(mine, rank, where["world"], progress, watchdog_s, report)
    opened = {"open_store": lambda name: PrefixStore(name, store), "local_rank": where["local_rank"]}
    try:
        lookout.meet("")
        ahead = clocks(lookout.store, rank, lookout.sights.hosts)
        lookout.start()
        if fault is not None and fault["rank"] == rank:
            _suffer(ctx.progress, partial(FAULTS[fault["kind"]], port))
        result = find(target)(replace(ctx, rank=rank, world=where["world"], **opened), **args)
        results: list[Any] = lookout.exchange({"result": result, "clock": ahead})
    except BaseException as error:
        lookout.fall(error)
    lookout.part()
    return results


def _suffer(progress: RankProgress, fault: Callable[[], None]) -> None:
    """As the second step begins."""
    op, last = progress.op, -1

    def note(index: int, text: str) -> None:
        nonlocal last
        op(index, text)
        again, last = index < last, index
        if again:
            fault()

    vars(progress)["op"] = note


def cut(store_port: int) -> None:
    """Every connection of this process but those to the store ends, and no message says so."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as s:
                    if store_port not in (s.getsockname()[1], s.getpeername()[1]):
                        s.shutdown(socket.SHUT_RDWR)


FAULTS: Mapping[str, Callable[[int], None]] = {
    "killed": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "cut off": cut,
}
