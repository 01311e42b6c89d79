"""The sections and keys of a job file, with their defaults. Field names are the keys; units stand in names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, get_type_hints

from msgspec import Meta

from ir.core.files import HIDDEN, Text, words
from ir.core.mesh import Mesh
from ir.workload.part import CP_COMMS, PartLayout

MOST = 2**31 - 1
PARTS = ("norm", "up_projection", "activation", "scores", "mlp", "attention", "operators")
BUCKET_MIB = 152.6  # of Megatron by default: 40 million parameters, whose gradients are fp32
Size = Annotated[int, Meta(ge=1, le=MOST)]
Natural = Annotated[int, Meta(ge=0, le=MOST)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, lt=1)]
NumberFormat = Annotated[str, words("fp64", "fp32", "bf16", "fp16", "fp8", said="number format")]
Recomputed = Annotated[str, words(*PARTS, said="part to recompute")]
Recompute = Annotated[str, words(*PARTS, "none", "selective", "full", said="recompute")]

Free = Annotated[str, words("all_to_all", "collective", "p2p", "host", said="cost to leave out")]


@dataclass(frozen=True)
class ModelSection:
    """What is trained. Any key of the Hugging Face config may be set inline; those land in `overrides`.

    Without config and graph, `model_type` and the keys set inline are the config. weights: a folder of safetensors
    files with a run's first values, as the Hub has them; without it they are drawn from the seed. drawn: patterns of
    names of trained parameters that these files need not have (adapters, a new head), and that are drawn. tp_plan: how
    tp divides the linears of a module of one's own, by path, where it has no plan itself. encoder_seq_len: tokens that
    an encoder beside a decoder reads; left out, as many as the decoder.
    """

    config: Text = ""
    seq_len: Size = 4096
    encoder_seq_len: Size | None = None
    attention: Annotated[str, words("flash", "unfused", said="attention")] = "flash"
    graph: Text | None = None
    module: Text | None = None
    tags: Mapping[str, Text] = field(default_factory=dict)
    tp_plan: Mapping[str, Text] = field(default_factory=dict)
    weights: Text | None = None
    drawn: tuple[Text, ...] = ()
    seed: Natural = 0
    overrides: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What titles call it: the config, the file that a module was captured in, or the type of a config inline."""
        return self.config or self.graph or str(self.overrides.get("model_type", ""))


@dataclass(frozen=True)
class JobSlowNodes:
    """Nodes that nobody knows to be slow. share: the chance of each; speed: of its GPUs' kernels, 1 is as usual."""

    share: Annotated[float, Meta(gt=0, lt=1)]
    speed: Annotated[float, Meta(ge=1e-3, lt=1)] = 0.91


