"""Ranks without a common parent watch each other through a store: who is at which op, who has failed, who says so."""

import atexit
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from executor.device import clock
from executor.launch.store import put, take
from executor.launch.watch.sights import EVERY_S, RankSights, host
from executor.launch.watch.verdict import RankFailed
from executor.runtime.flight import RankFlight, pointed
from executor.runtime.worker import PATIENCE_S, failure
from executor.transport.base import TransportError
from ir.core.errors import ErrorKind, PiperError

GRACE_S = 1.0  # for others to come to wait, or to run into a failure too, so that the report is complete
GONE_S = 3.0  # without a sign of life
STARTUP_S = 120.0
LOOK_S = 0.5  # for ranks that have not come yet
SAID = "said"  # a file: see `_first`
FAILED = ErrorKind.RANK_FAILED.exit_code


class RankWatchdog:
    """One rank's eyes. store: torchrun's; it is shared with nobody who blocks on it.

    Rank 0 watches all ranks. The others watch rank 0, and for a failure that nobody reports. report: prints an error.
    out: a folder that gets this rank's flight record if the run fails.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        progress: Path,
        watchdog_s: float,
        report: Callable[[PiperError], None],
        out: Path | None = None,
    ) -> None:
        self.store, self.rank, self.world, self.progress = store, rank, world, progress
        self.watchdog_s, self.report = watchdog_s, report
        self.flight = RankFlight(out, rank, progress)
        self.pids: list[int] = []
        self._mine = store.clone()
        self.sights = RankSights(self._mine, rank, world, progress)
        self._began_s = self._looked_s = clock.now()
        self._ended_s: float | None = None  # when somebody told this process to end
        self._failure_s: float | None = None
        self._over = threading.Event()
        self._buried = -1
        self._words = threading.RLock()  # held by who speaks, and by who leaves: no word is cut short
        self._told = False  # the verdict is out, by whomever: nothing may be said any more
        self._threads: list[threading.Thread] = []

    def meet(self, digest: str) -> list[int]:
        """All ranks are there, and have the same plan, by its digest. Returns their process ids.

        From here on a launcher that ends everybody leaves us the time to say why.

        Raises PiperError (illegal_plan): ranks were given different plans; TransportError: who has not come.
        """
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # else whoever took it decides
            with suppress(ValueError):  # a thread that is not the main one may not
                signal.signal(signal.SIGTERM, self._told_to_end)
        me = json.dumps([os.getpid(), host(), digest, str(self.progress)])
        self.store.set_timeout(timedelta(seconds=STARTUP_S))
        self.store.set(f"here/{self.rank}", me)
        found = [json.loads(text) for text in self.store.multi_get(self._all("here"))]
        self.pids, self.sights.hosts = [pid for pid, *_ in found], [name for _, name, *_ in found]
        self.sights.files = [Path(file) for *_, file in found]
        if any(theirs != digest for _, _, theirs, _ in found):
            message = "the ranks have built different plans, or have found different checkpoints"
            raise PiperError(ErrorKind.ILLEGAL_PLAN, message, suggestion="the same job and files everywhere")
        return self.pids

    def start(self) -> None:
        """Watch from now on. Raises TransportError: who has not come as far."""
        self._began_s = clock.now()
        self._publish()
        self._all("at")
        self._looked_s = clock.now()
        self._threads = [
            threading.Thread(target=self._watch, name="lookout", daemon=True),
            threading.Thread(target=self._guard, name="guard", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self._stop)  # a loop that ends without a close

    def _all(self, name: str) -> list[str]:
        """Every rank's key of a name, once all are there. Who is told to end meanwhile waits for no others."""
        keys = [f"{name}/{r}" for r in range(self.world)]
        limit, patience_s = clock.now() + STARTUP_S, STARTUP_S
        while True:
            try:
                self.store.wait(keys, timedelta(seconds=LOOK_S))  # and no longer: no signal is heard inside of it
                return keys
            except RuntimeError as error:
                absent = [r for r, key in enumerate(keys) if not self.store.check([key])]
                if self._ended_s is not None and patience_s > GONE_S:
                    limit, patience_s = self._ended_s + GONE_S, GONE_S
                if absent and clock.now() > limit:
                    raise TransportError(f"it did not come in {patience_s:.0f} s", absent) from error

    def tell(self, text: str | None) -> str:
        """What rank 0 has to say to all; everybody else says None."""
        if text is not None:
            put(self.store, "told", text)
            return text
        return take(self.store, "told")

    def exchange(self, result: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Leave this rank's result; rank 0 gets all."""
        put(self.store, f"result/{self.rank}", json.dumps(result))
        if self.rank:
            return []
        return [json.loads(take(self.store, f"result/{r}")) for r in range(self.world)]

    def part(self) -> None:
        """All end together, rank 0 last: its machine may hold the store."""
        try:
            if self.rank == 0:
                self.store.set("over", "")
            self.store.wait(["over"], timedelta(seconds=PATIENCE_S))  # a long trace; who watches sees rank 0 die
        except RuntimeError:
            self._orphaned()
        self._stop()
        with suppress(RuntimeError):  # all has been handed over
            self.store.add("gone", 1)
            while self.rank == 0 and self.store.add("gone", 0) < self.world:
                clock.sleep_until(clock.now() + 0.01)

    def fall(self, error: BaseException) -> NoReturn:
        """This rank has failed: leave word, wait until somebody has reported it, end."""
        said = failure(error)
        self.flight.fell = said["traceback"]
        try:
            self._mine.set(f"failure/{self.rank}", json.dumps(said))
            self._mine.add("failures", 1)
            limit = clock.now() + 3 * GONE_S
            while not self._mine.check(["reported"]) and clock.now() < limit:
                if not self._over.is_set() and not any(t.name == "lookout" for t in threading.enumerate()):
                    self._look()  # it fell before anybody watched
                clock.sleep_until(clock.now() + EVERY_S)
            if self._mine.check(["reported"]):
                self._end(int(self._mine.get("reported")))
        except RuntimeError:
            self._orphaned()
        self._leave()

    def _stop(self) -> None:
        """No thread is left: Python ends one that is inside the store by unwinding it, and C++ the process for that."""
        self._over.set()
        if signal.getsignal(signal.SIGTERM) == self._told_to_end:
            with suppress(ValueError):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for thread in self._threads:
            thread.join(GONE_S)  # else the store answers nobody

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _told_to_end(self, *_: object) -> None:
        self._ended_s = self._ended_s or clock.now()

    def _watch(self) -> None:
        try:
            while not self._over.wait(EVERY_S):
                self._looked_s = clock.now()
                self._publish()
                self._look()
        except RuntimeError:
            if not self._over.is_set():
                self._orphaned()

    def _guard(self) -> None:
        """A store that is stopped answers nobody: its client blocks for good."""
        while not self._over.wait(1.0):
            if clock.now() - self._looked_s > self.watchdog_s + GONE_S:
                self._orphaned("no sign of life of it, nor of the store")

    def _orphaned(self, reason: str = "it has vanished") -> NoReturn:
        """The store is gone, and with it whoever held it: rank 0, or its launcher. Rank 1 speaks, as none can ask."""
        with self._words:
            seen = self.sights.last_of(0)
            if self.rank == 1 and seen is not None:
                op = self.sights.op()
                waiting = {1: op} if op else {}
                self._speak(RankFailed(reason, rank=0, op=seen.op or None, waiting=waiting))
            self._bury(0)
            self._leave()

    def _speak(self, error: RankFailed) -> None:
        """Say the verdict, unless it is out."""
        with self._words:
            first, self._told = not self._told and self._first(), True
            if first:
                self.report(pointed(error, self.flight.out))

    def _first(self) -> bool:
        """Whether nobody has spoken, or is about to. The store elects; but rank 1 speaks without it, where it is gone,
        perhaps with who has spoken. So a file of rank 1's folder has the last word, for all who can see it."""
        if self.world < 2 or not self.sights.beside(1):
            return True
        try:
            os.close(os.open(self.sights.files[1].parent / SAID, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return False
        except OSError:  # rank 1 has gone, and its folder; or there is no room
            return True
        return True

    def _publish(self) -> None:
        self.sights.publish(others=self._ended_s is not None or self._failure_s is not None)

    def _look(self) -> None:
        """Read what there is to read, and act on it. Does not return if the run has failed."""
        now = clock.now()
        if self._mine.check(["reported"]):
            self._end(int(self._mine.get("reported")))
        if self._failure_s is None and self._mine.add("failures", 0):
            self._failure_s = now
        self.sights.see([0] if self.rank else range(self.world), now)
        patience = GRACE_S if self.rank == 0 else GRACE_S + GONE_S
        late = self._failure_s is not None and now - self._failure_s > patience
        if self._ended_s is not None:  # by a launcher that has seen somebody end: wait until it is plain who
            known = self._failure_s is not None or bool(self.sights.silent(now))
            late = late or now - self._ended_s > (patience if known else patience + GONE_S)
        calm = self.rank == 0 and self._failure_s is None
        if calm and (found := self.sights.stuck(now, self._began_s, self.watchdog_s, STARTUP_S)):
            self._accuse(found)
        if late or (self.rank and now - self.sights.beat_s(0) > self.watchdog_s + GONE_S):
            self.sights.see(range(self.world), now)
            self._accuse(self.sights.judge(now))

    def _accuse(self, error: RankFailed) -> NoReturn:
        if self._mine.add("reporter", 1) == 1:
            self._speak(error)
            self._mine.set("reported", str(error.rank))
        else:
            self._mine.wait(["reported"], timedelta(seconds=GONE_S))
        self._end(error.rank)

    def _end(self, culprit: int) -> NoReturn:
        """The verdict is out. With rank 0 the store may go, and whoever has not looked yet could take that for a fault:
        neither does it leave, nor is it killed, before the others have looked."""
        self._told = True
        self._mine.set(f"seen/{self.rank}", "")
        if 0 in (self.rank, culprit):
            self._seen({*range(self.world)} - {culprit}, GONE_S)
        self._bury(culprit)
        if self.rank == 0 and self._buried != culprit:
            self._seen({culprit}, 5 * EVERY_S)
        self._leave()

    def _seen(self, ranks: set[int], patience_s: float) -> None:
        """They have read the verdict, or had the time to."""
        limit = clock.now() + patience_s
        while not self._mine.check([f"seen/{r}" for r in ranks]) and clock.now() < limit:
            clock.sleep_until(clock.now() + 0.02)

    def _bury(self, culprit: int) -> None:
        """It may be stopped, and would outlive us; what is dead does not clean up behind itself."""
        if culprit != self.rank and self.sights.beside(culprit):
            self.flight.ask(culprit, self.pids[culprit], self.sights.files[culprit])
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pids[culprit], signal.SIGKILL)
            self._buried = culprit
            shutil.rmtree(self.sights.files[culprit].parent, ignore_errors=True)

    def _leave(self) -> NoReturn:
        """Without any farewell, which might hang; only this rank's own folder goes with it."""
        with self._words:
            self.flight.tell()
            shutil.rmtree(self.progress.parent, ignore_errors=True)
            os._exit(FAILED)
