"""Whatever device a user has made the default, no tensor of ours lands there by accident: each says where it is.

The default here is meta, whose tensors have no values: whoever makes one without saying where gets no numbers from it.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from executor.device.device import HostDevice
from executor.device.progress import RankProgress, create
from executor.frontend.capture import capture
from executor.measure.calibrate import measure_rank
from executor.measure.kernels import recipes
from executor.measure.links import wanted
from executor.measure.ops import names_of
from executor.measure.peak_bytes import peaks
from executor.modules.hub_weights import HubCheckpoint
from executor.optim import flat
from executor.parallel.shares import ParamShard, ShardCut
from executor.runtime import rank_model
from executor.runtime.given import given_name, given_text
from executor.runtime.spec import PlanRun
from executor.runtime.worker import LocalRanks, RankContext
from ir.job.run_options import JobRunOptions
from tests.executor.device.race_cases import Case
from tests.executor.device.races import resumed, trained
from tests.executor.frontend.models import small_net
from tests.executor.runs import judged

RUNS = {
    **{k: Case("zbv", zero, k, "full").sets() for zero, k in enumerate(("dense", "tied", "experts", "two ranks"))},
    **{k: Case("dualpipe", zero, k, "selective").sets() for zero, k in enumerate(("experts, tp", "shared experts"))},
    **{k: Case("1f1b", zero, k, "none").sets() for zero, k in ((2, "sequences"), (3, "cp"))},
}


def foreign() -> None:
    torch.set_default_device("meta")


def usual() -> None:
    """A CPU is the default."""


@pytest.fixture
def unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but what our code says of each tensor decides."""
    monkeypatch.setattr(HostDevice, "bind", lambda self: None)
    monkeypatch.setattr(rank_model, "make_default", lambda device: None)


def _both(told: Callable[[Path, Callable[[], None]], Any], folder: Path) -> list[Any]:
    """What is told with a CPU as this thread's default device, and with another."""
    out = list[Any]()
    for first in (usual, foreign):
        (folder / first.__name__).mkdir()
        out.append(_apart(lambda first=first: told(folder / first.__name__, first)))  # type: ignore[misc]
    return out


def _apart(work: Callable[[], Any]) -> Any:
    """In a thread of its own, as a default device is a thread's."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


QUICK, FEW = ("tied", "shared experts", "cp"), "schedule.microbatches=2"


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in RUNS])
@pytest.mark.usefixtures("unbound")
def test_a_run_trains_evaluates_saves_and_resumes(name: str, tmp_path: Path) -> None:
    plain, other = _both(lambda folder, first: resumed(folder, *RUNS[name], FEW, first=first), tmp_path)
    assert plain == other


@pytest.mark.usefixtures("unbound")
def test_no_kernels_but_messages(tmp_path: Path) -> None:

    def told(folder: Path, first: Callable[[], None]) -> Any:
        spec = PlanRun(JobRunOptions(1, 1, backend="local", emulate=0.0))
        found = trained(folder, spec, *RUNS["dense"], hub=LocalRanks(), first=first)
        return [sorted(row[2] for row in r["rows"]) for r in found]

    plain, other = _both(told, tmp_path)
    assert plain == other


@pytest.mark.parametrize("by", ["modules", "kernels"])
@pytest.mark.usefixtures("unbound")
def test_calibration(by: str, tmp_path: Path) -> None:
    prepared, plan = judged(tmp_path, "parallel.dp=2", "parallel.zero=3", "schedule.recompute=full")
    names = [[*key, found] for key, found in names_of(plan).items()]
    size = {"names": names, "pieces": msgspec.to_builtins(recipes(plan)[0]) if by == "kernels" else []}
    wants = msgspec.to_builtins(wanted(prepared, plan, 2))

    def told(folder: Path, first: Callable[[], None]) -> Any:
        create(folder / "progress", 2)
        (folder / given_name(0)).write_text(given_text(prepared, plan))
        hub = LocalRanks()

        def life(rank: int) -> Any:
            first()
            context = RankContext(rank, 2, folder, RankProgress(folder / "progress", rank), hub=hub)
            found = measure_rank(context, [size], wants, by, "local", 1)
            return [sorted(ops) for ops in found["ops"]], [row[:3] for row in found["links"]]

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(life, range(2)))

    plain, other = _both(told, tmp_path)
    assert plain == other and all(links for _, links in plain)


@pytest.mark.usefixtures("unbound")
def test_peak_bytes(tmp_path: Path) -> None:
    given = judged(tmp_path, *RUNS["two ranks"])

    def told(folder: Path, first: Callable[[], None]) -> Any:
        first()
        return [peaks(*given, real=real) for real in (True, False)]

    plain, other = _both(told, tmp_path)
    assert plain == other


@pytest.mark.parametrize("module", [f"{small_net.__file__}:build", small_net.build])
def test_capture(module: Any, tmp_path: Path) -> None:
    def told(folder: Path, first: Callable[[], None]) -> Any:
        reference = module if isinstance(module, str) else module()
        first()
        return capture(reference, batch=(1, 8))

    plain, other = _both(told, tmp_path)
    assert plain == other


def test_weights_of_the_hub(tmp_path: Path) -> None:
    save_file({"w": torch.arange(12.0).view(4, 3)}, tmp_path / "model.safetensors")
    share = ParamShard((4, 3), (ShardCut(0, 1, 2, (4,)),))

    def told(folder: Path, first: Callable[[], None]) -> Any:
        first()
        found = HubCheckpoint(tmp_path)
        return found.read("w", share, torch.float64).tolist(), found.digest(["w"])

    plain, other = _both(told, tmp_path)
    assert plain == other and plain[0] == [[6, 7, 8], [9, 10, 11]]


def test_a_user_s_forward_makes_tensors_where_the_rank_computes() -> None:
    def told() -> Any:
        foreign()
        HostDevice().bind()
        return torch.arange(2).tolist()

    assert _apart(told) == [0, 1]


@pytest.mark.usefixtures("unbound")
def test_a_tensor_that_says_nothing_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = SimpleNamespace(**{**vars(torch), "zeros": lambda *size, device=None, **more: torch.zeros(*size, **more)})
    monkeypatch.setattr(flat, "torch", mine)
    with pytest.raises((RuntimeError, NotImplementedError)):
        _both(lambda folder, first: resumed(folder, *RUNS["dense"], first=first), tmp_path)
