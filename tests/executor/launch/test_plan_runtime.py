"""`piper_sim.runtime`: a user's own loop on torchrun's ranks trains as `run` does, saves, goes on, and fails as one."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

import piper_sim
from tests.docs.test_docs import blocks
from tests.executor.launch.processes import ROOT, forked, objects, python
from tests.executor.runs import JOB, job_file, run

LOOP = """
import gc, json, os, sys, threading, weakref
import numpy as np
import piper_sim
import torch
from executor.data.tokens import source_of

job, first, steps, *sets = sys.argv[1:]
resume = "saved" if int(first) else None
torch.set_default_device("meta")  # where nothing of ours may land
with piper_sim.runtime(job, sets, save="saved", resume=resume) as runtime:
    source = source_of("synthetic", 256, 0, runtime.sequences)
    said = []
    assert torch.empty(()).is_meta, "what the loop makes is where it wants it"
    for step in range(runtime.steps, int(steps)):
        batch = [*np.stack([source.sequence(step, k, 8) for k in range(runtime.sequences)], 1)]
        said.append([runtime.evaluate(batch), runtime.step(batch), runtime.grad_norm])
        assert torch.empty(()).is_meta
        assert steps != "9" or int(os.environ["RANK"]) == 0, "a mistake of the loop's own"
    saved = runtime.save()
    params = [weakref.ref(x) for x in gc.get_objects() if type(x) is torch.nn.Parameter]
assert params and not any(p() is not None for p in params), "a loop may need the memory"
assert {"lookout", "guard"}.isdisjoint(t.name for t in threading.enumerate()), "they would be in the store at the end"
if int(os.environ["RANK"]) == 1:
    print(json.dumps({"said": said, "steps": runtime.steps, "saved": saved}))
"""


def _loop(folder: Path, code: str, *args: str) -> subprocess.CompletedProcess[str]:
    (folder / "loop.py").write_text(code)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return python(*launcher, "loop.py", *args, cwd=folder)


def _said(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    (found,) = objects(done.stdout)
    return found


DUALPIPE = ("schedule.name=dualpipe",)
BOTH = """
import runpy, sys
import torch

runpy.run_path("first.py")
torch.set_default_device(None)
del sys.argv[2:]
runpy.run_path("told.py")
print("told", flush=True)
"""


@pytest.fixture(scope="module")
def looped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Ranks on which two loops run, one behind the other: one that trains, and one of what loops may not do."""
    folder = tmp_path_factory.mktemp("looped")
    for name, code in (("first.py", LOOP), ("told.py", TOLD)):
        (folder / name).write_text(code)
    return folder, _loop(folder, BOTH, str(job_file(folder, text=JOB)), "0", "2", *DUALPIPE)


