"""piper-sim as a library: a job in, a prediction out. Nothing heavy is imported before it is asked for.

>>> import piper_sim
>>> job = piper_sim.load_job({"model": {"config": "tiny-llama", "seq_len": 64}}, set=["parallel.pp=2"])
>>> p = piper_sim.predict(job)
>>> p.fits, round(float(p.breakdown.sum(axis=1)[0]), 9) == round(p.iteration_s, 9)
(True, True)
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ir.core.errors import ErrorKind, PiperError
    from ir.job.load import load_job
    from ir.job.schema import Job
    from piper_sim.app.captured import capture
    from piper_sim.app.runtime import runtime
    from piper_sim.study.compare import Comparison, compare
    from piper_sim.study.explain import StepExplanation, explain
    from piper_sim.study.predict import predict
    from piper_sim.study.prediction import Prediction
    from piper_sim.study.search.search import search

__all__ = [
    "Comparison", "ErrorKind", "Job", "PiperError", "Prediction", "StepExplanation",
    "capture", "compare", "explain", "load_job", "predict", "runtime", "search",
]  # fmt: skip

_HOME = {
    "Comparison": "piper_sim.study.compare",
    "ErrorKind": "ir.core.errors",
    "Job": "ir.job.schema",
    "PiperError": "ir.core.errors",
    "Prediction": "piper_sim.study.prediction",
    "StepExplanation": "piper_sim.study.explain",
    "capture": "piper_sim.app.captured",
    "compare": "piper_sim.study.compare",
    "explain": "piper_sim.study.explain",
    "load_job": "ir.job.load",
    "predict": "piper_sim.study.predict",
    "runtime": "piper_sim.app.runtime",
    "search": "piper_sim.study.search.search",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'piper_sim' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