@dataclass(frozen=True)
class JobCluster:
    """Where it runs. Keys of the hardware file may be set inline; those land in `overrides`.

    price: of one GPU for an hour, in any currency. speed: rank -> factor, of those known to be slower or faster.
    slow_nodes: instead, of those that are not known.
    """

    gpu: Text = "h100-sxm"
    nodes: Size | None = None
    gpus_per_node: Size | None = None
    memory_margin_GiB: NonNegative = 2.0
    price: Positive | None = None
    speed: Mapping[str, float] = field(default_factory=dict)
    slow_nodes: JobSlowNodes | None = None
    overrides: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class JobParallel:
    """How it is divided. tp·cp·pp·dp is the number of GPUs; experts see the same devices as etp·ep·edp.

    prefetch: how many units ZeRO-3 gathers ahead of what is computed: a layer's dense weights with its norms are one,
    its experts another, as FSDP2 wraps them; with bucket_MiB each bucket is one. ZeRO-2 and 3 keep as many unreduced.
    dp_replicate: copies of what ZeRO shards (HSDP): each lies over an equal part of the cp·dp ranks of a parameter, of
    the edp ranks of an expert's, those that are closest; it divides dp and edp.
    overlap_grad_reduce: reductions of ZeRO 0 and 1 run beside backward passes (bucket by bucket, with bucket_MiB); off,
    they follow a rank's last one, as Megatron's without --overlap-grad-reduce. cp_comm: what attention sends over cp:
    all_gather, keys and values of whole sequences to each rank's queries, as many bytes as a ring; all_to_all, whole
    sequences of a rank's own heads.
    """

    tp: Size = 1
    cp: Size = 1
    pp: Size = 1
    dp: Size | None = None
    ep: Size = 1
    etp: Size = 1
    zero: Annotated[int, Meta(ge=0, le=3)] = 1
    dp_replicate: Size = 1
    bucket_MiB: Annotated[float, Meta(gt=0, lt=1e9)] | None = None
    prefetch: Natural = 1
    reshard: bool = True
    overlap_grad_reduce: bool = True
    order: Text = "tp cp ep dp pp"
    sequence_parallel: bool = True
    cp_comm: Annotated[str, words(*CP_COMMS, said="communication of cp")] = CP_COMMS[0]
    layers: Text | tuple[int, ...] = "balanced"

    @property
    def layout(self) -> PartLayout:
        """Of a part that all axes divide."""
        return PartLayout(self.tp, self.cp, self.ep, self.etp, self.sequence_parallel, self.cp_comm == CP_COMMS[1])

    @property
    def ahead(self) -> int:
        """How many buckets the plan may have gathered, or not yet reduced, beside one: those of `prefetch` units more.

        Where each tp rank has a part of the sequence, a layer's norms are a bucket apart: two to a unit. Norms of
        queries and keys alone, apart without sequence parallelism, count as a unit.
        """
        buckets = 2 if self.tp > 1 and self.sequence_parallel and self.bucket_MiB is None else 1
        return (self.prefetch + 1) * buckets - 1 if self.prefetch else 0

    @property
    def mesh(self) -> Mesh:
        """All ranks, once dp is known. Raises PiperError (job): sizes that do not divide each other."""
        sizes = dict(tp=self.tp, cp=self.cp, dp=self.dp or 1, pp=self.pp, ep=self.ep, etp=self.etp)
        return Mesh.of(**sizes, dp_replicate=self.dp_replicate, order=self.order.split())


@dataclass(frozen=True)
class JobSchedule:
    """In which order. One of name, directives, builder, csv; microbatches per replica, both directions together.

    merge: how a forward and a backward that overlap become one order. delay_wgrad: the backward's weight gradients
    behind its communication. layout: Megatron's string, which part stands on which stage, instead of parallel.layers.
    global_batch: sequences of a step, instead of microbatches: dp · microbatches · microbatch_size. flushes: how often
    the pipeline runs empty in a step; each time, a named schedule takes microbatches / flushes. p2p: blocking: stages
    compute nothing beside a transfer, as in Megatron's 1F1B without interleaving; ordered: a rank's transfers take
    turns, in one order of all ranks, so that the plan finishes even where no two messages overlap. recompute_layers:
    the decoder layers that recompute is true of: a list, a slice ("1::2"), or how many of each stage; left out, all.
    expert_all_to_all: what a microbatch computes beside its own: whatever can be (overlapped), shared experts alone
    (shared), nothing (serial); left out: nothing where costs.software names a framework, else whatever can be.
    """

    name: Text | None = None
    directives: Text | None = None
    builder: Text | None = None
    csv: Text | None = None
    microbatches: Size | None = None
    global_batch: Size | None = None
    microbatch_size: Size = 1
    flushes: Size = 1
    stages_per_rank: Size | None = None
    recompute: Recompute | tuple[Recomputed, ...] = "none"
    recompute_layers: Natural | Text | tuple[Natural, ...] | None = None
    merge: Annotated[str, words("alternate", "template", "profile", said="merge")] = "alternate"
    delay_wgrad: bool = False
    p2p: Annotated[str, words("overlapped", "blocking", "ordered", said="p2p")] = "overlapped"
    expert_all_to_all: Annotated[str, words("overlapped", "shared", "serial", said="expert_all_to_all")] | None = None
    layout: Text | None = None


