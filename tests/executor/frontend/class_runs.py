"""A class of transformers, captured once and trained under a plan; ranks are threads of this process."""

import atexit
import json
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from torch import nn

from executor.device.progress import RankProgress, create
from executor.frontend.capture import capture, text
from executor.launch.run import gathered
from executor.modules.user.exports.shared_exports import RankExports
from executor.runtime.batch import MicrobatchLoader
from executor.runtime.given import given_name, given_text
from executor.runtime.rank import train_rank
from executor.runtime.spec import PlanRun
from executor.runtime.worker import LocalRanks, RankContext
from ir.core.work import DType
from ir.job import load_job
from ir.job.build import PreparedJob, prepare
from ir.job.run_options import JobRunOptions
from ir.verify import check_plan
from ir.workload.part import CP_COMMS
from tests.executor.frontend.models import hub_classes
from tests.executor.modules.hub import Doubled, quiet
from tests.executor.runs import Arrays, distance, merged
from tests.executor.threads import together

LENGTH, SIZE, MBS, STEPS = 8, 1, 4, 3
MUON = "optimizer.name=muon"
ClassPlan = tuple[int, int, int, str]  # pp, dp, zero, schedule
PLANS = [
    *((pp, 1, 0, s) for pp, s in ((2, "1f1b"), (3, "zb1p"), (2, "dualpipe"), (2, "gpipe"))),
    *((pp, 2, zero, "1f1b") for pp, zero in ((1, 3), (2, 2), (1, 1), (2, 3), (1, 2))),
    *((2, 1, 0, s) for s in ("zbv", "interleaved-1f1b", "dualpipev")),
]


def _graph(name: str, tp: int = 1, ep: int = 0, cp: int = 1, heads: bool = False, sequence: bool = False) -> str:
    """Captured once, whatever of it is said. ep 0: with experts untagged."""
    return _captured(name, tp, ep, cp, heads, sequence)


