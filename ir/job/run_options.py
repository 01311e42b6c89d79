"""How a plan is to be run, and what is saved: the flags of `piper-sim run`, the same for whoever asks for a run."""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from ir.core.errors import usage_error

KEPT = 2  # checkpoints, unless told otherwise


@dataclass(frozen=True)
class JobRunOptions:
    """A run's flags.

    ranks: processes, as many as the job has ranks.
    steps: done at the end; those of a checkpoint that is resumed are among them.
    backend: gloo, nccl or local.
    watchdog_s: a rank without progress for so many seconds has failed.
    emulate: seconds of a layer's pass, instead of arithmetic.
    emulate_comm: seconds by which each transfer ends later.
    replay: a trace file whose ops' seconds are taken, instead of arithmetic.
    out: a folder that gets `ranks.json`, and `routing.csv` where the model has experts.
    dump: a folder for each rank's gradients and parameters, of the first step and of the last.
    parts: a folder for what each node of a compute op took, where the host computes: `parts-<rank>.json`, rows
    (step, op, seconds of each of its nodes).
    memory: one more step at the end, in which every storage is followed; without it, peak bytes are null.
    racecheck: on a CPU that keeps a GPU's promises about streams and freed memory, and no more.
    sets: the `--set` overrides that the job was loaded with, for what an error suggests.
    """

    ranks: int
    steps: int = 1
    backend: str = "gloo"
    watchdog_s: float = 15.0
    emulate: float | None = None
    emulate_comm: float = 0.0
    replay: Path | None = None
    out: Path | None = None
    dump: Path | None = None
    parts: Path | None = None
    sets: tuple[str, ...] = ()
    memory: bool = True
    racecheck: bool = False

    @classmethod
    def of(cls, flags: Namespace, ranks: int) -> JobRunOptions:
        """As a command line says them; what a command has no flag for stays as it is by default."""
        replay = getattr(flags, "replay", None)
        return cls(
            ranks=ranks,
            steps=flags.steps,
            backend="local" if getattr(flags, "racecheck", False) else flags.backend,
            racecheck=getattr(flags, "racecheck", False),
            watchdog_s=flags.watchdog,
            emulate=flags.emulate,
            emulate_comm=flags.emulate_comm,
            replay=None if replay is None else Path(replay),
            out=None if flags.out is None else Path(flags.out),
            sets=tuple(flags.sets),
        )

    @property
    def real(self) -> bool:
        """Whether ops compute something.

        >>> JobRunOptions(2).real, JobRunOptions(2, emulate=0.01).real
        (True, False)
        """
        return self.emulate is None and self.replay is None

    def check(self) -> None:
        """Refuse flags out of range. Raises PiperError (usage)."""
        rules = (
            ("--steps", self.steps, self.steps >= 1, "1 or more", "steps"),
            ("--watchdog", self.watchdog_s, 0 < self.watchdog_s < math.inf, "more than 0", "seconds"),
            ("--emulate", self.emulate, self.emulate is None or 0 <= self.emulate < math.inf, "0 or more", "seconds"),
            ("--emulate-comm", self.emulate_comm, 0 <= self.emulate_comm < math.inf, "0 or more", "seconds"),
        )
        usual = {"--steps": "1", "--watchdog": "15", "--emulate": "0.01", "--emulate-comm": "0.001"}
        for flag, value, good, allowed, unit in rules:
            if not good:
                raise usage_error(flag, f"{value} {unit}", f"{flag} {usual[flag]}", allowed)
        if self.racecheck and not self.real:
            message = "ops of a given time touch nothing that could race"
            raise usage_error("--racecheck", message, "leave out --emulate and --replay")
        if self.replay is not None and self.emulate is not None:
            message = "ops take either a given time or that of a trace"
            raise usage_error("--replay", message, "leave out --emulate")


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """What a run saves and what it takes up; by default neither."""

    save: str | None = None  # the folder to save to
    every: int | None = None  # steps between two checkpoints, from the very first step on; None: at the end only
    keep: int | None = None  # how many are kept, by default KEPT
    force: bool = False  # save to a folder that holds something else
    resume: str | None = None  # the checkpoint that is taken up
    first: int = 0  # steps done in it
    run: str | None = None  # the run that it is of, if that is continued in the same folder
    verified: bool = False  # its files are known to be whole

    def done(self, steps: int) -> bool:
        """Whether so many steps are done in what is taken up: it died behind its last save.

        >>> CheckpointOptions(resume="d/step-000004", first=4).done(4), CheckpointOptions().done(4)
        (True, False)
        """
        return self.first >= steps

    def due(self, done: int, steps: int) -> bool:
        """Whether to save behind so many steps of so many.

        >>> [CheckpointOptions("d", every=4).due(done, 6) for done in (3, 4, 5, 6)]
        [False, True, False, True]
        >>> CheckpointOptions(every=4).due(4, 6)
        False
        """
        return self.save is not None and (done == steps or (self.every is not None and done % self.every == 0))
