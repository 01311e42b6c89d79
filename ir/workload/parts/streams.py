"""Several residual streams (manifold-constrained hyper-connections, arXiv:2512.24880): a part reads a mixture of them,
and what it gives is mixed into them. By kernels as there: one product gives all coefficients, one reads the streams for
the part, one writes them; backward reads them again. Coefficients are a few numbers per token, in fp32.
"""

from dataclasses import dataclass, replace

from ir.core.ops import Pass
from ir.core.work import DType, Work
from ir.workload.part import SavedBuffer
from ir.workload.parts import kernels as k
from ir.workload.parts.kernels import LinearKernel
from ir.workload.setting import PartSetting


@dataclass(frozen=True, slots=True)
class StreamMixing:
    """What stands before a part's norm in forward (`before`), and behind it in I (`behind`), and what its weights take.

    mixed, unmixed: what puts the part's output into the streams, and back; saved: for both ends. workspace: bytes of
    what the streams' gradient is made of, beside itself.
    """

    before: Work = ()
    behind: Work = ()
    weight_grad: Work = ()
    mixed: Work = ()
    unmixed: Work = ()
    saved: tuple[SavedBuffer, ...] = ()
    workspace: int = 0
    model_flops: int = 0

    @classmethod
    def of(cls, s: PartSetting, *, ends: bool = False) -> "StreamMixing":
        """Nothing where parts add to one stream. ends: at the model's end, where they become one."""
        m, n = s.config.streams, s.stream * s.config.hidden
        if not m:
            return NO_MIXING
        wide, inner = s.stream_wide, s.wide
        numbers = m if ends else m * (m + 2)
        weigh = LinearKernel(
            "stream_coefficients", s.stream, numbers, m * s.config.hidden, dtype=s.precision.activations
        )
        one = k.memory(s, "streams.read", (m + 1) * n * wide)
        norm = (k.norm_forward(s, "stream_norm", m * n),) if s.style.op_by_op else ()
        few = DType.FP32.bytes * s.stream * numbers
        collapsed = SavedBuffer("collapsed", n * wide, Pass.I, ("norm", "operators"), (one,))
        # The read's backward gives the coefficients' gradients, of streams and what came; then all ways are added.
        ways = 2 if ends else 3
        behind = (
            k.memory(s, "streams.read_backward", (m + 1) * n * wide),
            weigh.input_grad(s),
            k.memory(s, "streams.sum", (ways * m + 1) * n * wide),
        )
        mixed = replace(k.memory(s, "streams.write", (2 * m * wide + inner) * n), flops=2 * m * m * n)
        unmixed = k.memory(s, "streams.write_backward", (3 * m * wide + 2 * inner) * n)
        given = SavedBuffer("given", n * inner, Pass.I)
        return cls(
            before=(*norm, weigh.forward(s), one),
            behind=behind,
            weight_grad=k.weight_grad(s, weigh),
            mixed=() if ends else (mixed,),
            unmixed=() if ends else (unmixed,),
            saved=(collapsed, SavedBuffer("coefficients", few, Pass.I), *(() if ends else (given,))),
            workspace=ways * m * n * wide,
            model_flops=2 * s.shape.tokens * m * s.config.hidden * (numbers if ends else numbers + m),
        )


NO_MIXING = StreamMixing()
