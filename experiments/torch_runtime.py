"""A job's model on torch.distributed.pipelining's runtime, by a schedule's CSV: what our executor is held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from executor.modules.base import BuiltChunks, TokenLoss, evaluate
from executor.modules.choose import model_of
from executor.modules.functions import token_loss
from executor.runtime.batch import Microbatch
from ir.job.build import PreparedJob
from ir.plan.plan import Plan


class StageModule(nn.Module):
    """One stage's units in a row; the last one gives logits, as torch's runtime calls the loss itself."""

    def __init__(self, built: BuiltChunks, names: Sequence[str]) -> None:
        super().__init__()
        units = {n: built.units[n] for n in names}
        units = {n: u.inner if isinstance(u, TokenLoss) else u for n, u in units.items()}
        self.units = nn.ModuleList(units.values())
        self._built = replace(built, units=units)

    def forward(self, x: Tensor) -> Tensor:
        return evaluate(self._built, x, {})


class TorchPipeline:
    """One rank of torch's runtime. csv: compute only; torch puts in the communication. group: None is the world.

    A model without ties: torch's runtime does not add up a parameter's gradients over ranks.
    """

    def __init__(self, prepared: PreparedJob, plan: Plan, rank: int, csv: Path, group: Any = None) -> None:
        # Not above: importing it takes a second.
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

        entries, self._scale = prepared.base.entries, 1.0
        mine = sorted({n.stage for n in plan.graph.nodes if not n.once and rank in n.groups})
        built = model_of(prepared).build(list(dict.fromkeys(e.chunk.name for e in entries if e.stage in mine)))
        self.params: dict[str, nn.Parameter] = dict(built.params)
        self.first, self.last = 0 in mine, prepared.stages - 1 in mine
        modules = {s: StageModule(built, [e.name for e in entries if e.stage == s]) for s in mine}
        cpu, count = torch.device("cpu"), prepared.stages
        stages = [PipelineStage(m, s, count, cpu, group=group) for s, m in modules.items()]
        runtime: Any = _PipelineScheduleRuntime
        self._runtime = runtime(stages, prepared.mbs, loss_fn=self._loss, scale_grads=False)
        self._runtime._load_csv(str(csv))

    def step(self, batches: Sequence[Microbatch]) -> list[float]:
        """Forward and backward of all microbatches; gradients add up in `.grad`. Losses where the last stage is."""
        self._scale = batches[0].scale
        losses: list[Tensor] = []
        ids = [torch.cat([b.ids for b in batches])] if self.first else []
        labels = torch.cat([b.labels for b in batches])
        self._runtime.step(*ids, target=labels, losses=losses, return_outputs=False)
        return [loss.item() for loss in losses]

    def grads(self) -> Mapping[str, Tensor]:
        return {n: p.grad for n, p in self.params.items() if p.grad is not None}

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return token_loss(logits.flatten(0, 1), labels.flatten(), self._scale, TokenLoss.IGNORE)
