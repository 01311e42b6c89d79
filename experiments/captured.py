"""`python -m experiments.captured [--tp N] [PRESET …]`: transformers' own classes, captured, beside their configs.

Each preset's config with four layers at its true width, one sequence of 2,048 tokens a microbatch, one H100 (four where
it has experts, which are divided over them), or N of them with tensor and sequence parallelism by the class's own
tp_plan. Two independent accounts of a step: a config's kernels are written down by hand, a captured module's are
counted as torch calls them and fused.
"""

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from executor.frontend.capture import capture, text
from ir.core.errors import PiperError
from ir.job import load_job
from ir.workload import presets
from ir.workload.config.load import raw_config
from piper_sim.study.predict import predict

LAYERS, LENGTH = 4, 2048
COUNTS = ("num_hidden_layers", "n_layer", "n_layers")


def shortened(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config with four layers, without prediction modules and dropout."""
    count = next((k for k in COUNTS if k in raw), COUNTS[0])
    out: dict[str, Any] = dict(raw)
    out |= {k: v[:LAYERS] for k, v in raw.items() if isinstance(v, list | str) and len(v) == raw.get(count)}
    out |= {k: 0.0 for k, v in raw.items() if k.endswith(("pdrop", "dropout")) and v} | {count: LAYERS}
    if raw.get("first_k_dense_replace", 0) > 1:
        out["first_k_dense_replace"] = 1
    return out | ({"num_nextn_predict_layers": 0} if "num_nextn_predict_layers" in out else {})


def module_of(raw: Mapping[str, Any]) -> nn.Module:
    """The class that transformers has for a config, without values."""
    import transformers

    kind: Any = transformers.CONFIG_MAPPING[raw["model_type"]]
    config = kind(**{k: v for k, v in raw.items() if k != "model_type"}, pad_token_id=0)
    config.use_cache = False
    models: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        made: nn.Module = models.from_config(config)
    return made


def tags_of(module: nn.Module) -> dict[str, str]:
    """Where its layers are, and experts that can be divided."""
    names = dict(module.named_modules())
    layers = next(n for n, m in names.items() if isinstance(m, nn.ModuleList) and len(m) == LAYERS)
    inside = [n.removeprefix(f"{layers}.").partition(".")[2] for n, m in names.items() if hasattr(m, "is_transposed")]
    return {"PP": f"{layers}.*"} | ({"EP": f"{layers}.*.{inside[0]}"} if inside else {})


@dataclass(frozen=True)
class Account:
    """What is predicted of a step: its seconds, its model FLOPs up to a factor, and the peak of allocated bytes."""

    seconds: float
    flops: float
    peak: int


def compared(raw: Mapping[str, Any], folder: Path, tp: int) -> tuple[Account, Account]:
    """A step as the config has it, and as captured.

    Raises PiperError: one of the two is refused.
    """
    module = module_of(raw)
    tags = tags_of(module)
    ep = 4 if "EP" in tags and tp == 1 else 1
    tags = tags if ep > 1 else {"PP": tags["PP"]}
    divided: dict[str, Any] = {"tp": tp, "sequence_parallel": True} if tp > 1 else {}
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "model.json").write_text(text(capture(module, batch=(1, LENGTH), tags=tags, ep=ep, **divided)))
    found, parallel = [], {"dp": ep, "ep": ep, **divided}
    for model in ({"config": str(folder / "config.json")}, {"graph": str(folder / "model.json")}):
        rest = {"parallel": parallel, "schedule": {"microbatches": 4}, "cluster": {"gpu": "h100-sxm"}}
        p = predict(load_job({"model": {**model, "seq_len": LENGTH}, **rest}))
        told = p.to_dict()
        peak = max(told["memory"]["peak_allocated_bytes"].values())
        found.append(Account(p.iteration_s, told["mfu"] * p.iteration_s, peak))
    config, captured = found
    return config, captured


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.captured", description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("presets", nargs="*", metavar="PRESET", help="default: one of each model_type")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that share each layer")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    known = [n for n in presets() if not n.startswith(("tiny", "piper", "mpt"))]  # MPT's class refuses its own numbers
    kinds = {str(raw_config(n)["model_type"]): n for n in reversed(known)}
    gaps = []
    for name in args.presets or sorted(kinds.values()):
        with tempfile.TemporaryDirectory() as folder:
            try:
                a, b = compared(shortened(raw_config(name)), Path(folder), args.tp)
            except PiperError as error:
                print(f"{name:18} refused: {error.message[:120]}", flush=True)
                continue
        gaps.append(abs(b.seconds / a.seconds - 1))
        took = f"{a.seconds * 1e3:8.1f} ms {b.seconds * 1e3:8.1f} ms {b.seconds / a.seconds - 1:+7.1%}"
        print(f"{name:18} {took}   FLOPs {b.flops / a.flops - 1:+.2%}   peak {b.peak / a.peak - 1:+.1%}", flush=True)
    if gaps:
        near = sum(g <= 0.08 for g in gaps)
        print(f"{len(gaps)} compared: median {median(gaps):.1%}, {near} within 8 %, worst {max(gaps):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
