"""Writes what nccl-tests would print on a machine of known constants: its columns, its rounding, its headers."""

from collections.abc import Callable, Sequence

FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "sendrecv": lambda n: 1.0,
}
REDOPS = {"all_reduce": "sum", "reduce_scatter": "sum"}
SIZES = tuple(2**k for k in range(10, 34))
_HALF = "     time   algbw   busbw #wrong", "            (us)  (GB/s)  (GB/s)       "
HEADER = (
    f"#\n#{'out-of-place':>74}{'in-place':>31}\n"
    f"#       size         count      type   redop    root{_HALF[0]}{_HALF[0]}\n"
    f"#        (B)    (elements)                          {_HALF[1]}{_HALF[1]}\n"
)


def number(value: float, width: int) -> str:
    """As many digits as go into the width, as nccl-tests has it."""
    for digits in (2, 1, 0):
        if len(text := f"{value:.{digits}f}") <= width:
            return text
    return f"{value:.1e}"


def table(
    test: str,
    seconds: Callable[[int], float],
    ranks: int = 16,
    per_node: int = 8,
    sizes: Sequence[int] = SIZES,
    *,
    named: bool = True,
    wrong: str = "0",
) -> str:
    """The whole output of one test. named: a version that prints its own name."""
    lines = [
        f"# nccl-tests version 2.17.1 nccl-headers=22501 nccl-library=22501\n# Collective test starting: {test}_perf\n"
    ]
    lines = lines if named else []
    step = "warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0"
    lines.append(
        f"# nThread 1 nGpus 1 minBytes {sizes[0]} maxBytes {sizes[-1]} step: 2(factor) {step}\n#\n# Using devices\n"
    )
    for r in range(ranks):
        where = f"node-{r // per_node} device {r % per_node:2d} [0000:{16 + r:02x}:00]"
        lines.append(f"#  Rank {r:2d} Group  0 Pid {4000 + r:6d} on {where} NVIDIA H100 80GB HBM3\n")
    lines.append(HEADER)
    for size in sizes:
        lines.append(f"{row(test, size, seconds(size), ranks, wrong)}\n")
    lines.append("# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 81.7 \n#\n")
    return "".join(lines)


def row(test: str, size: int, seconds: float, ranks: int, wrong: str = "0") -> str:
    """One line, both halves alike but for a little."""
    halves = []
    for us in (seconds * 1e6, seconds * 1e6 * 1.002):
        alg = size / us / 1e3
        bus = alg * FACTORS[test](ranks)
        halves.append(f"  {number(us, 7):>7}  {number(alg, 6):>6}  {number(bus, 6):>6}  {wrong:>5}")
    redop = REDOPS.get(test, "none")
    return f"{size:12d}  {size // 4:12d}  {'float':>8}  {redop:>6}  {-1:6d}{''.join(halves)}"
