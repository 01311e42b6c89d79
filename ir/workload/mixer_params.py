"""Parameters of what stands in place of attention, or beside it; tensor parallelism cuts heads and their groups."""

from ir.workload.config.recurrence import LayerMixer, LayerMixerKind
from ir.workload.config.spec import ModelConfig
from ir.workload.params import Params, branch_norms, cut, linear, whole
from ir.workload.part import Param


def mixer(config: ModelConfig, prefix: str) -> Params:
    """Input norm and recurrence of the decoder layer whose names begin with `prefix`. Beside attention the norm is
    attention's.
    """
    c, m = config, config.mixer
    assert m is not None
    at = f"{prefix}{c.names.mixer}."
    return (
        *(() if m.beside else branch_norms(c, prefix, c.names.attn_norm, "attn_out_norm")),
        *_projections(c, at, m),
        *_convolution(at, m),
        *_decays(c, at, m),
        *_norm(f"{at}norm.weight", m),
        *linear(c, f"{at}out_proj", c.hidden, m.inner, column=False, bias=m.out_bias),
    )


def _projections(c: ModelConfig, at: str, m: LayerMixer) -> Params:
    """Into gates, values, keys, queries and rates."""
    if m.kind in (LayerMixerKind.CONV, LayerMixerKind.SELECTIVE):
        blocks = (m.inner,) * (m.projected // m.inner)
        return linear(c, f"{at}in_proj", m.projected, c.hidden, column=True, bias=m.proj_bias, blocks=blocks)
    sizes = (m.inner, m.inner, m.keys, m.keys, m.heads)
    if m.kind.is_faded:
        params = linear(c, f"{at}in_proj_qkvb", sum(sizes[1:]), c.hidden, column=True, bias=False, blocks=sizes[1:])
        for gate in ("f", "g"):
            params += (whole(f"{at}{gate}_a_proj.weight", m.rank, c.hidden),) if m.rank else ()
            params += linear(c, f"{at}{gate}_proj", m.inner, m.rank or c.hidden, column=True, bias=False)
        return params
    if m.kind.is_delta:
        params = linear(c, f"{at}in_proj_qkvz", sum(sizes[:4]), c.hidden, column=True, bias=False, blocks=sizes[:4])
        both = (m.heads,) * 2
        return params + linear(c, f"{at}in_proj_ba", 2 * m.heads, c.hidden, column=True, bias=False, blocks=both)
    return linear(c, f"{at}in_proj", m.projected, c.hidden, column=True, bias=m.proj_bias, blocks=sizes)


def _convolution(at: str, m: LayerMixer) -> Params:
    blocks = tuple(n for n in (m.inner, m.keys, m.keys) if n)
    weight = cut(f"{at}conv1d.weight", 0, m.channels, 1, m.conv, blocks=blocks)
    return (weight, cut(f"{at}conv1d.bias", 0, m.channels, blocks=blocks)) if m.conv_bias else (weight,)


def _decays(c: ModelConfig, at: str, m: LayerMixer) -> Params:
    if m.kind is LayerMixerKind.CONV:
        return ()
    if m.kind is LayerMixerKind.SELECTIVE:
        return (
            *linear(c, f"{at}x_proj", m.selected, m.inner, column=False, bias=False),
            *linear(c, f"{at}dt_proj", m.inner, m.steps, column=True, bias=True),
            cut(f"{at}A_log", 0, m.inner, m.state, table=True),
            cut(f"{at}D", 0, m.inner),
        )
    sizes = {"dt_bias": m.inner if m.kind.is_faded else m.heads, "A_log": m.heads}
    sizes |= {} if m.kind.is_delta else {"D": m.heads}
    return tuple(cut(f"{at}{name}", 0, n) for name, n in sizes.items())


def _norm(name: str, m: LayerMixer) -> Params:
    """Before the projection out: over a head's features, or over a group's with weights for all."""
    if not m.normed:
        return ()
    return (Param(name, (m.head_dim,), by_heads=True) if m.kind.is_delta else cut(name, 0, m.inner),)