def test_a_loop_of_one_s_own_trains_to_the_bit_as_run_does(
    looped: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    want, (folder, done) = run(*DUALPIPE, steps=3).object, looped
    found = _said(done)
    evals, losses, norms = zip(*found["said"], strict=True)
    assert list(losses) == want["losses"][:2] and list(norms) == want["grad_norms"][:2]
    assert evals == losses  # nothing was updated, and the batch is the same
    assert found["steps"] == 2 and Path(found["saved"]).name == "step-000002"
    other = ["parallel.pp=1", "parallel.dp=2", "schedule.microbatches=2", "parallel.zero=3", "optimizer.clip_norm=0"]
    found = _said(_loop(folder, LOOP, str(folder / "job.toml"), "2", "3", *other))
    ((_, loss, norm),) = found["said"]
    assert loss == pytest.approx(want["losses"][2], rel=1e-12)
    assert norm == pytest.approx(want["grad_norms"][2], rel=1e-9)


LEFT = """
import atexit, os
from executor.launch.plan_runtime import PlanRuntime

class Others:
    def fall(self, error):
        print(type(error).__name__, error, flush=True)
        os._exit(4)

runtime = PlanRuntime.__new__(PlanRuntime)
runtime._lookout, runtime._closed = Others(), True
atexit.register(runtime._left)
"""


def test_a_loop_without_with_tells_the_others_of_its_mistake_too() -> None:
    ends = forked("import executor.launch.plan_runtime", LEFT, LEFT + "raise ValueError('mine')")
    assert ends == [(0, ""), (4, "ValueError mine\n")]


@pytest.mark.slow
def test_a_mistake_in_one_rank_s_loop_ends_all(tmp_path: Path) -> None:
    done = _loop(tmp_path, LOOP, str(job_file(tmp_path, text=JOB)), "0", "9")
    assert done.returncode != 0 and "a mistake of the loop's own" in done.stderr
    error = objects(done.stdout)[0]["error"]
    assert (error["kind"], error["rank"]) == ("rank_failed", 1) and "a mistake" in error["message"]


@pytest.mark.slow
def test_a_batch_of_another_shape_and_a_loop_without_torchrun_are_refused(tmp_path: Path) -> None:
    job = str(job_file(tmp_path, text=JOB))
    code = LOOP.replace("[*np.stack", "np.zeros((3, 3), int) if True else [*np.stack")
    done = _loop(tmp_path, code, job, "0", "1")
    assert done.returncode != 0 and "token ids [4, 9], or ids and labels [4, 8] each" in done.stderr
    ended = python("loop.py", job, "0", "1", cwd=tmp_path)
    assert ended.returncode != 0 and "torchrun" in ended.stderr


@pytest.mark.slow
def test_the_page_s_loop_runs(tmp_path: Path) -> None:
    found: dict[str, list[str]] = {}
    for _, language, text in blocks(ROOT / "docs" / "YOUR_MODEL.md"):
        found.setdefault(language, []).append(text)
    (tmp_path / "model.py").write_text(found["python"][0])
    (tmp_path / "job.toml").write_text(found["toml"][0])
    done = _loop(tmp_path, next(text for text in found[""] if "piper_sim.runtime" in text))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step-000003") == 2 and done.stdout.startswith("3 5.")


TOLD = """
import os, signal, sys
import numpy as np
import piper_sim
import torch

RANK = int(os.environ["RANK"])

def refused(call, word):
    try:
        call()
    except piper_sim.PiperError as error:
        assert word in str(error), error
    else:
        raise AssertionError(word)

refused(lambda: piper_sim.runtime(sys.argv[1], backend="glo"), "gloo")
runtime = piper_sim.runtime(sys.argv[1])
batch = np.arange(36).reshape(4, 9)
ids, labels = batch[:, :-1], batch[:, 1:]
with torch.inference_mode():
    first = runtime.evaluate([torch.tensor(ids), torch.tensor(labels)])  # as a DataLoader gives them
assert first == runtime.evaluate(batch[::-1][::-1].astype(">u2")) == runtime.evaluate(batch.tolist())
for odd in ({"input_ids": ids}, batch > 3, None, "text", (), [[1], [2, 3]]):
    refused(lambda: runtime.step(odd), "token ids [4, 9]")
refused(lambda: runtime.step((ids, labels - 2)), "label -1")
refused(lambda: runtime.step(batch + 256), "291 is outside the vocabulary")
refused(lambda: runtime.step(batch + RANK), "rank 1 has another batch")
refused(lambda: runtime.evaluate(batch) if RANK else runtime.step(batch), "rank 1 evaluate behind 0")
refused(lambda: piper_sim.runtime(sys.argv[1]), "one at a time")
assert runtime.evaluate(batch) == first == runtime.step(batch)  # what was refused has trained nothing
runtime.close()
runtime.close()
refused(lambda: runtime.step(batch), "step behind close")
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
taken = lambda *_: None
signal.signal(signal.SIGTERM, taken)
runtime = piper_sim.runtime(sys.argv[1])
assert signal.getsignal(signal.SIGTERM) is taken
assert first == runtime.step(batch)
if sys.argv[2:] and RANK:
    raise KeyError("a mistake of the loop's own")  # else nobody closes
"""


def test_what_a_loop_may_not_do_is_refused_and_trains_nothing(
    looped: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, done = looped
    assert done.returncode == 0 and done.stdout.count("told") == 2, done.stderr  # two ranks, maybe on one line
    assert "terminate called" not in done.stderr


@pytest.mark.slow
def test_a_mistake_outside_of_with_ends_all(tmp_path: Path) -> None:
    done = _loop(tmp_path, TOLD, str(job_file(tmp_path, text=JOB)), "mistake")
    error = objects(done.stdout)[0]["error"]
    assert done.returncode != 0 and (error["kind"], error["rank"]) == ("rank_failed", 1)
    assert "a mistake" in error["message"] and "terminate called" not in done.stderr


CAUGHT = """
import os, sys
import numpy as np
import piper_sim

with piper_sim.runtime(sys.argv[1]) as runtime:
    if os.environ["RANK"] == "0":
        runtime._rank.run.step = lambda *_: 1 // 0  # a token that a module of one's own has no row for, say
    for _ in range(2):
        try:
            runtime.step(np.arange(36).reshape(4, 9))
        except ZeroDivisionError:
            continue
"""


def test_a_step_that_fails_ends_all_whoever_catches_that(tmp_path: Path) -> None:
    """The others wait for what does not come: they would be named, when the watchdog's time is over."""
    error = objects(_loop(tmp_path, CAUGHT, str(job_file(tmp_path, text=JOB))).stdout)[0]["error"]
    assert (error["kind"], error["rank"]) == ("rank_failed", 0) and "ZeroDivisionError" in error["message"]


def test_overrides_of_a_job_that_is_loaded_are_refused() -> None:
    job = piper_sim.load_job({"model": {"config": "tiny-llama"}})
    with pytest.raises(piper_sim.PiperError, match="overrides of a job that is loaded"):
        piper_sim.runtime(job, set=["optimizer.lr=1"])
