"""What differs between frameworks on one GPU: a few constants per framework, frozen over all its runs.

`[costs] software` names one; the JSON files beside this one say where each constant comes from. A file sets at most
`MOST` constants: a framework is no place for a knob per row.

>>> load_software("nanotron").grad_copy_bytes
2
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from cost_models.software.dispatcher import Fp8Recipe
from ir.core.errors import ErrorKind, PiperError, nearest
from ir.core.files import FileErrors, read_json, typed
from ir.workload.setting import KernelStyle, TokenLossKind

__all__ = ["GENERIC", "MOST", "FrameworkCosts", "frameworks", "load_software"]

MOST = 8
GENERIC = "generic"  # no framework: fused kernels, launched ahead; as `software` left out
FORM = FileErrors("a software file", ErrorKind.JOB, "costs.software", 10**6, "a framework's name, or a path")
_HERE = Path(__file__).parent
Factor = Annotated[float, msgspec.Meta(ge=0.2, le=5)]
NonNegative = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Streams = Annotated[int, msgspec.Meta(ge=0, le=64)]


class FrameworkCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of a framework; by default those of the modelled kernels, fused and launched ahead. All fitted.

    traffic: bytes that memory-bound kernels (of passes and of the update, but not the loss's) move, over those of fused
    ones. portable_attention: attention kernels are written for any GPU (FlashAttention 2), not for this one. attention:
    their seconds over those of such kernels. launch_us: what the host needs per kernel; null: the hardware file's.
    dispatch_us: from one kernel or message inside an op to the next at least, where none is dispatched ahead. turn_us:
    where it waits for the device at each transfer between pipeline stages: what it then needs before the next pass; 0:
    it runs ahead. grad_copy_bytes: per parameter, of the format that gradients are made in before kernels of their own
    add them to the sums, and that a second copy has where they are reduced between replicas. grad_cast_apart: another
    kernel gives them the sums' format first. fresh_grads: gradients are
    none between steps (`zero_grad(set_to_none=True)`), each made by the first backward pass that reaches it.
    library_MiB: what libraries keep allocated, but for workspaces of matrix products: the hardware file's, for each of
    workspace_streams: so many always, more where there are grouped experts, more where messages of tp run under
    products. tied_apart: a tied weight's optimizer shards lie within each stage's replicas, not on both stages'; in
    memory alone. sent_freed: what a pipeline stage has sent it gives up, and not only where its gradient is back; in
    memory alone. tp_overlap: what a job's `[costs] tp_overlap` is where it says nothing. async_tp: where that is off, a
    column-parallel linear's messages of backward run beside its products: its input's gradient beside the weights', its
    input, gathered again, beside the input's. cp_ring: keys and values of context parallelism go around a ring beside
    attention's pieces, where a job does not have its heads exchanged. gather_on_demand: ZeRO-3 gathers weights where
    they are needed, whatever `parallel.prefetch` says. zero3_network: share of the network's rate that such gathers,
    and the reductions beside them, get. copies: rate, over that of elementwise kernels, at which gathered weights are
    copied out of one buffer, and gradients into another (where these change their format, at that of casts); 0: nothing
    is copied. persistent: where a GPU's products take all SMs (`GemmKernel`), none are left to collectives: blocks that
    find none wait for the others' end. fp8_recipe: goes before the hardware file's. loss, eager, op_by_op,
    keep_gathered, loss_vectors, whole_logits, stops_early, masked: see `ir.workload.setting.KernelStyle`; eager means a
    plain loss, too. sources: where each constant is from.
    """

    name: str = ""
    traffic: Factor = 1.0
    portable_attention: bool = False
    attention: Factor = 1.0
    launch_us: NonNegative | None = None
    dispatch_us: NonNegative = 0.0
    turn_us: NonNegative = 0.0
    grad_copy_bytes: Annotated[int, msgspec.Meta(ge=0, le=8)] = 0
    grad_cast_apart: bool = False
    fresh_grads: bool = False
    tp_overlap: bool = False
    async_tp: bool = False
    cp_ring: bool = False
    library_MiB: NonNegative = 0.0
    workspace_streams: tuple[Streams, Streams, Streams] = (0, 0, 0)
    tied_apart: bool = False
    sent_freed: bool = False
    gather_on_demand: bool = False
    zero3_network: Annotated[float, msgspec.Meta(ge=0.01, le=1)] = 1.0
    copies: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    persistent: bool = False
    fp8_recipe: Fp8Recipe | None = None
    loss_vectors: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0
    loss: Literal["parallel", "plain", "torch", "fused", "returned"] | None = None
    eager: bool = False
    op_by_op: bool = False
    keep_gathered: bool = False
    whole_logits: bool = False
    stops_early: bool = False
    masked: bool = False
    sources: dict[str, str] = {}

    @property
    def style(self) -> KernelStyle:
        """What the framework keeps, for the model graph."""
        loss = self.loss or (TokenLossKind.PLAIN if self.eager else TokenLossKind.PARALLEL)
        return KernelStyle(
            TokenLossKind(loss),
            self.eager,
            self.keep_gathered,
            self.loss_vectors,
            self.op_by_op,
            whole_logits=self.whole_logits,
            stops_early=self.stops_early,
            masked=self.masked,
        )


def frameworks() -> tuple[str, ...]:
    """Names that `[costs] software` may hold.

    >>> frameworks()[:4]
    ('deepspeed', 'llm-foundry', 'megatron', 'megatron-2021')
    """
    return tuple(sorted(p.stem for p in _HERE.glob("*.json")))


def load_software(name: str | None) -> FrameworkCosts:
    """The constants of a framework, by name or from a path to a .json file; those of fused kernels where none is named.

    Raises PiperError (hardware, io): no such framework or file, or constants out of range.

    >>> load_software("megatrom")
    Traceback (most recent call last):
    ...
    ir.core.errors.PiperError: costs.software: unknown framework 'megatrom'
    allowed: a path to a .json file, deepspeed, llm-foundry, ...
    fix: megatron
    """
    if name is None or name == GENERIC:
        return FrameworkCosts()
    if name.endswith(".json"):
        return read(Path(name))
    if name not in frameworks():
        raise PiperError(
            ErrorKind.JOB,
            f"unknown framework {name!r}",
            key="costs.software",
            allowed=["a path to a .json file", *frameworks(), GENERIC],
            suggestion=nearest(name, (*frameworks(), GENERIC)),
        )
    return read(_HERE / f"{name}.json")


def read(path: Path) -> FrameworkCosts:
    """One file, strictly: known keys, in range, at most `MOST` constants, each with its source. Raises PiperError."""
    raw = read_json(path, FORM)
    found = typed(raw, FrameworkCosts, FORM, str(path))
    constants = raw.keys() - {"name", "sources"}
    if len(constants) > MOST:
        message = f"{len(constants)} constants: {', '.join(sorted(constants))}"
        raise FORM.wrong(message, str(path), None, f"at most {MOST}")
    for name in sorted(constants ^ found.sources.keys()):
        message = "a source of no constant" if name in found.sources else "this constant has no source"
        allowed = f"one for each constant: {', '.join(sorted(constants))}"
        raise FORM.wrong(message, str(path), f"sources.{name}", allowed)
    return found
