"""What every rank is told about checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

KEPT = 2


@dataclass(frozen=True, slots=True)
class Saving:
    """save: the folder to save to. every: steps between two checkpoints, counted from the run's very first step; None:
    only behind the last one. keep: how many to keep. force: save to a folder that holds something else.

    resume: the checkpoint that the run takes up. first: steps done in it. verified: its files are known to be whole.
    """

    save: str | None = None
    every: int | None = None
    keep: int | None = None
    force: bool = False
    resume: str | None = None
    first: int = 0
    verified: bool = False

    def due(self, done: int, steps: int) -> bool:
        """Whether to save behind so many steps of so many.

        >>> [Saving("d", every=4).due(done, 6) for done in (3, 4, 5, 6)], Saving(every=4).due(4, 6)
        ([False, True, False, True], False)
        """
        return self.save is not None and (done == steps or (self.every is not None and done % self.every == 0))
