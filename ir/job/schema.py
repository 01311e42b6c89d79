"""The sections and keys of a job file, with their defaults. Field names are the keys; units stand in names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Scalar = str | int | float | bool


@dataclass(frozen=True)
class Model:
    """What is trained. Any key of the Hugging Face config may be set inline; those land in `overrides`."""

    config: str = ""
    seq_len: int = 4096
    attention: str = "flash"
    graph: str | None = None
    module: str | None = None
    seed: int = 0
    overrides: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What titles call it: the config, or the file that a module was captured in."""
        return self.config or (self.graph or "")


@dataclass(frozen=True)
class Cluster:
    """Where it runs. Keys of the hardware file may be set inline; those land in `overrides`."""

    gpu: str = "h100-sxm"
    nodes: int | None = None
    gpus_per_node: int | None = None
    memory_margin_GiB: float = 2.0
    speed: Mapping[str, float] = field(default_factory=dict)
    overrides: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Parallel:
    """How it is divided. tp·cp·pp·dp is the number of GPUs; experts see the same devices as etp·ep·edp."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int | None = None
    ep: int = 1
    etp: int = 1
    zero: int = 1
    bucket_MiB: float | None = None
    prefetch: int = 1
    reshard: bool = True
    order: str = "tp cp ep dp pp"
    sequence_parallel: bool = True
    layers: str | tuple[int, ...] = "balanced"


@dataclass(frozen=True)
class Schedule:
    """In which order. One of name, directives, builder, csv; microbatches per replica, both directions together."""

    name: str | None = None
    directives: str | None = None
    builder: str | None = None
    csv: str | None = None
    microbatches: int | None = None
    microbatch_size: int = 1
    stages_per_rank: int | None = None
    recompute: str | tuple[str, ...] = "none"


@dataclass(frozen=True)
class Routing:
    """Which experts tokens go to. forced: in a run too, where else routers choose."""

    kind: str = "balanced"
    strength: float = 1.0
    seed: int = 0
    file: str | None = None
    forced: bool = False


@dataclass(frozen=True)
class Costs:
    """Where seconds come from."""

    profile: str | None = None
    interference: str = "pairwise"
    host_model: str = "ahead"
    software: str | None = None
    stage_times: Mapping[str, object] | None = None


@dataclass(frozen=True)
class Data:
    """What `run` trains on."""

    source: str = "synthetic"
    seed: int = 0


@dataclass(frozen=True)
class Gate:
    """Sizes of relative errors that `validate` lets pass."""

    iteration: float = 0.05
    op_median: float = 0.10
    memory: float = 0.02


@dataclass(frozen=True)
class History:
    """Past runs, for backtests: a table beside the job. apply: correct predictions by what it suggests."""

    file: str | None = None
    apply: bool = False


@dataclass(frozen=True)
class Optimizer:
    """The update. clip_norm 0 turns clipping off."""

    name: str = "adamw"
    lr: float = 1e-3
    clip_norm: float = 1.0


@dataclass(frozen=True)
class Precisions:
    """Number formats by name; those left out follow `compute`."""

    compute: str = "bf16"
    dispatch: str | None = None
    combine: str | None = None
    gather: str | None = None
    reduce: str | None = None
    params: str | None = None
    grads: str | None = None
    optimizer: str | None = None


@dataclass(frozen=True)
class Job:
    """A whole job. `file` is where relative paths start and what errors name."""

    model: Model
    cluster: Cluster = field(default_factory=Cluster)
    parallel: Parallel = field(default_factory=Parallel)
    schedule: Schedule = field(default_factory=Schedule)
    routing: Routing = field(default_factory=Routing)
    costs: Costs = field(default_factory=Costs)
    data: Data = field(default_factory=Data)
    gate: Gate = field(default_factory=Gate)
    history: History = field(default_factory=History)
    optimizer: Optimizer = field(default_factory=Optimizer)
    precision: Precisions = field(default_factory=Precisions)
    file: str = "job"


CHOICES: Mapping[str, tuple[str, ...]] = {
    "model.attention": ("flash", "unfused"),
    "routing.kind": ("balanced", "zipf", "hot", "file"),
    "costs.interference": ("none", "pairwise", "maxmin"),
    "costs.host_model": ("ahead", "inline"),
    "optimizer.name": ("adamw", "sgd"),
}
DTYPES = ("fp64", "fp32", "bf16", "fp16", "fp8")
RECOMPUTE = ("norm", "up_projection", "activation", "scores", "mlp", "attention")
POSITIVE = frozenset(
    {
        *(f"parallel.{k}" for k in ("tp", "cp", "pp", "dp", "ep", "etp")),
        *(f"schedule.{k}" for k in ("microbatches", "microbatch_size", "stages_per_rank")),
        "model.seq_len",
        "cluster.nodes",
        "cluster.gpus_per_node",
    }
)

SECTIONS: Mapping[str, type] = {
    "model": Model,
    "cluster": Cluster,
    "parallel": Parallel,
    "schedule": Schedule,
    "routing": Routing,
    "costs": Costs,
    "data": Data,
    "gate": Gate,
    "history": History,
    "optimizer": Optimizer,
    "precision": Precisions,
}
OPEN = ("model", "cluster")  # sections whose other keys belong to the model config and the hardware file
