"""Which model a job names, a config or a captured file: its chunks, where their numbers come from, what it refuses."""

from dataclasses import dataclass, replace

from ir.core.errors import job_error
from ir.core.files import named_path
from ir.core.limits import check_layers
from ir.job.schema import Job
from ir.job.table import keys_of
from ir.workload import load_config, model_chunks
from ir.workload.captured import CapturedModel, CapturedModelWork, load_captured
from ir.workload.config.load import config_from, presets
from ir.workload.config.spec import ModelConfig
from ir.workload.part import Chunk, ModelWork, PartLayout, chunk_flops
from ir.workload.setting import FUSED_STYLE, KernelStyle, MicrobatchShape, ModelPrecision, check_setting
from ir.workload.work import ConfigModelWork


@dataclass(frozen=True)
class JobModel:
    """A job's model. config: all of it, or what is known of a captured one."""

    config: ModelConfig
    chunks: tuple[Chunk, ...]
    attention: str
    captured: CapturedModel | None = None

    def check(
        self,
        layout: PartLayout,
        shape: MicrobatchShape,
        precision: ModelPrecision,
        recompute: frozenset[str],
        ranks: int = 0,
    ) -> None:
        """Refuse sizes, and for a captured model formats and options, that do not go with it. ranks: tp·cp·dp, where
        the number of GPUs is given.
        """
        if self.captured is None:
            check_setting(self.config, layout, shape, ranks)
        else:
            self.captured.check(layout, shape, precision, recompute)

    def source(self, shape: MicrobatchShape, precision: ModelPrecision, style: KernelStyle) -> ModelWork:
        """Its numbers, for one microbatch shape and precision. A captured model has a style of its own."""
        if self.captured is None:
            return ConfigModelWork(self.config, shape, precision, self.attention, style)
        return CapturedModelWork(self.captured, shape, precision)

    def flops(self, chunk: Chunk, shape: MicrobatchShape, precision: ModelPrecision) -> int:
        """Of a chunk's F, I and W."""
        return chunk_flops(replace(self, attention="flash").source(shape, precision, FUSED_STYLE), chunk)


def read_model(job: Job) -> JobModel:
    """Read `[model] config` or `[model] graph`. Raises PiperError."""
    m = job.model
    if m.graph is None and not m.config and m.module is not None:
        message, fix = f"{m.module} is planned by a graph captured from it", "piper_sim.capture(..., out='model.json')"
        raise job_error("model.graph", message, fix, "a model.json")
    if m.graph is None:
        check_layers(m.overrides)
        path = named_path(job.file, m.config, presets()) if m.config else ""
        own = keys_of("model")
        config = load_config(path, m.overrides, own) if path else config_from({}, job.file, m.overrides, own)
        return JobModel(config, model_chunks(config), m.attention)
    if extra := [*(["config"] if m.config else []), *m.overrides]:
        message, allowed = f"{extra[0]} and graph are both given", "a config and its keys, or a captured graph"
        raise job_error(f"model.{extra[0]}", message, f"leave out {extra[0]}", allowed)
    captured = load_captured(named_path(job.file, m.graph))
    check_layers({"num_hidden_layers": captured.config.layers})
    return JobModel(captured.config, captured.chunks, m.attention, captured)
