"""Which schedule is quickest, and at what price of communication another takes over: seconds over 1F1B's.

    python -m experiments.joint breakeven --out breakeven [--force]

Uniform DeepSeek-V3 layers, four to a rank (two to a stage where a rank has two), no multi-token prediction, a small
vocabulary. A plain case, and one thing changed at a time: ranks, microbatches, experts' group, products, recompute.
Along each line all-to-alls and transfers take `WIRES` times what the links of the hardware file would. Overlap
schedules and DualPipe by `template`, weight gradients delayed. Writes breakeven.png, points.csv (seconds, fullest rank)
and prints, per case, who leads where, and who is quickest within 80 and 141 GiB. All modelled.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pandas as pd

from experiments.joint import fair
from experiments.joint.fair import SCHEDULES, UNIFORM
from experiments.published.picture import canvas, png
from ir.job.load import job_from
from piper_sim.report.files import write_outputs
from piper_sim.report.units import GIB
from piper_sim.study.predict import predict

WIRES = (0.01, 0.25, 0.5, 1.0, 2.0, 4.0)  # seconds of messages over the modelled ones
LIMITS_GIB = (80, 141)


@dataclass(frozen=True)
class BreakEven:
    """One panel. experts: ranks that share a layer's experts. microbatches: per pipeline rank."""

    name: str = "P 8, M 32, EP 64, fp8"
    ranks: int = 8
    microbatches: int = 4
    experts: int = 64
    dtype: str = "fp8"
    recompute: tuple[str, ...] = ("norm", "up_projection", "activation")

    def job(self, schedule: str, wire: float) -> dict[str, Any]:
        merge, stages = fair.usual(schedule)
        return {
            "model": {"config": "deepseek-v3", "seq_len": 4096} | UNIFORM | {"num_hidden_layers": 4 * self.ranks},
            "cluster": {"gpu": "h800-sxm", "nvlink_GBps": 200 / wire, "nic_Gbps": 400 / wire},
            "parallel": {"pp": self.ranks, "dp": 64, "ep": self.experts, "zero": 1},
            "schedule": {
                "name": schedule,
                "merge": merge,
                "delay_wgrad": merge == "template",
                "stages_per_rank": stages,
                "microbatches": self.microbatches * self.ranks,
                "recompute": list(self.recompute) or "none",
            },
            "precision": {"compute": self.dtype, "dispatch": self.dtype},
        }


PLAIN = BreakEven()
CASES = (
    PLAIN,
    replace(PLAIN, name="P = 4", ranks=4),
    replace(PLAIN, name="P = 16", ranks=16),
    replace(PLAIN, name="M = P", microbatches=1),
    replace(PLAIN, name="M = 12 P", microbatches=12),
    replace(PLAIN, name="EP 8: experts inside a node", experts=8),
    replace(PLAIN, name="bf16", dtype="bf16"),
    replace(PLAIN, name="nothing recomputed", recompute=()),
)


@dataclass(frozen=True)
class Point:
    """wire: seconds of messages over the modelled ones. peak_GiB: of the fullest rank."""

    case: str
    schedule: str
    wire: float
    seconds: float
    peak_GiB: float


@dataclass(frozen=True)
class Lines:
    """A case's points, by schedule and along `WIRES`."""

    case: BreakEven
    points: tuple[Point, ...] = field(repr=False)

    def seconds(self, schedule: str) -> list[float]:
        return [p.seconds for p in self.points if p.schedule == schedule]

    def leaders(self, most_GiB: float = math.inf) -> list[tuple[float, str]]:
        """(from this wire on, the quickest schedule that fits), the first from 0."""
        peak = {p.schedule: p.peak_GiB for p in self.points}
        times = {s: self.seconds(s) for s in peak if peak[s] <= most_GiB}
        return leaders(times, WIRES)


