"""Every format: a valid file of it, and what reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cost_models.hardware import load_hardware
from cost_models.profile.file import load_profile, profile_text
from cost_models.profile.machine import ProfileMachine
from cost_models.profile.profile import MeasuredCost, OpEntry, Profile
from cost_models.software import load_software
from ir.directives.load import load_strategy
from ir.job import load_job
from ir.job.build import PreparedJob, prepare
from ir.job.load import job_from
from ir.job.routing.counts import ExpertLayer
from ir.job.routing.recorded import counts_text, read_counts
from ir.plan.read import read_plan
from ir.plan.text import plan_text
from ir.schedules.custom import from_csv
from ir.trace.text import read_trace, write_trace
from ir.trace.trace import MemorySamples, Trace
from ir.workload.captured import load_captured
from ir.workload.config.load import load_config
from piper_sim.frameworks.importing import import_launch
from piper_sim.study.calibrate.nccl_tests import read_nccl_tests
from piper_sim.study.calibrate.pairs import read_pairs
from piper_sim.study.calibrate.trace_events import read_trace_file
from piper_sim.study.explain.kineto import read_traces
from piper_sim.study.history.table import read_runs
from tests.ir.directives.strategies import SHIPPED
from tests.piper_sim.study.calibrate.nccl_text import table

ROOT = Path(__file__).parents[2]
JOB = """[model]
config = "tiny-moe"
seq_len = 128
[cluster]
gpu = "h800-sxm"
nic_Gbps = 100
speed = { 0 = 0.8 }
[parallel]
pp = 2
dp = 2
ep = 2
layers = [2, 2]
bucket_MiB = 25.0
[schedule]
name = "1f1b"
microbatches = 4
recompute = ["norm"]
[precision]
compute = "bf16"
"""
_TITAN = (
    '[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\npipeline_parallel_degree = 2\n[training]\nseq_len = 64\n'
)
_NEMO = """trainer: {devices: 8}
model: {num_layers: 4, hidden_size: 64, num_attention_heads: 4, kv_channels: '${.hidden_size}'}
"""
_SCRIPT = """A=(--num-layers 4 --hidden-size 64)
torchrun --nproc_per_node ${N:-8} x.py ${A[@]} --num-attention-heads=$((2*2)) \\
  --tensor-model-parallel-size 2 --pipeline-model-parallel-layout 'Et|tttL' --moe-layer-freq '[0]*2+[1]*2'
