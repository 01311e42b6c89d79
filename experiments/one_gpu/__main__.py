"""`python -m experiments.one_gpu OUT`: measure this machine's GPU; see the package."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from experiments.one_gpu import kernels, steps, sustained
from experiments.one_gpu.timer import Deadline, host_us, measured_table


def host(out: Path, until: Deadline) -> None:
    """Microseconds of the host for one operation that the device does in no time."""
    x, y = torch.ones(16, device="cuda"), torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    linear = torch.nn.Linear(16, 16, device="cuda", dtype=torch.bfloat16)
    what: Mapping[str, Callable[[], object]] = {
        "add": lambda: x + x,
        "add_": lambda: x.add_(1),
        "mm": lambda: y @ y,
        "linear, recorded": lambda: linear(y),
        "linear, sum, backward": lambda: linear(y).sum().backward(),
    }
    with measured_table(out / "host.csv", ("what", "us", "spread_us")) as row:
        for name, call in what.items():
            if until.near():
                return
            row(name, *host_us(call))


PARTS: Mapping[str, Callable[[Path, Deadline], None]] = {
    "kernels": kernels.measure,
    "host": host,
    "sustained": sustained.measure,
    "steps": steps.measure,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the parts asked for, until the time is up."""
    parser = argparse.ArgumentParser(prog="python -m experiments.one_gpu", description=__doc__)
    parser.add_argument("out", type=Path, help="folder of the tables")
    parser.add_argument("--seconds", type=float, default=300.0, help="begin nothing behind so many")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of " + ", ".join(PARTS))
    args = parser.parse_args(argv)
    if unknown := set(args.parts.split(",")) - PARTS.keys():
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; allowed: {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        print("one_gpu: PyTorch sees no GPU on this machine; nothing was measured", file=sys.stderr)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    until = Deadline(args.seconds)
    for part in args.parts.split(","):
        PARTS[part](args.out, until)
    return 0


if __name__ == "__main__":
    sys.exit(main())
