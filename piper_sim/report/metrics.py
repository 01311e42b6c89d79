"""A run as Prometheus reads it: a text file for its node exporter, written anew with every step that is told."""

import math
from collections.abc import Mapping
from pathlib import Path

from ir.core.files import writing

FILE = "metrics.prom"
GAUGES = {  # name → (key of a step's line, what it says)
    "step": ("step", "Steps done, less one."),
    "loss": ("loss", "Loss of the step's global batch."),
    "eval_loss": ("eval_loss", "Held out, where the step was followed by an evaluation."),
    "grad_norm": ("grad_norm", "Norm of all gradients, before clipping."),
    "learning_rate": ("lr", "Of the step."),
    "tokens_total": ("tokens", "Read since training began."),
    "tokens_per_second": ("tokens_per_s", "Of all ranks together."),
    "step_seconds": ("step_s", "From the end of one step to the end of the next."),
    "predicted_step_seconds": ("predicted_s", "What simulate says of the same job."),
    "measured_to_predicted": ("drift", "Measured seconds of a step over predicted ones: the alarm."),
    "mfu": ("mfu", "Model FLOPs over the peak of the job's GPUs."),
}


def prometheus(line: Mapping[str, float], plan: str) -> str:
    """A step's line in Prometheus' text format; keys that it does not have are left out.

    >>> print(prometheus({"step": 3, "step_s": 0.5}, "ab12"), end="")
    # HELP piper_sim_step Steps done, less one.
    # TYPE piper_sim_step gauge
    piper_sim_step{plan="ab12"} 3
    # HELP piper_sim_step_seconds From the end of one step to the end of the next.
    # TYPE piper_sim_step_seconds gauge
    piper_sim_step_seconds{plan="ab12"} 0.5
    """
    out = []
    for name, (key, said) in GAUGES.items():
        if key in line:
            full = f"piper_sim_{name}"
            out += [f"# HELP {full} {said}", f"# TYPE {full} gauge", f'{full}{{plan="{plan}"}} {_number(line[key])}']
    return "".join(f"{text}\n" for text in out)


def _number(x: float) -> str:
    return repr(x) if math.isfinite(x) else "NaN" if math.isnan(x) else f"{'+' if x > 0 else '-'}Inf"


def write_metrics(folder: Path, line: Mapping[str, float], plan: str) -> None:
    """Write the file whole, under another name first: who reads it while it is written reads the step before."""
    part = folder / f".{FILE}.part"
    with writing(folder / FILE, "--out"):
        part.write_text(prometheus(line, plan), encoding="utf-8")
        part.replace(folder / FILE)
