"""A module of the user's own begins at values of files, as if it had drawn them, and takes no memory for any other."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from executor.device.valueless import ValuelessModel
from executor.frontend.capture import capture
from executor.modules.choose import model_of
from executor.modules.hub_weights import WHOLE, HubCheckpoint
from executor.modules.user.model import UserModel
from ir.core.errors import PiperError
from ir.core.work import DType
from ir.job import load_job
from ir.job.build import prepare
from tests.executor.frontend.class_runs import _graph, run_class
from tests.executor.frontend.models import hub_classes
from tests.executor.frontend.models.small_net import Net
from tests.executor.launch.processes import forked
from tests.executor.modules.hub import quiet
from tests.executor.runs import distance

RUNS = {
    "gpt2": ("schedule.name=zb1p", "parallel.pp=2", "schedule.microbatches=4"),
    "llama": ("parallel.tp=2", "parallel.dp=2", "parallel.zero=3", "schedule.microbatches=2"),
    "deepseek_v3": ("parallel.dp=2", "parallel.ep=2", "parallel.zero=2", "schedule.microbatches=2"),
    "qwen3_moe": ("parallel.dp=2", "parallel.ep=2", "parallel.pp=2", "schedule.microbatches=2"),
}


def drawn(name: str, folder: Path, factor: float = 1.0) -> str:
    """The values that the class draws by itself under seed 0, in a file; the override that names it."""
    build: Callable[[], nn.Module] = getattr(hub_classes, name)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = build().to(torch.float64)
    save_file({n: factor * t.detach() for n, t in saved(module).items()}, folder / WHOLE, {"format": "pt"})
    return f'model.weights="{folder}"'


def saved(module: nn.Module) -> dict[str, torch.Tensor]:
    """One name of what is tied, and the buffers that a checkpoint has, such as corrections of routers."""
    named = {*dict(module.named_parameters()), *dict(module.named_buffers())}
    return {n: t for n, t in module.state_dict(keep_vars=True).items() if n in named}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_from_files_is_the_run_that_drew_them(name: str, tmp_path: Path) -> None:
    with quiet():
        wanted = run_class(name, *RUNS[name])
        found = run_class(name, *RUNS[name], drawn(name, tmp_path))
    assert found[0]["losses"] == wanted[0]["losses"]
    assert distance(found[1], wanted[1]) == distance(found[2], wanted[2]) == 0.0
    with quiet():  # the control
        other = run_class(name, *RUNS[name], drawn(name, tmp_path, 1.001))
    assert other[0]["losses"] != wanted[0]["losses"]


@pytest.mark.parametrize("what, told", [("lost", "no tensor for"), ("cut", "4, the job's model has")])
def test_files_of_another_module_are_refused_before_ranks_start(what: str, told: str, tmp_path: Path) -> None:
    values = {n: torch.zeros(p.shape) for n, p in hub_classes.llama().named_parameters()}
    last = list(values)[-1]
    values[last] = values[last][:, :4].contiguous()
    if what == "lost":
        del values[last]
    save_file(values, tmp_path / WHOLE, {"format": "pt"})
    with quiet():
        model = {"module": f"{hub_classes.__file__}:llama", "graph": _graph("llama"), "seq_len": 8}
    table = {"model": {**model, "tags": {"PP": "model.layers.*"}, "weights": str(tmp_path)}, "cluster": {"gpu": "cpu"}}
    with pytest.raises(PiperError, match=told):
        model_of(prepare(load_job(table, ["precision.compute=fp64"])))


class _Reads(Net):
    def __init__(self, how: str) -> None:
        super().__init__()
        if how == "a buffer":
            self.register_buffer("table", self.embed.weight.detach() * 2)
        if how == "a number":
            self.size = float(self.embed.weight.sum())
        if how == "a tensor":
            self.scale = self.head.weight.std(dim=0).detach()


@pytest.mark.parametrize("how, told", [("a buffer", "table"), ("a number", "_local_scalar"), ("a tensor", "scale")])
def test_what_is_made_of_values_that_are_not_there_is_refused(how: str, told: str, tmp_path: Path) -> None:
    save_file({n: p.detach() for n, p in Net().named_parameters()}, tmp_path / WHOLE)
    UserModel(lambda: _Reads(""), values=HubCheckpoint(tmp_path))
    with pytest.raises(PiperError, match=rf"build\(\) reads the values of parameters \(.*{told}") as error:
        UserModel(lambda: _Reads(how), values=HubCheckpoint(tmp_path))
    assert error.value.key == "model.weights" and "from_pretrained" in str(error.value.suggestion)


class _Shifted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(3))
        self.register_buffer("order", torch.arange(3))
        self.register_buffer("seen", torch.ones(3, dtype=torch.bool))
        self.register_buffer("table", torch.arange(3.0), persistent=False)


def test_buffers_that_files_have_are_read(tmp_path: Path) -> None:
    values = {**saved(_Shifted()), "shift": torch.tensor([1.0, 2.0, 4.0]), "order": torch.tensor([2, 0, 1])}
    del values["seen"]  # of somebody whose module had none yet
    save_file({n: t.detach() for n, t in values.items()}, tmp_path / WHOLE)
    model = UserModel(_Shifted, values=HubCheckpoint(tmp_path))
    model.check_values()
    model._fill(model.module)
    assert all(torch.equal(p, values[n]) for n, p in model.module.named_parameters())
    assert model.module.shift.tolist() == [1, 2, 4] and model.module.table.tolist() == [0, 1, 2]
    assert model.module.order.tolist() == [2, 0, 1] and model.module.seen.tolist() == [True] * 3
    with pytest.raises(PiperError, match=r"no parameter for (shift|order)"):
        UserModel(Net, values=HubCheckpoint(tmp_path)).check_values()


def test_inside_values_of_others_are_what_they_are() -> None:
    with ValuelessModel().building() as mode:
        net = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
        net.register_buffer("turns", torch.arange(3.0).outer(torch.ones(2)))
        moved, like = net[0].weight.t()[1:].to(torch.float64), torch.zeros_like(net[0].weight)
        other = torch.full((2,), 3.0).add_(1)
        other.add_(net[1].bias[:2])  # made of what is not there
        mode.refuse_made(net)
    assert net.turns.tolist() == [[0, 0], [1, 1], [2, 2]] and like.eq(0).all()
    assert mode.without(moved) and mode.without(other) and not mode.without(like) and not mode.without(net.turns)
    assert moved.shape == (2, 3) and moved.dtype == torch.float64


SOURCE = """
from transformers import LlamaForCausalLM
from tests.executor.frontend.models.hub_classes import llama as build