"""
_LOGGED = ("num_layers", "hidden_size", "lr", "seed", "tp", "fp16")
LAUNCHES = {
    "sh": _SCRIPT,
    "toml": _TITAN,
    "yaml": _NEMO,
    "json": '{"train_batch_size": 8, "zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}',
    "log": "using world size: 8\n" + "".join(f"  {k} ........ 4\n" for k in _LOGGED),
}


@dataclass(frozen=True)
class Format:
    """name: of the file. seed: a valid one. read: what answers with a value, or a PiperError."""

    name: str
    seed: bytes
    read: Callable[[Path], object]


@cache
def formats() -> tuple[Format, ...]:
    """All of them; the valid files are made here."""
    return tuple(Format(name, seed.encode(), read) for name, (seed, read) in _made().items())


def _made() -> Mapping[str, tuple[str, Callable[[Path], object]]]:
    prepared = _prepared()
    plan = prepared.plan()
    tiny = load_config("tiny-moe")
    assert tiny.moe is not None
    moe, layers = tiny.moe, [ExpertLayer(i, prepared.base.entries[0], 8) for i in (0, 1)]
    rows = [(n, 0, 0, [8 * moe.top_k // moe.experts] * moe.experts) for n in (0, 1)]

    def counts(path: Path) -> object:
        job = job_from({"model": {"config": "x"}, "routing": {"kind": "file", "file": str(path)}})
        return read_counts(job, moe, layers, 1, 1)

    return {
        "job.toml": (JOB, load_job),
        "hardware.json": ((ROOT / "cost_models/hardware/h100-sxm.json").read_text(), load_hardware),
        "based.json": ('{"base": "h100-sxm", "name": "x", "hbm_GiB": 40, "gemm": {"ramp_bytes": 1}}', load_hardware),
        "software.json": ((ROOT / "cost_models/software/megatron.json").read_text(), lambda p: load_software(str(p))),
        "profile.json": (profile_text(_profile()), load_profile),
        "strategy.json": (json.dumps(SHIPPED["pp2_dp2_ep2_custom_order"]), load_strategy),
        "model.json": (json.dumps(CAPTURED), load_captured),
        "config.json": (
            (ROOT / "ir/workload/config/presets/deepseek-v3.json").read_text(),
            lambda p: load_config(str(p)),
        ),
        "kineto.json": (json.dumps(KINETO), lambda p: (read_trace_file(str(p), bool), read_traces([str(p)]))),
        "all_reduce.txt": (table("all_reduce", lambda n: 1e-5 + n / 1e11), lambda p: read_nccl_tests([str(p)])),
        "pairs.csv": ("compute,message,held,moving,wire\nmemory,p2p,0.1,0.2,0\n", lambda p: read_pairs(str(p))),
        "history.csv": ("parallel.pp,iteration_s,peak_allocated_GiB,note\n4,1.5,20,mine\n8,oom,,\n", read_runs),
        "routing.csv": (counts_text(rows), counts),
        "schedule.csv": ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", from_csv),
        "trace.tsv": (TRACE, read_trace),
        **{f"launch.{end}": (text, lambda p: import_launch(str(p))) for end, text in LAUNCHES.items()},
        "plan.txt": (plan_text(plan), lambda p: read_plan(p, plan.graph)),
    }


def _prepared() -> PreparedJob:
    return prepare(job_from({"model": {"config": "tiny-moe", "seq_len": 64}, "parallel": {"pp": 2}}))


def _profile() -> Profile:
    links = {f"p2p {n}": MeasuredCost(1e-6 * n, 1e-8, 5) for n in (64, 4096, 65536)}
    ops = {"F/attn 3f2a": OpEntry(MeasuredCost(0.01, 0.001, 3), alone=True)}
    return Profile.of(ProfileMachine("a cpu", 2, "", 0, {"torch": "2.13"}, "2026-01-01T00:00:00Z"), ops, links, 1e-5)


_PASS: dict[str, Any] = {
    "workspace_bytes": 64,
    "kernels": [
        {"op": "mm", "kind": "gemm", "flops": 128, "bytes": 96, "dtype": "fp32", "shape": [4, 4, 4], "count": 1},
        {"op": "add", "kind": "memory", "flops": 0, "bytes": 96, "dtype": "fp32", "shape": [], "count": 2},
    ],
}
_PART: dict[str, Any] = {
    "output_bytes": 64,
    "reads_input_again": "W",
    "saved_bytes": {"until_I": 1, "until_W": 2, "constants": 3},
    "stash_bytes": 4,
    "passes": {"F": _PASS, "I": _PASS, "W": _PASS},
}
CAPTURED: dict[str, Any] = {
    "format": "piper-sim/model",
    "version": 1,
    "model": "m",
    "microbatch_size": 1,
    "seq_len": 4,
    "dtype": "fp32",
    "hidden": 4,
    "vocab": 8,
    "chunks": [
        {"name": "embed", "part": "embed", "parameters": [["e.weight", [8, 4]]]},
        {"name": "l0", "part": "block", "parameters": [["l.weight", [4, 4]]]},
    ],
    "parts": {"embed": _PART, "block": _PART},
}
_SAME = {"correlation": 7}
KINETO: dict[str, Any] = {
    "distributedInfo": {"rank": 0, "world_size": 2},
    "deviceProperties": [{"name": "NVIDIA H100"}],
    "traceEvents": [
        {"ph": "X", "cat": "user_annotation", "name": "0F0/l0.attn", "pid": 1, "tid": 1, "ts": 1.0, "dur": 9.0},
        {"ph": "X", "cat": "cuda_runtime", "name": "l", "pid": 1, "tid": 1, "ts": 2, "dur": 1, "args": _SAME},
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 3, "dur": 4, "args": _SAME},
        {"ph": "X", "cat": "kernel", "name": "ncclKernel", "pid": 0, "tid": 9, "ts": 3, "dur": 4, "args": {}},
    ],
}  # fmt: skip
TRACE = write_trace(
    Trace.of(
        {"engine": "simpy"},
        [(0, 0, "compute", "0F0", 0.0, 0.0, 1.0), (0, 1, "compute", "1F0", 1.0, 1.0, 2.5)],
        MemorySamples.of([(0, 0.0, 10), (1, 0.5, 20)]),
    )
)
