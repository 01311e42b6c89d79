"""What a hardware file says about one GPU, its node and its network. Units stand in the keys.

Every number here is a *model parameter*: datasheet values where a datasheet exists, else a constant fitted once per GPU
to published measurements (each preset names its sources per value). A measured profile replaces them.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import structs

from cost_models.software import FrameworkCosts
from cost_models.software.dispatcher import ExpertDispatcher, Fp8Recipe
from ir.core.errors import ErrorKind, PiperError
from ir.core.files import HIDDEN, words
from ir.core.work import DType

Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]

Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Dtype = Annotated[str, words(*(str(d) for d in DType), said="dtype")]
PeakDtype = Annotated[str, words(*(str(d) for d in DType), "tf32", said="dtype")]
COMM_KINDS = ("all_to_all", "collective", "p2p")
CommKind = Annotated[str, words(*COMM_KINDS, said="kind of communication")]
Tiles = Annotated[
    tuple[tuple[Count, Count, Share], ...], msgspec.Meta(min_length=1, extra={"fix": "[[128, 128, 1.0]]"})
]
GIB = 1024**3
MIB = 1024**2


class BurstKernel(msgspec.Struct, frozen=True, kw_only=True):
    """What is different where a matrix multiplication is measured by itself, again and again, and not in training.

    unhidden_memory: as of GemmKernel, with nothing else in the caches and no gradients to add to. throttle: dtype ->
    what a launch takes longer once the power limit holds, as a share; throttle_us: microseconds of work at which half
    of that has come. tensor_scaled: dtype -> rate of a main loop with one scale per tensor over that with blocks; 1
    where not named. In training nothing of it was found: there the power limit holds for both.
    """

    unhidden_memory: dict[Dtype, Fraction]
    throttle: dict[Dtype, NonNegative]
    throttle_us: NonNegative
    tensor_scaled: dict[Dtype, Positive] = {}


class GemmKernel(msgspec.Struct, frozen=True, kw_only=True):
    """How a matrix multiplication approaches the peak.

    efficiency: dtype -> share of peak in the main loop of a huge GEMM in a short burst, at boost clocks.
    sustained: dtype -> share of that rate that is left in training, where the power limit always holds; 1 where not
    named. It has evidence of its own. burst: what else a burst is like; null: as training.
    unhidden_memory: dtype -> share of the HBM time that the main loop does not hide (epilogues, cold starts), in
    training.
    ramp_bytes: prologue and epilogue of a tile, as bytes of extra K (so K in elements is ramp_bytes / dtype bytes).
    tiles: [rows, columns, relative efficiency] of the output tiles that the library chooses from.
    grouped_efficiency: a grouped GEMM's rate relative to a plain one of equal tiles. experts_fused: in MXFP8, the rate
    of kernels that make the experts' activation, too (`[costs] fused_experts`), over others'; null: there are none.
    weight_grad: dtype -> rate of a product that adds up a weight's gradient relative to another of equal tiles; 1 where
    not named. unaligned: rate of a product some of whose tensors' rows do not begin at multiples of 16 bytes (an odd
    vocabulary), over that of others.
    workspace_MiB: what the library keeps for each stream that a framework calls it on. persistent: it launches a block
    for each SM, which takes tile after tile (see `FrameworkCosts.persistent`).
    """

    efficiency: dict[Dtype, Share]
    unhidden_memory: dict[Dtype, Fraction]
    ramp_bytes: NonNegative
    tiles: Tiles
    sustained: dict[Dtype, Share] = {}
    burst: BurstKernel | None = None
    grouped_efficiency: Share = 1.0
    experts_fused: Positive | None = None
    weight_grad: dict[Dtype, Share] = {}
    unaligned: Share = 1.0
    workspace_MiB: NonNegative = 0.0
    persistent: bool = False


class AttentionKernel(msgspec.Struct, frozen=True, kw_only=True):
    """How a fused attention kernel approaches the peak, causal FLOPs counted as they are done (half).

    forward_efficiency, backward_efficiency: share of peak at head dim 128 and a long sequence.
    ramp_tokens: KV length at which half of that is reached. head_exponent: efficiency ~ (head dim / 128) ** this, with
    the mean of the query-key and the value dim, at most head_limit. tail_waves: what a kernel takes longer than if all
    SMs ended together (causal tiles of queries differ in length), in waves of one tile for each SM. portable: rate of a
    kernel written for any GPU (FlashAttention 2) over that of one written for this one; 1 where that is the best there
    is. sustained: what training leaves of the rates, where they were measured in short bursts. dropout: what drawing it
    leaves of them, forward and backward; 75-85 and 60-70 % of FlashAttention 4's on GB200 (Dao-AILab/flash-attention
    pull request 2597), nothing found of others. fixed: what one order of sums (`[costs] deterministic`) leaves of the
    backward rate; portable_fixed: the same of a portable kernel; null: as the other. fixed_dropout: of both rates
    before dropout, where no usual kernel can do both and another one runs. fp8: recipe -> forward and backward rates in
    fp8 over those of 16 bits, casts apart; without one there is no such kernel. fp8_narrow: the same of heads with at
    most 128 features, which gain less; without, as of others.
    """

    forward_efficiency: Share
    backward_efficiency: Share
    ramp_tokens: NonNegative
    head_exponent: NonNegative
    head_limit: Positive = 192
    tail_waves: NonNegative = 0.0
    portable: Share = 1.0
    sustained: Share = 1.0
    dropout: tuple[Share, Share] = (0.8, 0.65)
    fixed: Share = 1.0
    portable_fixed: Share | None = None
    fixed_dropout: tuple[Share, Share] | None = None
    fp8: dict[Fp8Recipe, tuple[Positive, Positive]] = {}
    fp8_narrow: dict[Fp8Recipe, tuple[Positive, Positive]] = {}


class RecurrenceKernel(msgspec.Struct, frozen=True, kw_only=True):
    """How kernels of recurrences (Mamba-2's scan, the gated delta rule; Triton's) come near their products and traffic.

    forward, backward: share of the rates that these would have by themselves. product_ns: what a product with states
    that pass from chunk to chunk, one behind the other, takes at least for each token of a sequence.
    """

    forward: Share
    backward: Share
    product_ns: NonNegative


class DeviceHardware(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU with its usual node and network. All values are modelled; `sources` says from what.

    peak_TFLOPs: dtype -> dense peak, 10^12 FLOP/s (fp32 is the non-tensor-core path, tf32 stands beside it).
    hbm_GiB: total memory as the driver reports it to a process (torch `get_device_properties().total_memory`).
    hbm_GBps: datasheet HBM bandwidth, 10^9 byte/s. sms: streaming multiprocessors (compute units).
    rated_W: power limit at which all rates here hold. power_W: the limit that is set (`nvidia-smi -pl`), at most that;
    null: rated. power_exponent: in training tensor cores get (power_W / rated_W) ** this of their rate, memory all.
    kernel_launch_us: device-side floor of one kernel with its gap. host_launch_us: what a launch costs the host.
    host_speed: of the host's own work over that of the x86 hosts on which a framework's launches were timed.
    memory_efficiency, memory_ramp_KiB: share of HBM bandwidth a long elementwise kernel reaches; bytes lost to ramping.
    multi_tensor_efficiency: dtype -> rate of kernels over lists of tensors (updates, norms of gradients and their
    scaling) over that of elementwise ones; 1 where not named. Of 16 bits they move fewer bytes at a time.
    cast_efficiency: rate of kernels that scale and turn tensors for fp8, over that of elementwise ones. fp8_recipe: how
    they are cast where the framework does not say ("blocks", "tensor", "mxfp8": cost_models/software/casts.toml).
    context_MiB: CUDA context and modules. communicator_MiB: buffers of one communicator.
    reserved_over_allocated: low, middle, high of the allocator's reserved / allocated.
    gpus_per_node: GPUs in one scale-up (NVLink) domain. nvlink_GBps: one direction, one GPU, line rate.
    nvlink_few: rings of n GPUs of a node get 1 / (1 + nvlink_few / (n - 1)) of what endless ones get. nvlink_ramp_KiB:
    bytes that a collective of large chunks loses inside a node until it is under way.
    nvlink_pair_GBps: between two given GPUs; n of a node have n - 1 times that, where no switch joins them; null:
    nvlink_GBps. nvlink_sharp_efficiency: 0 where no switch reduces.
    nic_Gbps: one direction, per GPU. *_latency_us: one low-latency hop. *_efficiency: busbw of a long ring / line rate.
    nic_congestion: all-gathers and reduce-scatters over n > 2 nodes get (2/n) to this power of what they get over two;
    0 where no hop of a ring is slower than the others.
    dispatch_*_efficiency: the same of token dispatch kernels (DeepEP-like).
    pcie_GBps: to the host, one direction, per GPU. host_GBps: what a GPU's optimizer on the CPU gets of the host's
    memory; null: not known.
    collective_launch_us: base time of a call. collectives: which library's protocols ("nccl" or "gloo").
    comm_sms: kind of communication ("all_to_all", "collective", "p2p") -> SMs its kernel holds from its start to its
    end. comm_hbm: kind -> share of HBM bandwidth it takes while it moves. comm_slowed: kind -> what it takes longer
    while something computes beside it, as a share. Kinds left out take nothing and are not slowed.
    all_to_all_spread: standard deviation over ranks of what one takes, in training, over its seconds: all wait for the
    slowest.
    software: the framework that runs on it, from `[costs] software`; dispatcher: what carries tokens to experts, from
    `[costs] dispatcher`, None: sorted once, deduplicated, on comm_sms; training: whether it is at the clocks of a long
    run, not of a short burst, as for every job; deterministic, blocking: of `[costs]`; no keys of a hardware file.
    leaf_nodes: nodes under one leaf switch; null: all. oversubscription: a leaf's NICs together over its uplinks.
    """

    name: str
    peak_TFLOPs: dict[PeakDtype, Positive]
    hbm_GiB: Positive
    hbm_GBps: Positive
    sms: Count
    rated_W: Positive | None = None
    power_W: Positive | None = None
    power_exponent: NonNegative = 0.0
    kernel_launch_us: NonNegative
    host_launch_us: NonNegative
    host_speed: Positive = 1.0
    gemm: GemmKernel
    attention: AttentionKernel
    recurrence: RecurrenceKernel | None = None
    memory_efficiency: Share
    multi_tensor_efficiency: dict[Dtype, Share] = {}
    cast_efficiency: Share = 1.0
    fp8_recipe: Fp8Recipe = "blocks"
    memory_ramp_KiB: NonNegative
    context_MiB: NonNegative
    communicator_MiB: NonNegative
    reserved_over_allocated: tuple[Positive, Positive, Positive]
    gpus_per_node: Count
    nvlink_GBps: Positive
    nvlink_pair_GBps: Positive | None = None
    nvlink_latency_us: NonNegative
    nvlink_efficiency: Share
    nvlink_few: NonNegative = 0.0
    nvlink_ramp_KiB: NonNegative = 0.0
    nvlink_sharp_efficiency: Fraction = 0.0
    nic_Gbps: Positive
    nic_latency_us: NonNegative
    nic_efficiency: Share
    nic_congestion: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.0
    dispatch_nvlink_efficiency: Share
    dispatch_nic_efficiency: Share
    collective_launch_us: NonNegative
    collectives: Annotated[str, words("nccl", "gloo", said="library")] = "nccl"
    pcie_GBps: Positive
    host_GBps: Positive | None = None
    comm_sms: dict[CommKind, NonNegative] = {}
    comm_hbm: dict[CommKind, Annotated[float, msgspec.Meta(ge=0, lt=1)]] = {}
    comm_slowed: dict[CommKind, NonNegative] = {}
    all_to_all_spread: Fraction = 0.0
    leaf_nodes: Count | None = None
    oversubscription: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    sources: dict[str, str] = {}
    software: Annotated[FrameworkCosts, HIDDEN] = FrameworkCosts()
    dispatcher: Annotated[ExpertDispatcher | None, HIDDEN] = None
    training: Annotated[bool, HIDDEN] = False
    deterministic: Annotated[bool, HIDDEN] = False
    blocking: Annotated[bool, HIDDEN] = False
    fused_experts: Annotated[bool, HIDDEN] = False

    def in_training(self) -> DeviceHardware:
        """The same device under the sustained load of a training run.

        >>> from cost_models.hardware import load_hardware
        >>> load_hardware("h100-sxm").in_training().training
        True
        """
        return structs.replace(self, training=True)

    def library_bytes(self, experts: bool, overlapped: bool) -> int:
        """What the framework's libraries keep allocated. experts: with grouped products of experts; overlapped: with
        messages of tensor parallelism under products.
        """
        soft = self.software
        streams = sum(n for n, used in zip(soft.workspace_streams, (True, experts, overlapped), strict=True) if used)
        return int((soft.library_MiB + streams * self.gemm.workspace_MiB) * MIB)

    @property
    def hbm_bytes(self) -> int:
        return int(self.hbm_GiB * GIB)

    @property
    def hbm_bytes_per_s(self) -> float:
        return self.hbm_GBps * 1e9

    @property
    def power_share(self) -> float:
        """What a power limit below the rated one leaves of tensor cores' rate in training.

        >>> from cost_models.hardware import load_hardware
        >>> [round(load_hardware("h100-sxm", {"power_W": w}).power_share, 2) for w in (500, 700)]
        [0.79, 1.0]
        """
        if self.power_W is None or self.rated_W is None:
            return 1.0
        return math.pow(self.power_W / self.rated_W, self.power_exponent)

    def peak_flops(self, dtype: DType) -> float:
        """Dense peak of a dtype, FLOP/s. Raises PiperError (hardware): the device does not have it.

        >>> from cost_models.hardware import load_hardware
        >>> load_hardware("h100-sxm").peak_flops(DType.BF16)
        989400000000000.0
        """
        peak = self.peak_TFLOPs.get(dtype.value)
        if peak is None:
            raise PiperError(
                ErrorKind.HARDWARE,
                f"{self.name} has no {dtype.value} arithmetic",
                key="precision.compute",
                allowed=[k for k in self.peak_TFLOPs if k != "tf32"],
                suggestion='precision.compute = "bf16"',
            )
        return peak * 1e12