def leaders(times: dict[str, list[float]], wires: tuple[float, ...]) -> list[tuple[float, str]]:
    """Who is least from where on; between two wires, lines are straight in their logarithms.

    >>> [(round(w, 2), s) for w, s in leaders({"a": [1.0, 1.0, 4.0], "b": [2.0, 2.0, 2.0]}, (0.5, 1.0, 2.0))]
    [(0.0, 'a'), (1.41, 'b')]
    """
    if not times:
        return []
    best = [min(times, key=lambda s: times[s][i]) for i in range(len(wires))]
    found = [(0.0, best[0])]
    for i, (a, b) in enumerate(pairwise(best)):
        if a != b:
            before, after = (math.log(times[a][k] / times[b][k]) for k in (i, i + 1))
            at = math.log(wires[i]) + (before / (before - after)) * math.log(wires[i + 1] / wires[i])
            found.append((math.exp(at), b))
    return found


def lines_of(case: BreakEven) -> Lines:
    """Every schedule along `WIRES`."""
    found = []
    for schedule in SCHEDULES:
        for wire in WIRES:
            p = predict(job_from(case.job(schedule, wire)))
            peak = max(p.to_dict()["memory"]["device_peak_bytes"].values()) / GIB
            found.append(Point(case.name, schedule, wire, p.iteration_s, peak))
    return Lines(case, tuple(found))


def told(found: Lines) -> Iterator[str]:
    """What is printed of a case."""
    yield found.case.name
    for limit in (math.inf, *LIMITS_GIB):
        said = "; ".join(f"{s} from x {w:.2g}" if w else s for w, s in found.leaders(limit)) or "nothing fits"
        yield f"    {'any memory' if limit == math.inf else f'{limit} GiB':10}  {said}"
    middle = {p.schedule: p for p in found.points if p.wire == 1.0}
    base = middle["1f1b"].seconds
    yield "    x 1         " + ", ".join(
        f"{s} {p.seconds / base:.3f} ({p.peak_GiB:.0f} GiB)" for s, p in middle.items()
    )


def table(found: list[Lines]) -> str:
    """All points as CSV."""
    points = pd.DataFrame([p for x in found for p in x.points])
    return str(points.to_csv(index=False, float_format="%.6g"))


def picture(found: list[Lines]) -> bytes:
    """A PNG: a panel per case, seconds over 1F1B's along the price of messages; dashed: who leads changes."""
    colours = ("#7b8491", "#3d7fc4", "#2e933c", "#e08e1b", "#c9699f", "#d1495b", "#6f5bc0")
    figure = canvas(13, 6.5, "constrained")
    panels = figure.subplots(2, -(-len(found) // 2), sharex=True, sharey=True, squeeze=False).ravel()
    for axes, x in zip(panels, found, strict=False):
        base = x.seconds("1f1b")
        for colour, schedule in zip(colours, SCHEDULES, strict=False):
            ratio = [a / b for a, b in zip(x.seconds(schedule), base, strict=True)]
            axes.plot(WIRES[1:], ratio[1:], color=colour, marker="o", markersize=3, label=schedule)
        for at in (w for w, _ in x.leaders() if w > WIRES[1]):
            axes.axvline(at, color="#1f2933", lw=0.8, ls=(0, (4, 3)))
        axes.set_xscale("log", base=2)
        axes.set_xticks(WIRES[1:], [f"{w:g}" for w in WIRES[1:]])
        axes.set_title(x.case.name, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("seconds of messages over those of H800's links", fontsize=10)
    figure.supylabel("step over 1F1B's", fontsize=10)
    named = panels[0].get_legend_handles_labels()
    figure.legend(*named, loc="outside upper center", ncols=7, frameon=False, fontsize=9)
    return png(figure, dpi=120)


def write(out: str, force: bool) -> None:
    """Predict, print, draw, write."""
    found = []
    for case in CASES:
        found.append(lines_of(case))
        print(*told(found[-1]), sep="\n", flush=True)
    write_outputs(out, {"breakeven.png": picture(found), "points.csv": table(found)}, force)
