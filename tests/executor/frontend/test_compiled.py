"""`run.compile`: the passes of a unit as compiled code give what its own Python gives, under any plan."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from executor.autograd.compiled import PartCompiler
from executor.autograd.split import SplitPass
from executor.launch.refusals import refuse
from ir.core.errors import ErrorKind, PiperError
from ir.job import load_job
from ir.job.build import prepare
from tests.executor.frontend.class_runs import ClassPlan, far, run_class, sets_of
from tests.executor.runs import JOB, alone, distance, error, job_file, run

WARNINGS = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself


class Block(nn.Module):
    """A norm, two products, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (sequences, tokens, 8)."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@WARNINGS
def test_a_unit_s_passes_are_compiled_once_and_give_its_own_numbers() -> None:
    torch.manual_seed(0)
    units = [Block().double() for _ in range(2)]
    x, dy = (torch.randn(2, 3, 8, dtype=torch.float64) for _ in range(2))
    notes: list[str] = []
    compiler = PartCompiler(notes.append)
    before = _graphs()
    for unit in units:
        weights, found, early = dict(unit.named_parameters()), {}, set[str]()
        part = compiler.part("l0", unit, weights, [x], [])
        for kind in ("own", "compiled"):
            got: dict[str, Tensor] = {}
            made: Any = SplitPass(weights, got.__setitem__) if kind == "own" else part.begin(got.__setitem__)
            (got["y"],) = made.forward(unit, x)
            (got["dx"],) = made.input_grad(dy)
            assert {*got} == {"y", "dx"}  # a plan may have no room for weight gradients before W
            early = {*made.early} if kind == "compiled" else early
            made.weight_grad()
            found[kind] = {n: t.detach().numpy() for n, t in got.items()}
        assert distance(found["compiled"], found["own"]) <= 1e-10
        assert early == {"norm.weight", "norm.bias", "up.bias"}  # sums; the products wait for W
    assert compiler.graphs == 3 == _graphs() - before  # the second unit is the first one's code
    assert not {f"in{k}" for k in range(len(weights))} & {*part.plan.reads["W"]}, "W reads a weight"
    assert notes[:2] == ["compile l0", "compile l0 F"]


def _graphs() -> int:
    """What Inductor says it has been given, found in its cache or not."""
    return sum(n for name, n in counters["inductor"].items() if name in ("fxgraph_cache_hit", "fxgraph_cache_miss"))


# float64 throughout. transformers' RMSNorm computes in float32 whatever it is given, and three updates by AdamW make
# 1e-6 of a gradient up to 2e-5 of a parameter: hence the second bound.
CLASSES: list[tuple[str, ClassPlan, str, float]] = [
    ("gpt2", (3, 1, 0, "zb1p"), "none", 1e-10),
    ("gpt2", (2, 2, 3, "1f1b"), "full", 1e-10),
    ("llama", (2, 1, 0, "dualpipe"), "full", 1e-4),
    ("gemma3", (2, 1, 0, "zbv"), "none", 1e-4),
    ("mixtral", (2, 2, 2, "1f1b"), "none", 1e-4),
]


@pytest.mark.slow
@WARNINGS
@pytest.mark.parametrize(("name", "plan", "recompute", "bound"), CLASSES, ids=str)
def test_a_class_compiled_trains_as_by_plain_torch(name: str, plan: ClassPlan, recompute: str, bound: float) -> None:
    sets = sets_of(plan, recompute)
    assert 0.0 <= far(name, *sets, "run.compile=true") <= bound
    found, _, _ = run_class(name, *sets, "run.compile=true")
    plain, _, _ = run_class(name, *sets)
    assert plain["compiled"] is None and sum(found["compiled"]["units"].values()) >= 5
    assert plain["plan_digest"] == found["plan_digest"]


@pytest.mark.slow
@WARNINGS
@pytest.mark.parametrize(
    ("model", "units"),
    [([], {"0": 5, "1": 6}), (["model.config=tiny-moe", "model.num_hidden_layers=2"], {"0": 2, "1": 3})],
    ids=str,
)
def test_reference_modules_compiled_train_as_one_process(model: list[str], units: dict[str, int]) -> None:
    sets = [*model, "schedule.name=zb1p", "schedule.recompute=full"]
    ran = run(*sets, "run.compile=true", watchdog_s=15.0)
    assert error(ran, alone(*model)) <= 1e-10
    assert ran.object["compiled"]["units"] == units and ran.object["memory"]["peak_allocated_bytes"] is None


@pytest.mark.parametrize(
    ("sets", "compiler", "kind", "said"),
    [
        ([], "no-such-compiler", ErrorKind.MISSING_DEPENDENCY, "needs no-such-compiler"),
        (["parallel.tp=2", "parallel.pp=1"], "g++", ErrorKind.JOB, "tp = 2 inside of compiled code"),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_ranks_start(
    sets: list[str], compiler: str, kind: ErrorKind, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    prepared = prepare(load_job(str(job_file(tmp_path, text=JOB)), ["run.compile=true", *sets]))
    with pytest.raises(PiperError, match=said) as info:
        refuse(prepared)
    assert info.value.kind is kind and info.value.kind.exit_code == 2
