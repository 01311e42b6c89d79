"""All pieces together, without a plan: two gloo ranks train two stages with late W, and equal one process bitwise."""

import hashlib
from typing import Any

import torch

from executor.autograd.stage import Stage
from executor.launch.launch import launch
from executor.modules.decoder import DecoderModel
from executor.optim.optimizer import Optimizer, clip_scale, norm_of, square_sums
from executor.runtime.batch import MicrobatchLoader
from executor.runtime.worker import RankContext
from executor.transport.base import TransportTopology
from ir.core.ops import Pass
from ir.job.schema import JobOptimizer
from ir.workload.config.load import load_config
from tests.executor.reference import forward, input_grad, train

M, STEPS = 4, 2
STAGES = [["embed", "l0"], ["l1", "head"]]


def _model(dtype: str) -> DecoderModel:
    return DecoderModel(load_config("tiny-llama", {"num_hidden_layers": 2}), dtype=getattr(torch, dtype))


def _data() -> MicrobatchLoader:
    return MicrobatchLoader("synthetic", vocab=256, length=16, microbatches=M, size=2)


def _digest(params: dict[str, Any]) -> dict[str, str]:
    return {n: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for n, p in params.items()}


def _rank(ctx: RankContext, dtype: str) -> dict[str, Any]:
    model, data, me = _model(dtype), _data(), ctx.rank
    built = model.build(STAGES[me])
    stage = Stage(built.units, built.params)
    t = ctx.gloo(TransportTopology.of(2, [(0, 1), (1, 0)], {"world": (0, 1)}), timeout_s=20)
    wide = getattr(torch, dtype)
    opt = Optimizer(JobOptimizer(), built.params, wide)
    out: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        stage.grads.begin()
        boxes = [torch.empty(2, 16, 64, dtype=wide) for _ in range(M)]
        handles = [t.recv(1 - me, b) for b in boxes]  # all posted ahead
        sent, loss = [], 0.0
        if me == 0:
            order = ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]
        else:
            order = ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]
        for i, op in enumerate(order):
            mb = int(op[1])
            ctx.progress.op(i, f"{me}{op}")
            batch = data.batch(step, 0, mb)
            if (me == 1 and op[0] == "F") or (me == 0 and op[0] == "B"):
                ctx.progress.wait([1 - me])
                handles[mb].wait()
                ctx.progress.go_on()
            if op[0] == "F":
                for unit, wants in built.extras.items():
                    stage.feed_extra(mb, unit, *batch.extras(wants))
                (y,) = forward(stage, mb, batch.ids if me == 0 else boxes[mb])
                if me == 0:
                    sent.append(t.send(1, y))
                else:
                    loss += y.item()
            else:
                (dx,) = input_grad(stage, mb, *([] if me else [boxes[mb]]))
                if me == 1:
                    sent.append(t.send(0, dx))
        stage_order = range(M)
        for mb in stage_order:
            stage.run(Pass.W, mb)
        for h in sent:
            h.wait()
        stage.grads.settle()
        sums = square_sums(stage.grads.sums, list(model.shapes))
        total = torch.tensor([loss], dtype=torch.float64)
        t.all_reduce("world", sums).wait()
        t.all_reduce("world", total).wait()
        norm = norm_of(sums)
        out["losses"].append(total.item())
        out["norms"].append(norm)
        opt.step(stage.grads.sums, clip_scale(norm, 1.0))
    t.close()
    return {**out, "grads": _digest(stage.grads.sums), "params": _digest(built.params), "left": stage.in_flight}


def test_two_ranks_equal_one_process_bitwise() -> None:
    for dtype in ("float64", "float32"):
        want = train(_model(dtype), _data(), STEPS, moments=getattr(torch, dtype))
        got = launch(_rank, 2, {"dtype": dtype})
        for rank in got:
            assert rank["losses"] == want.losses and rank["norms"] == want.grad_norms and rank["left"] == 0
        assert {**got[0]["grads"], **got[1]["grads"]} == _digest(want.grads)
        assert {**got[0]["params"], **got[1]["params"]} == _digest(want.params)
