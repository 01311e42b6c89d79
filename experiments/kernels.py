"""`python -m experiments.kernels DIR`: measured kernels and collectives of a folder of tables against the model.

Tables: gemm_*.csv (gpu, dtype, m, n, k, us), attention_*.csv, sdpa*.csv (both passes), recurrence.csv, experts*.csv,
op*.csv, nccl*.csv with the columns of the small ones in `experiments/published/data/kernels`, which are read where no
folder is given. Kernels there were measured by themselves: short bursts at boost clocks, so the hardware files are
taken as they are, not `in_training()`, but for experts fused with their activation. A product in fp8 is measured with
the kernels that quantise x in front of it, but for fp8_cold. What a timer reads around nothing (timer_us) is taken off.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from msgspec import structs

from cost_models import (
    DeviceHardware,
    LinkFabric,
    OptimizerPrecision,
    kernel_seconds,
    load_hardware,
    message_seconds,
    work_seconds,
)
from cost_models.compute.optimizer import clip, grad_norm, update
from cost_models.software import FrameworkCosts
from experiments.published.rows import DATA, Line, ints, lines
from ir.core.work import CAST, EXPERTS, DType, Kernel, KernelKind, Message, MessageKind
from ir.workload import load_config
from ir.workload.config.recurrence import LayerMixer, LayerMixerKind
from ir.workload.part import PartLayout
from ir.workload.parts.mixer_core import LayerRecurrence
from ir.workload.setting import MicrobatchShape, ModelPrecision, PartSetting
from piper_sim.study.history.show import PredictionErrors

GPUS = {
    "a100": "a100-sxm-80gb",
    "h100": "h100-sxm",
    "h200": "h200-sxm",
    "h20": "h20-sxm",
    "b200": "b200-sxm",
    "gb200": "gb200-nvl72",
    "gb200_graphs": "gb200-nvl72",
    "gb300": "gb300-nvl72",
    "b300": "b300-sxm",
}
RECURRING = "qwen3.5-35b-a3b"  # a model that has one; its sizes are a line's
RECURRENCE = ("batch", "seq_len", "heads", "groups", "head_dim", "state", "chunk")


# Bytes that each kernel in front moves for an element of x: one scale per tensor asks for its largest first.
CASTS: Mapping[str, tuple[float, ...]] = {
    **dict.fromkeys(("bf16", "bf16_cold", "fp8_cold"), ()),
    "fp8_tensor": (2.0, 3.0),
    "fp8_block": (3.0,),
}
# Elementwise kernels, norms and losses: reads and writes of each element, kernel by kernel. Softmax reads for its
# maximum, for its sum and to write; its backward reads the gradient twice, which the loss hands to it as zeros but for
# the labels.
TOUCHED: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("copy", "silu", "gelu", "rms_norm", "layer_norm", "softmax"), (2,)),
    "add": (3,),
    "sum": (1,),
    "cast": (),
    "cross_entropy": (4,),
    "cross_entropy_backward": (1, 4),
}
UPDATES = {"adamw_fused": (update,), "clip_grad_norm": (grad_norm, clip)}
FORMATS = {"bf16": DType.BF16, "fp32": DType.FP32}
# Blackwell's tensor cores take scales of blocks packed: x's, and those of weights, repeated and packed at each call. As
# powers of two they ask for no division: such a cast waits for HBM.
PACKED = (4 / 128,) * 3


def gemm(line: Line, hw: DeviceHardware) -> float:
    """Seconds of a product, in fp8 with the casts of x."""
    m, n, k = ints(line, *"mnk")
    dtype = DType.BF16 if line["dtype"].startswith("bf16") else DType.FP8
    casts, label = CASTS[line["dtype"]], f"x{CAST}"
    if line["dtype"] == "fp8_block" and hw.fp8_recipe == "mxfp8":
        casts, label = casts + PACKED, "x"
    hw = structs.replace(hw, fp8_recipe="tensor") if line["dtype"] in ("fp8_tensor", "fp8_cold") else hw
    product = Kernel(KernelKind.GEMM, 2 * m * n * k, dtype.bytes * (m + n) * k + 2 * m * n, dtype, (m, n, k))
    before = [Kernel(KernelKind.MEMORY, 0, int(b * m * k), DType.BF16, (), label) for b in casts]
    return work_seconds((product, *before), hw)


def attention(line: Line, hw: DeviceHardware) -> float:
    """Seconds of one pass of causal attention, in bf16 unless a line names a recipe of fp8; forward, and of one width,
    where a line has no other. By the kernel for this GPU, but where FlashAttention 2 ("flash") was asked for.
    """
    line = {"qk_dim": line.get("head_dim", ""), "v_dim": line.get("head_dim", ""), "pass": "forward", **line}
    batch, heads, few, s, qk, v = ints(line, "batch", "heads", "kv_heads", "seq_len", "qk_dim", "v_dim")
    back, portable = line["pass"] == "backward", line.get("backend") == "flash"
    recipe = line.get("fp8_recipe") or hw.fp8_recipe
    hw = structs.replace(hw, software=FrameworkCosts(portable_attention=portable), fp8_recipe=recipe)
    dtype = DType.FP8 if line.get("fp8_recipe") else DType.BF16
    flops, moved = batch * heads * s * s * (qk + v), dtype.bytes * batch * s * (heads + few) * (qk + v)
    whole = (flops * 5 // 2, 2 * moved) if back else (flops, moved)
    return kernel_seconds(Kernel(KernelKind.ATTENTION, *whole, dtype, (batch, heads, s, s, qk, v)), hw)


def recurrence(line: Line, hw: DeviceHardware) -> float:
    """Seconds of one pass of a recurrence alone, in bf16: what stands between its convolution and its gate."""
    batch, tokens, heads, groups, width, state, chunk = ints(line, *RECURRENCE)
    mixer = LayerMixer(LayerMixerKind(line["kind"]), heads, width, groups, state, 4, chunk, frozenset({0}))
    config = replace(load_config(RECURRING), mixer=mixer)
    setting = PartSetting(config, PartLayout(), MicrobatchShape(batch, tokens), ModelPrecision())
    core = LayerRecurrence.of(setting)
    return work_seconds(core.backward(setting) if line["pass"] == "backward" else core.forward(setting), hw)


def experts(line: Line, hw: DeviceHardware) -> float:
    """Seconds of one of the products of experts that are fused with SwiGLU, at training's clocks; with backward's
    activation, which is left a pass of its own. Gradients of weights are written once, in 16 bits.
    """
    groups, rows, hidden, ffn = ints(line, "experts", "rows", "hidden", "ffn")
    name, _, of = line["product"].partition("_")
    out, into = (2 * ffn, hidden) if name == "up" else (hidden, ffn)
    m, n, k = {"": (rows, out, into), "grad": (rows, into, out), "weight": (out, into, rows)}[of]
    moved = groups * (m * k + n * k + 2 * m * n)
    label = f"{EXPERTS}{name}"
    product = Kernel(KernelKind.GROUPED_GEMM, 2 * groups * m * n * k, moved, DType.FP8, (groups, m, n, k), label)
    unmade = Kernel(KernelKind.MEMORY, 0, groups * rows * ffn * 5 * 2, DType.BF16)
    hw = structs.replace(hw.in_training(), fused_experts=True)
    return work_seconds((product, unmade) if line["product"] == "down_grad" else (product,), hw)


def op(line: Line, hw: DeviceHardware) -> float:
    """Seconds of what is no product and no attention, by its bytes."""
    name, n, dtype = line["op"], math.prod(map(int, line["sizes"].split())), FORMATS.get(line["dtype"], DType.FP32)
    recipe = OptimizerPrecision("adamw", dtype, dtype, dtype)
    if name in UPDATES:
        return work_seconds(tuple(kernel(n, recipe) for kernel in UPDATES[name]), hw)
    moved = [6] if name == "cast" or "_fp32" in name else []  # from the one format to the other
    each = 4 if "_fp32" in name else dtype.bytes
    moved += [each * x for x in TOUCHED[name.replace("_fp32", "")]]
    return work_seconds(tuple(Kernel(KernelKind.MEMORY, 0, n * b, dtype, (), name) for b in moved), hw)


def collective(line: Line, hw: DeviceHardware) -> float:
    """Seconds of a collective inside a node."""
    message, ranks = Message(MessageKind(line["collective"]), int(line["bytes"]), ("dp",)), int(line["gpus"])
    return message_seconds(message, ranks, ranks, LinkFabric.of(hw))


def seconds(line: Line, key: str) -> float:
    """What was measured; of attention the quicker kernel."""
    found = [line[c] for c in ("us", "us_trtllm", "us_vllm") if line.get(c)]
    if key in ("sdpa", "recurrence"):
        us = 1e3 * float(line["ms"])
    else:
        us = min(map(float, found)) if key == "attention" else float(line["us"])
    return 1e-6 * (us - float(line.get("timer_us", "0")))


KINDS: Mapping[str, tuple[Callable[[Line, DeviceHardware], float], str]] = {
    "gemm": (gemm, "dtype"),
    "attention": (attention, "head_dim"),
    "sdpa": (attention, "backend fp8_recipe pass"),
    "recurrence": (recurrence, "kind pass"),
    "experts": (experts, "product"),
    "op": (op, "op"),
    "nccl": (collective, "collective"),
}


def priced_at_all(line: Line) -> bool:
    """Not so: attention in a window, the memory-efficient kind, updates in many kernels, an embedding's gradient."""
    known = line.get("op", "copy") in {
        *TOUCHED,
        *UPDATES,
        *(f"{x}_fp32" for x in TOUCHED),
        "cross_entropy_fp32_backward",
    }
    return known and line.get("window", "0") == "0" and line.get("backend") != "efficient"