def check_consistent(hw: DeviceHardware, at: str = "") -> DeviceHardware:
    """The same, if its parts do not contradict each other, which types alone cannot tell. at: before keys in errors.

    Raises PiperError (hardware).
    """
    tables = {"gemm.efficiency": hw.gemm.efficiency, "gemm.unhidden_memory": hw.gemm.unhidden_memory}
    for key, table in tables.items():
        if lacking := hw.peak_TFLOPs.keys() - table.keys() - {"tf32"}:
            missing = ", ".join(sorted(lacking))
            allowed = f"an entry for each dtype of peak_TFLOPs: {', '.join(k for k in hw.peak_TFLOPs if k != 'tf32')}"
            raise _bad(f"{missing} has a peak but no entry here", at + key, allowed, f"add {missing} to {at}{key}")
    if list(hw.reserved_over_allocated) != sorted(hw.reserved_over_allocated) or hw.reserved_over_allocated[0] < 1:
        allowed = "low <= middle <= high, from 1 up"
        raise _bad(f"not {allowed}", f"{at}reserved_over_allocated", allowed, "[1.0, 1.04, 1.08]")
    if hw.power_W is not None and (hw.rated_W is None or hw.power_W > hw.rated_W):
        rated = f"at most {hw.rated_W:g}, at which {hw.name} was measured" if hw.rated_W else "nothing: no rated_W here"
        raise _bad(f"{hw.power_W:g} W", f"{at}power_W", rated, f"without {at}power_W")
    for kind, sms in hw.comm_sms.items():
        if sms >= hw.sms:
            allowed = f"a number from 0 to below {hw.sms}"
            raise _bad(f"{sms:g} of {hw.sms} SMs leave none to compute", f"{at}comm_sms.{kind}", allowed, None)
    return hw


def _bad(message: str, key: str, allowed: str, fix: str | None) -> PiperError:
    return PiperError(ErrorKind.HARDWARE, message, key=key, allowed=allowed, suggestion=fix)