@lru_cache
def _captured(name: str, tp: int, ep: int, cp: int, heads: bool, sequence: bool) -> str:
    folder = Path(tempfile.mkdtemp(prefix="piper-graph-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    reference = f"{hub_classes.__file__}:{name}"
    with quiet():
        tags = hub_classes.EP if ep else {"PP": hub_classes.LAYERS[name]}
        divided: dict[str, Any] = {"tp": tp, "ep": ep or 1, "cp": cp, "cp_comm": CP_COMMS[heads]}
        divided["sequence_parallel"] = sequence
        found = capture(reference, batch=(SIZE, LENGTH), dtype=DType.FP64, tags=tags, **divided)
    (folder / "model.json").write_text(text(found))
    return str(folder / "model.json")


def prepared_class(name: str, *sets: str) -> PreparedJob:
    """The job of a class, and the graph captured from it."""
    given = dict(s.split("=", 1) for s in sets)
    tp, ep, cp = (int(given.get(f"parallel.{a}", n)) for a, n in (("tp", 1), ("ep", 0), ("cp", 1)))
    heads = given.get("parallel.cp_comm") == "all_to_all"
    sequence = given.get("parallel.sequence_parallel") == "true"
    table = {
        "model": {
            "module": f"{hub_classes.__file__}:{name}",
            "graph": _graph(name, tp, ep, cp, heads, sequence),
            "tags": hub_classes.EP if ep else {"PP": hub_classes.LAYERS[name]},
            "seq_len": LENGTH,
        },
        "cluster": {"gpu": "h100-sxm"},
        "precision": {"compute": "fp64"},
        "optimizer": {"lr": 0.01, "weight_decay": 0.1},
    }
    return prepare(load_job(table, sets))


@lru_cache(maxsize=8)
def _exports(file: str, name: str, *sets: str) -> RankExports:
    """What runs of one class have exported, under every plan. file: the class's own; sets: what makes it another."""
    return RankExports()


def run_class(name: str, *sets: str) -> tuple[dict[str, Any], Arrays, Arrays]:
    """The run's object, gradients of its last step and parameters behind it."""
    prepared = prepared_class(name, *sets)
    plan = prepared.plan()
    check_plan(plan)
    with tempfile.TemporaryDirectory() as folder:
        made = (s for s in sets if s.startswith(("model.", "precision.", "schedule.microbatch_size", "parallel.ep")))
        at, hub = Path(folder), LocalRanks(exports=_exports(hub_classes.__file__, name, *made))
        (at / given_name(0)).write_text(given_text(prepared, plan))
        create(at / "progress", prepared.ranks)
        spec = PlanRun(JobRunOptions(prepared.ranks, steps=STEPS, backend="local", dump=at)).told()

        def life(rank: int) -> dict[str, Any]:
            context = RankContext(rank, prepared.ranks, at, RankProgress(at / "progress", rank), hub=hub)
            told: dict[str, Any] = json.loads(json.dumps(train_rank(context, **spec)))
            return told

        results = together(life, prepared.ranks, hub.fail)
        found, _ = gathered(prepared, plan, results)
        ends = [load_file(at / f"rank-{r}.safetensors") for r in range(prepared.ranks)]
    both = merged(ends)
    grads, params = ({n.partition("/")[2]: x for n, x in both.items() if n.startswith(k)} for k in ("grad", "param"))
    return found, grads, params


Leaf = tuple[nn.Parameter, nn.Parameter, int]  # a matrix of a stack, which shares its memory; the stack; which one


def optimizers(model: nn.Module, muon: str) -> tuple[list[torch.optim.Optimizer], list[Leaf]]:
    """torch's own. muon: of the layers' matrices, but for those whose rows are looked up, and AdamW of all else; of
    each of a stack of experts where it says "experts"; AdamW alone where it says nothing."""
    rows = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    hidden: list[nn.Parameter] = []
    other: list[nn.Parameter] = []
    leaves: list[Leaf] = []
    for n, p in model.named_parameters():
        if not muon or not any(f".{x}." in n for x in ("layers", "h", "block")) or id(p) in rows:
            other.append(p)
        elif p.dim() == 3 and muon == "experts":
            leaves += [(nn.Parameter(x), p, i) for i, x in enumerate(p.detach())]
        else:
            (hidden if p.dim() == 2 else other).append(p)
    hidden += [leaf for leaf, _, _ in leaves]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(other, lr=0.01, weight_decay=0.1, foreach=False)]
    return [*found, *([torch.optim.Muon(hidden, lr=0.01, weight_decay=0.1)] if hidden else [])], leaves


@lru_cache
def _alone(name: str, spoilt: bool = False, muon: str = "") -> tuple[list[float], list[float], Arrays, Arrays]:
    """Plain torch: the class's own forward and loss, torch's clipping and AdamW; none of ours but the data."""
    torch.set_num_threads(1)
    data = MicrobatchLoader("synthetic", vocab=hub_classes.VOCAB, length=LENGTH, microbatches=MBS, size=SIZE)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = getattr(hub_classes, name)().to(torch.float64)
    if spoilt:
        _untie(model)
    (made, leaves), losses, norms = optimizers(model, muon), [], []
    grads: dict[str, np.ndarray] = {}
    for step in range(STEPS):
        model.zero_grad()
        total = 0.0
        for mb in range(MBS):
            batch = data.batch(step, 0, mb)
            logits = model(input_ids=batch.ids, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum") * batch.scale
            if hasattr(model, "loss_function"):
                labels = {"num_items_in_batch": 1 / batch.scale, "shift_labels": batch.labels}
                with Doubled():
                    theirs = model.loss_function(logits, None, hub_classes.VOCAB, **labels)
                assert theirs.item() == pytest.approx(loss.item(), rel=1e-12)
            loss.backward()
            total += loss.item()
        grads = {n: _zeros_or(p) for n, p in model.named_parameters() if p.requires_grad}
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        for leaf, whole, k in leaves:
            assert whole.grad is not None
            leaf.grad = whole.grad[k]
        for optimizer in made:
            optimizer.step()
    trained = {n: p.detach().numpy() for n, p in model.named_parameters() if p.requires_grad}
    return losses, norms, grads, trained


def _zeros_or(p: nn.Parameter) -> np.ndarray:
    """A copy of its gradient: zeros where the loss does not reach it, and torch's optimizers leave it alone."""
    found: np.ndarray = (torch.zeros_like(p) if p.grad is None else p.grad.clone()).numpy()
    return found


def _untie(model: Any) -> None:
    """A copy of the tied weight: the same forward at first, and not the same training."""
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def far(name: str, *sets: str, spoilt: bool = False) -> float:
    """How far a run is from plain torch; NaN where a number is. spoilt: from a class whose tied weight is two."""
    found, grads, params = run_class(name, *sets)
    muon = ("matrices", "experts")[any(s.startswith("parallel.ep=") for s in sets)] if MUON in sets else ""
    losses, norms, their_grads, their_params = _alone(name, spoilt, muon)
    if spoilt:
        their_grads, their_params = ({k: x[k] for k in grads} for x in (their_grads, their_params))
    numbers, wanted = np.array([*found["losses"], *found["grad_norms"]]), np.array([*losses, *norms])
    return float(
        np.max([distance(grads, their_grads), distance(params, their_params), np.abs(numbers / wanted - 1).max()])
    )


def sets_of(plan: ClassPlan, recompute: str) -> list[str]:
    """The job's overrides."""
    pp, dp, zero, schedule = plan
    layers = {"zbv": "[0,1,1,1]", "dualpipev": "[0,1,1,1]", "interleaved-1f1b": "[0,1,1,1]"}.get(schedule, "balanced")
    return [
        f"parallel.pp={pp}", f"parallel.dp={dp}", f"parallel.zero={zero}", f"parallel.layers={layers}",
        f"schedule.name={schedule}", f"schedule.microbatches={MBS // dp}", f"schedule.recompute={recompute}",
    ]  # fmt: skip
