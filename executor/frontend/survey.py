"""Every unit of a model measured, one behind the other, on microbatches of one shape; nothing is computed."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from executor.frontend.measure import PartMeasure, Sizes, measure
from executor.modules.attention.attend import forget_masks
from executor.modules.attention.rope import forget_tables
from executor.modules.base import BuiltChunks, Model, example_extra, wiring
from executor.modules.user.annotate import model_error
from executor.modules.user.routed import balanced
from executor.parallel.inline import MessageAxis


@contextmanager
def without_values() -> Iterator[None]:
    """Tensors made inside have shapes and no values, and take no memory."""
    with FakeTensorMode():
        yield


def survey(
    model: Model,
    size: int,
    length: int,
    *,
    chunks: Sequence[str] | None = None,
    given: Mapping[str, Sizes] | None = None,
    axis: MessageAxis | None = None,
) -> dict[str, PartMeasure]:
    """Measure the units of some chunks (default: all) on microbatches of `size` sequences of `length` tokens.

    given: what units outside of these chunks give. axis: notes their messages. Call it inside `without_values`, so
    that weights are fake too.

    >>> from executor.modules.decoder import DecoderModel
    >>> from ir.workload.config.load import load_config
    >>> with without_values():
    ...     found = survey(DecoderModel(load_config("tiny-llama", {"num_hidden_layers": 1}), parts=True), 1, 16)
    >>> sum(k.flops for k in found["l0.mlp"].forward.work) == 3 * 2 * 16 * 64 * 128
    True
    """
    built = model.build(model.chunks if chunks is None else chunks)
    names = {id(p): n for n, p in built.params.items()}
    shapes: dict[str, Sizes] = {"": (((size, length), torch.int64),), **(given or {})}
    reads = {**wiring(built.units, built.reads), **built.reads}
    found, take = {}, () if axis is None else (axis.take,)
    for unit, module in built.units.items():
        inputs = tuple(s for r in reads[unit] for s in shapes[r])
        extras = batch(built, unit, size, length)
        for wire in (built.exchanges[r] for r in reads[unit] if r in built.exchanges):
            if wire.counts and not wire.back:  # as many rows from each rank for each expert
                (((experts,), _),) = shapes[wire.counts]
                rows = balanced(inputs[0][0][0], experts)
                extras = [[rows[k :: wire.ranks] for k in range(wire.ranks)]]
        weights = {names[id(p)]: p for p in module.parameters()}
        forget_tables()
        forget_masks()
        with _blaming(unit):
            found[unit] = measure(module, inputs, extras, weights, *take)
        shapes[unit] = found[unit].shapes
        shapes |= {p: tuple(shapes[unit][k] for k in at) for p, at in built.ports.get(unit, {}).items()}
        shapes |= {n: shapes[x.reads] for n, x in built.exchanges.items() if x.reads in shapes}
    return found


@contextmanager
def _blaming(unit: str) -> Iterator[None]:
    """Name the unit in whatever a user's code raises."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        message = f"{unit}: shapes depend on values ({error}), and here are none"
        raise model_error(message, "make shapes depend on sizes alone, as with balanced experts") from error
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError) as error:
        message = f"{unit} failed without values: {type(error).__name__}: {error}"
        raise model_error(message, "run the module on a small batch first") from error


def batch(built: BuiltChunks, unit: str, size: int, length: int) -> list[object]:
    """What a unit takes of a microbatch, without values."""
    ids = torch.zeros(size, length, dtype=torch.int64)
    return [example_extra(want, ids) for want in built.extras.get(unit, ())]
