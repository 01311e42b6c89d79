"""What does DualPipe save over 1F1B and the others, and where? DeepSeek-V3 on 2,048 H800, the demo's job.

    python -m experiments.dualpipe_vs_1f1b --out dualpipe-vs-1f1b [--microbatches 120] [--force]

Beside it, the fair comparison of `experiments.joint`: uniform layers, every schedule with the overlap it can have.
Writes bars.png (a bar per schedule: the step, split by what the mean rank spends it on) and rows.json with the command
and the commit. Nothing is random. All seconds are modelled from the hardware file; no GPU is used.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.joint import fair
from experiments.published.picture import canvas, png
from ir.core.errors import PiperError
from ir.job.load import job_from
from piper_sim.app.commands.demo import JOB
from piper_sim.report.files import write_outputs
from piper_sim.report.units import GIB
from piper_sim.study.compare import SIX, compare
from piper_sim.study.predict import predict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Categories from the bottom up: work, then waiting for messages, then waiting for other ranks.
PARTS = {
    "compute": ("compute", "#3d7fc4"),
    "recompute": ("recompute", "#86c5ee"),
    "slowdown": ("slowed by communication", "#6f5bc0"),
    "optimizer": ("optimizer", "#7b8491"),
    "host": ("host", "#a0785a"),
    "exposed_tp": ("exposed: tensor parallel", "#6f5bc0"),
    "exposed_cp": ("exposed: context parallel", "#2a9fa8"),
    "exposed_ep": ("exposed: expert all-to-all", "#c9699f"),
    "exposed_dp": ("exposed: data parallel", "#b59a00"),
    "exposed_pp": ("exposed: send, receive", "#8d99ab"),
    "dependency": ("waiting for other ranks", "#e6e9ee"),
}

Row = dict[str, Any]


def mean(row: Row) -> dict[str, float]:
    """Seconds by category, mean over ranks; they sum to the step."""
    ranks = list(row["time_breakdown"].values())
    return {k: sum(r[k] for r in ranks) / len(ranks) for k in PARTS}


def uniform(microbatches: int) -> list[Row]:
    """The fair comparison's rows, quickest first."""
    found: list[Row] = []
    for name in fair.SCHEDULES:
        merge, _ = fair.usual(name)
        job = fair.job(name, merge, merge == "template", uniform=True, microbatches=microbatches)
        found.append(predict(job_from(job)).to_dict() | {"schedule": name})
    return sorted(found, key=lambda row: float(row["iteration_s"]))


def bars(panels: dict[str, list[Row]]) -> bytes:
    """The figure: a panel per title."""
    figure = canvas(15, 6, "constrained")
    every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, rows) in zip(every, panels.items(), strict=True):
        _panel(axes, title, rows)
    every[0].set_ylabel("seconds of one step, mean over ranks")
    named = dict(zip(*reversed(every[0].get_legend_handles_labels()), strict=True))
    figure.legend(named.values(), named, loc="outside right center", frameon=False, fontsize=9, reverse=True)
    return png(figure, dpi=110)


def _panel(axes: Axes, title: str, rows: list[Row]) -> None:
    bottom = [0.0] * len(rows)
    split = [mean(r) for r in rows]
    for key, (word, colour) in PARTS.items():
        height = [s[key] for s in split]
        if max(height) > 0:
            axes.bar(range(len(rows)), height, bottom=bottom, color=colour, label=word, edgecolor="white", lw=0.5)
            bottom = [b + h for b, h in zip(bottom, height, strict=True)]
    for x, row in enumerate(rows):
        peak = max(row["memory"]["device_peak_bytes"].values()) / GIB
        text = f"{row['iteration_s']:.2f} s\n{row['bubble_fraction']:.1%} bubble\n{peak:.0f} GiB"
        axes.text(x, bottom[x], text + ("" if row["fits"] else "\ndoes not fit"), ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(rows)), [r["schedule"].replace("-1f1b", "\n1f1b").replace("b-o", "b\no") for r in rows])
    axes.set_ylim(0, max(axes.get_ylim()[1], max(bottom) * 1.22))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=11)


def commit() -> str:
    """The commit of this checkout, or unknown outside of one."""
    here = Path(__file__).parent
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main(argv: list[str] | None = None) -> int:
    """Predict, print, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--microbatches", type=int, default=120)
    parser.add_argument("--force", action="store_true")
    args = parser.parse_args(argv)
    job = job_from(tomllib.loads(JOB), file="demo")
    job = replace(job, schedule=replace(job.schedule, microbatches=args.microbatches))
    rows = [r for r in compare(job, SIX).rows if r["iteration_s"] is not None]
    for row in rows:
        spent = ", ".join(f"{PARTS[k][0]} {v:.2f}" for k, v in mean(row).items() if v >= 0.005)
        print(f"{row['schedule']:18} {row['iteration_s']:6.2f} s: {spent}")
    same = uniform(args.microbatches)
    for row in same:
        print(f"uniform {row['schedule']:26} {row['iteration_s']:6.2f} s")
    told = {"command": " ".join(sys.argv), "commit": commit(), "seed": None, "rows": rows, "uniform": same}
    panels = {
        "DeepSeek-V3, 2,048 H800, PP16: where a step goes (modelled)": rows,
        "64 uniform layers, every schedule with the overlap it can have": same,
    }
    files: dict[str, bytes | str] = {"bars.png": bars(panels), "rows.json": json.dumps(told, indent=1) + "\n"}
    try:
        write_outputs(args.out, files, args.force)
    except PiperError as e:
        print(e, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