def read():
    return LlamaForCausalLM.from_pretrained({folder!r}).train()

def fails():
    return {{}}["mine"]
"""


def test_what_build_reads_itself_is_captured_like_what_it_draws(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(SOURCE.format(folder=str(tmp_path / "hub")))
    with quiet():
        hub_classes.llama().save_pretrained(tmp_path / "hub")
        given = {"batch": (1, 8), "dtype": DType.FP32, "tags": {"PP": "model.layers.*"}}
        drawn, read = (capture(f"{file}:{name}", **given) for name in ("build", "read"))
    assert drawn == {**read, "model": drawn["model"]}
    with pytest.raises(PiperError, match=r"build\(\) failed: KeyError: 'mine' \(model.py:9\)"):
        capture(f"{file}:fails", **given)


CHILD = """
import re
import torch
from contextlib import nullcontext
from torch import nn
from executor.device.valueless import ValuelessModel

most = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024
before = most()
with ValuelessModel().building() if {files} else nullcontext():
    net = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))).to(torch.bfloat16)
print(most() - before)
"""


def test_half_a_gibibyte_of_parameters_takes_none() -> None:
    programs = [CHILD.format(files=files) for files in (True, False)]
    (read, files), (made, drawn) = forked("import torch, executor.device.valueless", *programs)
    assert read == made == 0 and int(files) < 64 and int(drawn) > 128  # MiB


def test_a_digest_is_of_every_value_of_a_small_tensor_and_of_some_all_over_a_large_one(tmp_path: Path) -> None:
    files, large = HubCheckpoint(tmp_path / WHOLE), torch.arange(2.0**21)
    spoilt = {
        "the first": large.clone().index_fill_(0, torch.tensor([0]), 5),
        "the last": large.clone().index_fill_(0, torch.tensor([len(large) - 1]), 5),
        "all": large * 1.001,
    }
    digests = set()
    for x in (large, *spoilt.values()):
        save_file({"large": x, "small": torch.zeros(2**20)}, tmp_path / WHOLE)
        digests.add(HubCheckpoint(tmp_path / WHOLE).digest(["large", "small"]))
    for k in (0, 777_777, 2**20 - 1):
        save_file({"large": large, "small": torch.zeros(2**20).index_fill_(0, torch.tensor([k]), 1)}, tmp_path / WHOLE)
        digests.add(HubCheckpoint(tmp_path / WHOLE).digest(["large", "small"]))
    assert len(digests) == 7 and files.digest(["small"]) != files.digest(["large"])