@dataclass(frozen=True)
class JobRouting:
    """Which experts tokens go to. forced: in a run too, where else routers choose. strength: of zipf the exponent, 0 is
    balanced; of hot how many times as popular as any other one expert of a layer is, 1 is balanced."""

    kind: Annotated[str, words("balanced", "zipf", "hot", "file", said="kind of routing")] = "balanced"
    strength: NonNegative = 1.0
    seed: Natural = 0
    file: Text | None = None
    forced: bool = False


@dataclass(frozen=True)
class JobCosts:
    """Where seconds come from. free: what is taken to cost none, for what-ifs. tp_overlap: messages of tensor
    parallelism run in pieces under the products beside them (Megatron's user buffers); left out: what the software
    does. cuda_graphs: passes: each op is launched as one; step: the host launches nothing. deterministic: sums have one
    order, as with Megatron's --deterministic-mode: attention's backward is slower. blocking_launches: each waits for
    its kernel's end (CUDA_LAUNCH_BLOCKING=1), so the host's time comes on top. portable_attention: its kernels are
    written for any GPU (FlashAttention 2), not for this one (cuDNN, FlashAttention 3); left out: what the software
    does. loss_parallel: tensor-parallel ranks have the loss of their own logits, and gather none; left out: what the
    software does. grouped_gemm: a rank's experts are one grouped product; off: one expert after the other, as Megatron
    without --moe-grouped-gemm. fused_experts: its products in MXFP8 make the activation, too, in kernels of their own
    (Megatron's --use-transformer-engine-op-fuser on Blackwell).
    """

    profile: Text | None = None
    interference: Annotated[str, words("none", "pairwise", "maxmin", said="interference")] = "pairwise"
    host_model: Annotated[str, words("ahead", "inline", "one-queue", said="host model")] = "ahead"
    software: Text | None = None
    dispatcher: Annotated[str, words("nccl", "deepep", "hybridep", said="dispatcher")] | None = None
    grouped_gemm: bool = True
    fused_experts: bool = False
    stage_times: Mapping[str, object] | None = None
    free: tuple[Free, ...] = ()
    tp_overlap: bool | None = None
    portable_attention: bool | None = None
    loss_parallel: bool | None = None
    cuda_graphs: Annotated[str, words("none", "passes", "step", said="what CUDA graphs cover")] = "none"
    deterministic: bool = False
    blocking_launches: bool = False


@dataclass(frozen=True)
class JobData:
    """What `run` trains on."""

    source: Text = "synthetic"
    seed: Natural = 0


@dataclass(frozen=True)
class JobGate:
    """Sizes of relative errors that `validate` lets pass."""

    iteration: NonNegative = 0.05
    op_median: NonNegative = 0.10
    memory: NonNegative = 0.02


@dataclass(frozen=True)
class JobHistory:
    """Past runs, for backtests: a table beside the job. apply: correct predictions by what it suggests."""

    file: Text | None = None
    apply: bool = False


@dataclass(frozen=True)
class JobOptimizer:
    """The update. clip_norm 0 turns clipping off. weight_decay: by default 0.01 of adamw, 0 of sgd; no_decay: patterns
    of the names it spares. decay_steps: of every schedule but "constant"; of "wsd" the run's last ones. offload: share
    of the parameters whose moments and master weights the host keeps and updates.

    "muon" is torch.optim.Muon for hidden matrices (each expert's by itself), with momentum, nesterov, ns_steps of
    Newton-Schulz and adjust_lr, and AdamW for all else: embeddings, head, norms, biases; weight_decay of both, by
    default 0.1. Under ZeRO-1 each matrix is whole on one rank. tp_mode: how matrices that tp cuts are orthogonalised:
    block by block, or whole, by every rank or by all together.
    """

    name: Annotated[str, words("adamw", "sgd", "muon", said="optimizer")] = "adamw"
    lr: NonNegative = 1e-3
    clip_norm: NonNegative = 1.0
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    weight_decay: NonNegative | None = None
    no_decay: tuple[Text, ...] = ()
    schedule: Annotated[str, words("constant", "cosine", "linear", "wsd", said="schedule")] = "constant"
    warmup_steps: Natural = 0
    decay_steps: Size | None = None
    min_lr: NonNegative = 0.0
    offload: Annotated[float, Meta(ge=0, le=1)] = 0.0
    momentum: Share = 0.95
    nesterov: bool = True
    ns_steps: Annotated[int, Meta(ge=1, le=99)] = 5
    adjust_lr: Annotated[str, words("original", "match_rms_adamw", said="adjustment of lr")] = "original"
    tp_mode: Annotated[str, words("blockwise", "duplicated", "distributed", said="tp_mode")] = "blockwise"


