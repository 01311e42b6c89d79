"""`run.compile`: the passes of a unit as compiled code give what its own Python gives, under any plan."""

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from executor.autograd.compiled import PartCompiler
from executor.autograd.inductor import options, passes
from executor.autograd.split import SplitPass
from executor.launch.refusals import refuse
from executor.modules.parallel import across, columns
from executor.modules.user.rewrites.dropout import drop, fallen
from executor.parallel import traced
from executor.parallel.inline import RankAxis, RankRegion
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


class Dropping(nn.Module):
    """An embedding of which some elements fall."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32)

    def forward(self, ids: Tensor, draws: Tensor) -> Tensor:
        """ids (2, 12)."""
        return drop(self.table(ids), draws, fallen(draws, -(2**62), 0.3, 2, (2, 12, 32)), 0.3)


@WARNINGS
def test_what_falls_is_the_same_where_it_is_compiled() -> None:
    torch.manual_seed(0)
    unit, ids, dy = Dropping(), torch.randint(64, (2, 12)), torch.randn(2, 12, 32)
    weights = dict(unit.named_parameters())
    part = PartCompiler(lambda text: None).part("embed", unit, weights, [ids], [torch.zeros(3, dtype=torch.int64)])
    for draws in ([0, 0, 1], [123, 45, 1], [3, 1, 0]):
        got: dict[str, Tensor] = {}
        made: Any = part.begin(got.__setitem__)
        wanted = unit(ids, torch.tensor(draws))
        assert torch.equal(made.forward(unit, ids, extras=[torch.tensor(draws)])[0], wanted)
        made.input_grad(dy)
        made.weight_grad()
        torch.testing.assert_close(got["table.weight"], torch.autograd.grad(wanted, unit.table.weight, dy)[0])


CHILD = """
import sys, torch
from executor.autograd import compiled
compiled.options = compiled.options if sys.argv[1] == "said" else lambda: {"config_patches": {"compile_threads": 1}}
torch.manual_seed(0)
unit, x = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.GELU()), torch.randn(32, 64)
part = compiled.PartCompiler(print).part("l0", unit, dict(unit.named_parameters()), [x], [])
(y,) = part.begin(print).forward(unit, x)
print(torch.allclose(y, unit(x), atol=1e-5))
"""


@pytest.mark.slow
def test_a_cache_that_another_kind_of_processor_has_filled_is_not_taken(tmp_path: Path) -> None:
    def right(how: str) -> list[bool]:
        places = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / how), "OMP_NUM_THREADS": "1"}
        runs = [
            subprocess.run(
                [sys.executable, "-c", CHILD, how],
                env={**os.environ, **places, "ATEN_CPU_CAPABILITY": isa},
                capture_output=True,
                text=True,
            )
            for isa in ("avx2", "avx512")
        ]
        return [run.returncode == 0 and run.stdout.endswith("True\n") for run in runs]

    assert right("said") == [True, True]
    if torch.cpu._is_avx512_supported():
        assert right("unsaid") == [True, False]  # what torch does by itself: other numbers, or a crash


def test_how_wide_vectors_are_is_in_the_cache_s_key(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []
    for isa in ("default", "avx2"):
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", isa)
        widths.append(options.__wrapped__()["config_patches"]["cpp.simdlen"])
    assert widths == [None, 256]


def _graphs() -> int:
    """What Inductor says it has been given, found in its cache or not."""
    from torch._dynamo.utils import counters  # a second that no other worker need spend

    return sum(n for name, n in counters["inductor"].items() if name in ("fxgraph_cache_hit", "fxgraph_cache_miss"))


# float64 throughout. transformers' RMSNorm computes in float32 whatever it is given, and three updates by AdamW make
# 1e-6 of a gradient up to 2e-5 of a parameter: hence the second bound.
TP, CP = ("parallel.tp=2",), ("parallel.cp=2",)
SP, HEADS = (*TP, "parallel.sequence_parallel=true"), (*CP, "parallel.cp_comm=all_to_all")
CLASSES: list[tuple[str, ClassPlan, tuple[str, ...], str, float]] = [
    ("gpt2", (3, 1, 0, "zb1p"), (), "none", 1e-10),
    ("gpt2", (2, 2, 3, "1f1b"), (), "full", 1e-10),
    ("llama", (2, 1, 0, "dualpipe"), (), "full", 1e-4),
    ("llama", (2, 1, 0, "zb1p"), SP, "none", 1e-4),
    ("qwen3", (1, 2, 3, "1f1b"), TP, "full", 1e-4),
    ("gemma3", (2, 1, 0, "zbv"), (), "none", 1e-4),
    ("gemma3", (1, 1, 0, "1f1b"), HEADS, "none", 1e-4),
    ("llama", (2, 1, 0, "1f1b"), CP, "none", 1e-4),
    ("mixtral", (2, 2, 2, "1f1b"), (), "none", 1e-4),
    ("mixtral", (1, 2, 0, "1f1b"), (*TP, "parallel.ep=2"), "none", 1e-4),
]


@pytest.mark.slow
@WARNINGS
@pytest.mark.parametrize(("name", "plan", "more", "recompute", "bound"), CLASSES, ids=str)
def test_a_class_compiled_trains_as_by_plain_torch(
    name: str, plan: ClassPlan, more: tuple[str, ...], recompute: str, bound: float
) -> None:
    sets = [*sets_of(plan, recompute), *more]
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


def test_without_a_compiler_it_is_refused_before_ranks_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    prepared = prepare(load_job(str(job_file(tmp_path, text=JOB)), ["run.compile=true"]))
    with pytest.raises(PiperError, match="needs no-such-compiler") as info:
        refuse(prepared)
    assert info.value.kind is ErrorKind.MISSING_DEPENDENCY and info.value.kind.exit_code == 2


def _collectives(function: Callable[..., tuple[Tensor, ...]], *shapes: tuple[int, ...]) -> dict[str, list[str]]:
    """The collectives of each pass of a function of a weight and an input."""
    mode = FakeTensorMode(static_shapes=True)
    with traced.collectives_traced():
        fakes = [mode.from_tensor(torch.ones(shape, dtype=torch.float64, requires_grad=True)) for shape in shapes]
        made = passes(function, fakes, 1, 1)
    found = {p: traced.collectives_in(g.graph) for p, g in made.graphs.items()}
    for nodes in found.values():
        assert all(later.args[5] is node for node, later in pairwise(nodes)), "they may change places"
    return {p: [str(n.args[1]) for n in nodes] for p, nodes in found.items()}


def test_what_is_gathered_again_for_weights_is_not_kept_from_forward() -> None:
    region = RankRegion(RankAxis(2, 1, "tp"), sequence=True)
    found = _collectives(lambda w, x: tuple(columns(x, [w], [None], region)), (6, 8), (1, 4, 8))
    assert found == {"F": ["gather"], "I": ["scatter"], "W": ["gather"]}


def test_equal_collectives_are_not_found_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    axis = RankAxis(2, 1, "tp")

    def twice(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        a, b = (across(x, axis.gather, axis.scatter) for _ in range(2))
        return (a * b * w,)

    assert _collectives(twice, (4,), (3, 4))["F"] == ["gather", "gather"]
    monkeypatch.setattr(traced, "count", lambda: repeat(0))
    assert _collectives(twice, (4,), (3, 4))["F"] == ["gather"]


def test_collectives_of_a_pass_wait_for_one_another() -> None:
    graph = fx.Graph()
    x, op = graph.placeholder("x"), torch.ops.piper_sim.collective.default
    nodes = [graph.call_function(op, (x, "sum", "tp", 2, k)) for k in range(3)]
    traced.in_order(graph)
    assert [n.args[5:] for n in nodes] == [(), (nodes[0],), (nodes[1],)]
