"""Whole training steps of transformers' classes by plain PyTorch: seconds, peaks, and when the host was done."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from experiments.one_gpu.timer import Deadline, measured_table
from experiments.published.sets import facts
from ir.workload.config.load import raw_config

WARM, STEPS = 3, 6
# PyTorch's name of a device, as the tables have it.
GPUS = {"H200": "H200-141GB-SXM", "H100 80GB HBM3": "H100-80GB-SXM", "A100-SXM4-80GB": "A100-80GB-SXM", "B200": "B200"}
COLUMNS = (
    "case_id model gpu seq_len micro_batch microbatches recompute precision torch_compile"
    " iter_time_s spread_s host_s peak_allocated_bytes peak_reserved_bytes state_bytes source"
)


@dataclass(frozen=True)
class StepCase:
    """A run. model: of `[models]` in sets.toml. recomputed: whole layers. autocast: of parameters in fp32."""

    model: str
    seq_len: int
    microbatch_size: int
    microbatches: int = 1
    recomputed: bool = False
    autocast: bool = False
    compiled: bool = False

    @property
    def name(self) -> str:
        """As tables have it.

        >>> StepCase("gpt2", 1024, 8, compiled=True).name
        'gpt2_1024x8x1_compiled'
        """
        said = {"recomputed": self.recomputed, "autocast": self.autocast, "compiled": self.compiled}
        sizes = f"{self.seq_len}x{self.microbatch_size}x{self.microbatches}"
        return "_".join([self.model, sizes, *(word for word, yes in said.items() if yes)])


CASES = (
    StepCase("llama-3.2-1b", 2048, 1),
    StepCase("llama-3.2-1b", 2048, 4),
    StepCase("llama-3.2-1b", 8192, 1),
    StepCase("llama-3.2-1b", 2048, 4, 4),
    StepCase("llama-3.2-1b", 8192, 2, recomputed=True),
    StepCase("llama-3.2-1b", 2048, 4, autocast=True),
    StepCase("llama-2-7b-8", 4096, 1),
    StepCase("llama-2-7b-8", 4096, 4),
    StepCase("llama-2-7b-8", 4096, 2, 2, recomputed=True),
    StepCase("gpt2", 1024, 1),
    StepCase("gpt2", 1024, 8),
    StepCase("gpt2", 1024, 32),
    StepCase("qwen3-0.6b", 4096, 1),
    StepCase("qwen3-0.6b", 4096, 4),
    StepCase("mixtral-4", 2048, 2),
    StepCase("mixtral-4", 4096, 4),
    StepCase("llama-3.2-1b", 16384, 1),
    StepCase("qwen3-moe-4", 4096, 2),
    StepCase("deepseek-v2-lite-4", 2048, 4),
    StepCase("gemma3-1b", 2048, 2),
    StepCase("llama-3.2-1b", 2048, 4, compiled=True),
    StepCase("llama-2-7b-8", 4096, 2, compiled=True),
    StepCase("gpt2", 1024, 8, compiled=True),
)


@dataclass(frozen=True)
class MeasuredStep:
    """seconds and host: of each step, whole and until all was launched. bytes of the allocator; state: what stays."""

    seconds: list[float]
    host: list[float]
    allocated: int
    reserved: int
    state: int


def measure(out: Path, until: Deadline) -> None:
    """All cases there is time for; one that fails is named and left out."""
    name = torch.cuda.get_device_name(0).removeprefix("NVIDIA ")
    with measured_table(out / "one_gpu.csv", COLUMNS.split()) as row:
        for case in CASES:
            if until.near(30.0 if case.compiled else 8.0):
                continue
            try:
                found = run(case, torch.device("cuda"))
            except (RuntimeError, ValueError) as e:
                print(f"{case.name}: {type(e).__name__} {str(e).splitlines()[0]}")
                continue
            spread = sorted(found.seconds)[-2] - sorted(found.seconds)[1]
            times = (f"{x:.6f}" for x in (median(found.seconds), spread, median(found.host)))
            cells = ("full" if case.recomputed else "", "autocast" if case.autocast else "bf16", int(case.compiled))
            sizes = (case.seq_len, case.microbatch_size, case.microbatches)
            peaks = (found.allocated, found.reserved, found.state)
            row(case.name, case.model, GPUS.get(name, name), *sizes, *cells, *times, *peaks, "measured here")


def run(case: StepCase, device: torch.device) -> MeasuredStep:
    """Some steps of one case, none of whose tensors are left behind."""
    try:
        return _timed(case, device)
    finally:
        gc.collect()
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def model_of(case: StepCase, device: torch.device) -> Any:
    """The class that transformers has for the model, random values in it."""
    import transformers

    told: dict[str, Any] = dict(facts()["models"][case.model])
    raw = {**raw_config(told.pop("config")), **told}
    kinds: Any = transformers.CONFIG_MAPPING
    config = kinds[raw.pop("model_type")](**raw, use_cache=False)
    dtype = torch.float32 if case.autocast else torch.bfloat16
    models: Any = transformers.AutoModelForCausalLM
    with device:
        made = models.from_config(config, dtype=dtype, attn_implementation="sdpa")
    made.train()
    if case.recomputed:
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return made


def _timed(case: StepCase, device: torch.device) -> MeasuredStep:
    model, cuda = model_of(case, device), device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
    words = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(words, (case.microbatches, case.microbatch_size, case.seq_len), device=device)
    step = _step(case, torch.compile(model) if case.compiled else model, optimizer, ids)
    wait: Callable[[], object] = torch.cuda.synchronize if cuda else lambda: None
    for _ in range(WARM):
        step()
    wait()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds, host = [], []
    for _ in range(STEPS):
        begin = time.perf_counter()
        step()
        host.append(time.perf_counter() - begin)
        wait()
        seconds.append(time.perf_counter() - begin)
    moments = (t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor))
    state = sum(t.nbytes for t in (*model.parameters(), *moments))
    peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if cuda else (0, 0)
    return MeasuredStep(seconds, host, *peaks, state)


def _step(case: StepCase, model: Any, optimizer: torch.optim.Optimizer, ids: Tensor) -> Callable[[], None]:
    def step() -> None:
        for microbatch in ids:
            with torch.autocast(ids.device.type, torch.bfloat16, enabled=case.autocast):
                loss = model(input_ids=microbatch, labels=microbatch).loss / case.microbatches
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
