"""Which of a rank's units are compiled, and for what inputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from executor.autograd.compiled import CompiledPart, Note, PartCompiler
from executor.device import clock
from executor.modules.base import TORCH, BuiltChunks, example_extra
from ir.job.build import PreparedJob, precision_of

EAGER = ("router", "experts", "shared", "add")  # what experts get is known by the host alone, and only as it runs


@dataclass(frozen=True)
class CompiledParts:
    """What one rank has compiled. graphs: so many, equal ones once; seconds: how long it took."""

    parts: dict[str, CompiledPart]
    graphs: int = 0
    seconds: float = 0.0

    def told(self) -> tuple[int, int, float]:
        """For the run's object: units, graphs, seconds."""
        return len(self.parts), self.graphs, self.seconds


def compile_parts(
    prepared: PreparedJob, built: BuiltChunks, units: Iterable[str], device: torch.device, note: Note | None
) -> CompiledParts:
    """Compile those units of a rank that can be; before its parameters become views of flat buckets. note: told before
    each graph.
    """
    job, began = prepared.job, clock.now()
    batch = job.schedule.microbatch_size, job.model.seq_len
    ids = torch.zeros(batch, dtype=torch.int64, device=device)
    act = torch.zeros(*batch, prepared.config.hidden, dtype=TORCH[precision_of(job).compute], device=device)
    names, made = {id(p): n for n, p in built.params.items()}, PartCompiler(note or _unsaid)
    parts, first = {}, prepared.base.entries[0].name
    for name in units:
        if name.rpartition(".")[2] in EAGER:
            continue
        unit, reads = built.units[name], built.reads.get(name, ("",))
        weights = {names[id(p)]: p for p in unit.parameters()}
        acts = [ids if name == first else act for _ in reads]
        extras = [example_extra(w, ids) for w in built.extras.get(name, ())]
        parts[name] = made.part(name, unit, weights, acts, extras)
    return CompiledParts(parts, made.graphs, clock.now() - began)


def _unsaid(text: str) -> None:
    """Nobody asks."""
