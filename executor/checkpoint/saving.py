"""What every rank is told about checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

KEPT = 2


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

    def due(self, done: int, steps: int) -> bool:
        """Whether to save behind so many steps of so many.

        >>> [CheckpointOptions("d", every=4).due(done, 6) for done in (3, 4, 5, 6)]
        [False, True, False, True]
        >>> CheckpointOptions(every=4).due(4, 6)
        False
        """
        return self.save is not None and (done == steps or (self.every is not None and done % self.every == 0))
