"""What a node costs, in the hardware's own terms: kernels with FLOPs and bytes, or a message over mesh axes."""

from dataclasses import dataclass
from enum import StrEnum


class DType(StrEnum):
    """A number format."""

    FP64 = "fp64"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"

    bytes: int  # of one element

    def __init__(self, text: str) -> None:
        self.bytes = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}[text]


class KernelKind(StrEnum):
    """Kernels that a roofline treats alike."""

    GEMM = "gemm"
    GROUPED_GEMM = "grouped_gemm"
    ATTENTION = "attention"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel launch (or `count` equal ones) on one device.

    flops: multiply-adds counted twice, of one launch; bytes: HBM traffic of one launch.
    shape: (m, n, k) of a GEMM; (groups, m, n, k) of a grouped one with m rows per group;
    (batch, heads, q, kv, qk_dim, v_dim) of attention; () else.
    """

    kind: KernelKind
    flops: int
    bytes: int
    dtype: DType
    shape: tuple[int, ...] = ()
    label: str = ""
    count: int = 1


Work = tuple[Kernel, ...]


CAST = ".fp8"  # ends the label of a kernel that takes a tensor into fp8, out of it, or turns it there
SORTS = ("permute", "unpermute", "unpermute_backward")  # labels of kernels that sort rows by expert, or back
WEIGHTS_CAST = "weights.cast"  # label of the kernels that take weights into the format of products
DROPOUT = ".dropout"  # ends the label of an attention kernel that draws dropout
EXPERTS = "experts."  # begins the label of a kernel on rows of experts
LOSS = "loss."  # begins the label of a kernel of the loss
SCAN = "scan."  # begins the label of a recurrence's kernel
SCAN_BACK = "scan.backward_"  # of one in backward
SCAN_PASS = "pass"  # ends the label of the one that takes states from chunk to chunk
WEIGHT_GRAD = ".weight_grad"  # ends the label of a product that adds up a weight's gradient


class MessageKind(StrEnum):
    """Collectives, by what they do to a group."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    P2P = "p2p"


@dataclass(frozen=True, slots=True)
class Message:
    """One communication, seen from one rank of its group.

    axes: mesh axes whose product is the group, e.g. ("dp",), ("ep",), ("cp", "dp").
    bytes: all_reduce, the tensor; reduce_scatter, its input; all_gather, its output; p2p, the tensor; all_to_all,
    what a rank sends in all, every copy of a token counted (to itself too).
    fanout: all_to_all only; copies of each token (top-k), so that a link model may send a token once per node.
    nodes_limit: all_to_all only; the most nodes a token goes to (DeepSeek-V3's group-limited routing: 4); 0: no limit.
    """

    kind: MessageKind
    bytes: int
    axes: tuple[str, ...]
    fanout: int = 1
    nodes_limit: int = 0
