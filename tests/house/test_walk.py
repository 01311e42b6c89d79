"""`predict` reads as one pipeline: few doors, no stage entered twice, and nothing calls back up to those above it.

Doors are the files that the pipeline's own calls directly; how many lie behind them is not counted here.
"""

import inspect
import sys
import tomllib
from collections.abc import Callable
from functools import cached_property
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

from ir.job.load import job_from
from piper_sim.study.predict import predict

ROOT = Path(__file__).parents[2]
HERE = "piper_sim/study"  # where the pipeline is written down
KEEPER = "ir/plan/kept.py"  # wraps functions, as functools' own: whoever asks them does so through it
MOST_FILES, MOST_CLIMBS = 25, 5
JOB = {"model": {"config": "tiny-moe", "seq_len": 128}, "parallel": {"pp": 2, "dp": 2, "ep": 2}}
Call = tuple[str, str]  # (file that calls, file called)


def calls_of(work: Callable[[], object], root: Path = ROOT) -> list[Call]:
    """Every call from one file of the house into another; reading a value's property or its length is none."""
    out: list[Call] = []

    def ours(frame: FrameType) -> bool:
        name = frame.f_code.co_filename
        beside = name.startswith(f"{root}/.") or name == f"{root}/{KEEPER}"  # an environment may lie beside us
        return name.startswith(f"{root}/") and not beside

    def file(frame: FrameType | None) -> str:
        while frame is not None and not ours(frame):
            frame = frame.f_back
        return frame.f_code.co_filename.removeprefix(f"{root}/") if frame else ""

    def seen(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and ours(frame) and not _is_value(frame):
            out.append((file(frame.f_back), file(frame)))

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return [(a, b) for a, b in out if a != b]


def _is_value(frame: FrameType) -> bool:
    name, of = frame.f_code.co_name, type(frame.f_locals.get("self"))
    if name.startswith("<") or (name.startswith("__") and name != "__init__"):
        return True
    return isinstance(inspect.getattr_static(of, name, None), property | cached_property)


def walk(calls: list[Call], layers: list[list[str]]) -> tuple[set[str], list[str]]:
    """(files of the pipeline and those it calls, climbs: rooms it goes back to, and calls up from below)."""

    def height(file: str) -> int:
        names = file.replace("/", ".")
        return next((-k for k, rooms in enumerate(layers) if any(names.startswith(f"{r}.") for r in rooms)), 0)

    doors = [b for a, b in calls if a.startswith(HERE)]
    rooms = [room for room, _ in groupby("/".join(b.split("/")[:2]) for b in doors if not b.startswith(HERE))]
    back = [room for k, room in enumerate(rooms) if room in rooms[:k]]
    up = sorted({f"{a} -> {b}" for a, b in calls if a and not b.startswith("tests/") and height(b) > height(a)})
    return {*doors, *(a for a, _ in calls if a.startswith(HERE))}, [*back, *up]


def layers_of(project: str) -> list[list[str]]:
    """The rooms of the first contract, from above."""
    contract = tomllib.loads(project)["tool"]["importlinter"]["contracts"][0]
    return [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]


def test_predict_is_one_walk_down() -> None:
    job = job_from({s: dict(keys) for s, keys in JOB.items()})
    layers = layers_of((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    files, climbs = walk(calls_of(lambda: predict(job)), layers)
    assert len(files) <= MOST_FILES, sorted(files)
    assert len(climbs) <= MOST_CLIMBS, climbs


def test_rooms_entered_twice_and_calls_from_below_are_climbs() -> None:
    layers = [["piper_sim.study"], ["piper_sim.pricing"], ["ir"]]
    study, price, plan = f"{HERE}/predict.py", "piper_sim/pricing/costs.py", "ir/job/build.py"
    assert walk([(study, price), (price, plan), (study, plan)], layers) == ({study, price, plan}, [])
    assert walk([(study, price), (study, plan), (study, price)], layers)[1] == ["piper_sim/pricing"]
    assert walk([(study, plan), (plan, price)], layers) == ({study, plan}, [f"{plan} -> {price}"])
