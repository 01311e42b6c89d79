"""The flags of `piper-sim calibrate`, by themselves: the command line knows them without loading the command."""

from __future__ import annotations

import argparse


def calibrate_flags(sub: argparse.ArgumentParser) -> None:
    """What is measured, on what, and what is read instead."""
    measuring = sub.add_argument_group("measuring (needs PyTorch)")
    measuring.add_argument(
        "-n", "--ranks", type=int, metavar="N", help="processes, at most the job's ranks (default: as many as fit here)"
    )
    measuring.add_argument(
        "--backend", choices=("gloo", "nccl"), default="gloo", help="gloo: the CPU; nccl: a CUDA GPU for each process"
    )
    measuring.add_argument("--repeats", type=int, default=20, metavar="K", help="timings of each op (default: 20)")
    measuring.add_argument(
        "--by",
        choices=("auto", "modules", "kernels"),
        default="auto",
        help="time a rank's own modules, or the single kernels that its ops consist of (default: modules if they run)",
    )
    measuring.add_argument("--seq-len", metavar="a,b,c", help="further sequence lengths, to read others between them")
    measuring.add_argument("--microbatch-size", metavar="a,b", help="further sequences per microbatch")
    measuring.add_argument("--tp", metavar="a,b", help="further tensor-parallel sizes")
    measuring.add_argument("--watchdog", type=float, default=60.0, metavar="SECONDS", help="no progress is failure")
    importing = sub.add_argument_group("reading instead of measuring (needs no PyTorch)")
    for flag, name, what in (
        ("--from-kineto", "kineto", "torch.profiler traces of a training whose ranges are named 2F0, l7.attn ..."),
        ("--from-nccl-tests", "nccl", "what all_reduce_perf, alltoall_perf ... printed"),
    ):
        importing.add_argument(flag, dest=name, nargs="+", action="extend", default=[], metavar="FILE", help=what)
    importing.add_argument("--pairs", metavar="FILE", help="a CSV of slowdowns: compute,message,held,moving,wire")
    sub.add_argument("--onto", metavar="PROFILE", help="start from this profile; what is new goes before it")
    sub.add_argument("--out", metavar="DIR", help="write DIR/profile.json")
    sub.add_argument("--force", action="store_true", help="overwrite it")


def imports(parsed: argparse.Namespace) -> bool:
    """Whether files are read and nothing is measured."""
    return bool(parsed.kineto or parsed.nccl or parsed.pairs)