@dataclass(frozen=True)
class JobRun:
    """What `run` does beside training. log_every, eval_every: steps from one line, or evaluation, to the next.

    eval_source: as `[data] source`, of which one global batch is evaluated. compile: layers by Inductor. save_behind:
    checkpoints are written while steps go on.
    """

    compile: bool = False
    log_every: Size = 1
    eval_every: Size | None = None
    eval_source: Text | None = None
    save_behind: bool = False


@dataclass(frozen=True)
class JobPrecision:
    """Number formats by name. Left out, params, gather, dispatch and combine follow `compute` (bf16 where that is fp8);
    grads, optimizer and reduce are fp32 (fp64 where that is; optimizer also where params is). Gradients travel in
    reduce, whatever grads says. Of ZeRO 1 and 2, whose ranks keep weights whole, and of compiled code gather follows
    params. residual: of the stream that parts add to, and stages send; left out, that of norms and attention.
    attention: of fused attention's products, fp8 beside `compute` = fp8; left out, that of norms. head: of the product
    that makes logits, and of its gradients', the same way.
    """

    compute: NumberFormat = "bf16"
    dispatch: NumberFormat | None = None
    combine: NumberFormat | None = None
    gather: NumberFormat | None = None
    reduce: NumberFormat | None = None
    params: NumberFormat | None = None
    grads: NumberFormat | None = None
    optimizer: NumberFormat | None = None
    residual: NumberFormat | None = None
    attention: NumberFormat | None = None
    head: NumberFormat | None = None


@dataclass(frozen=True)
class JobSearch:
    """What `search` varies. Any key of `[parallel]` and `[schedule]`, and `attention`, as a list of values to try;
    those land in `overrides`. pin: keys that keep the job's value.
    """

    pin: tuple[Text, ...] = ()
    objective: Annotated[str, words("iteration", "tokens_per_gpu", "cost", said="objective")] = "iteration"
    memory_limit_GiB: Positive | None = None
    seed: Natural = 0
    overrides: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """A whole job. `file` is where relative paths start and what errors name."""

    model: ModelSection
    cluster: JobCluster = field(default_factory=JobCluster)
    parallel: JobParallel = field(default_factory=JobParallel)
    schedule: JobSchedule = field(default_factory=JobSchedule)
    routing: JobRouting = field(default_factory=JobRouting)
    costs: JobCosts = field(default_factory=JobCosts)
    data: JobData = field(default_factory=JobData)
    gate: JobGate = field(default_factory=JobGate)
    history: JobHistory = field(default_factory=JobHistory)
    optimizer: JobOptimizer = field(default_factory=JobOptimizer)
    run: JobRun = field(default_factory=JobRun)
    precision: JobPrecision = field(default_factory=JobPrecision)
    search: JobSearch = field(default_factory=JobSearch)
    file: Annotated[str, HIDDEN] = "job"


SECTIONS: Mapping[str, type] = {name: cls for name, cls in get_type_hints(Job).items() if name != "file"}

OPEN = ("model", "cluster", "search")  # other keys belong to the model config, the hardware file, other sections
