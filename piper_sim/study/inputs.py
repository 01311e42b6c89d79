"""All that a prediction is made from, as one digest: what a job says, what its files hold, hardware, this program."""

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from cost_models.hardware import presets as gpus
from cost_models.software import frameworks
from ir.core.errors import PiperError
from ir.core.files import named_path
from ir.job import Job
from ir.workload.config.load import presets as models
from piper_sim.pricing.prepare import hardware_of
from piper_sim.study.simulate import job_digest

PRESETS: Mapping[str, Callable[[], Collection[str]]] = {
    "model.config": models,
    "cluster.gpu": gpus,
    "costs.software": frameworks,
}
WORDS = {"data.source": "synthetic", "run.eval_source": "synthetic"}  # else a path
FUNCTIONS = ("model.module", "schedule.builder")  # of a file: "file.py:function"
FILES = (
    *PRESETS,
    *("model.graph", "model.module", "model.weights"),
    *("schedule.directives", "schedule.csv", "schedule.builder"),
    *("routing.file", "costs.profile", "history.file", "data.source", "run.eval_source"),
)
OF_A_RUN = ("model.module", "model.weights", "data.source", "run.eval_source")  # nothing that is predicted reads these
_PACKAGES, _SUFFIXES = ("ir", "cost_models", "piper_sim"), (".py", ".json", ".toml", ".csv")


@dataclass(frozen=True)
class PredictionFile:
    """A file or folder that a job names. function: of a Python file, what stands behind it: ":build"."""

    path: Path
    function: str = ""


def named_files(job: Job) -> dict[str, PredictionFile]:
    """By key; only those that are there, as it is not said here that one is missing.

    >>> from ir.job.load import job_from
    >>> named_files(job_from({"model": {"config": "tiny-llama"}}))
    {}
    """
    out = {}
    for key in FILES:
        section, name = key.split(".")
        value = getattr(getattr(job, section), name)
        known = PRESETS[key]() if key in PRESETS else ()
        if not value or value in known or value == WORDS.get(key):
            continue
        file, colon, function = value.rpartition(":") if key in FUNCTIONS else (value, "", "")
        path = Path(named_path(job.file, file, known))
        if file and os.path.exists(path):  # which says of a name too long that it is not there
            out[key] = PredictionFile(path, colon + function)
    return out


def inputs_digest(job: Job) -> str:
    """SHA-256, the same as long as the job's prediction is. Files that cannot be read are refused by who needs them."""
    said = {k: _content(f.path) for k, f in named_files(job).items() if k not in OF_A_RUN}
    hardware = None
    with suppress(PiperError):
        hardware = msgspec.to_builtins(hardware_of(job))  # of the files, too, that a hardware file starts from
    whole = [job_digest(job), said, hardware, program_digest()]
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()


@cache
def program_digest() -> str:
    """Of the sources and tables that predictions are made by: another version may predict something else."""
    root, text = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(p for name in _PACKAGES for p in (root / name).rglob("*") if p.suffix in _SUFFIXES):
        text.update(f"{path.relative_to(root)} {_content(path)} ".encode())
    return text.hexdigest()


def _content(path: Path) -> str:
    """Of a file, or of a model's folder its config.json; empty for what is no regular file, whose reader refuses it."""
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