def errors(
    folder: Path, swap: Mapping[str, str] | None = None, shuffle: bool = False
) -> dict[tuple[str, str, str], list[float]]:
    """(kind, GPU, dtype and the like) -> errors. Controls, swap: another GPU's file instead; shuffle: each kernel is
    held against the time of the one half its table further on."""
    pairs: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for kind, (priced, columns) in KINDS.items():
        files = (*sorted(folder.glob(f"{kind}_*.csv")), *sorted(folder.glob(f"{kind}.csv")))
        for line in filter(priced_at_all, (x for file in files for x in lines(file))):
            gpu, of = line["gpu"], " ".join(line[c] for c in columns.split() if c in line)
            hw = load_hardware(GPUS[(swap or {}).get(gpu, gpu)])
            pairs.setdefault((kind, gpu, of), []).append((priced(line, hw), seconds(line, kind)))
    return {key: [*_errors(rows, len(rows) // 2 if shuffle else 0)] for key, rows in pairs.items()}


def _errors(rows: Sequence[tuple[float, float]], by: int) -> Iterator[float]:
    for (priced_s, _), (_, measured_s) in zip(rows, (*rows[by:], *rows[:by]), strict=True):
        yield priced_s / measured_s - 1


def main(argv: Sequence[str] | None = None) -> int:
    """Score a folder."""
    parser = argparse.ArgumentParser(prog="python -m experiments.kernels", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=DATA / "kernels")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(argv)
    rows: list[dict[str, str | int | float]] = []
    for (kind, gpu, of), found in errors(args.folder).items():
        x = PredictionErrors.of(found)
        assert x is not None
        rows.append(
            {"kind": kind, "gpu": gpu, "of": of, "n": x.n, "median": x.median, "p90": x.p90, "sign": median(found)}
        )
    for r in rows if not args.json else ():
        print(
            "{kind!s:10} {gpu!s:5} {of!s:26} {n!s:>5} median".format(**r),
            *(f"{float(r[k]):+.3f}" for k in ("median", "p90", "sign")),
        )
    if args.json:
        print(json.dumps({"schema_version": 1, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
