"""How far off are predictions of emulated runs, and do they rank schedules as the runs do? `validate`, over a table.

python -m experiments.validate_table [--ranks 2,4,8] [--seconds 0.002,0.01,0.02] [--schedules 1f1b,zbv] [--steps 5]
    [--dp 1,2] [--zero 1,3]

ranks: of the pipeline; each of dp replicas has as many. One calibration serves all schedules of a size that have its
kinds of messages; none is on the plan that is judged. Rows whose ops are shorter than 10 ms are reported and not
counted. It says how busy the machine was.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from statistics import median

from executor.launch import run as cli
from executor.measure.peak_bytes import peak_bytes
from ir.job import load_job
from ir.job.run_options import JobRunOptions
from piper_sim.study.validate import PlanTools, ProfileCalibration, validate

SCHEDULES = ("1f1b", "gpipe", "zb1p", "interleaved-1f1b", "zbv", "dualpipe")
LEAST_S = 0.01  # of a layer's pass, to count
APART = 0.05
JOB = (Path(__file__).parent / "jobs" / "validate_table.toml").read_text(encoding="utf-8")


@dataclass(frozen=True)
class TableRow:
    """One judged plan; seconds of a step."""

    ranks: int
    dp: int
    zero: int
    op_s: float
    schedule: str
    measured_s: float
    predicted_s: float
    bare_s: float
    replay: float
    load: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def bare_error(self) -> float:
        """The same without communication."""
        return self.bare_s / self.measured_s - 1

    def text(self) -> str:
        return (
            f"{self.ranks:5} {self.dp:2} {self.zero:4} {self.op_s * 1e3:5.0f} {self.schedule:18}"
            f"{self.measured_s * 1e3:12.1f}{self.predicted_s * 1e3:13.1f}{self.error:+9.2%}{self.bare_error:+9.2%}"
            f"{self.replay:+9.2%}{self.load:6.1f}"
        )


def judged(
    schedule: str, size: tuple[int, int, int], op_s: float, steps: int, known: dict[str, ProfileCalibration]
) -> TableRow:
    """Validate one schedule: two layers to a rank, two microbatches to a rank."""
    ranks, dp, zero = size
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.toml"
        file.write_text(JOB.format(layers=2 * ranks, ranks=ranks, dp=dp, zero=zero, schedule=schedule, mbs=2 * ranks))
        options = JobRunOptions(ranks * dp, steps, watchdog_s=60.0, emulate=op_s)
        found = validate(load_job(str(file)), PlanTools(cli, peak_bytes), options, known).found
    iteration, bare = found["iteration"], found["without_communication"]
    replay = found["replay"]["error"] if found["replay"] else float("nan")
    seconds = iteration["measured_s"], iteration["predicted_s"], bare["predicted_s"]
    return TableRow(*size, op_s, schedule, *seconds, replay, os.getloadavg()[0])


def agreement(rows: Sequence[TableRow]) -> tuple[int, int]:
    """(pairs of schedules in the right order, pairs whose measured steps are more than 5 % apart) of equal sizes."""
    right = total = 0
    for a, b in combinations(rows, 2):
        alike = (a.ranks, a.dp, a.zero, a.op_s) == (b.ranks, b.dp, b.zero, b.op_s)
        low, high = sorted((a, b), key=lambda r: r.measured_s)
        if alike and high.measured_s > (1 + APART) * low.measured_s:
            total += 1
            right += high.predicted_s > low.predicted_s
    return right, total


def summary(rows: Sequence[TableRow]) -> str:
    """Median and worst of what counts, how often communication helped, and the ranking."""
    counted = [r for r in rows if r.op_s >= LEAST_S]
    if not counted:
        return "nothing counts"
    off = [abs(r.error) for r in counted]
    better = sum(abs(r.error) < abs(r.bare_error) for r in counted)
    right, total = agreement(counted)
    return (
        f"{len(counted)} plans: median {median(off):.2%}, worst {max(off):.2%}; "
        f"without communication median {median(abs(r.bare_error) for r in counted):.2%}; better than that {better} "
        f"times; replay worst {max(abs(r.replay) for r in counted):.2%}; "
        f"order right in {right} of {total} pairs more than {APART:.0%} apart"
    )


def main() -> None:
    """Print rows as they come, then the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--seconds", default="0.002,0.01,0.02")
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dp", default="1")
    parser.add_argument("--zero", default="1")
    args = parser.parse_args()
    rows: list[TableRow] = []
    print("ranks dp zero  F ms schedule          measured ms predicted ms    error     bare   replay  load", flush=True)
    sizes = product(*(map(int, text.split(",")) for text in (args.ranks, args.dp, args.zero)))
    for ranks, dp, zero in sizes:
        for op_s in map(float, args.seconds.split(",")):
            known: dict[str, ProfileCalibration] = {}
            for schedule in args.schedules.split(","):
                rows.append(judged(schedule, (ranks, dp, zero), op_s, args.steps, known))
                print(rows[-1].text(), flush=True)
    print(summary(rows))


if __name__ == "__main__":
    main()
